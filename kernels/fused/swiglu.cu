#include "base/status_macros.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/fused/swiglu.h"
#include "kernels/fused/vector/e4m3.cuh"
#include "kernels/fused/vector/row_block.cuh"
#include "kernels/fused/vector/vec.cuh"

namespace ringleader::kernels::fused {
namespace {

constexpr int kThreads = 128;
constexpr int kUnroll = 4;  // vectors of each operand that a thread has in flight
constexpr int kChunk = kThreads * kUnroll * kVec;

__device__ __forceinline__ float Sigmoid(float x) {
  return __fdividef(1.0f, 1.0f + __expf(-x));
}

__device__ __forceinline__ Bf16x8 Forward(const Bf16x8& gate, const Bf16x8& up) {
  float g[kVec], x[kVec];
  Unpack(gate, g);
  Unpack(up, x);
#pragma unroll
  for (int e = 0; e < kVec; ++e) x[e] *= g[e] * Sigmoid(g[e]);
  return Pack(x);
}

// gate, up and d_out become d_gate, d_up and forward's result.
__device__ __forceinline__ void Backward(Bf16x8& gate, Bf16x8& up, Bf16x8& d_out) {
  float g[kVec], x[kVec], d[kVec], out[kVec];
  Unpack(gate, g);
  Unpack(up, x);
  Unpack(d_out, d);
#pragma unroll
  for (int e = 0; e < kVec; ++e) {
    const float sigmoid = Sigmoid(g[e]);
    const float silu = g[e] * sigmoid;
    out[e] = silu * x[e];
    g[e] = d[e] * x[e] * (sigmoid + silu - silu * sigmoid);
    x[e] = d[e] * silu;
  }
  gate = Pack(g);
  up = Pack(x);
  d_out = Pack(out);
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
    StoreStream(args.out.data + at.row * args.out.stride + c, Forward(gate[u], up[u]));
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
    Backward(gate[u], up[u], d_out[u]);
    StoreStream(args.d_gate.data + at.row * args.d_gate.stride + c, gate[u]);
    StoreStream(args.d_up.data + at.row * args.d_up.stride + c, up[u]);
    StoreStream(args.out.data + at.row * args.out.stride + c, d_out[u]);
  }
}

// The same with a block for each row, whose largest magnitude decides on its cast.
template <int V>
__global__ void __launch_bounds__(kMaxRowThreads)
    SwigluForwardCastKernel(const SwigluForwardArgs args) {
  __shared__ uint32_t slots[32];
  const int64_t row = blockIdx.x;
  Bf16x8 gate[V], up[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int c = (threadIdx.x + v * blockDim.x) * kVec;
    if (c >= args.dim) break;
    gate[v] = LoadStream(args.gate.data + row * args.gate.stride + c);
    up[v] = LoadStream(args.up.data + row * args.up.stride + c);
  }
  uint32_t magnitudes = 0;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int c = (threadIdx.x + v * blockDim.x) * kVec;
    if (c >= args.dim) break;
    gate[v] = Forward(gate[v], up[v]);
    magnitudes = MaxMagnitudes(magnitudes, gate[v]);
    if (args.out.data != nullptr) StoreStream(args.out.data + row * args.out.stride + c, gate[v]);
  }
  const E4m3Scale scale = BlockScale(magnitudes, slots);
  if (threadIdx.x == 0) args.cast.scales[row] = scale.scale;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int c = (threadIdx.x + v * blockDim.x) * kVec;
    if (c >= args.dim) break;
    StoreCodes(args.cast.codes + row * args.dim + c, gate[v], scale.inverse);
  }
}

template <int V>
__global__ void __launch_bounds__(kMaxRowThreads)
    SwigluBackwardCastKernel(const SwigluBackwardArgs args) {
  __shared__ uint32_t slots[32], out_slots[32];
  const int64_t row = blockIdx.x;
  Bf16x8 gate[V], up[V], d_out[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int c = (threadIdx.x + v * blockDim.x) * kVec;
    if (c >= args.dim) break;
    gate[v] = LoadStream(args.gate.data + row * args.gate.stride + c);
    up[v] = LoadStream(args.up.data + row * args.up.stride + c);
    d_out[v] = LoadStream(args.d_out.data + row * args.d_out.stride + c);
  }
  uint32_t magnitudes = 0, out_magnitudes = 0;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int c = (threadIdx.x + v * blockDim.x) * kVec;
    if (c >= args.dim) break;
    Backward(gate[v], up[v], d_out[v]);
    magnitudes = MaxMagnitudes(MaxMagnitudes(magnitudes, gate[v]), up[v]);
    out_magnitudes = MaxMagnitudes(out_magnitudes, d_out[v]);
    if (args.out.data == nullptr) continue;
    StoreStream(args.d_gate.data + row * args.d_gate.stride + c, gate[v]);
    StoreStream(args.d_up.data + row * args.d_up.stride + c, up[v]);
    StoreStream(args.out.data + row * args.out.stride + c, d_out[v]);
  }
  const E4m3Scale scale = BlockScale(magnitudes, slots),
                  out_scale = BlockScale(out_magnitudes, out_slots);
  if (threadIdx.x == 0) {
    args.cast.scales[row] = scale.scale;
    args.out_cast.scales[row] = out_scale.scale;
  }
  uint8_t *const codes = args.cast.codes + row * 2 * args.dim, *const out_codes =
                                                                   args.out_cast.codes +
                                                                   row * args.dim;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int c = (threadIdx.x + v * blockDim.x) * kVec;
    if (c >= args.dim) break;
    StoreCodes(codes + c, gate[v], scale.inverse);
    StoreCodes(codes + args.dim + c, up[v], scale.inverse);
    StoreCodes(out_codes + c, d_out[v], out_scale.inverse);
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
  RETURN_IF_ERROR(CheckCast(args.cast, "SwigluForward: cast"));
  if (args.cast.codes == nullptr || args.out.data != nullptr) {
    RETURN_IF_ERROR(CheckMatrix(args.out, "SwigluForward: out", args.dim));
  }
  if (args.cast.codes != nullptr) {
    RETURN_IF_ERROR(CheckSize(args.dim, "SwigluForward: dim", kVec, kMaxCastDim, kVec));
    LaunchRows(args.dim, [&](auto vectors, int threads) {
      SwigluForwardCastKernel<vectors>
          <<<static_cast<unsigned>(args.rows), threads, 0, stream>>>(args);
    });
    RETURN_IF_CUDA_ERROR(cudaGetLastError(), "SwigluForward: with a cast");
    return absl::OkStatus();
  }
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
  const bool casts_alone = args.cast.codes != nullptr && args.d_gate.data == nullptr &&
                           args.d_up.data == nullptr && args.out.data == nullptr;
  if (!casts_alone) {
    RETURN_IF_ERROR(CheckMatrix(args.d_gate, "SwigluBackward: d_gate", args.dim));
    RETURN_IF_ERROR(CheckMatrix(args.d_up, "SwigluBackward: d_up", args.dim));
    RETURN_IF_ERROR(CheckMatrix(args.out, "SwigluBackward: out", args.dim));
  }
  RETURN_IF_ERROR(CheckCast(args.cast, "SwigluBackward: cast"));
  RETURN_IF_ERROR(CheckCast(args.out_cast, "SwigluBackward: out_cast"));
  if ((args.cast.codes == nullptr) != (args.out_cast.codes == nullptr)) {
    return absl::InvalidArgumentError("SwigluBackward: one of cast and out_cast is null");
  }
  if (args.cast.codes != nullptr) {
    RETURN_IF_ERROR(CheckSize(args.dim, "SwigluBackward: dim", kVec, kMaxCastDim, kVec));
    LaunchRows(args.dim, [&](auto vectors, int threads) {
      SwigluBackwardCastKernel<vectors>
          <<<static_cast<unsigned>(args.rows), threads, 0, stream>>>(args);
    });
    RETURN_IF_CUDA_ERROR(cudaGetLastError(), "SwigluBackward: with a cast");
    return absl::OkStatus();
  }
  SwigluBackwardKernel<<<static_cast<unsigned>(args.rows * chunks), kThreads, 0, stream>>>(
      args, static_cast<int>(chunks));
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "SwigluBackward");
  return absl::OkStatus();
}

}  // namespace ringleader::kernels::fused
