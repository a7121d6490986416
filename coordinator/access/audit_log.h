// Notes calls that changed nothing because they failed or were refused. A thread of the log's own
// writes the records in batches. (A call that changes something is noted in the transaction that
// does so: store::RequestKey::audit. Those that are old go by store::Retention.)
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "coordinator/store/store.h"

namespace ringleader::access {

// Thread-safe. Callers of the log never wait for the disk.
class AuditLog {
 public:
  // Both must outlive the log.
  AuditLog(store::Store* store, const Clock* clock);
  // Writes the records that are queued.
  ~AuditLog();

  // `status`: why the call failed. Anybody who reaches the port can make calls that fail, so each
  // caller has an allowance: a burst of records, then one in ten seconds. Calls beyond it are
  // counted, and the number is noted. All callers that are nobody share one allowance, so that they
  // cannot use up anybody else's.
  void Note(v1::AuditRecord record, const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);

  // Callers whose allowance is remembered.
  size_t allowances() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Allowance {
    double records;
    absl::Time counted;
  };
  // False when the caller has used its allowance up.
  bool Spend(const std::string& caller) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Push(v1::AuditRecord record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Run();
  void Write(std::vector<v1::AuditRecord> records, uint64_t left_out);

  store::Store& store_;
  const Clock& clock_;

  mutable absl::Mutex mutex_;
  std::vector<v1::AuditRecord> queue_ ABSL_GUARDED_BY(mutex_);
  uint64_t left_out_ ABSL_GUARDED_BY(mutex_) = 0;  // records for which there was no room
  std::map<std::string, Allowance> allowances_ ABSL_GUARDED_BY(mutex_);  // by caller's name
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

// The name of a code as records have it: "OK", "PERMISSION_DENIED" and so on.
std::string OutcomeText(absl::StatusCode code);

// What a caller wrote and nobody has checked, such as the name of a job, as records have it: up to
// `most` bytes, safe to show on a terminal.
std::string RecordText(std::string_view text, size_t most = 200);

}  // namespace ringleader::access
