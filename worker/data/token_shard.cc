#include "worker/data/token_shard.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_format.h"
#include "base/checksum.h"
#include "base/files.h"
#include "base/status_macros.h"

namespace ringleader::data {
namespace {

constexpr char kShardMagic[8] = {'R', 'L', 'T', 'O', 'K', 'E', 'N', 'S'};

int64_t ModifiedAt(const struct stat& status) {
  return int64_t{status.st_mtim.tv_sec} * 1'000'000'000 + status.st_mtim.tv_nsec;
}

absl::Status Damaged(const std::string& path, const std::string& what) {
  return absl::DataLossError(absl::StrFormat(
      "token shard %s is damaged: %s; pack the text again with `ringctl data pack`", path, what));
}

uint64_t HeaderChecksum(const ShardHeader& header) {
  return Checksum(&header, offsetof(ShardHeader, header_checksum));
}

// Checks all that a header says, of a file of so many bytes.
absl::Status CheckHeader(const std::string& path, const ShardHeader& header, size_t bytes) {
  if (std::memcmp(header.magic, kShardMagic, sizeof(kShardMagic)) != 0) {
    return Damaged(path, "it does not start with RLTOKENS");
  }
  if (header.version != kShardVersion && header.version != kMarkedShardVersion) {
    return absl::FailedPreconditionError(
        absl::StrFormat("token shard %s has format version %d; this build reads versions %d and %d",
                        path, header.version, kShardVersion, kMarkedShardVersion));
  }
  if (header.header_checksum != HeaderChecksum(header)) return Damaged(path, "header checksum");
  // Whoever wrote the header: each count fits the file by itself, so that their sum does not wrap.
  if ((header.token_bytes != 2 && header.token_bytes != 4) || header.tokens > bytes ||
      header.documents > bytes / sizeof(uint64_t)) {
    return Damaged(path, "its header's counts");
  }
  const size_t expected = sizeof(ShardHeader) + header.documents * sizeof(uint64_t) +
                          header.tokens * header.token_bytes + header.mark_bytes();
  if (bytes == expected) return absl::OkStatus();
  return Damaged(path, absl::StrFormat("%d bytes instead of %d", bytes, expected));
}

// Returns the open file, whose header is as it has to be, for the caller to close.
absl::StatusOr<int> OpenShard(const std::string& path, struct stat* status, ShardHeader* header) {
  // A pipe in its place is opened without waiting for its other end.
  const int fd = open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) {
    const int error = errno;
    const std::string message =
        absl::StrFormat("cannot open token shard %s: %s", path, std::strerror(error));
    // One that is there may be opened elsewhere, or later.
    return error == ENOENT ? absl::NotFoundError(message) : absl::UnavailableError(message);
  }
  absl::Cleanup close_file = [fd] { close(fd); };
  if (fstat(fd, status) != 0) return FileError(errno, "stat " + path);
  if (!S_ISREG(status->st_mode)) return Damaged(path, "it is not a regular file");
  const auto bytes = static_cast<size_t>(status->st_size);
  if (bytes < sizeof(ShardHeader)) {
    return Damaged(path, absl::StrFormat("%d bytes are fewer than its header's %d", bytes,
                                         sizeof(ShardHeader)));
  }
  const ssize_t read = pread(fd, header, sizeof(ShardHeader), 0);
  if (read < 0) return FileError(errno, "read " + path);
  if (read != sizeof(ShardHeader)) return Damaged(path, "it got shorter");
  RETURN_IF_ERROR(CheckHeader(path, *header, bytes));
  std::move(close_file).Cancel();
  return fd;
}

}  // namespace

absl::Status WriteShard(const std::string& path, std::span<const uint32_t> tokens,
                        std::span<const uint64_t> document_starts, uint32_t token_bytes,
                        std::span<const uint8_t> marks) {
  if (token_bytes != 2 && token_bytes != 4) {
    return absl::InvalidArgumentError(
        absl::StrFormat("token_bytes is %d; 2 and 4 are possible", token_bytes));
  }
  if (!marks.empty() && marks.size() != tokens.size()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%d marks for %d tokens", marks.size(), tokens.size()));
  }
  std::vector<uint16_t> narrow;
  std::span<const std::byte> token_data = std::as_bytes(tokens);
  if (token_bytes == 2) {
    narrow.reserve(tokens.size());
    for (const uint32_t token : tokens) {
      if (token > UINT16_MAX) {
        return absl::InvalidArgumentError(
            absl::StrFormat("token %d does not fit 2 bytes; use 4", token));
      }
      narrow.push_back(static_cast<uint16_t>(token));
    }
    token_data = std::as_bytes(std::span(narrow));
  }
  const std::span<const std::byte> start_data = std::as_bytes(document_starts);
  const std::span<const std::byte> mark_data = std::as_bytes(marks);

  ShardHeader header{};
  std::memcpy(header.magic, kShardMagic, sizeof(kShardMagic));
  header.version = marks.empty() ? kShardVersion : kMarkedShardVersion;
  header.token_bytes = token_bytes;
  header.tokens = tokens.size();
  header.documents = document_starts.size();
  ChecksumStream body;
  body.Update(start_data.data(), start_data.size());
  body.Update(token_data.data(), token_data.size());
  body.Update(mark_data.data(), mark_data.size());
  header.body_checksum = body.Digest();
  header.header_checksum = HeaderChecksum(header);

  return WriteFileAtomically(
      path, {std::as_bytes(std::span(&header, 1)), start_data, token_data, mark_data});
}

absl::StatusOr<ShardHeader> ReadShardHeader(const std::string& path) {
  struct stat status;
  ShardHeader header;
  ASSIGN_OR_RETURN(const int fd, OpenShard(path, &status, &header));
  close(fd);
  return header;
}

absl::StatusOr<std::unique_ptr<TokenShard>> TokenShard::Open(const std::string& path) {
  std::unique_ptr<TokenShard> shard(new TokenShard);
  struct stat status;
  ShardHeader& header = shard->header_;
  ASSIGN_OR_RETURN(const int fd, OpenShard(path, &status, &header));
  const absl::Cleanup close_file = [fd] { close(fd); };
  const auto bytes = static_cast<size_t>(status.st_size);
  shard->mapping_ = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0);
  if (shard->mapping_ == MAP_FAILED) {
    shard->mapping_ = nullptr;
    return FileError(errno, "mmap " + path);
  }
  shard->mapping_bytes_ = bytes;
  shard->path_ = path;
  shard->device_ = status.st_dev;
  shard->inode_ = status.st_ino;
  shard->modified_ = ModifiedAt(status);
  const auto* base = static_cast<const std::byte*>(shard->mapping_);
  const size_t marks = header.mark_bytes();
  const std::byte* body = base + sizeof(ShardHeader);
  if (Checksum(body, bytes - sizeof(ShardHeader)) != header.body_checksum) {
    return Damaged(path, "checksum of the tokens");
  }
  shard->document_starts_ = {reinterpret_cast<const uint64_t*>(body), header.documents};
  shard->body_tokens_ = body + header.documents * sizeof(uint64_t);
  shard->marks_ = {reinterpret_cast<const uint8_t*>(base + bytes - marks), marks};
  return shard;
}

absl::Status TokenShard::CheckUnchanged() const {
  struct stat now;
  if (stat(path_.c_str(), &now) != 0 || now.st_dev != device_ || now.st_ino != inode_) {
    return absl::OkStatus();
  }
  const bool is_whole = static_cast<size_t>(now.st_size) == mapping_bytes_;
  if (is_whole && ModifiedAt(now) == modified_) return absl::OkStatus();
  const std::byte* const body = static_cast<const std::byte*>(mapping_) + sizeof(ShardHeader);
  if (is_whole && Checksum(body, mapping_bytes_ - sizeof(ShardHeader)) == header_.body_checksum) {
    modified_ = ModifiedAt(now);
    return absl::OkStatus();
  }
  return absl::DataLossError(absl::StrFormat(
      "token shard %s was written into while a job read it; put data that changes into another "
      "folder, or rename a new file over this one",
      path_));
}

TokenShard::~TokenShard() {
  if (mapping_ != nullptr) munmap(mapping_, mapping_bytes_);
}

}  // namespace ringleader::data
