// How much memory a rank's machine has, and how much the rank takes.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace ringleader::trainer {

// Returns the memory that this machine has left, or the process's control group (version 2) or one
// above it, whichever has least. `own_cgroup` says which group that is, in the form of
// /proc/self/cgroup; groups are folders below `cgroup_root`.
absl::StatusOr<uint64_t> AvailableMemoryBytes(const std::string& own_cgroup = "/proc/self/cgroup",
                                              const std::string& cgroup_root = "/sys/fs/cgroup");

// Returns what each of a node's `ranks` may plan to take of it: all but a share for whatever else
// runs there. All ranks must ask before any of them takes it.
absl::StatusOr<int64_t> HostMemoryShare(int ranks);

// Returns the most that this process ever held; 0 where the system does not tell.
uint64_t PeakMemoryBytes();

// "3.2 GiB"
std::string FormatBytes(uint64_t bytes);

}  // namespace ringleader::trainer
