// How long to wait before something that failed is tried again.
#pragma once

#include <algorithm>
#include <cstdint>

#include "absl/time/time.h"

namespace ringleader {

// After `failures` in a row (1, 2, …): `first`, doubled with each further failure, at most
// `longest`.
inline absl::Duration BackOff(absl::Duration first, absl::Duration longest, uint32_t failures) {
  const uint32_t doublings = std::min(std::max(failures, 1u) - 1, 30u);
  return std::min(first * static_cast<double>(uint64_t{1} << doublings), longest);
}

}  // namespace ringleader
