#pragma once

#include "kernels/sm90/ptx/sync.cuh"

namespace ringleader::kernels::sm90 {

// The first warp of the first warpgroup produces; each of the other warpgroups consumes, by its
// number. All threads of a CTA of 384 call, which has 168 registers a thread to divide.
template <typename Produce, typename Consume>
__device__ __forceinline__ void RunRoles(const Produce& produce, const Consume& consume) {
  // Uniform across the warp, and known to be so by the compiler.
  const int warpgroup = __shfl_sync(0xFFFFFFFFu, threadIdx.x / ptx::kWarpgroupThreads, 0);
  if (warpgroup == 0) {
    ptx::RegistersShrink<24>();
    if (threadIdx.x < 32) produce();
  } else {
    ptx::RegistersGrow<240>();
    consume(warpgroup - 1);
  }
}

}  // namespace ringleader::kernels::sm90
