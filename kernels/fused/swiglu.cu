#include "base/status_macros.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/fused/swiglu.h"
#include "kernels/fused/vec.cuh"

namespace ringleader::kernels::fused {
namespace {

constexpr int kThreads = 128;
constexpr int kUnroll = 4;  // vectors of each operand that a thread has in flight
constexpr int kChunk = kThreads * kUnroll * kVec;

__device__ __forceinline__ float Sigmoid(float x) {
  return __fdividef(1.0f, 1.0f + __expf(-x));
}

// Blocks take kChunk columns of one row; chunk is the fast index.
struct Place {
  int64_t row;
  int column;
};

__device__ __forceinline__ Place BlockPlace(int chunks) {
  const int64_t row = blockIdx.x / chunks;
  const int chunk = static_cast<int>(blockIdx.x - row * chunks);
  return {row, chunk * kChunk + static_cast<int>(threadIdx.x) * kVec};
}

__global__ void __launch_bounds__(kThreads)
    SwigluForwardKernel(const SwigluForwardArgs args, int chunks) {
  const Place at = BlockPlace(chunks);
  Bf16x8 gate[kUnroll], up[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int c = at.column + u * kThreads * kVec;
    if (c >= args.dim) break;
    gate[u] = LoadStream(args.gate.data + at.row * args.gate.stride + c);
    up[u] = LoadStream(args.up.data + at.row * args.up.stride + c);
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int c = at.column + u * kThreads * kVec;
    if (c >= args.dim) break;
    float g[kVec], x[kVec];
    Unpack(gate[u], g);
    Unpack(up[u], x);
#pragma unroll
    for (int e = 0; e < kVec; ++e) x[e] *= g[e] * Sigmoid(g[e]);
    StoreStream(args.out.data + at.row * args.out.stride + c, Pack(x));
  }
}

__global__ void __launch_bounds__(kThreads)
    SwigluBackwardKernel(const SwigluBackwardArgs args, int chunks) {
  const Place at = BlockPlace(chunks);
  Bf16x8 gate[kUnroll], up[kUnroll], d_out[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int c = at.column + u * kThreads * kVec;
    if (c >= args.dim) break;
    gate[u] = LoadStream(args.gate.data + at.row * args.gate.stride + c);
    up[u] = LoadStream(args.up.data + at.row * args.up.stride + c);
    d_out[u] = LoadStream(args.d_out.data + at.row * args.d_out.stride + c);
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int c = at.column + u * kThreads * kVec;
    if (c >= args.dim) break;
    float g[kVec], x[kVec], d[kVec], out[kVec];
    Unpack(gate[u], g);
    Unpack(up[u], x);
    Unpack(d_out[u], d);
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      const float sigmoid = Sigmoid(g[e]);
      const float silu = g[e] * sigmoid;
      out[e] = silu * x[e];
      g[e] = d[e] * x[e] * (sigmoid + silu - silu * sigmoid);
      x[e] = d[e] * silu;
    }
    StoreStream(args.d_gate.data + at.row * args.d_gate.stride + c, Pack(g));
    StoreStream(args.d_up.data + at.row * args.d_up.stride + c, Pack(x));
    StoreStream(args.out.data + at.row * args.out.stride + c, Pack(out));
  }
}

template <typename T>
absl::Status CheckMatrix(const RowMatrix<T>& matrix, const char* name, int64_t dim) {
  RETURN_IF_ERROR(CheckPointer(matrix.data, name));
  return CheckSize(matrix.stride, name, dim, INT64_MAX, kVec);
}

absl::Status CheckShape(int64_t rows, int64_t dim, int64_t chunks) {
  RETURN_IF_ERROR(CheckSize(dim, "Swiglu: dim", kVec, 1 << 24, kVec));
  return CheckSize(rows, "Swiglu: rows", 0, INT32_MAX / chunks);
}

}  // namespace

absl::Status SwigluForward(const SwigluForwardArgs& args, cudaStream_t stream) {
  const int64_t chunks = (args.dim + kChunk - 1) / kChunk;
  RETURN_IF_ERROR(CheckShape(args.rows, args.dim, chunks > 0 ? chunks : 1));
  if (args.rows == 0) return absl::OkStatus();
  RETURN_IF_ERROR(CheckMatrix(args.gate, "SwigluForward: gate", args.dim));
  RETURN_IF_ERROR(CheckMatrix(args.up, "SwigluForward: up", args.dim));
  RETURN_IF_ERROR(CheckMatrix(args.out, "SwigluForward: out", args.dim));
  SwigluForwardKernel<<<static_cast<unsigned>(args.rows * chunks), kThreads, 0, stream>>>(
      args, static_cast<int>(chunks));
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "SwigluForward");
  return absl::OkStatus();
}

absl::Status SwigluBackward(const SwigluBackwardArgs& args, cudaStream_t stream) {
  const int64_t chunks = (args.dim + kChunk - 1) / kChunk;
  RETURN_IF_ERROR(CheckShape(args.rows, args.dim, chunks > 0 ? chunks : 1));
  if (args.rows == 0) return absl::OkStatus();
  RETURN_IF_ERROR(CheckMatrix(args.gate, "SwigluBackward: gate", args.dim));
  RETURN_IF_ERROR(CheckMatrix(args.up, "SwigluBackward: up", args.dim));
  RETURN_IF_ERROR(CheckMatrix(args.d_out, "SwigluBackward: d_out", args.dim));
  RETURN_IF_ERROR(CheckMatrix(args.d_gate, "SwigluBackward: d_gate", args.dim));
  RETURN_IF_ERROR(CheckMatrix(args.d_up, "SwigluBackward: d_up", args.dim));
  RETURN_IF_ERROR(CheckMatrix(args.out, "SwigluBackward: out", args.dim));
  SwigluBackwardKernel<<<static_cast<unsigned>(args.rows * chunks), kThreads, 0, stream>>>(
      args, static_cast<int>(chunks));
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "SwigluBackward");
  return absl::OkStatus();
}

}  // namespace ringleader::kernels::fused
