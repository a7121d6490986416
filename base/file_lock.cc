#include "base/file_lock.h"

#include <sys/file.h>

#include <cerrno>
#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "base/files.h"

namespace ringleader {

absl::StatusOr<bool> TryLockFile(int fd, const std::string& path) {
  int result = 0;
  do {
    result = flock(fd, LOCK_EX | LOCK_NB);
  } while (result != 0 && errno == EINTR);
  if (result == 0) return true;
  if (errno == EWOULDBLOCK) return false;
  if (errno != EOPNOTSUPP && errno != ENOSYS && errno != EINVAL) {
    return FileError(errno, "lock " + path);
  }
  return absl::FailedPreconditionError(
      absl::StrFormat("%s cannot be locked (%s); put it on storage with file locks: a local disk, "
                      "NFS, or Lustre mounted with -o flock",
                      path, std::strerror(errno)));
}

}  // namespace ringleader
