#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <span>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/checksum.h"
#include "base/files.h"
#include "base/process/progress.h"
#include "base/status_macros.h"
#include "worker/checkpoint/format.h"

namespace ringleader::checkpoint {
namespace {

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

// 64 bytes; then master, first_moment, second_moment: [elements] fp32 each.
struct ShardHeader {
  char magic[8] = {'R', 'L', 'S', 'H', 'A', 'R', 'D', '\n'};
  uint32_t version = kFormatVersion;
  uint32_t header_bytes = 64;
  uint64_t begin = 0;
  uint64_t elements = 0;
  uint64_t reserved[4] = {};
};
static_assert(sizeof(ShardHeader) == 64);

constexpr int kSections = 3;
constexpr size_t kPieceBytes = size_t{16} << 20;  // that are read at a time

// A shard's arrays in the order of the file.
std::array<std::vector<float>*, kSections> Sections(optim::OptimizerShard& shard) {
  return {&shard.master, &shard.first_moment, &shard.second_moment};
}

int64_t FileBytes(int64_t elements) {
  return static_cast<int64_t>(sizeof(ShardHeader)) +
         kSections * elements * static_cast<int64_t>(sizeof(float));
}

// What `error` of a system call says: DATA_LOSS if there is no such file, and otherwise nothing of
// the file.
absl::Status ReadError(int error, const std::string& what) {
  const std::string message = absl::StrCat(what, ": ", std::strerror(error));
  const bool missing = error == ENOENT || error == ENOTDIR || error == ELOOP || error == ENXIO;
  return missing ? absl::DataLossError(message) : absl::UnavailableError(message);
}

// An open shard file of the right length.
absl::StatusOr<int> OpenShard(const std::string& path, int64_t elements) {
  // A pipe in its place is opened without waiting for its other end.
  const int fd = open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) return ReadError(errno, path);
  struct stat info {};
  absl::Status status;
  if (fstat(fd, &info) != 0) {
    status = ReadError(errno, path);
  } else if (!S_ISREG(info.st_mode) || info.st_size != FileBytes(elements)) {
    status = absl::DataLossError(absl::StrFormat("%s: damaged: %d bytes long instead of %d", path,
                                                 info.st_size, FileBytes(elements)));
  }
  if (status.ok()) return fd;
  close(fd);
  return status;
}

// All of it or an error; the file's end does not count as success.
absl::Status ReadAt(int fd, void* data, size_t bytes, int64_t offset, const std::string& path) {
  char* next = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t got = pread(fd, next, std::min(bytes, kPieceBytes), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      return ReadError(errno, absl::StrFormat("%s: cannot be read at byte %d", path, offset));
    }
    if (got == 0) {
      return absl::DataLossError(absl::StrFormat("%s: cut off at byte %d", path, offset));
    }
    next += got;
    offset += got;
    bytes -= static_cast<size_t>(got);
    Progress::Tick();
  }
  return absl::OkStatus();
}

}  // namespace

std::string ShardName(int rank, int ranks) {
  return absl::StrFormat("shard-%05d-of-%05d.bin", rank, ranks);
}

absl::StatusOr<uint64_t> WriteShardFile(const std::string& path, const optim::OptimizerShard& shard,
                                        int64_t elements) {
  ShardHeader header;
  header.begin = static_cast<uint64_t>(shard.begin);
  header.elements = static_cast<uint64_t>(elements);
  // Padding past the end of the model is not written: it depends on the number of ranks.
  std::vector<std::span<const std::byte>> pieces = {std::as_bytes(std::span(&header, 1))};
  for (const std::vector<float>* section :
       {&shard.master, &shard.first_moment, &shard.second_moment}) {
    pieces.push_back(std::as_bytes(std::span(*section).first(elements)));
  }
  ChecksumStream checksum;
  for (const auto& piece : pieces) checksum.Update(piece.data(), piece.size());
  RETURN_IF_ERROR(WriteFileAtomically(path, pieces));
  return checksum.Digest();
}

absl::Status VerifyShardFile(const std::string& folder, const ShardFile& expected) {
  const std::string path = folder + "/" + expected.name;
  ASSIGN_OR_RETURN(const int fd, OpenShard(path, expected.elements));
  const absl::Cleanup close_fd = [fd] { close(fd); };
  ChecksumStream checksum;
  std::vector<char> buffer(size_t{1}
                           << 20);  // a piece at a time: a shard may be larger than memory
  const int64_t end = FileBytes(expected.elements);
  for (int64_t offset = 0; offset < end; offset += static_cast<int64_t>(buffer.size())) {
    const auto bytes =
        static_cast<size_t>(std::min(end - offset, static_cast<int64_t>(buffer.size())));
    RETURN_IF_ERROR(ReadAt(fd, buffer.data(), bytes, offset, path));
    checksum.Update(buffer.data(), bytes);
  }
  if (checksum.Digest() != expected.checksum) {
    return absl::DataLossError(path + ": damaged: its checksum is not the manifest's");
  }
  return absl::OkStatus();
}

absl::Status ReadShardRange(const std::string& folder, const ShardFile& file, int64_t begin,
                            int64_t elements, optim::OptimizerShard& out) {
  const std::string path = folder + "/" + file.name;
  ASSIGN_OR_RETURN(const int fd, OpenShard(path, file.elements));
  const absl::Cleanup close_fd = [fd] { close(fd); };
  ShardHeader header, expected;
  expected.begin = static_cast<uint64_t>(file.begin);
  expected.elements = static_cast<uint64_t>(file.elements);
  RETURN_IF_ERROR(ReadAt(fd, &header, sizeof(header), 0, path));
  if (std::memcmp(&header, &expected, sizeof(header)) != 0) {
    return absl::DataLossError(path + ": damaged: its header is not what the manifest says");
  }
  // The payload was checked against the manifest's checksum when the checkpoint was chosen.
  int64_t section_offset = sizeof(header);
  for (std::vector<float>* section : Sections(out)) {
    RETURN_IF_ERROR(ReadAt(fd, section->data() + (begin - out.begin), elements * sizeof(float),
                           section_offset + (begin - file.begin) * sizeof(float), path));
    section_offset += file.elements * static_cast<int64_t>(sizeof(float));
  }
  return absl::OkStatus();
}

}  // namespace ringleader::checkpoint
