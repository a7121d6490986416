// Looking a position up among a head's selected columns.
#pragma once

#include <cstdint>

namespace ringleader::kernels::sm90 {

// The index of `position` in `positions` ([count], ascending), or -1 where it is missing.
__device__ __forceinline__ int32_t FindColumn(const int64_t* positions, int32_t count,
                                              int64_t position) {
  int32_t low = 0, high = count;
  while (low < high) {
    const int32_t middle = (low + high) / 2;
    if (positions[middle] < position) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low < count && positions[low] == position ? low : -1;
}

}  // namespace ringleader::kernels::sm90
