// Notes calls that changed nothing because they failed or were refused: a thread of its own writes
// them, in batches, and deletes what is old. (A call that
// changes something is noted in the transaction that does: store::RequestKey::audit.)
#pragma once

#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "coordinator/store/store.h"

namespace ringleader::access {

// Thread-safe. No call waits for the disk.
class AuditLog {
 public:
  // Keeps records for `max_age`. `store` must outlive the log.
  AuditLog(store::Store* store, const Clock* clock, absl::Duration max_age);
  // Writes what is queued.
  ~AuditLog();

  // `status`: why the call failed.
  void Note(v1::AuditRecord record, const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);
  // The same of a call that never reached its method. Anybody who reaches the port can cause these:
  // after a burst so many are noted, the rest is counted.
  void NoteTurnedAway(v1::AuditRecord record, const absl::Status& status)
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void Push(v1::AuditRecord record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Run();
  void Write(std::vector<v1::AuditRecord> records, uint64_t left_out);

  store::Store& store_;
  const Clock& clock_;
  const absl::Duration max_age_;

  absl::Mutex mutex_;
  std::vector<v1::AuditRecord> queue_ ABSL_GUARDED_BY(mutex_);
  uint64_t left_out_ ABSL_GUARDED_BY(mutex_) = 0;  // records for which there was no room
  double allowance_ ABSL_GUARDED_BY(mutex_);       // of calls that are turned away
  absl::Time allowance_time_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

// "OK", "PERMISSION_DENIED" and so on.
std::string OutcomeText(absl::StatusCode code);

}  // namespace ringleader::access
