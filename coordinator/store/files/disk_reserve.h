// Space on the disk that nobody else can take: a file beside the database that is given up when its
// file system runs full, so that the store can go on with what must be written, and say what is
// wrong, until somebody makes room.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"

namespace ringleader::store {

// Thread-safe.
class DiskReserve {
 public:
  // `path` of the file, which is made at once where there is room; `bytes`: its size, 0 for none.
  // `heirs`: files that each keep at least an eighth as much, mostly a quarter, allocated beyond
  // their end, for what is written once the reserve is given up: what fills the disk goes on, and
  // takes what is merely free in the moment in which it is. Where that would leave too little free
  // they get it when the reserve is given up. They are open for as long as the reserve lives, which
  // has to be longer than SQLite uses them: to close a file lets go of all locks that the process
  // has on it.
  DiskReserve(std::string path, int64_t bytes, const std::vector<std::string>& heirs = {});
  ~DiskReserve();
  DiskReserve(const DiskReserve&) = delete;
  DiskReserve& operator=(const DiskReserve&) = delete;

  // Gives the reserve up when less than half its size is free besides, and takes it again when
  // there is room for it and as much. RESOURCE_EXHAUSTED while it is given up: names the file
  // system and says how much has to be freed.
  absl::Status Check() ABSL_LOCKS_EXCLUDED(mutex_);
  // Whether there is nothing to save space for: the reserve is there, or none is wanted.
  bool held() const ABSL_LOCKS_EXCLUDED(mutex_);
  // A write found the disk full, whatever the file system said.
  void GiveUp() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void GiveUpLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes it if there is so much room: a quota may leave less than the file system has free.
  void TryToTake(int64_t room) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  int64_t FreeBytes() const;
  void AllocateForHeirs() const;
  // Whether half the reserve is free even once heirs have their share.
  bool LeavesRoom(int64_t free) const { return free >= bytes_; }

  const std::string path_;
  const int64_t bytes_;
  std::vector<int> heirs_;  // open
  mutable absl::Mutex mutex_;
  bool held_ ABSL_GUARDED_BY(mutex_) = false;
  bool said_ ABSL_GUARDED_BY(mutex_) = false;  // that it is given up
};

}  // namespace ringleader::store
