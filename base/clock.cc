#include "base/clock.h"

#include "absl/time/clock.h"
#include "base/boot_clock.h"

namespace ringleader {
namespace {

class RealClock : public Clock {
 public:
  absl::Time Now() const override { return absl::Now(); }
};

}  // namespace

Clock* Clock::Real() {
  static RealClock clock;
  return &clock;
}

Clock* Clock::Steady() {
  static SteadyClock clock(absl::Now(), &BootNow);
  return &clock;
}

}  // namespace ringleader
