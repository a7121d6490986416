#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/fused/rotate.h"
#include "kernels/fused/vector/e4m3.cuh"
#include "kernels/fused/vector/row_block.cuh"
#include "kernels/fused/vector/vec.cuh"

namespace ringleader::kernels::fused {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxHeadDim = 256;
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

// (cosine, sine) of a token's i-th pair of values.
__device__ __forceinline__ float2 RotationOf(int64_t position, float inverse_frequency, float scale,
                                             bool inverse) {
  float2 rotation;
  SinCos(static_cast<float>(position) * inverse_frequency, &rotation.y, &rotation.x);
  rotation.x *= scale;
  rotation.y *= inverse ? -scale : scale;
  return rotation;
}

// A vector of a head's first half, and that of its second half which it is paired with.
struct Pairs {
  Bf16x8 low, high;
};
__device__ __forceinline__ Pairs Rotated(const Pairs& x, const float2* rotations) {
  float a[kVec], b[kVec];
  Unpack(x.low, a);
  Unpack(x.high, b);
  const auto* const table = reinterpret_cast<const float4*>(rotations);
#pragma unroll
  for (int e = 0; e < kVec; e += 2) {
    const float4 two = table[e / 2];
    const float a0 = a[e], a1 = a[e + 1];
    a[e] = a0 * two.x - b[e] * two.y;
    b[e] = b[e] * two.x + a0 * two.y;
    a[e + 1] = a1 * two.z - b[e + 1] * two.w;
    b[e + 1] = b[e + 1] * two.z + a1 * two.w;
  }
  return {Pack(a), Pack(b)};
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
    rotations[i] = RotationOf(args.positions[first + i / half], args.inv_freq[i % half], args.scale,
                              args.inverse);
  }
  __syncthreads();

  const int per_token = (args.q.heads + args.k.heads) * chunks;
  const int items = tokens * per_token;
  for (int start = threadIdx.x; start < items; start += kThreads * kUnroll) {
    Pairs pairs[kUnroll];
    int token[kUnroll], head[kUnroll], chunk[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int item = min(start + u * kThreads, items - 1);
      token[u] = item / per_token;
      head[u] = item % per_token / chunks;
      chunk[u] = item % chunks;
      if (start + u * kThreads < items) {
        const __nv_bfloat16* x = Row(args.q, args.k, first + token[u], head[u]) + chunk[u] * kVec;
        pairs[u] = {LoadStream(x), LoadStream(x + half)};
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (start + u * kThreads >= items) break;
      const Pairs rotated = Rotated(pairs[u], rotations + token[u] * half + chunk[u] * kVec);
      __nv_bfloat16* y = Row(args.q_out, args.k_out, first + token[u], head[u]) + chunk[u] * kVec;
      StoreStream(y, rotated.low);
      StoreStream(y + half, rotated.high);
    }
  }
}

// A block has a token's row, a thread V pairs of vectors.
template <int V>
__global__ void __launch_bounds__(kMaxRowThreads) RotateBackKernel(const RotateBackArgs args) {
  __shared__ alignas(16) float2 rotations[kMaxHeadDim / 2];
  __shared__ uint32_t slots[32];
  const int half = args.dq.head_dim / 2, chunks = half / kVec;
  const int rotated_heads = args.dq.heads + args.dk.heads;
  const int items = (rotated_heads + args.dv.heads) * chunks;
  const int64_t token = blockIdx.x;
  Pairs x[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int item = threadIdx.x + v * blockDim.x, head = item / chunks;
    x[v] = {ZeroVec(), ZeroVec()};
    if (item >= items) continue;
    const __nv_bfloat16* const row = head < rotated_heads
                                         ? Row(args.dq, args.dk, token, head)
                                         : args.dv.data + token * args.dv.token_stride +
                                               (head - rotated_heads) * args.dv.head_stride;
    x[v] = {LoadStream(row + item % chunks * kVec), LoadStream(row + item % chunks * kVec + half)};
  }
  for (int i = threadIdx.x; i < half; i += blockDim.x) {
    rotations[i] =
        RotationOf(args.positions[token], args.inv_freq[i], args.scale, /*inverse=*/true);
  }
  __syncthreads();
  uint32_t magnitudes = 0;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int item = threadIdx.x + v * blockDim.x;
    if (item < rotated_heads * chunks) x[v] = Rotated(x[v], rotations + item % chunks * kVec);
    magnitudes = MaxMagnitudes(MaxMagnitudes(magnitudes, x[v].low), x[v].high);
  }
  const E4m3Scale scale = BlockScale(magnitudes, slots);
  if (threadIdx.x == 0) args.cast.scales[token] = scale.scale;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int item = threadIdx.x + v * blockDim.x;
    if (item >= items) continue;
    const int64_t at =
        (token * (items / chunks) + item / chunks) * args.dq.head_dim + item % chunks * kVec;
    StoreCodes(args.cast.codes + at, x[v].low, scale.inverse);
    StoreCodes(args.cast.codes + at + half, x[v].high, scale.inverse);
    if (args.out == nullptr) continue;
    StoreStream(args.out + at, x[v].low);
    StoreStream(args.out + at + half, x[v].high);
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

absl::Status CheckGradient(const TokenMajor<const __nv_bfloat16>& x,
                           const TokenMajor<const __nv_bfloat16>& dk, const char* name) {
  if (x.tokens != dk.tokens || x.head_dim != dk.head_dim) {
    return absl::InvalidArgumentError(
        absl::StrFormat("RotateBack: %s is [%d, %d, %d], dk is [%d, %d, %d]; give them tokens and "
                        "head_dim in common",
                        name, x.tokens, x.heads, x.head_dim, dk.tokens, dk.heads, dk.head_dim));
  }
  const std::string prefix = absl::StrCat("RotateBack: ", name);
  for (const auto& [stride, what] :
       {std::pair{x.token_stride, ".token_stride"}, std::pair{x.head_stride, ".head_stride"}}) {
    RETURN_IF_ERROR(CheckSize(stride, (prefix + what).c_str(), 0, INT64_MAX, kVec));
  }
  return CheckPointer(x.data, prefix.c_str());
}

}  // namespace

absl::Status RotateBack(const RotateBackArgs& args, cudaStream_t stream) {
  const int64_t dim = int64_t{args.dq.heads + 2 * args.dk.heads} * args.dq.head_dim;
  RETURN_IF_ERROR(CheckSize(args.dq.head_dim, "RotateBack: head_dim", 16, kMaxHeadDim, 16));
  RETURN_IF_ERROR(CheckSize(args.dk.heads, "RotateBack: dk heads", 1, 1024));
  RETURN_IF_ERROR(CheckSize(args.dv.heads, "RotateBack: dv heads", args.dk.heads, args.dk.heads));
  RETURN_IF_ERROR(CheckSize(dim, "RotateBack: values of a token", 1, kMaxCastDim));
  RETURN_IF_ERROR(CheckSize(args.dq.tokens, "RotateBack: tokens", 0, INT32_MAX));
  if (args.dq.tokens == 0) return absl::OkStatus();
  RETURN_IF_ERROR(CheckGradient(args.dq, args.dk, "dq"));
  RETURN_IF_ERROR(CheckGradient(args.dk, args.dk, "dk"));
  RETURN_IF_ERROR(CheckGradient(args.dv, args.dk, "dv"));
  RETURN_IF_ERROR(CheckPointer(args.positions, "RotateBack: positions"));
  RETURN_IF_ERROR(CheckPointer(args.inv_freq, "RotateBack: inv_freq"));
  RETURN_IF_ERROR(CheckPointer(args.cast.codes, "RotateBack: codes"));
  RETURN_IF_ERROR(CheckCast(args.cast, "RotateBack: cast"));
  if (args.out != nullptr) RETURN_IF_ERROR(CheckPointer(args.out, "RotateBack: out"));
  LaunchRows(dim / 2, [&](auto pairs, int threads) {
    RotateBackKernel<pairs><<<static_cast<unsigned>(args.dq.tokens), threads, 0, stream>>>(args);
  });
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "RotateBack");
  return absl::OkStatus();
}

absl::Status Rope(const RopeArgs& args, cudaStream_t stream) {
  RETURN_IF_ERROR(CheckSize(args.q.head_dim, "Rope: head_dim", 16, kMaxHeadDim, 16));
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
