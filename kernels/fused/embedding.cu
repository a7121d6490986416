#include "base/status_macros.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/fused/embedding.h"
#include "kernels/fused/vector/vec.cuh"

namespace ringleader::kernels::fused {
namespace {

constexpr int kThreads = 128;
constexpr int kUnroll = 4;  // rows in flight: frequent tokens are long chains of loads

// A block takes one sorted row and 1,024 columns; only blocks where a token begins have work.
__global__ void __launch_bounds__(kThreads)
    EmbeddingBackwardKernel(const EmbeddingBackwardArgs args) {
  const int64_t first = blockIdx.x;
  const int64_t token = args.tokens[first];
  if (first > 0 && args.tokens[first - 1] == token) return;
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x) * kVec;
  if (column >= args.dim) return;

  float sum[kVec] = {};
  for (int64_t i = first; i < args.rows; i += kUnroll) {
    Bf16x8 rows[kUnroll];
    bool same[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      same[u] = i + u < args.rows && args.tokens[i + u] == token;
      if (same[u]) rows[u] = LoadStream(args.dx + args.order[i + u] * args.dim + column);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (!same[u]) continue;
      float f[kVec];
      Unpack(rows[u], f);
#pragma unroll
      for (int e = 0; e < kVec; ++e) sum[e] += f[e];
    }
    if (!same[kUnroll - 1]) break;
  }
  float4* out = reinterpret_cast<float4*>(args.table + token * args.dim + column);
  float4 low = out[0], high = out[1];
  low.x += sum[0], low.y += sum[1], low.z += sum[2], low.w += sum[3];
  high.x += sum[4], high.y += sum[5], high.z += sum[6], high.w += sum[7];
  out[0] = low;
  out[1] = high;
}

}  // namespace

absl::Status EmbeddingBackward(const EmbeddingBackwardArgs& args, cudaStream_t stream) {
  RETURN_IF_ERROR(CheckSize(args.rows, "EmbeddingBackward: rows", 0, INT32_MAX));
  RETURN_IF_ERROR(CheckSize(args.dim, "EmbeddingBackward: dim", kVec, 1 << 20, kVec));
  if (args.rows == 0) return absl::OkStatus();
  RETURN_IF_ERROR(CheckPointer(args.dx, "EmbeddingBackward: dx"));
  RETURN_IF_ERROR(CheckPointer(args.table, "EmbeddingBackward: table"));
  if (args.tokens == nullptr || args.order == nullptr) {
    return absl::InvalidArgumentError("EmbeddingBackward: tokens and order must both be set");
  }
  const int64_t columns = kThreads * kVec;
  const dim3 grid(static_cast<unsigned>(args.rows),
                  static_cast<unsigned>((args.dim + columns - 1) / columns));
  EmbeddingBackwardKernel<<<grid, kThreads, 0, stream>>>(args);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "EmbeddingBackward");
  return absl::OkStatus();
}

}  // namespace ringleader::kernels::fused
