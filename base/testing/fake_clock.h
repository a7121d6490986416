#pragma once

#include "absl/time/time.h"
#include "base/clock.h"

namespace ringleader {

// A clock that moves only when told to. Not thread-safe: set it up before threads read it, or
// between their steps.
class FakeClock : public Clock {
 public:
  explicit FakeClock(absl::Time start = absl::UnixEpoch() + absl::Hours(24 * 365 * 50))
      : now_(start) {}
  absl::Time Now() const override { return now_; }
  void Advance(absl::Duration by) { now_ += by; }

 private:
  absl::Time now_;
};

}  // namespace ringleader
