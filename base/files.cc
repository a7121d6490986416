#include "base/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/process/progress.h"
#include "base/status_macros.h"

namespace ringleader {
namespace {

absl::Status Failed(const char* what, const std::string& path) {
  return FileError(errno, absl::StrCat(what, " ", path));
}

// At a time, and durable before the next where there is more: what a slow disk or network takes
// within a minute.
constexpr size_t kPieceBytes = size_t{256} << 20;

absl::Status WriteAll(int fd, std::span<const std::byte> data, const std::string& path) {
  while (!data.empty()) {
    const ssize_t written = write(fd, data.data(), std::min(data.size(), kPieceBytes));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return Failed("write", path);
    data = data.subspan(static_cast<size_t>(written));
    if (!data.empty() && fdatasync(fd) != 0) return Failed("sync", path);
    Progress::Tick();
  }
  return absl::OkStatus();
}

// Syncs the folder that holds `path`.
absl::Status SyncFolder(const std::string& path) {
  const std::string folder = std::filesystem::path(path).parent_path().string();
  const int fd = open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return Failed("open", folder);
  const int result = fsync(fd);
  close(fd);
  return result == 0 ? absl::OkStatus() : Failed("sync", folder);
}

absl::Status WriteAndSync(const std::string& path,
                          std::span<const std::span<const std::byte>> pieces) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) return Failed("create", path);
  absl::Status status;
  for (const auto& piece : pieces) {
    status = WriteAll(fd, piece, path);
    if (!status.ok()) break;
  }
  if (status.ok() && fsync(fd) != 0) status = Failed("sync", path);
  if (close(fd) != 0 && status.ok()) status = Failed("close", path);
  return status;
}

// What can be read of `fd`, but no more than `most` bytes. expected: how many there are, as far as
// somebody knows.
absl::StatusOr<std::string> ReadToEnd(int fd, size_t expected, size_t most,
                                      const std::string& path) {
  // One byte more than there is, for it may grow while it is read.
  std::string text(std::min(expected + 1, most), '\0');
  size_t size = 0;
  while (size < most) {
    if (size == text.size()) text.resize(size > most / 2 ? most : 2 * size);
    const ssize_t got = read(fd, text.data() + size, text.size() - size);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return Failed("read", path);
    if (got == 0) break;
    size += static_cast<size_t>(got);
  }
  text.resize(size);
  return text;
}

}  // namespace

absl::Status FileError(int error, absl::string_view what) {
  const absl::Status status = absl::ErrnoToStatus(error, what);
  return absl::IsAborted(status) ? absl::UnavailableError(status.message()) : status;
}

absl::Status WriteFileAtomically(const std::string& path,
                                 std::initializer_list<std::span<const std::byte>> pieces) {
  return WriteFileAtomically(path, std::span(pieces.begin(), pieces.size()));
}

absl::Status WriteFileAtomically(const std::string& path,
                                 std::span<const std::span<const std::byte>> pieces) {
  const std::string temporary = path + ".tmp";
  absl::Status status = WriteAndSync(temporary, pieces);
  if (status.ok() && rename(temporary.c_str(), path.c_str()) != 0) status = Failed("rename", path);
  if (!status.ok()) {
    unlink(temporary.c_str());
    return status;
  }
  return SyncFolder(path);
}

absl::Status WriteFileAtomically(const std::string& path, const std::string& text) {
  return WriteFileAtomically(path, {std::as_bytes(std::span(text.data(), text.size()))});
}

absl::Status RenameDurably(const std::string& from, const std::string& to) {
  if (rename(from.c_str(), to.c_str()) != 0) return Failed("rename to", to);
  return SyncFolder(to);
}

absl::Status ReplaceFolder(const std::string& fresh, const std::string& target) {
  // A name that nobody gives a folder of their own.
  const std::filesystem::path place(target);
  const std::string replaced =
      place.parent_path() / ("." + place.filename().string() + ".replaced");
  std::error_code error;
  // Left by a process that was killed below.
  std::filesystem::remove_all(replaced, error);
  if (std::filesystem::exists(target, error)) RETURN_IF_ERROR(RenameDurably(target, replaced));
  RETURN_IF_ERROR(RenameDurably(fresh, target));
  std::filesystem::remove_all(replaced, error);
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return Failed("open", path);
  const absl::Cleanup close_it = [fd] { close(fd); };
  struct stat about = {};
  if (fstat(fd, &about) != 0) return Failed("look at", path);
  return ReadToEnd(fd, static_cast<size_t>(about.st_size), std::string().max_size(), path);
}

namespace {

absl::StatusOr<std::string> ReadBounded(const std::string& path, size_t max_bytes, Pipe pipe) {
  // Without O_NONBLOCK, opening a pipe waits for somebody who writes into it.
  const int fd = open(path.c_str(), O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
  if (fd < 0) {
    // The path leads nowhere: there is no such file, in other words.
    const bool nowhere = errno == ENOTDIR || errno == ELOOP;
    const absl::Status failed = Failed("open", path);
    return nowhere ? absl::NotFoundError(failed.message()) : failed;
  }
  const absl::Cleanup close_it = [fd] { close(fd); };
  struct stat about = {};
  if (fstat(fd, &about) != 0) return Failed("look at", path);
  const bool is_pipe = S_ISFIFO(about.st_mode) && pipe == Pipe::kRead;
  if (!S_ISREG(about.st_mode) && !is_pipe) {
    return absl::InvalidArgumentError(absl::StrCat(path, " is a ",
                                                   S_ISDIR(about.st_mode)    ? "folder"
                                                   : S_ISFIFO(about.st_mode) ? "pipe"
                                                                             : "device",
                                                   "; a file is expected"));
  }
  // From here on, whoever writes into a pipe is waited for.
  if (is_pipe && fcntl(fd, F_SETFL, 0) != 0) return Failed("wait for", path);
  if (static_cast<uint64_t>(about.st_size) > max_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, " has ", about.st_size, " bytes; at most ", max_bytes, " are allowed"));
  }
  ASSIGN_OR_RETURN(std::string text,
                   ReadToEnd(fd, static_cast<size_t>(about.st_size), max_bytes + 1, path));
  if (text.size() > max_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, " has more than the ", max_bytes, " bytes that are allowed"));
  }
  return text;
}

}  // namespace

absl::StatusOr<std::string> ReadRegularFile(const std::string& path, size_t max_bytes) {
  return ReadBounded(path, max_bytes, Pipe::kRefused);
}

absl::StatusOr<std::string> ReadFlagFile(absl::string_view flag, const std::string& path,
                                         size_t max_bytes, Pipe pipe) {
  absl::StatusOr<std::string> text = ReadBounded(path, max_bytes, pipe);
  if (text.ok()) return text;
  absl::string_view why = text.status().message();
  const bool is_closed = absl::ConsumePrefix(&why, absl::StrCat("open ", path, ": "));
  return absl::Status(text.status().code(),
                      is_closed ? absl::StrCat(flag, ": cannot read ", path, ": ", why)
                                : absl::StrCat(flag, ": ", why));
}

}  // namespace ringleader
