#include "worker/trainer/engine/same_inputs.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <iterator>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/checksum.h"
#include "base/files.h"
#include "base/status_macros.h"
#include "worker/checkpoint/shared_outcome.h"
#include "worker/model/files/huggingface.h"

namespace ringleader::trainer {
namespace {

namespace fs = std::filesystem;

// Of a file: its beginning, where tensors are named, and as many pieces spread over the rest.
constexpr int64_t kPieces = 64, kPieceBytes = int64_t{16} << 10;

absl::Status AddFile(const fs::path& path, ChecksumStream& sum) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return FileError(errno, absl::StrCat("open ", path.string()));
  const absl::Cleanup close_it = [fd] { close(fd); };
  struct stat status = {};
  if (fstat(fd, &status) != 0) return FileError(errno, absl::StrCat("look at ", path.string()));
  const int64_t bytes = status.st_size;
  const std::string about = absl::StrCat(path.filename().string(), "\n", bytes, "\n");
  sum.Update(about.data(), about.size());
  std::vector<char> piece(static_cast<size_t>(std::min(bytes, kPieceBytes)));
  for (int64_t i = 0; i < kPieces; ++i) {
    const int64_t at = std::max<int64_t>(0, bytes - kPieceBytes) * i / (kPieces - 1);
    const ssize_t got = pread(fd, piece.data(), piece.size(), at);
    if (got < 0) return FileError(errno, absl::StrCat("read ", path.string()));
    if (static_cast<size_t>(got) != piece.size()) {
      return absl::DataLossError(absl::StrCat(path.string(), " got shorter while it was read"));
    }
    sum.Update(piece.data(), piece.size());
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
  ASSIGN_OR_RETURN(const std::vector<std::string> files, model::WeightFiles(folder));
  ChecksumStream sum;
  for (const std::string& file : files) RETURN_IF_ERROR(AddFile(fs::path(folder) / file, sum));
  return sum.Digest();
}

}  // namespace ringleader::trainer
