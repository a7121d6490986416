// The clock seam: everything that waits or stamps takes a Clock, so that tests decide what time it
// is.
#pragma once

#include "absl/time/time.h"

namespace ringleader {

class Clock {
 public:
  virtual ~Clock() = default;
  virtual absl::Time Now() const = 0;

  // The machine's clock. Lives for ever.
  static Clock* Real();
};

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
