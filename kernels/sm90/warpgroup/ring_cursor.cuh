#pragma once

#include <cstdint>

namespace ringleader::kernels::sm90 {

// Position in a ring of buffers: index, and the parity of the current lap. A consumer waits for
// parity `lap`; a producer, whose buffers start out free, for `lap ^ 1`.
template <int kDepth>
struct RingCursor {
  int index = 0;
  uint32_t lap = 0;
  __device__ __forceinline__ void Advance() {
    if (++index == kDepth) {
      index = 0;
      lap ^= 1;
    }
  }
};

}  // namespace ringleader::kernels::sm90
