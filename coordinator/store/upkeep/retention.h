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
};

// Deletes what is too old, a job a transaction. Returns how many jobs lost something.
absl::StatusOr<int> DeleteOld(Store& store, absl::Time now, const RetentionOptions& options);

// Does so now and once an hour.
class Retention {
 public:
  // `store` and `clock` must outlive it.
  Retention(Store* store, const Clock* clock, const RetentionOptions& options);
  ~Retention();

 private:
  void Run() ABSL_LOCKS_EXCLUDED(mutex_);

  Store& store_;
  const Clock& clock_;
  const RetentionOptions options_;
  absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace ringleader::store
