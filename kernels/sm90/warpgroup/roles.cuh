#pragma once

#include "kernels/sm90/ptx/sync.cuh"

namespace ringleader::kernels::sm90 {

// The first kProducers warps of the first warpgroup produce; each of the other warpgroups consumes,
// by its number. All threads of a CTA call: one of 384 has 168 registers a thread to divide, one of
// 512 has 128.
template <int kProducers, int kConsumerRegisters = 240, typename Produce, typename Consume>
__device__ __forceinline__ void RunRoles(const Produce& produce, const Consume& consume) {
  // Uniform across the warp, and known to be so by the compiler.
  const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);
  if (warp < 4) {
    ptx::RegistersShrink<24>();
    if (warp < kProducers) produce(warp);
  } else {
    ptx::RegistersGrow<kConsumerRegisters>();
    consume(warp / 4 - 1);
  }
}

}  // namespace ringleader::kernels::sm90
