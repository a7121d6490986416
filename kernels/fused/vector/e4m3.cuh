// Rows of bf16 to e4m3 in registers: what the kernels share that cast what they produce.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

#include "kernels/fused/vector/vec.cuh"
#include "ringleader/kernels/e4m3.h"

namespace ringleader::kernels::fused {

// The larger magnitudes of two pairs of bf16, compared as integers (E4m3ScaleOf).
__device__ __forceinline__ uint32_t MaxMagnitudes(uint32_t magnitudes, const Bf16x8& v) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    magnitudes = __vmaxu2(magnitudes, *reinterpret_cast<const uint32_t*>(&v.pair[i]) & 0x7fff7fffu);
  }
  return magnitudes;
}

// The scale of the row whose magnitudes the block's threads have. `slots`: 32 words of shared
// memory that no thread still reads.
__device__ __forceinline__ E4m3Scale BlockScale(uint32_t magnitudes, uint32_t* slots) {
  const uint32_t mine = __reduce_max_sync(0xffffffffu, max(magnitudes >> 16, magnitudes & 0xffffu));
  if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = mine;
  __syncthreads();
  uint32_t largest = 0;
  for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) largest = max(largest, slots[warp]);
  return E4m3ScaleOf(largest << 16);
}

__device__ __forceinline__ uint2 ToE4m3(const Bf16x8& v, float inverse) {
  float f[kVec];
  Unpack(v, f);
  uint32_t word[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float* const x = f + 4 * half;
    const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(x[0] * inverse, x[1] * inverse),
                                                  __NV_SATFINITE, __NV_E4M3);
    const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(x[2] * inverse, x[3] * inverse),
                                                   __NV_SATFINITE, __NV_E4M3);
    word[half] = low | high << 16;
  }
  return make_uint2(word[0], word[1]);
}

__device__ __forceinline__ void StoreCodes(uint8_t* p, const Bf16x8& v, float inverse) {
  __stcs(reinterpret_cast<uint2*>(p), ToE4m3(v, inverse));
}

}  // namespace ringleader::kernels::fused
