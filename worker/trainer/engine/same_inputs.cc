#include "worker/trainer/engine/same_inputs.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/checksum.h"
#include "base/status_macros.h"
#include "worker/checkpoint/shared_outcome.h"

namespace ringleader::trainer {
namespace {

namespace fs = std::filesystem;

// Of a file: its beginning, where tensors are named, and as many pieces spread over the rest.
constexpr int64_t kPieces = 64, kPieceBytes = int64_t{16} << 10;

absl::Status AddFile(const fs::path& path, ChecksumStream& sum) {
  std::error_code error;
  const auto bytes = static_cast<int64_t>(fs::file_size(path, error));
  if (error) return absl::ErrnoToStatus(error.value(), absl::StrCat("look at ", path.string()));
  const std::string about = absl::StrCat(path.filename().string(), "\n", bytes, "\n");
  sum.Update(about.data(), about.size());
  std::ifstream file(path, std::ios::binary);
  std::vector<char> piece(kPieceBytes);
  for (int64_t i = 0; i < kPieces; ++i) {
    file.seekg(std::max<int64_t>(0, bytes - kPieceBytes) * i / (kPieces - 1));
    file.read(piece.data(), std::min(bytes, kPieceBytes));
    if (!file) return absl::DataLossError(absl::StrCat("cannot read ", path.string()));
    sum.Update(piece.data(), static_cast<size_t>(file.gcount()));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckSameInputs(std::span<const Input> inputs, comm::Communicator& world) {
  for (const Input& input : inputs) {
    ASSIGN_OR_RETURN(const std::vector<uint64_t> digests,
                     checkpoint::Agree(world, absl::OkStatus(), input.digest));
    const auto other =
        std::ranges::find_if(digests, [&](uint64_t digest) { return digest != digests.front(); });
    if (other == digests.end()) continue;
    return absl::FailedPreconditionError(absl::StrFormat(
        "%s: %s has other content for rank %d than for rank 0; mount the same storage at this path "
        "on every node, or copy it there anew",
        input.field, input.place, other - digests.begin()));
  }
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> DigestOfWeights(const std::string& folder) {
  if (folder == "random") return 0;
  std::vector<fs::path> files;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; it != end; it.increment(error)) {
    if (it->path().extension() == ".safetensors") files.push_back(it->path());
  }
  if (error) return absl::ErrnoToStatus(error.value(), absl::StrCat("list ", folder));
  std::ranges::sort(files);
  ChecksumStream sum;
  for (const fs::path& file : files) RETURN_IF_ERROR(AddFile(file, sum));
  return sum.Digest();
}

}  // namespace ringleader::trainer
