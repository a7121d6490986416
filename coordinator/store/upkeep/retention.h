// Jobs that ended long ago go: first what they reported, then the jobs themselves.
#pragma once

#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "coordinator/store/store.h"

namespace ringleader::store {

// How long after its end a job keeps what.
struct RetentionOptions {
  absl::Duration events = absl::Hours(24 * 90);  // its logs, steps and evaluations
  absl::Duration jobs = absl::Hours(24 * 365);   // the job; not less than `events`
  // How long after the start, and after the last time, what is too old goes.
  absl::Duration interval = absl::Hours(1);
};

// Deletes what is too old, a job a transaction. Returns how many jobs lost something.
absl::StatusOr<int> DeleteOld(Store& store, absl::Time now, const RetentionOptions& options);

// Does so once an interval, by the earlier of two clocks, for what goes is gone: the time of day as
// it is set by then, and a steady one that stands for the time of day at the start. A clock that is
// ahead when the machine starts, and mended within the interval, deletes nothing then, and neither
// does one that is set ahead later. A coordinator that was away for a year catches up.
class Retention {
 public:
  // All must outlive it.
  Retention(Store* store, const Clock* time_of_day, const Clock* steady,
            const RetentionOptions& options);
  ~Retention();

 private:
  void Run() ABSL_LOCKS_EXCLUDED(mutex_);

  Store& store_;
  const Clock& time_of_day_;
  const Clock& steady_;
  const RetentionOptions options_;
  absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace ringleader::store
