// Arithmetic on accumulator fragments (see ptx/wgmma.cuh for their layout): a row of a tile lies in
// a quad of lanes.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/sm90/ptx/exp2.cuh"

namespace ringleader::kernels::sm90 {

using ptx::Exp2;
using ptx::kLn2;
using ptx::kLog2E;

__device__ __forceinline__ float QuadMax(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 2));
}

__device__ __forceinline__ float QuadSum(float x) {
  x += __shfl_xor_sync(0xFFFFFFFFu, x, 1);
  return x + __shfl_xor_sync(0xFFFFFFFFu, x, 2);
}

// First of the rows whose elements this thread of a warpgroup holds, of 64; the second is 8
// further.
__device__ __forceinline__ int FragmentRow() {
  return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
}

// A thread holds the columns 8 * j + 2 * (lane % 4) + low of a row of 64. Returns those below
// `bound` as bits 2 * j + low.
__device__ __forceinline__ uint32_t ColumnsBelow(int bound) {
  const int own = min(max(bound - static_cast<int>(2 * (threadIdx.x % 4)), 0), 64);
  return (1u << (own / 8 * 2 + min(own % 8, 2))) - 1;
}

// Sets scores to -infinity in the columns that are not in `visible`, in row half `half` of a tile
// of 64 columns.
__device__ __forceinline__ void HideColumns(float* scores, int half, uint32_t visible) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if (!(visible >> i & 1)) scores[i / 2 * 4 + 2 * half + i % 2] = -INFINITY;
  }
}

__device__ __forceinline__ uint32_t PackBf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

}  // namespace ringleader::kernels::sm90
