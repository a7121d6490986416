// Shares that people give, as kernels take them: which is the nearest float on the side that keeps
// a whole product whole, so that 0.9 of ten blocks are nine, and 0.3 of fifty fifteen.
#pragma once

#include <cmath>

namespace ringleader::kernels {

// For counts that are rounded down (MostBlocks): the least float that is no less.
inline float ShareToRoundDown(double share) {
  const auto nearest = static_cast<float>(share);
  return nearest < share ? std::nextafter(nearest, 1.0f) : nearest;
}

// For counts that are rounded up (BlocksOfShare): the largest float that is no more.
inline float ShareToRoundUp(double share) {
  const auto nearest = static_cast<float>(share);
  return nearest > share ? std::nextafter(nearest, 0.0f) : nearest;
}

}  // namespace ringleader::kernels
