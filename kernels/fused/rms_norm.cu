#include <algorithm>

#include "absl/status/statusor.h"
#include "base/status_macros.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/fused/rms_norm.h"
#include "kernels/fused/vector/e4m3.cuh"
#include "kernels/fused/vector/vec.cuh"

namespace ringleader::kernels::fused {
namespace {

// A block works on one row at a time, in registers: kThreads * V vectors of 8.
// Each backward block keeps its own sum of weight gradients; no Hopper chip has room for more
// blocks at a time.
constexpr int kMaxBackwardBlocks = 132 * 6;

template <int kThreads, int V, bool kResidual, bool kCast>
__global__ void __launch_bounds__(kThreads) RmsNormForwardKernel(const RmsNormForwardArgs args) {
  constexpr int kWarps = kThreads / 32;
  __shared__ float slots[kWarps];
  const int vectors = static_cast<int>(args.dim / kVec);
  const int64_t row = blockIdx.x;
  const int64_t base = row * args.dim;

  Bf16x8 x[V], r[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int i = threadIdx.x + v * kThreads;
    x[v] = i < vectors ? LoadStream(args.x + base + i * kVec) : ZeroVec();
    if (kResidual) r[v] = i < vectors ? LoadStream(args.residual + base + i * kVec) : ZeroVec();
  }
  float squares = 0.0f;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int i = threadIdx.x + v * kThreads;
    float f[kVec];
    Unpack(x[v], f);
    if (kResidual) {
      float g[kVec];
      Unpack(r[v], g);
#pragma unroll
      for (int e = 0; e < kVec; ++e) f[e] += g[e];
      // The norm sees the sum as it is stored, so that backward can start from the stored one.
      x[v] = Pack(f);
      Unpack(x[v], f);
      if (i < vectors) StoreStream(args.sum + base + i * kVec, x[v]);
    }
#pragma unroll
    for (int e = 0; e < kVec; ++e) squares += f[e] * f[e];
  }
  const float rstd =
      rsqrtf(BlockSum<kWarps>(squares, slots) / static_cast<float>(args.dim) + args.epsilon);
  if (threadIdx.x == 0) args.rstd[row] = rstd;
  uint32_t magnitudes = 0;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int i = threadIdx.x + v * kThreads;
    if (i >= vectors) break;
    float f[kVec], w[kVec];
    Unpack(x[v], f);
    Unpack(LoadCached(args.weight + i * kVec), w);
#pragma unroll
    for (int e = 0; e < kVec; ++e) f[e] = f[e] * rstd * w[e];
    x[v] = Pack(f);
    if (!kCast || args.y != nullptr) StoreStream(args.y + base + i * kVec, x[v]);
    if constexpr (kCast) magnitudes = MaxMagnitudes(magnitudes, x[v]);
  }
  if constexpr (kCast) {
    __shared__ uint32_t largest[32];
    const E4m3Scale scale = BlockScale(magnitudes, largest);
    if (threadIdx.x == 0) args.cast.scales[row] = scale.scale;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int i = threadIdx.x + v * kThreads;
      if (i < vectors) StoreCodes(args.cast.codes + base + i * kVec, x[v], scale.inverse);
    }
  }
}

template <int kThreads, int V>
struct BackwardRow {
  Bf16x8 h[V], dy[V], d_sum[V];
  float rstd;

  template <bool kSum>
  __device__ __forceinline__ void Load(const RmsNormBackwardArgs& args, int64_t row, int vectors) {
    rstd = __ldg(args.rstd + row);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int i = threadIdx.x + v * kThreads;
      const int64_t at = row * args.dim + i * kVec;
      h[v] = i < vectors ? LoadStream(args.h + at) : ZeroVec();
      dy[v] = i < vectors ? LoadStream(args.dy + at) : ZeroVec();
      if (kSum) d_sum[v] = i < vectors ? LoadStream(args.d_sum + at) : ZeroVec();
    }
  }
};

// How many blocks of the backward kernel a multiprocessor should hold: rows in flight hide latency.
constexpr int BackwardBlocks(int threads, bool sum) {
  return threads >= 512 ? 1 : (sum ? 512 : 768) / threads;
}

template <int kThreads, int V, bool kSum, bool kCast>
__global__ void __launch_bounds__(kThreads, BackwardBlocks(kThreads, kSum))
    RmsNormBackwardKernel(const RmsNormBackwardArgs args) {
  constexpr int kWarps = kThreads / 32;
  __shared__ float slots[2][kWarps];
  __shared__ uint32_t largest[kCast ? 2 : 1][32];
  const int vectors = static_cast<int>(args.dim / kVec);
  float d_weight[V][kVec] = {};
  BackwardRow<kThreads, V> current;
  int64_t row = blockIdx.x;
  if (row < args.rows) current.template Load<kSum>(args, row, vectors);
  for (int turn = 0; row < args.rows; row += gridDim.x, turn ^= 1) {
    // The next row is on its way while this one is reduced.
    BackwardRow<kThreads, V> next;
    const int64_t next_row = row + gridDim.x;
    if (next_row < args.rows) next.template Load<kSum>(args, next_row, vectors);

    float dot = 0.0f;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int i = threadIdx.x + v * kThreads;
      float h[kVec], dy[kVec], w[kVec];
      Unpack(current.h[v], h);
      Unpack(current.dy[v], dy);
      Unpack(i < vectors ? LoadCached(args.weight + i * kVec) : ZeroVec(), w);
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        const float normed = h[e] * current.rstd;
        dot += dy[e] * w[e] * normed;
        d_weight[v][e] += dy[e] * normed;
      }
    }
    // Slots alternate: a warp that runs ahead into the next row must not overwrite what others
    // still read.
    const float mean = BlockSum<kWarps>(dot, slots[turn]) / static_cast<float>(args.dim);
    uint32_t magnitudes = 0;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int i = threadIdx.x + v * kThreads;
      if (i >= vectors) break;
      float h[kVec], dy[kVec], w[kVec], d_sum[kVec];
      Unpack(current.h[v], h);
      Unpack(current.dy[v], dy);
      Unpack(LoadCached(args.weight + i * kVec), w);
      if (kSum) Unpack(current.d_sum[v], d_sum);
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        const float dx = current.rstd * (dy[e] * w[e] - h[e] * current.rstd * mean);
        dy[e] = kSum ? dx + d_sum[e] : dx;
      }
      current.dy[v] = Pack(dy);
      StoreStream(args.dx + row * args.dim + i * kVec, current.dy[v]);
      if constexpr (kCast) magnitudes = MaxMagnitudes(magnitudes, current.dy[v]);
    }
    if constexpr (kCast) {
      const E4m3Scale scale = BlockScale(magnitudes, largest[turn]);
      if (threadIdx.x == 0) args.cast.scales[row] = scale.scale;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const int i = threadIdx.x + v * kThreads;
        if (i >= vectors) break;
        StoreCodes(args.cast.codes + row * args.dim + i * kVec, current.dy[v], scale.inverse);
      }
    }
    current = next;
  }
  float* partial = static_cast<float*>(args.workspace) + blockIdx.x * args.dim;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int i = threadIdx.x + v * kThreads;
    if (i >= vectors) break;
#pragma unroll
    for (int e = 0; e < kVec; e += 4) {
      *reinterpret_cast<float4*>(partial + i * kVec + e) =
          make_float4(d_weight[v][e], d_weight[v][e + 1], d_weight[v][e + 2], d_weight[v][e + 3]);
    }
  }
}

// d_weight[c] += sum over blocks of partials[block][c], in a fixed order. 32 columns a block, 32
// warps share the rows.
__global__ void __launch_bounds__(1024)
    SumPartialsKernel(const float* partials, int blocks, int64_t dim, float* out) {
  __shared__ float sums[32][33];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t column = blockIdx.x * 32 + lane;
  float sum = 0.0f;
  if (column < dim) {
#pragma unroll 8
    for (int b = warp; b < blocks; b += 32) sum += partials[b * dim + column];
  }
  sums[warp][lane] = sum;
  __syncthreads();
  const float total = WarpSum(sums[lane][warp]);
  const int64_t mine = blockIdx.x * 32 + warp;
  if (lane == 0 && mine < dim) out[mine] += total;
}

template <int kThreads, int V, bool kCast>
void LaunchForward(const RmsNormForwardArgs& args, cudaStream_t stream) {
  const unsigned grid = static_cast<unsigned>(args.rows);
  if (args.residual != nullptr) {
    RmsNormForwardKernel<kThreads, V, true, kCast><<<grid, kThreads, 0, stream>>>(args);
  } else {
    RmsNormForwardKernel<kThreads, V, false, kCast><<<grid, kThreads, 0, stream>>>(args);
  }
}

template <int kThreads, int V>
void LaunchForward(const RmsNormForwardArgs& args, cudaStream_t stream) {
  args.cast.codes != nullptr ? LaunchForward<kThreads, V, true>(args, stream)
                             : LaunchForward<kThreads, V, false>(args, stream);
}

// The number of blocks that fit on the chip together, so that all finish at the same time.
template <int kThreads>
cudaError_t ResidentBlocks(const void* kernel, int* blocks) {
  int device = 0, processors = 0, per_processor = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_processor, kernel, kThreads, 0);
  }
  *blocks = std::min(kMaxBackwardBlocks, processors * per_processor);
  return error;
}

// Returns the number of blocks, each of which leaves a row of partial weight gradients.
template <int kThreads, int V, bool kSum, bool kCast>
absl::StatusOr<int> LaunchBackward(const RmsNormBackwardArgs& args, cudaStream_t stream) {
  const auto kernel = RmsNormBackwardKernel<kThreads, V, kSum, kCast>;
  static int resident = 0;
  static const cudaError_t error =
      ResidentBlocks<kThreads>(reinterpret_cast<const void*>(kernel), &resident);
  RETURN_IF_CUDA_ERROR(error, "RmsNormBackward: occupancy");
  const int blocks = static_cast<int>(std::min<int64_t>(args.rows, resident));
  kernel<<<blocks, kThreads, 0, stream>>>(args);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "RmsNormBackward");
  return blocks;
}

template <int kThreads, int V>
absl::StatusOr<int> LaunchBackward(const RmsNormBackwardArgs& args, cudaStream_t stream) {
  if (args.cast.codes != nullptr) {
    return args.d_sum != nullptr ? LaunchBackward<kThreads, V, true, true>(args, stream)
                                 : LaunchBackward<kThreads, V, false, true>(args, stream);
  }
  return args.d_sum != nullptr ? LaunchBackward<kThreads, V, true, false>(args, stream)
                               : LaunchBackward<kThreads, V, false, false>(args, stream);
}

absl::StatusOr<int> LaunchBackward(const RmsNormBackwardArgs& args, cudaStream_t stream) {
  if (args.dim <= 2048) return LaunchBackward<128, 2>(args, stream);
  if (args.dim <= 4096) return LaunchBackward<256, 2>(args, stream);
  return LaunchBackward<512, 2>(args, stream);
}

}  // namespace

absl::Status RmsNormForward(const RmsNormForwardArgs& args, cudaStream_t stream) {
  RETURN_IF_ERROR(CheckSize(args.dim, "RmsNormForward: dim", kVec, kMaxNormDim, kVec));
  RETURN_IF_ERROR(CheckSize(args.rows, "RmsNormForward: rows", 0, INT32_MAX));
  if (args.rows == 0) return absl::OkStatus();
  RETURN_IF_ERROR(CheckPointer(args.x, "RmsNormForward: x"));
  RETURN_IF_ERROR(CheckPointer(args.weight, "RmsNormForward: weight"));
  RETURN_IF_ERROR(CheckCast(args.cast, "RmsNormForward: cast"));
  if (args.cast.codes == nullptr || args.y != nullptr) {
    RETURN_IF_ERROR(CheckPointer(args.y, "RmsNormForward: y"));
  }
  RETURN_IF_ERROR(CheckPointer(args.rstd, "RmsNormForward: rstd"));
  if ((args.residual != nullptr) != (args.sum != nullptr)) {
    return absl::InvalidArgumentError(
        "RmsNormForward: residual and sum go together; set both or neither");
  }
  if (args.residual != nullptr) {
    RETURN_IF_ERROR(CheckPointer(args.residual, "RmsNormForward: residual"));
    RETURN_IF_ERROR(CheckPointer(args.sum, "RmsNormForward: sum"));
  }
  if (args.dim <= 2048) {
    LaunchForward<128, 2>(args, stream);
  } else if (args.dim <= 4096) {
    LaunchForward<256, 2>(args, stream);
  } else {
    LaunchForward<256, 4>(args, stream);
  }
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "RmsNormForward");
  return absl::OkStatus();
}

size_t RmsNormWorkspaceBytes(int64_t dim) {
  return sizeof(float) * kMaxBackwardBlocks * static_cast<size_t>(dim);
}

absl::Status RmsNormBackward(const RmsNormBackwardArgs& args, cudaStream_t stream) {
  RETURN_IF_ERROR(CheckSize(args.dim, "RmsNormBackward: dim", kVec, kMaxNormDim, kVec));
  RETURN_IF_ERROR(CheckSize(args.rows, "RmsNormBackward: rows", 0, INT32_MAX));
  if (args.rows == 0) return absl::OkStatus();
  RETURN_IF_ERROR(CheckPointer(args.h, "RmsNormBackward: h"));
  RETURN_IF_ERROR(CheckPointer(args.weight, "RmsNormBackward: weight"));
  RETURN_IF_ERROR(CheckPointer(args.rstd, "RmsNormBackward: rstd"));
  RETURN_IF_ERROR(CheckPointer(args.dy, "RmsNormBackward: dy"));
  RETURN_IF_ERROR(CheckPointer(args.dx, "RmsNormBackward: dx"));
  RETURN_IF_ERROR(CheckCast(args.cast, "RmsNormBackward: cast"));
  RETURN_IF_ERROR(CheckPointer(args.d_weight, "RmsNormBackward: d_weight"));
  RETURN_IF_ERROR(CheckPointer(args.workspace, "RmsNormBackward: workspace"));
  if (args.d_sum != nullptr) RETURN_IF_ERROR(CheckPointer(args.d_sum, "RmsNormBackward: d_sum"));
  ASSIGN_OR_RETURN(const int blocks, LaunchBackward(args, stream));
  SumPartialsKernel<<<static_cast<unsigned>((args.dim + 31) / 32), 1024, 0, stream>>>(
      static_cast<const float*>(args.workspace), blocks, args.dim, args.d_weight);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "RmsNormBackward: weight gradient");
  return absl::OkStatus();
}

}  // namespace ringleader::kernels::fused
