#include "worker/data/foreign_format.h"

#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"

namespace ringleader::data {
namespace {

struct Format {
  std::string_view magic;  // the file's first bytes
  const char* what;
  const char* remedy;
};

constexpr char kExtract[] =
    "write the text of each document into a file of its own, or its token ids as little-endian "
    "numbers (--format uint32)";
constexpr std::string_view kMegatronIndex = "MMIDIDX";
constexpr std::string_view kGzip = "\x1f\x8b";  // fewer bytes than a token of 32 bits has

constexpr Format kFormats[] = {
    {"PAR1", "a Parquet file", kExtract},
    {"\x93NUMPY", "a NumPy array", "write its ids without a header: array.tofile(FILE)"},
    {kMegatronIndex, "the index of a Megatron data set",
     "it says where documents of the .bin beside it end: write the ids of each document into a "
     "file of its own"},
    {kGzip, "compressed (gzip)", "unpack it first"},
    {"\x28\xb5\x2f\xfd", "compressed (zstd)", "unpack it first"},
};

bool IsJsonObject(std::string_view line) {
  return line.starts_with('{') && nlohmann::json::accept(line.begin(), line.end());
}

// Two lines in a row that are objects, or one in a file that is called so.
bool IsJsonLines(const std::string& path, std::string_view content) {
  const size_t first = content.find('\n');
  if (!IsJsonObject(content.substr(0, first))) return false;
  if (path.ends_with(".jsonl") || path.ends_with(".ndjson")) return true;
  if (first == std::string_view::npos) return false;
  const std::string_view rest = content.substr(first + 1);
  return IsJsonObject(rest.substr(0, rest.find('\n')));
}

bool HasMegatronIndex(const std::string& path) {
  constexpr std::string_view kBin = ".bin";
  if (!path.ends_with(kBin)) return false;
  std::ifstream file(path.substr(0, path.size() - kBin.size()) + ".idx", std::ios::binary);
  std::string magic(kMegatronIndex.size(), '\0');
  return file.read(magic.data(), static_cast<std::streamsize>(magic.size())) &&
         magic == kMegatronIndex;
}

absl::Status Refuse(const std::string& path, const char* what, const char* remedy) {
  return absl::InvalidArgumentError(absl::StrCat(path, " is ", what, ", which is not read; ",
                                                 remedy, "; or leave it out (--suffix)"));
}

}  // namespace

absl::Status RefuseForeignFormat(const std::string& path, std::string_view content, bool is_text) {
  for (const Format& format : kFormats) {
    if (!is_text && format.magic == kGzip && !path.ends_with("gz")) continue;
    if (content.starts_with(format.magic)) return Refuse(path, format.what, format.remedy);
  }
  if (IsJsonLines(path, content)) return Refuse(path, "a file of JSON lines", kExtract);
  if (HasMegatronIndex(path)) {
    return Refuse(path, "half of a Megatron data set",
                  "the .idx beside it says where documents end: write the ids of each document "
                  "into a file of its own");
  }
  return absl::OkStatus();
}

}  // namespace ringleader::data
