// A job's record as the controller writes it, a step further with each call.
#pragma once

#include <string>

#include "proto/timestamps.h"
#include "ringleader/v1/job.pb.h"
#include "ringleader/v1/telemetry.pb.h"

namespace ringleader::trace::testing {

inline absl::Time At(double seconds) {
  return absl::FromUnixSeconds(1'000'000) + absl::Seconds(seconds);
}

inline v1::Job WaitingJob(const std::string& id, const std::string& uid) {
  v1::Job job;
  job.set_name("jobs/" + id);
  job.set_uid(uid);
  job.set_owner("alice");
  job.set_state(v1::Job::PENDING);
  job.mutable_spec()->set_name(id);
  SetTime(At(0), job.mutable_pending_time());
  return job;
}

// Its next attempt: waited since `queued`, was given slots 3 s later, has its trainers started 4 s
// later.
inline v1::Attempt* Place(double queued, v1::Job* job) {
  v1::Attempt* const attempt = job->add_attempts();
  attempt->set_number(static_cast<uint32_t>(job->attempts_size()));
  attempt->set_state(v1::Attempt::STARTING);
  for (int rank = 0; rank < 4; ++rank) attempt->add_ranks();
  attempt->add_placements();
  SetTime(At(queued), attempt->mutable_queue_time());
  SetTime(At(queued + 3), attempt->mutable_place_time());
  SetTime(At(queued + 4), attempt->mutable_create_time());
  job->set_state(v1::Job::STARTING);
  return attempt;
}

inline void BeReady(double time, v1::Attempt* attempt) {
  attempt->set_state(v1::Attempt::RUNNING);
  SetTime(At(time), attempt->mutable_ready_time());
}

// A step of 2 s that ended at `time`.
inline v1::StepReport Step(uint64_t step, double time) {
  v1::StepReport report;
  report.set_step(step);
  report.set_rank(-1);
  report.set_loss(2.5);
  report.set_tokens(4096);
  report.set_step_seconds(2);
  report.mutable_phases()->set_linear(0.5);
  SetTime(At(time), report.mutable_time());
  return report;
}

inline void Train(const v1::StepReport& step, v1::Attempt* attempt) {
  if (attempt->last_step() == 0) {
    attempt->set_first_step(step.step() - 1);
    SetTime(ToTime(step.time()) - absl::Seconds(step.step_seconds()),
            attempt->mutable_train_time());
  }
  attempt->set_last_step(step.step());
}

inline v1::CheckpointNotice Checkpoint(uint64_t step, double time, uint32_t attempt) {
  v1::CheckpointNotice notice;
  notice.set_step(step);
  notice.set_seconds(1);
  notice.set_bytes(1 << 20);
  notice.set_path("/checkpoints/x");
  notice.set_attempt(attempt);
  SetTime(At(time), notice.mutable_time());
  return notice;
}

inline void End(v1::Attempt::State state, const std::string& reason, double time,
                v1::Attempt* attempt) {
  attempt->set_state(state);
  attempt->set_state_reason(reason);
  SetTime(At(time), attempt->mutable_end_time());
}

}  // namespace ringleader::trace::testing
