// Which spans of each job that goes on have been handed out, so that each is handed out once.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "coordinator/store/store.h"
#include "coordinator/trace/attempt_spans.h"

namespace ringleader::trace {

// Not thread-safe. Memory: some 200 bytes a job that has gone on since Adopt, until it is deleted.
class TraceBook {
 public:
  // At most one step of an attempt in `step_interval` becomes a span.
  explicit TraceBook(absl::Duration step_interval) : step_interval_(step_interval) {}

  // What the store says to be over now counts as handed out, and is appended: who calls knows what
  // of it the coordinator before this one sent. Of jobs that have ended, only those that ended
  // after `since`.
  absl::Status Adopt(store::ReadTransaction& transaction, absl::Time since,
                     std::vector<otlp::Span>* spans);

  // Appends the spans of this job that are over since the last call, to be called whenever it has
  // changed. Where it fails, nothing counts as handed out. OK for a job that is gone.
  absl::Status Collect(store::ReadTransaction& transaction, const std::string& job,
                       std::vector<otlp::Span>* spans);

 private:
  struct Entry {
    std::string uid = {};               // jobs of one name follow each other
    uint32_t attempt = 0;               // the newest that has spans
    std::set<std::string> handed = {};  // names of its spans
    uint64_t last_step = 0;             // of this attempt: looked at up to here
    absl::Time step_due = absl::InfinitePast();
    uint64_t checkpoint_step = 0;  // the newest that it saved
  };

  absl::Status AdoptJob(store::ReadTransaction& transaction, const std::string& id,
                        std::vector<otlp::Span>* spans);
  // Appends what `entry` does not have yet, and notes it there.
  absl::Status Advance(store::ReadTransaction& transaction, const v1::Job& job, Entry* entry,
                       std::vector<otlp::Span>* spans) const;
  // The sampled step and the checkpoints of the job's newest attempt.
  absl::Status AdvanceSteps(store::ReadTransaction& transaction, const v1::Job& job, Entry* entry,
                            std::vector<otlp::Span>* spans) const;
  absl::Status AdvanceCheckpoints(store::ReadTransaction& transaction, const v1::Job& job,
                                  Entry* entry, std::vector<otlp::Span>* spans) const;

  const absl::Duration step_interval_;
  uint64_t newest_adopted_ = 0;  // sequence of a job
  std::map<std::string, Entry> entries_;
};

}  // namespace ringleader::trace
