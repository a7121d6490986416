#include "worker/data/pack/pack_lock.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/file_lock.h"
#include "base/files.h"
#include "base/status_macros.h"

namespace ringleader::data {
namespace {

namespace fs = std::filesystem;

// Each further one takes another pack that ends at just that moment.
constexpr int kMaxTries = 1000;

// A file of this name may be another one than that which is open.
bool IsAt(int fd, const std::string& path) {
  struct stat open_file = {}, named = {};
  return fstat(fd, &open_file) == 0 && stat(path.c_str(), &named) == 0 &&
         open_file.st_dev == named.st_dev && open_file.st_ino == named.st_ino;
}

}  // namespace

absl::StatusOr<PackLock> PackLock::Take(const fs::path& output) {
  PackLock lock;
  for (int i = 0; i < kMaxTries; ++i) {
    ASSIGN_OR_RETURN(const bool is_ours, lock.Try(output));
    if (is_ours) return lock;
  }
  return absl::UnavailableError(
      absl::StrFormat("%s goes away as often as it is made; name another folder", output.string()));
}

PackLock::PackLock(PackLock&& other) noexcept
    : file_(std::exchange(other.file_, {})),
      fd_(std::exchange(other.fd_, -1)),
      made_(std::exchange(other.made_, {})) {}

// The file goes while this still has the lock: who has opened it meanwhile gets the lock of a file
// that has no name any more, and sees that. Closed before its folder goes, for NFS keeps the files
// that are open.
PackLock::~PackLock() {
  if (!file_.empty()) unlink(file_.c_str());
  if (fd_ >= 0) close(fd_);
  // Fails where there is something in it, such as another pack's lock.
  while (!made_.empty() && rmdir(made_.back().c_str()) == 0) made_.pop_back();
}

absl::StatusOr<bool> PackLock::Try(const fs::path& output) {
  RETURN_IF_ERROR(MakeFolders(output));
  const fs::path file = output / ".packing.lock";
  const int fd = open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (fd < 0 && errno == ENOENT) return false;
  if (fd < 0) return FileError(errno, absl::StrCat("open ", file.string()));
  const absl::StatusOr<bool> is_ours = TryLockFile(fd, file.string());
  if (is_ours.ok() && *is_ours && IsAt(fd, file.string())) {
    file_ = file;
    fd_ = fd;
    return true;
  }
  close(fd);
  RETURN_IF_ERROR(is_ours.status());
  if (*is_ours) return false;
  return absl::UnavailableError(absl::StrFormat(
      "%s: another `ringctl data pack` writes there; wait for its end, or name another folder",
      output.string()));
}

absl::Status PackLock::MakeFolders(const fs::path& output) {
  std::error_code error;
  std::vector<fs::path> missing;
  for (fs::path folder = output; !folder.empty() && !fs::exists(folder, error);
       folder = folder.parent_path()) {
    if (folder.has_filename()) missing.push_back(folder);  // "tokens/" is "tokens"
  }
  for (; !missing.empty(); missing.pop_back()) {
    const bool is_new = fs::create_directory(missing.back(), error);
    if (error == std::errc::no_such_file_or_directory) return absl::OkStatus();  // Try() sees it
    if (error) {
      return absl::InvalidArgumentError(
          absl::StrFormat("cannot create %s: %s", output.string(), error.message()));
    }
    if (is_new) made_.push_back(missing.back());
  }
  return absl::OkStatus();
}

}  // namespace ringleader::data
