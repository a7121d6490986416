#include <cstdint>

#include "base/status_macros.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/sm90/backward/rounded_sum.h"
#include "kernels/sm90/launch/launch.h"

namespace ringleader::kernels::sm90 {
namespace {

constexpr int kThreads = 256;

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

// Thread -> (token, head, chunk of 8); blockIdx.y: k or v.
__global__ void AddRoundedKernel(KeyValuePair<const float*> sums,
                                 KeyValuePair<TokenMajor<__nv_bfloat16>> targets, int64_t threads) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (thread >= threads) return;
  const TokenMajor<__nv_bfloat16>& target = blockIdx.y == 0 ? targets.k : targets.v;
  const float* const sum = (blockIdx.y == 0 ? sums.k : sums.v) + 8 * thread;
  const int32_t chunks = target.head_dim / 8;
  const int64_t row = thread / chunks;
  const float4 low = *reinterpret_cast<const float4*>(sum);
  const float4 high = *reinterpret_cast<const float4*>(sum + 4);
  const float terms[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  AddRoundedVector(target.data + row / target.heads * target.token_stride +
                       row % target.heads * target.head_stride + thread % chunks * 8,
                   terms);
}

}  // namespace

absl::Status AddRounded(const KeyValuePair<const float*>& sums,
                        const KeyValuePair<TokenMajor<__nv_bfloat16>>& target,
                        cudaStream_t stream) {
  const int64_t threads = target.k.tokens * target.k.heads * (target.k.head_dim / 8);
  const auto blocks = static_cast<unsigned>((threads + kThreads - 1) / kThreads);
  AddRoundedKernel<<<dim3(blocks, 2), kThreads, 0, stream>>>(sums, target, threads);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "backward: rounding");
  return absl::OkStatus();
}

}  // namespace ringleader::kernels::sm90
