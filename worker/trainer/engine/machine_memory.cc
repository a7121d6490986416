#include "worker/trainer/engine/machine_memory.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>

#include "absl/strings/str_format.h"

namespace ringleader::trainer {
namespace {

// Returns the number after `key` in a file of /proc or of a control group; 0 if there is none.
uint64_t ReadValue(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  std::string word;
  while (file >> word) {
    uint64_t value = 0;
    if (word == key && file >> value) return value;
  }
  return 0;
}

// Returns the bytes of a line "Key:   123 kB".
uint64_t ReadKilobytes(const std::string& path, const std::string& key) {
  return ReadValue(path, key) * 1024;
}

uint64_t ReadNumber(const std::string& path, uint64_t otherwise) {
  std::ifstream file(path);
  uint64_t number = 0;
  return file >> number ? number : otherwise;  // "max" is no number
}

// Returns the process's group below the root, from the line "0::/path"; empty: the root itself.
std::filesystem::path OwnGroup(const std::string& own_cgroup) {
  std::ifstream file(own_cgroup);
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("0::/")) continue;
    // A group outside the cgroup namespace ("/../other") has no folder below the root.
    return line.starts_with("0::/..") ? "" : line.substr(4);
  }
  return "";
}

// Returns what the group in `folder` may still take; UINT64_MAX where it has no limit, or does not
// exist: in a container, the host's name for a group may lead nowhere.
uint64_t LeftInGroup(const std::filesystem::path& folder) {
  const uint64_t limit = ReadNumber(folder / "memory.max", UINT64_MAX);
  if (limit == UINT64_MAX) return UINT64_MAX;
  // Pages of files that nobody used lately give way, as they do in MemAvailable.
  const uint64_t held = ReadNumber(folder / "memory.current", 0);
  const uint64_t used = held - std::min(held, ReadValue(folder / "memory.stat", "inactive_file"));
  return limit - std::min(limit, used);
}

}  // namespace

absl::StatusOr<uint64_t> AvailableMemoryBytes(const std::string& own_cgroup,
                                              const std::string& cgroup_root) {
  uint64_t left = ReadKilobytes("/proc/meminfo", "MemAvailable:");
  if (left == 0) return absl::UnavailableError("cannot read MemAvailable of /proc/meminfo");
  // Every limit on the way up holds: systemd and Slurm set theirs on a group above the process's,
  // and inside a cgroup namespace the root is the container's.
  std::filesystem::path folder = cgroup_root;
  left = std::min(left, LeftInGroup(folder));
  for (const std::filesystem::path& part : OwnGroup(own_cgroup)) {
    folder /= part;
    left = std::min(left, LeftInGroup(folder));
  }
  return left;
}

absl::StatusOr<int64_t> HostMemoryShare(int ranks) {
  constexpr double kReserved = 0.1;
  absl::StatusOr<uint64_t> available = AvailableMemoryBytes();
  if (!available.ok()) return available.status();
  return static_cast<int64_t>((1 - kReserved) * static_cast<double>(*available) / ranks);
}

uint64_t PeakMemoryBytes() {
  return ReadKilobytes("/proc/self/status", "VmHWM:");
}

std::string FormatBytes(uint64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  for (; value >= 1024 && unit + 1 < std::size(kUnits); ++unit) value /= 1024;
  return absl::StrFormat("%.*f %s", unit == 0 ? 0 : 1, value, kUnits[unit]);
}

}  // namespace ringleader::trainer
