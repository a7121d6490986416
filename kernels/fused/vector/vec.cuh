// 16-byte vectors of bf16 and the reductions that the memory-bound kernels share.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/sm90/ptx/exp2.cuh"

namespace ringleader::kernels::fused {

using sm90::ptx::Exp2;

inline constexpr int kVec = 8;  // bf16 values in a 16-byte vector

struct alignas(16) Bf16x8 {
  __nv_bfloat162 pair[4];
};

// Streaming: what these kernels touch is far larger than the caches and is not read again soon.
__device__ __forceinline__ Bf16x8 LoadStream(const __nv_bfloat16* p) {
  const uint4 raw = __ldcs(reinterpret_cast<const uint4*>(p));
  return *reinterpret_cast<const Bf16x8*>(&raw);
}

__device__ __forceinline__ Bf16x8 LoadCached(const __nv_bfloat16* p) {
  const uint4 raw = __ldg(reinterpret_cast<const uint4*>(p));
  return *reinterpret_cast<const Bf16x8*>(&raw);
}

__device__ __forceinline__ void StoreStream(__nv_bfloat16* p, const Bf16x8& v) {
  __stcs(reinterpret_cast<uint4*>(p), *reinterpret_cast<const uint4*>(&v));
}

__device__ __forceinline__ Bf16x8 ZeroVec() {
  const uint4 raw = make_uint4(0, 0, 0, 0);
  return *reinterpret_cast<const Bf16x8*>(&raw);
}

__device__ __forceinline__ void Unpack(const Bf16x8& v, float (&f)[kVec]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 two = __bfloat1622float2(v.pair[i]);
    f[2 * i] = two.x;
    f[2 * i + 1] = two.y;
  }
}

__device__ __forceinline__ Bf16x8 Pack(const float (&f)[kVec]) {
  Bf16x8 v;
#pragma unroll
  for (int i = 0; i < 4; ++i) v.pair[i] = __floats2bfloat162_rn(f[2 * i], f[2 * i + 1]);
  return v;
}

__device__ __forceinline__ float WarpSum(float x) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) x += __shfl_xor_sync(0xffffffffu, x, lane);
  return x;
}

// Sum over a block of kWarps warps. `slots` is shared memory for kWarps floats; calls that follow
// one another need different slots, or a barrier between them.
template <int kWarps>
__device__ __forceinline__ float BlockSum(float x, float* slots) {
  x = WarpSum(x);
  if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += slots[w];
  return sum;
}

}  // namespace ringleader::kernels::fused
