// Eight values of bf16 in 16 bytes.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace ringleader::kernels::sm90 {

// target[0..8) += terms[0..8), rounded once. 16-byte aligned.
__device__ __forceinline__ void AddRoundedVector(__nv_bfloat16* target, const float (&terms)[8]) {
  uint4 packed = *reinterpret_cast<const uint4*>(target);
  auto* const pairs = reinterpret_cast<__nv_bfloat162*>(&packed);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 old = __bfloat1622float2(pairs[i]);
    pairs[i] = __floats2bfloat162_rn(old.x + terms[2 * i], old.y + terms[2 * i + 1]);
  }
  *reinterpret_cast<uint4*>(target) = packed;
}

}  // namespace ringleader::kernels::sm90
