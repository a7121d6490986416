// How long a worker waits between two tries to have a session.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/back_off.h"

namespace ringleader::agent {

// Between attempts to connect: short enough that a restarted coordinator has its workers back
// within a few heartbeats.
inline constexpr absl::Duration kFirstPause = absl::Milliseconds(100);
inline constexpr absl::Duration kLongestPause = absl::Seconds(2);
// Of a worker that is told that it may not come. It may be let in again without a restart of
// anything, and nothing is lost by waiting: its trainers have ended with its lease.
inline constexpr absl::Duration kLongestPauseOfRefused = absl::Minutes(1);

// Of one worker, session after session.
class SessionPauses {
 public:
  // `session`: OK if it was welcomed, or why it was not. `lease_runs`: the trainers that it found
  // may still be alive, so that it tries as often as after any other failure.
  absl::Duration After(const absl::Status& session, bool lease_runs) {
    failures_ = session.ok() ? 1 : failures_ + 1;
    const bool refused = absl::IsPermissionDenied(session) || absl::IsUnauthenticated(session);
    if (!refused || lease_runs) {
      refusals_ = 0;
      return BackOff(kFirstPause, kLongestPause, failures_);
    }
    return BackOff(kLongestPause, kLongestPauseOfRefused, ++refusals_);
  }

 private:
  uint32_t failures_ = 1;
  uint32_t refusals_ = 0;  // in a row, with no lease
};

}  // namespace ringleader::agent
