#include <algorithm>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/fused/rope.h"
#include "kernels/fused/vec.cuh"

namespace ringleader::fused {
namespace {

constexpr int kThreads = 256;
// Rotations (a vector of the first and one of the second half) that a thread has in flight.
constexpr int kUnroll = 2;

// The sine and cosine of an angle that may be a million radians: the fp32 angle is reduced in
// double, because sincosf on such arguments takes a slow path through local memory.
__device__ __forceinline__ void SinCos(float angle, float* sine, float* cosine) {
  constexpr double kHalfTurns = 0.31830988618379067154;  // 1 / pi
  double half_turns = static_cast<double>(angle) * kHalfTurns;
  half_turns -= 2.0 * rint(0.5 * half_turns);
  sincospif(static_cast<float>(half_turns), sine, cosine);
}

__global__ void __launch_bounds__(kThreads) RopeKernel(const RopeArgs args, int tokens_per_block) {
  extern __shared__ float2 rotations[];  // [tokens_per_block, half] (cosine, sine)
  const int half = args.x.head_dim / 2;
  const int chunks = half / kVec;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * tokens_per_block;
  const int tokens =
      static_cast<int>(min(static_cast<int64_t>(tokens_per_block), args.x.tokens - first));

  for (int i = threadIdx.x; i < tokens * half; i += kThreads) {
    const float angle =
        static_cast<float>(args.positions[first + i / half]) * args.inv_freq[i % half];
    float2 rotation;
    SinCos(angle, &rotation.y, &rotation.x);
    rotation.x *= args.scale;
    rotation.y *= args.inverse ? -args.scale : args.scale;
    rotations[i] = rotation;
  }
  __syncthreads();

  const int per_token = args.x.heads * chunks;
  const int items = tokens * per_token;
  for (int start = threadIdx.x; start < items; start += kThreads * kUnroll) {
    Bf16x8 low[kUnroll], high[kUnroll];
    int token[kUnroll], head[kUnroll], chunk[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int item = min(start + u * kThreads, items - 1);
      token[u] = item / per_token;
      head[u] = item % per_token / chunks;
      chunk[u] = item % chunks;
      const __nv_bfloat16* x =
          args.x.data + (first + token[u]) * args.x.token_stride + head[u] * args.x.head_stride;
      low[u] = LoadStream(x + chunk[u] * kVec);
      high[u] = LoadStream(x + half + chunk[u] * kVec);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (start + u * kThreads >= items) break;
      float a[kVec], b[kVec];
      Unpack(low[u], a);
      Unpack(high[u], b);
      const float4* table =
          reinterpret_cast<const float4*>(rotations + token[u] * half + chunk[u] * kVec);
#pragma unroll
      for (int e = 0; e < kVec; e += 2) {
        const float4 two = table[e / 2];
        const float a0 = a[e], a1 = a[e + 1];
        a[e] = a0 * two.x - b[e] * two.y;
        b[e] = b[e] * two.x + a0 * two.y;
        a[e + 1] = a1 * two.z - b[e + 1] * two.w;
        b[e + 1] = b[e + 1] * two.z + a1 * two.w;
      }
      __nv_bfloat16* y =
          args.y.data + (first + token[u]) * args.y.token_stride + head[u] * args.y.head_stride;
      StoreStream(y + chunk[u] * kVec, Pack(a));
      StoreStream(y + half + chunk[u] * kVec, Pack(b));
    }
  }
}

}  // namespace

absl::Status Rope(const RopeArgs& args, cudaStream_t stream) {
  RETURN_IF_ERROR(CheckSize(args.x.head_dim, "Rope: head_dim", 16, 256, 16));
  RETURN_IF_ERROR(CheckSize(args.x.heads, "Rope: heads", 1, 1024));
  RETURN_IF_ERROR(CheckSize(args.x.tokens, "Rope: tokens", 0, INT32_MAX));
  if (args.y.tokens != args.x.tokens || args.y.heads != args.x.heads ||
      args.y.head_dim != args.x.head_dim) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "Rope: y is [%d, %d, %d], x is [%d, %d, %d]; give both one shape", args.y.tokens,
        args.y.heads, args.y.head_dim, args.x.tokens, args.x.heads, args.x.head_dim));
  }
  if (args.x.tokens == 0) return absl::OkStatus();
  RETURN_IF_ERROR(CheckSize(args.x.token_stride, "Rope: x.token_stride", 0, INT64_MAX, kVec));
  RETURN_IF_ERROR(CheckSize(args.x.head_stride, "Rope: x.head_stride", 0, INT64_MAX, kVec));
  RETURN_IF_ERROR(CheckSize(args.y.token_stride, "Rope: y.token_stride", 0, INT64_MAX, kVec));
  RETURN_IF_ERROR(CheckSize(args.y.head_stride, "Rope: y.head_stride", 0, INT64_MAX, kVec));
  RETURN_IF_ERROR(CheckPointer(args.x.data, "Rope: x"));
  RETURN_IF_ERROR(CheckPointer(args.y.data, "Rope: y"));
  RETURN_IF_ERROR(CheckPointer(args.positions, "Rope: positions"));
  RETURN_IF_ERROR(CheckPointer(args.inv_freq, "Rope: inv_freq"));
  // About four turns of the block's loop: enough to share the sines, few enough to fill the chip.
  const int half = args.x.head_dim / 2;
  const int items_per_token = args.x.heads * half / kVec;
  const int tokens_per_block = std::clamp(4 * kThreads * kUnroll / items_per_token, 1, 8192 / half);
  const int64_t blocks = (args.x.tokens + tokens_per_block - 1) / tokens_per_block;
  const size_t shared_bytes = sizeof(float2) * tokens_per_block * half;  // 64 KiB at most
  static const cudaError_t raised =
      cudaFuncSetAttribute(RopeKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 65536);
  RETURN_IF_CUDA_ERROR(raised, "Rope: shared memory");
  RopeKernel<<<static_cast<unsigned>(blocks), kThreads, shared_bytes, stream>>>(args,
                                                                                tokens_per_block);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "Rope");
  return absl::OkStatus();
}

}  // namespace ringleader::fused
