#include "coordinator/store/files/disk_reserve.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "absl/strings/str_format.h"

namespace ringleader::store {

DiskReserve::DiskReserve(std::string path, int64_t bytes, const std::vector<std::string>& heirs)
    : path_(std::move(path)), bytes_(bytes) {
  if (bytes_ == 0) {
    unlink(path_.c_str());  // one of an earlier process, which had other settings
    return;
  }
  for (const std::string& heir : heirs) {
    if (const int fd = open(heir.c_str(), O_RDWR | O_CLOEXEC); fd >= 0) heirs_.push_back(fd);
  }
  absl::MutexLock lock(&mutex_);
  struct stat file = {};
  held_ = stat(path_.c_str(), &file) == 0 && int64_t{file.st_blocks} * 512 >= bytes_;
  if (!held_) TryToTake(bytes_);
  if (!held_ || LeavesRoom(FreeBytes())) AllocateForHeirs();
}

DiskReserve::~DiskReserve() {
  for (const int heir : heirs_) close(heir);
}

int64_t DiskReserve::FreeBytes() const {
  const std::string folder = path_.substr(0, path_.rfind('/') + 1);
  struct statvfs system = {};
  if (statvfs(folder.empty() ? "." : folder.c_str(), &system) != 0) return 0;
  return static_cast<int64_t>(system.f_bavail) * static_cast<int64_t>(system.f_frsize);
}

void DiskReserve::TryToTake(int64_t room) {
  const int fd = open(path_.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0) return;
  held_ = posix_fallocate(fd, 0, room) == 0 && ftruncate(fd, bytes_) == 0;
  close(fd);
  // A part of a reserve would be missing elsewhere.
  if (!held_) unlink(path_.c_str());
  if (held_ && std::exchange(said_, false)) {
    spdlog::info("there is space again beside {}: everything is written again", path_);
  }
}

void DiskReserve::GiveUpLocked() {
  held_ = false;
  unlink(path_.c_str());
  AllocateForHeirs();
}

void DiskReserve::AllocateForHeirs() const {
  for (const int heir : heirs_) {
    struct stat file = {};
    if (fstat(heir, &file) != 0) continue;
    int64_t bytes = bytes_ / 4;
    if (int64_t{file.st_blocks} * 512 - file.st_size >= bytes / 2) continue;
    // As much as can be had; a file system that allocates nothing in advance leaves it free.
    while (bytes >= 4096 && fallocate(heir, FALLOC_FL_KEEP_SIZE, file.st_size, bytes) != 0) {
      bytes = errno == ENOSPC || errno == EDQUOT ? bytes / 2 : 0;
    }
  }
}

bool DiskReserve::held() const {
  absl::MutexLock lock(&mutex_);
  return held_ || bytes_ == 0;
}

void DiskReserve::GiveUp() {
  absl::MutexLock lock(&mutex_);
  GiveUpLocked();
}

absl::Status DiskReserve::Check() {
  if (bytes_ == 0) return absl::OkStatus();
  absl::MutexLock lock(&mutex_);
  const int64_t free = FreeBytes();
  if (!held_ && free >= 2 * bytes_) {
    TryToTake(2 * bytes_);
  } else if (held_ && free < bytes_ / 2) {
    GiveUpLocked();
  }
  if (held_) {
    if (LeavesRoom(free)) AllocateForHeirs();
    return absl::OkStatus();
  }
  const absl::Status full = absl::ResourceExhaustedError(absl::StrFormat(
      "the disk is full: %s had to be given up, and %d MiB are free on its file system; make at "
      "least %d MiB free. Until then training goes on, and nothing else is written down",
      path_, free >> 20, (2 * bytes_) >> 20));
  if (!std::exchange(said_, true)) spdlog::error("{}", std::string(full.message()));
  return full;
}

}  // namespace ringleader::store
