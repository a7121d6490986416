// What is old goes: of jobs that ended long ago first what they reported, then the jobs themselves,
// and the records of the audit log.
#pragma once

#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "coordinator/store/store.h"
#include "coordinator/store/upkeep/history_time.h"

namespace CLI {
class App;
}

namespace ringleader::store {

// How long after its end a job keeps what, and the audit log its records.
struct RetentionOptions {
  absl::Duration events = absl::Hours(24 * 90);  // its logs, steps and evaluations
  absl::Duration jobs = absl::Hours(24 * 365);   // the job; not less than `events`
  absl::Duration audit = absl::Hours(24 * 90);
  // How long after the start, and after the last time, what is too old goes.
  absl::Duration interval = absl::Hours(1);
};

// --keep-events, --keep-jobs and --audit-days, and how often they are looked after. `options` must
// outlive the parse.
void AddRetentionFlags(CLI::App& app, RetentionOptions* options);
// INVALID_ARGUMENT names the flags that contradict each other.
absl::Status Validate(const RetentionOptions& options);

struct Deleted {
  int jobs = 0;  // that lost something
  // What is wrong with jobs that have ended and whose record is damaged, by name: they stay, for
  // nobody knows how old they are.
  std::vector<std::string> damage;
};

// Deletes what is too old, a job a transaction.
absl::StatusOr<Deleted> DeleteOld(Store& store, absl::Time now, const RetentionOptions& options);

// Does so once an interval, by HistoryTime, for what goes is gone: a clock that is ahead, whenever
// and for however long, deletes no more than what has passed meanwhile justifies.
class Retention {
 public:
  // All must outlive it. `time_of_day` may be set; `steady` may not. To be made before the process
  // records anything.
  Retention(Store* store, const Clock* time_of_day, const Clock* steady,
            const RetentionOptions& options);
  ~Retention();

 private:
  void Run() ABSL_LOCKS_EXCLUDED(mutex_);
  void Sweep();

  Store& store_;
  HistoryTime time_;
  const RetentionOptions options_;
  std::set<std::string> told_damage_;
  absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace ringleader::store
