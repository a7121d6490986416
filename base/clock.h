// The clock seam: everything that waits or stamps takes a Clock, so that tests decide what time it
// is.
#pragma once

#include "absl/time/time.h"

namespace ringleader {

class Clock {
 public:
  virtual ~Clock() = default;
  virtual absl::Time Now() const = 0;

  // The machine's clock: the time of day, which an administrator may set. Lives for ever.
  static Clock* Real();

  // A clock for leases and time-outs, which setting the time of day must not end: the machine's
  // clock as it was at the first call, and the time that has passed since, suspension included.
  // Close enough to Real() to be stored and shown; it is off by as much as that was corrected since
  // this process started. Lives for ever.
  static Clock* Steady();
};

// Clock::Steady() of any two clocks: `start` plus what `boot_now` has advanced since.
class SteadyClock : public Clock {
 public:
  SteadyClock(absl::Time start, absl::Time (*boot_now)())
      : boot_now_(boot_now), offset_(start - boot_now()) {}
  absl::Time Now() const override { return boot_now_() + offset_; }

 private:
  absl::Time (*const boot_now_)();
  const absl::Duration offset_;
};

}  // namespace ringleader
