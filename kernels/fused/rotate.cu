#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/fused/rotate.h"
#include "kernels/fused/vector/vec.cuh"

namespace ringleader::kernels::fused {
namespace {

constexpr int kThreads = 256;
// Rotations (a vector of the first and one of the second half) that a thread has in flight.
constexpr int kUnroll = 2;
constexpr int kMaxRotations = 2048;  // in shared memory: 16 KiB

// The sine and cosine of an angle that may be a million radians: the fp32 angle is reduced in
// double, because sincosf on such arguments takes a slow path through local memory.
__device__ __forceinline__ void SinCos(float angle, float* sine, float* cosine) {
  constexpr double kHalfTurns = 0.31830988618379067154;  // 1 / pi
  double half_turns = static_cast<double>(angle) * kHalfTurns;
  half_turns -= 2.0 * rint(0.5 * half_turns);
  sincospif(static_cast<float>(half_turns), sine, cosine);
}

// The heads of k follow those of q.
template <typename T>
__device__ __forceinline__ T* Row(const TokenMajor<T>& q, const TokenMajor<T>& k, int64_t token,
                                  int head) {
  return head < q.heads ? q.data + token * q.token_stride + head * q.head_stride
                        : k.data + token * k.token_stride + (head - q.heads) * k.head_stride;
}

__global__ void __launch_bounds__(kThreads) RopeKernel(const RopeArgs args, int tokens_per_block) {
  extern __shared__ float2 rotations[];  // [tokens_per_block, half] (cosine, sine)
  const int half = args.q.head_dim / 2;
  const int chunks = half / kVec;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * tokens_per_block;
  const int tokens =
      static_cast<int>(min(static_cast<int64_t>(tokens_per_block), args.q.tokens - first));

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

  const int per_token = (args.q.heads + args.k.heads) * chunks;
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
      if (start + u * kThreads < items) {
        const __nv_bfloat16* x = Row(args.q, args.k, first + token[u], head[u]) + chunk[u] * kVec;
        low[u] = LoadStream(x);
        high[u] = LoadStream(x + half);
      }
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
      __nv_bfloat16* y = Row(args.q_out, args.k_out, first + token[u], head[u]) + chunk[u] * kVec;
      StoreStream(y, Pack(a));
      StoreStream(y + half, Pack(b));
    }
  }
}

absl::Status CheckPair(const TokenMajor<const __nv_bfloat16>& x, const TokenMajor<__nv_bfloat16>& y,
                       const char* name) {
  if (y.tokens != x.tokens || y.heads != x.heads || y.head_dim != x.head_dim) {
    return absl::InvalidArgumentError(
        absl::StrFormat("Rope: %s_out is [%d, %d, %d], %s is [%d, %d, %d]; give both one shape",
                        name, y.tokens, y.heads, y.head_dim, name, x.tokens, x.heads, x.head_dim));
  }
  const std::string prefix = absl::StrCat("Rope: ", name);
  const std::pair<int64_t, const char*> strides[] = {{x.token_stride, ".token_stride"},
                                                     {x.head_stride, ".head_stride"},
                                                     {y.token_stride, "_out.token_stride"},
                                                     {y.head_stride, "_out.head_stride"}};
  for (const auto& [stride, what] : strides) {
    RETURN_IF_ERROR(CheckSize(stride, (prefix + what).c_str(), 0, INT64_MAX, kVec));
  }
  RETURN_IF_ERROR(CheckPointer(x.data, prefix.c_str()));
  return CheckPointer(y.data, (prefix + "_out").c_str());
}

}  // namespace

absl::Status Rope(const RopeArgs& args, cudaStream_t stream) {
  RETURN_IF_ERROR(CheckSize(args.q.head_dim, "Rope: head_dim", 16, 256, 16));
  RETURN_IF_ERROR(CheckSize(args.q.heads, "Rope: q heads", 1, 1024));
  RETURN_IF_ERROR(CheckSize(args.k.heads, "Rope: k heads", 0, 1024));
  RETURN_IF_ERROR(CheckSize(args.q.tokens, "Rope: tokens", 0, INT32_MAX));
  if (args.q.tokens == 0) return absl::OkStatus();
  RETURN_IF_ERROR(CheckPair(args.q, args.q_out, "q"));
  if (args.k.heads > 0) {
    RETURN_IF_ERROR(CheckPair(args.k, args.k_out, "k"));
    if (args.k.tokens != args.q.tokens || args.k.head_dim != args.q.head_dim) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "Rope: k has %d tokens of head_dim %d, q has %d of %d; they must be equal", args.k.tokens,
          args.k.head_dim, args.q.tokens, args.q.head_dim));
    }
  }
  RETURN_IF_ERROR(CheckPointer(args.positions, "Rope: positions"));
  RETURN_IF_ERROR(CheckPointer(args.inv_freq, "Rope: inv_freq"));
  // A few turns of the block's loop: enough to share the sines, few enough that blocks in other
  // phases fill the gaps.
  const int half = args.q.head_dim / 2;
  const int items_per_token = (args.q.heads + args.k.heads) * half / kVec;
  const int tokens_per_block =
      std::clamp(2 * kThreads * kUnroll / items_per_token, 1, kMaxRotations / half);
  const int64_t blocks = (args.q.tokens + tokens_per_block - 1) / tokens_per_block;
  RopeKernel<<<static_cast<unsigned>(blocks), kThreads, sizeof(float2) * tokens_per_block * half,
               stream>>>(args, tokens_per_block);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "Rope");
  return absl::OkStatus();
}

}  // namespace ringleader::kernels::fused
