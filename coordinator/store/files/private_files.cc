#include "coordinator/store/files/private_files.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "base/file_lock.h"
#include "base/status_macros.h"

namespace ringleader::store {
namespace {

namespace fs = std::filesystem;

constexpr mode_t kOthers = S_IRWXG | S_IRWXO;

// Takes away what users other than the owner may do. OK also where there is nothing.
absl::Status TakeRightsAway(const std::string& path) {
  struct stat file = {};
  if (stat(path.c_str(), &file) != 0 || (file.st_mode & kOthers) == 0) return absl::OkStatus();
  const mode_t was = file.st_mode & 07777;
  if (chmod(path.c_str(), was & ~kOthers & 0777) != 0) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "%s: other users may use it (mode %04o), and that cannot be changed: %s; make it and its "
        "folder this user's own, private, and writable for this user",
        path, was, std::strerror(errno)));
  }
  spdlog::warn("{}: other users could use it (mode {:04o}); it is private now", path, was);
  return absl::OkStatus();
}

bool HoldsOnlyADatabase(const std::string& folder) {
  std::error_code error;
  const fs::directory_iterator entries(folder, error);
  return !error && std::all_of(begin(entries), end(entries), [](const fs::directory_entry& entry) {
    const std::string name = entry.path().filename();
    return name == "lost+found" || absl::StartsWith(name, "ringleader.") ||
           absl::StartsWith(name, kTracesSentName);
  });
}

}  // namespace

absl::Status MakePrivateFolder(const std::string& path) {
  std::error_code error;
  if (fs::create_directories(path, error)) {
    fs::permissions(path, fs::perms::owner_all, error);
  }
  struct stat folder = {};
  if (error || stat(path.c_str(), &folder) != 0) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "cannot create %s: %s", path, error ? error.message() : std::string(std::strerror(errno))));
  }
  if ((folder.st_mode & kOthers) == 0 || HoldsOnlyADatabase(path)) return TakeRightsAway(path);
  return absl::FailedPreconditionError(absl::StrFormat(
      "%s: other users may use it (mode %04o), and it holds other things than a database, so it is "
      "left as it is; chmod 700 it, or choose a folder for the database alone",
      path, folder.st_mode & 07777));
}

absl::Status MakePrivateFile(const std::string& path) {
  // Only one that is new is opened: to close a file that SQLite has open would end its locks.
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (fd >= 0) {
    close(fd);
    return absl::OkStatus();
  }
  return TakeRightsAway(path);
}

absl::StatusOr<std::unique_ptr<FileLock>> FileLock::Take(const std::string& database) {
  const std::string path = database + ".lock";
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "database %s: cannot create %s: %s; make its folder exist and writable for this user",
        database, path, std::strerror(errno)));
  }
  auto lock = std::unique_ptr<FileLock>(new FileLock(fd));
  ASSIGN_OR_RETURN(const bool is_ours, TryLockFile(fd, path));
  if (!is_ours) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "database %s: another coordinator uses it; stop that one or choose another --data-dir",
        database));
  }
  return lock;
}

FileLock::~FileLock() {
  close(fd_);
}

}  // namespace ringleader::store
