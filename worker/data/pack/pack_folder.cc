#include "worker/data/pack/pack_folder.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/checksum.h"
#include "base/files.h"
#include "base/status_macros.h"
#include "worker/data/foreign_format.h"
#include "worker/data/pack/pack_lock.h"
#include "worker/data/pack/pack_sources.h"

namespace ringleader::data {
namespace {

namespace fs = std::filesystem;

// One of the two outputs: collects documents, cuts them into shards.
class FolderWriter {
 public:
  FolderWriter(const PackOptions& options, std::string folder)
      : options_(options),
        folder_(std::move(folder)),
        token_bytes_(options.vocabulary <= UINT16_MAX + 1u ? 2 : 4) {}

  // A file's documents: token ids may hold separators, each of which ends one. The last one's is
  // added where it is missing. `marks`: one a token; none without tasks or prefixes.
  absl::Status Add(std::span<const uint32_t> file, absl::string_view marks) {
    bool begins = true;
    for (const uint32_t token : file) {
      if (begins) starts_.push_back(tokens_.size());
      tokens_.push_back(token);
      begins = token == *options_.separator;
    }
    marks_.insert(marks_.end(), marks.begin(), marks.end());
    if (!begins) {
      tokens_.push_back(*options_.separator);
      if (!options_.tasks.empty()) marks_.push_back(kGivenMark);
      if (options_.prefix_end.has_value()) marks_.push_back(kPlainMark);
    }
    return tokens_.size() >= options_.shard_tokens ? Flush() : absl::OkStatus();
  }

  absl::StatusOr<Manifest> Finish() {
    RETURN_IF_ERROR(Flush());
    manifest_.vocabulary = options_.vocabulary;
    manifest_.separator = *options_.separator;
    manifest_.tokenizer = options_.tokenizer;
    manifest_.tasks = options_.tasks;
    manifest_.prefixes = options_.prefix_end.has_value();
    RETURN_IF_ERROR(WriteManifest(folder_, manifest_));
    return manifest_;
  }

 private:
  absl::Status Flush() {
    if (tokens_.empty()) return absl::OkStatus();
    const std::string name = absl::StrFormat("shard-%05d.tokens", manifest_.shards.size());
    RETURN_IF_ERROR(
        WriteShard(absl::StrCat(folder_, "/", name), tokens_, starts_, token_bytes_, marks_));
    manifest_.shards.push_back(name);
    manifest_.tokens += tokens_.size();
    manifest_.documents += starts_.size();
    tokens_.clear();
    starts_.clear();
    marks_.clear();
    return absl::OkStatus();
  }

  const PackOptions& options_;
  const std::string folder_;
  const uint32_t token_bytes_;
  Manifest manifest_;
  std::vector<uint32_t> tokens_;
  std::vector<uint64_t> starts_;
  std::vector<uint8_t> marks_;
};

template <typename Token>
absl::Status Decode(const std::string& bytes, const Source& source, uint32_t vocabulary,
                    std::vector<uint32_t>* tokens) {
  if (bytes.size() % sizeof(Token) != 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: %d bytes do not divide by %d", source.file.string(), bytes.size(), sizeof(Token)));
  }
  tokens->clear();
  for (size_t i = 0; i < bytes.size(); i += sizeof(Token)) {
    Token token;
    std::memcpy(&token, bytes.data() + i, sizeof(Token));
    if (token >= vocabulary) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s: token %d at %d is outside the vocabulary of %d",
                          source.file.string(), token, i / sizeof(Token), vocabulary));
    }
    tokens->push_back(token);
  }
  return absl::OkStatus();
}

absl::Status DecodeDocument(const PackOptions& options, const std::string& bytes,
                            const Source& source, std::vector<uint32_t>* tokens) {
  switch (options.input) {
    case PackOptions::Input::kText:
      return Decode<uint8_t>(bytes, source, options.vocabulary, tokens);
    case PackOptions::Input::kUint16:
      return Decode<uint16_t>(bytes, source, options.vocabulary, tokens);
    case PackOptions::Input::kUint32:
      return Decode<uint32_t>(bytes, source, options.vocabulary, tokens);
  }
  return absl::InternalError("unknown input kind");
}

// The marks of `source`, whose content holds `tokens` tokens; none without tasks.
absl::StatusOr<std::string> ReadMarks(const PackOptions& options, const Source& source,
                                      size_t tokens) {
  if (options.tasks.empty()) return std::string();
  const std::string path = source.file.string() + kMarksSuffix;
  ASSIGN_OR_RETURN(std::string marks, ReadFile(path));
  if (marks.size() != tokens) {
    return absl::InvalidArgumentError(absl::StrFormat("%s holds %d marks for the %d tokens of %s",
                                                      path, marks.size(), tokens, source.name));
  }
  const absl::Status known = CheckMarks(
      {reinterpret_cast<const uint8_t*>(marks.data()), marks.size()}, options.tasks.size());
  if (!known.ok()) return absl::InvalidArgumentError(absl::StrCat(path, ": ", known.message()));
  return marks;
}

// The marks of the prefixes of `source`'s documents, which separators within it end, too.
absl::StatusOr<std::string> MarkPrefixes(const PackOptions& options, const Source& source,
                                         std::span<const uint32_t> tokens) {
  std::string marks;
  bool in_prefix = true;
  const auto unended = [&] {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: no token %d (--prefix-end) in the document that ends at its token %d: a prefix ends "
        "with one; add it, or pack without",
        source.file.string(), *options.prefix_end, marks.size()));
  };
  for (const uint32_t token : tokens) {
    const bool is_separator = token == *options.separator;
    if (in_prefix && is_separator) return unended();
    marks.push_back(static_cast<char>(in_prefix ? kGivenMark : kPlainMark));
    in_prefix = is_separator || (in_prefix && token != *options.prefix_end);
  }
  const bool is_after_separator = !tokens.empty() && tokens.back() == *options.separator;
  if (in_prefix && !is_after_separator) return unended();
  return marks;
}

// Empty if it cannot be read, which is found later.
std::string HeadOf(const Source& source) {
  std::string head(size_t{1} << 18, '\0');
  std::ifstream file(source.file, std::ios::binary);
  file.read(head.data(), static_cast<std::streamsize>(head.size()));
  head.resize(static_cast<size_t>(file.gcount()));
  return head;
}

bool IsHeldOut(const Source& source, double share) {
  const uint64_t hash = Checksum(source.name.data(), source.name.size());
  return static_cast<double>(hash >> 11) * 0x1p-53 < share;
}

absl::Status CheckOptions(PackOptions* options) {
  if (options->paths.empty()) return absl::InvalidArgumentError("no input files or folders");
  if (!(options->eval_share >= 0 && options->eval_share < 1)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("eval share is %g; it must be in [0, 1)", options->eval_share));
  }
  if (options->input == PackOptions::Input::kText) {
    if (options->vocabulary != 0 || options->separator.has_value() || !options->tokenizer.empty() ||
        !options->tasks.empty()) {
      return absl::InvalidArgumentError(
          "vocabulary, separator, tokenizer and tasks are for token ids (--format uint16 or "
          "uint32); text is packed a token a byte");
    }
    options->vocabulary = kByteVocabulary;
    options->separator = kByteSeparator;
    options->tokenizer = "bytes";
  } else if (!options->separator.has_value() || *options->separator >= options->vocabulary) {
    // No default would do: 0 is an ordinary token of most tokenizers.
    return absl::InvalidArgumentError(absl::StrFormat(
        "token-id input needs the vocabulary's size and a separator below it; got vocabulary %d, "
        "%s; give --vocabulary and --separator (the tokenizer's end of text)",
        options->vocabulary,
        options->separator ? absl::StrCat("separator ", *options->separator) : "no separator"));
  }
  RETURN_IF_ERROR(CheckTasks(options->tasks));
  if (options->prefix_end.has_value() && !options->tasks.empty()) {
    return absl::InvalidArgumentError(
        "--prefix-end beside --tasks: marks say which tokens are given, and so where a prefix "
        "ends; "
        "give one");
  }
  if (options->prefix_end.has_value() && (*options->prefix_end >= options->vocabulary ||
                                          *options->prefix_end == *options->separator)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "--prefix-end %d is none of the tokens below %d (the vocabulary) but %d (the separator)",
        *options->prefix_end, options->vocabulary, *options->separator));
  }
  return absl::OkStatus();
}

absl::Status CheckOutput(const fs::path& output) {
  for (const char* part : {"train", "eval"}) {
    const fs::path folder = output / part;
    std::error_code error;
    const bool is_there = fs::exists(folder, error);
    if (error) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s: %s", folder.string(), error.message()));
    }
    if (is_there) {
      return absl::AlreadyExistsError(
          absl::StrFormat("%s exists; choose another output folder or remove it", folder.string()));
    }
  }
  return absl::OkStatus();
}

// For an error: what may be missed where there is no document.
std::string LeftOut(const PackOptions& options, const PackResult& result) {
  std::string text;
  if (result.empty_files > 0)
    absl::StrAppendFormat(&text, ", of which %d are empty", result.empty_files);
  if (result.too_long_files > 0) {
    absl::StrAppendFormat(&text, ", of which %d, as %s, are longer than --max-document-bytes (%d)",
                          result.too_long_files, result.first_too_long, options.max_document_bytes);
  }
  if (result.skipped_links > 0) {
    absl::StrAppendFormat(&text, ", beside %d links to folders or to nothing, as %s",
                          result.skipped_links, result.first_skipped_link);
  }
  return text;
}

// Whether `source` was packed; else it is counted in `result` as left out.
absl::StatusOr<bool> PackSource(const PackOptions& options, const Source& source,
                                FolderWriter* writer, PackResult* result) {
  const bool is_text = options.input == PackOptions::Input::kText;
  RETURN_IF_ERROR(RefuseForeignFormat(source.file.string(), HeadOf(source), is_text));
  std::error_code error;
  const uint64_t bytes = fs::file_size(source.file, error);
  if (error) {
    return absl::UnavailableError(absl::StrFormat("%s: %s", source.file.string(), error.message()));
  }
  if (bytes > options.max_document_bytes) {
    if (source.is_named) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s has %d bytes, more than the %d of a document; cut it, or raise "
                          "--max-document-bytes",
                          source.file.string(), bytes, options.max_document_bytes));
    }
    if (++result->too_long_files == 1) result->first_too_long = source.file.string();
    ++result->skipped_files;
    return false;
  }
  if (bytes == 0) {
    ++result->empty_files;
    ++result->skipped_files;
    return false;
  }
  ASSIGN_OR_RETURN(const std::string content, ReadFile(source.file.string()));
  // A NUL byte marks what is no text: objects and archives that lie among headers.
  if (is_text && content.find('\0') != std::string::npos) {
    ++result->skipped_files;
    return false;
  }
  std::vector<uint32_t> tokens;
  RETURN_IF_ERROR(DecodeDocument(options, content, source, &tokens));
  ASSIGN_OR_RETURN(const std::string marks, options.prefix_end.has_value()
                                                ? MarkPrefixes(options, source, tokens)
                                                : ReadMarks(options, source, tokens.size()));
  RETURN_IF_ERROR(writer->Add(tokens, marks));
  return true;
}

// Files that were found, and those of them that were packed.
struct FileCounts {
  size_t found = 0;
  size_t packed = 0;
};

// That both parts hold what was asked for.
absl::Status CheckParts(const PackOptions& options, const PackResult& result,
                        const FileCounts& files) {
  constexpr char kApart[] =
      "pack with --eval-share 0, and what is to be held out (data.eval) into a folder of its own";
  if (result.train.documents == 0 && result.eval.documents > 0) {
    if (files.packed == 1) {
      return absl::InvalidArgumentError(
          absl::StrFormat("the only file was held out, and none is left to train on: %s", kApart));
    }
    return absl::InvalidArgumentError(absl::StrFormat(
        "all %d files were held out, and none is left to train on: hold out less than a share of "
        "%g (--eval-share), or %s",
        files.packed, options.eval_share, kApart));
  }
  if (result.train.documents == 0 && files.found > 0 && result.empty_files == files.found) {
    return absl::InvalidArgumentError(files.found == 1
                                          ? "the only file is empty"
                                          : absl::StrFormat("all %d files are empty", files.found));
  }
  if (result.train.documents == 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "found no document to train on among %d files%s; check the paths and suffixes", files.found,
        LeftOut(options, result)));
  }
  if (options.eval_share == 0 || result.eval.documents > 0) return absl::OkStatus();
  if (files.packed == 1) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "nothing was held out, for a file is held out whole, and there is only one: %s", kApart));
  }
  return absl::InvalidArgumentError(absl::StrFormat(
      "none of %d documents was held out: a file is held out whole, and a share of %g is picked "
      "by path; cut the text into more files, hold out more (--eval-share), or nothing "
      "(--eval-share 0)",
      result.train.documents, options.eval_share));
}

}  // namespace

absl::StatusOr<PackResult> Pack(const PackOptions& user_options) {
  PackOptions options = user_options;
  RETURN_IF_ERROR(CheckOptions(&options));
  RETURN_IF_ERROR(CheckOutput(options.output));
  PackResult result;
  ASSIGN_OR_RETURN(const std::vector<Source> sources, FindSources(options, &result));

  // Built beside the output and renamed into place, so that a broken-off call leaves nothing that
  // looks whole.
  const fs::path output = options.output;
  ASSIGN_OR_RETURN(const PackLock lock, PackLock::Take(output));
  RETURN_IF_ERROR(CheckOutput(output));  // another pack may have ended meanwhile
  std::error_code error;
  const fs::path building = output / ".packing";
  fs::remove_all(building, error);
  const absl::Cleanup clean_up = [&] { fs::remove_all(building, error); };
  for (const char* part : {"train", "eval"}) {
    fs::create_directories(building / part, error);
    if (error) {
      return absl::InvalidArgumentError(
          absl::StrFormat("cannot create %s: %s", (building / part).string(), error.message()));
    }
  }

  FolderWriter train(options, building / "train");
  FolderWriter eval(options, building / "eval");
  FileCounts files = {.found = sources.size()};
  for (const Source& source : sources) {
    FolderWriter* part = IsHeldOut(source, options.eval_share) ? &eval : &train;
    ASSIGN_OR_RETURN(const bool is_packed, PackSource(options, source, part, &result));
    files.packed += is_packed ? 1 : 0;
  }
  ASSIGN_OR_RETURN(result.train, train.Finish());
  ASSIGN_OR_RETURN(result.eval, eval.Finish());
  RETURN_IF_ERROR(CheckParts(options, result, files));
  for (const char* part : {"eval", "train"}) {
    const absl::Status moved = RenameDurably(building / part, output / part);
    if (moved.ok()) continue;
    // What is there no more lies in the output, where nothing may look whole.
    for (const char* other : {"train", "eval"}) {
      if (!fs::exists(building / other, error)) fs::remove_all(output / other, error);
    }
    return moved;
  }
  return result;
}

}  // namespace ringleader::data
