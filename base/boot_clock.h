// Time since boot, suspension included: a machine that slept must not believe that its lease is
// fresh, and nobody can set this clock.
#pragma once

#include <ctime>

#include "absl/time/time.h"

namespace ringleader {

inline absl::Time BootNow() {
  timespec now{};
  clock_gettime(CLOCK_BOOTTIME, &now);
  return absl::TimeFromTimespec(now);
}

}  // namespace ringleader
