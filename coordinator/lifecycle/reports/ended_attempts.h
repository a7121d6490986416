// What the store says of attempts of jobs that have ended, for reports that come after the end.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>

#include "absl/status/statusor.h"
#include "coordinator/store/store.h"
#include "ringleader/v1/job.pb.h"
#include "ringleader/v1/telemetry.pb.h"

namespace ringleader::lifecycle {

// So many reports a worker keeps at most (worker/agent/link/event_buffer.h): those that come after
// the end of their attempt lie no further beyond what is on record.
inline constexpr uint64_t kMostStepsLate = 100'000;

// No more than it takes to judge a report.
struct EndedAttempt {
  uint64_t token = 0;
  int ranks = 0;
  uint64_t last_step = 0;
  std::optional<v1::Placement> placement;  // its part on the node that reports, if it had one
  std::optional<uint64_t> recorded;        // the last step of the job's record, once it was read
};

// Remembers what it was asked for until Clear(): however many reports of a batch name an attempt,
// it is read once. That there is none is remembered, too.
class EndedAttempts {
 public:
  // `node`: who reports. Null: there is no such attempt. DATA_LOSS where its record is damaged;
  // asked again, it passes for none.
  absl::StatusOr<EndedAttempt*> Find(store::ReadTransaction& transaction, const std::string& node,
                                     const std::string& job, uint32_t number);

  // Whether a report of a step may go into the job's record for want of a better one. Below the
  // record's end it fills a gap, and any rank's word will do, for loss and tokens are global. How
  // far the attempt came beyond, rank 0 says, as it does of its checkpoints.
  static absl::StatusOr<bool> Lacks(store::ReadTransaction& transaction, const std::string& job,
                                    const v1::StepReport& step, EndedAttempt* attempt);

  void Clear() { attempts_.clear(); }

 private:
  // By node, job and number.
  std::map<std::tuple<std::string, std::string, uint32_t>, std::optional<EndedAttempt>> attempts_;
};

}  // namespace ringleader::lifecycle
