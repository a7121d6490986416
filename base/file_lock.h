// Files that one process at a time holds.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace ringleader {

// Whether this process now has the lock of the file at `path`, open as `fd`; false: another has it.
// The kernel takes it back when `fd` is closed, and when the process ends. flock(2), which all
// nodes of NFS see, and of Lustre mounted with -o flock. FAILED_PRECONDITION where files cannot be
// locked.
absl::StatusOr<bool> TryLockFile(int fd, const std::string& path);

}  // namespace ringleader
