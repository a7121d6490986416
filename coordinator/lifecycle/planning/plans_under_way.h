// How many plans are being made: each holds a copy of its job's specification, and of one owner's
// others can wait as well here as with the planner.
#pragma once

#include <cstddef>
#include <map>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"

namespace ringleader::lifecycle {

// Thread-safe.
class PlansUnderWay {
 public:
  static constexpr size_t kMaxOfOwner = 8, kMax = 128;

  void Begin(const std::string& owner) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    ++all_;
    ++of_owner_[owner];
  }
  void End(const std::string& owner) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    --all_;
    if (--of_owner_[owner] == 0) of_owner_.erase(owner);
  }
  // What the next plan of this owner has to wait for, as its job says it; empty: nothing.
  std::string Wait(const std::string& owner) const ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    const auto own = of_owner_.find(owner);
    const size_t of_owner = own == of_owner_.end() ? 0 : own->second;
    if (of_owner < kMaxOfOwner && all_ < kMax) return "";
    return absl::StrFormat("there is room; its plan comes after those of %d other jobs%s",
                           of_owner < kMaxOfOwner ? all_ : of_owner,
                           of_owner < kMaxOfOwner ? "" : " of its owner");
  }

 private:
  mutable absl::Mutex mutex_;
  size_t all_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<std::string, size_t> of_owner_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ringleader::lifecycle
