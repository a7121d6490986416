#include <algorithm>

#include "base/status_macros.h"
#include "kernels/fused/cast.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/fused/vector/e4m3.cuh"
#include "kernels/fused/vector/row_block.cuh"

namespace ringleader::kernels::fused {
namespace {

template <int V>
__global__ void __launch_bounds__(kMaxRowThreads) CastRowsKernel(const CastRowsArgs args) {
  __shared__ uint32_t slots[32];
  const int vectors = static_cast<int>(args.dim / kVec);
  const int64_t row = blockIdx.x;
  Bf16x8 x[V];
  uint32_t magnitudes = 0;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int i = threadIdx.x + v * blockDim.x;
    x[v] = i < vectors ? LoadStream(args.x + row * args.stride + i * kVec) : ZeroVec();
  }
#pragma unroll
  for (int v = 0; v < V; ++v) magnitudes = MaxMagnitudes(magnitudes, x[v]);
  const E4m3Scale scale = BlockScale(magnitudes, slots);
  if (threadIdx.x == 0) args.cast.scales[row] = scale.scale;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int i = threadIdx.x + v * blockDim.x;
    if (i < vectors) StoreCodes(args.cast.codes + row * args.dim + i * kVec, x[v], scale.inverse);
  }
}

constexpr int kScaleThreads = 256;

// Scales are positive or NaN, whose order is that of their bits. `largest` is zero before.
__global__ void __launch_bounds__(kScaleThreads)
    LargestScaleKernel(const float* scales, int64_t rows, uint32_t* largest) {
  uint32_t bits = 0;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kScaleThreads + threadIdx.x; i < rows;
       i += static_cast<int64_t>(gridDim.x) * kScaleThreads) {
    bits = max(bits, __float_as_uint(scales[i]));
  }
  bits = __reduce_max_sync(0xffffffffu, bits);
  if (threadIdx.x % 32 == 0) atomicMax(largest, bits);
}

// A block turns kTurned x kTurned codes, a thread 4 rows of 16 columns.
constexpr int kTurned = 128;
constexpr int kTurnThreads = 256;
constexpr int kTurnVectors = kTurned / 16;  // of a row
constexpr int kTurnWords = kTurned / 4;     // of a column

// Four codes of a row in units of another scale, `factor` times which is the row's own. Exact in
// half precision but for what e4m3 rounds to zero either way.
__device__ __forceinline__ uint32_t InUnits(uint32_t codes, __half2 factor) {
  uint32_t result = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const auto pair = static_cast<__nv_fp8x2_storage_t>(codes >> 16 * half);
    const __half2 values = __hmul2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3)), factor);
    result |= static_cast<uint32_t>(
                  __nv_cvt_halfraw2_to_fp8x2(__half2_raw(values), __NV_SATFINITE, __NV_E4M3))
              << 16 * half;
  }
  return result;
}

// words[i] is row i's codes of four columns; afterwards column i's of four rows.
__device__ __forceinline__ void TurnFour(uint32_t (&words)[4]) {
  const uint32_t low01 = __byte_perm(words[0], words[1], 0x5140),
                 high01 = __byte_perm(words[0], words[1], 0x7362),
                 low23 = __byte_perm(words[2], words[3], 0x5140),
                 high23 = __byte_perm(words[2], words[3], 0x7362);
  words[0] = __byte_perm(low01, low23, 0x5410);
  words[1] = __byte_perm(low01, low23, 0x7632);
  words[2] = __byte_perm(high01, high23, 0x5410);
  words[3] = __byte_perm(high01, high23, 0x7632);
}

__global__ void __launch_bounds__(kTurnThreads)
    TurnCodesKernel(const TurnCodesArgs args, int64_t padded_rows) {
  // [column][four rows], where the latter's place is turned by the column's vector: a warp's words
  // then lie in 32 banks.
  __shared__ alignas(16) uint32_t tile[kTurned][kTurnWords];
  const int64_t row0 = static_cast<int64_t>(blockIdx.y) * kTurned;
  const int64_t column0 = static_cast<int64_t>(blockIdx.x) * kTurned;
  const float scale = *args.scale;
  {
    const int vector = threadIdx.x % kTurnVectors, four = threadIdx.x / kTurnVectors;
    uint4 codes[4];
    float scales[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t row = row0 + four * 4 + i;
      const bool exists = row < args.rows && column0 + vector * 16 < args.dim;
      codes[i] = exists ? __ldcs(reinterpret_cast<const uint4*>(args.codes + row * args.dim +
                                                                column0 + vector * 16))
                        : make_uint4(0, 0, 0, 0);
      scales[i] = exists ? __ldg(args.scales + row) : 0.0f;
    }
    uint32_t words[4][4];  // of a row's vector, by row
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __half2 factor = __half2half2(__float2half_rn(scales[i] / scale));
      words[i][0] = InUnits(codes[i].x, factor);
      words[i][1] = InUnits(codes[i].y, factor);
      words[i][2] = InUnits(codes[i].z, factor);
      words[i][3] = InUnits(codes[i].w, factor);
    }
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      uint32_t turned[4] = {words[0][word], words[1][word], words[2][word], words[3][word]};
      TurnFour(turned);
#pragma unroll
      for (int i = 0; i < 4; ++i) tile[vector * 16 + word * 4 + i][four ^ (vector * 4)] = turned[i];
    }
  }
  __syncthreads();
  for (int at = threadIdx.x; at < kTurned * kTurnVectors; at += kTurnThreads) {
    const int column = at / kTurnVectors, sixteen = at % kTurnVectors;
    const int64_t row = row0 + sixteen * 16;
    if (column0 + column >= args.dim || row >= padded_rows) continue;
    const uint4 codes =
        *reinterpret_cast<const uint4*>(&tile[column][(sixteen ^ (column / 16)) * 4]);
    __stcs(reinterpret_cast<uint4*>(args.turned + (column0 + column) * padded_rows + row), codes);
  }
}

unsigned Blocks(int64_t count, int64_t each) {
  return static_cast<unsigned>((count + each - 1) / each);
}

}  // namespace

absl::Status CheckCast(const E4m3Rows& cast, const char* name) {
  if (cast.codes == nullptr && cast.scales == nullptr) return absl::OkStatus();
  RETURN_IF_ERROR(CheckPointer(cast.codes, name));
  return CheckPointer(cast.scales, name);
}

absl::Status CastRows(const CastRowsArgs& args, cudaStream_t stream) {
  RETURN_IF_ERROR(CheckSize(args.dim, "CastRows: dim", kVec, kMaxCastDim, kVec));
  RETURN_IF_ERROR(CheckSize(args.rows, "CastRows: rows", 0, INT32_MAX));
  if (args.rows == 0) return absl::OkStatus();
  RETURN_IF_ERROR(CheckSize(args.stride, "CastRows: stride", args.dim, INT64_MAX, kVec));
  RETURN_IF_ERROR(CheckPointer(args.x, "CastRows: x"));
  RETURN_IF_ERROR(CheckPointer(args.cast.codes, "CastRows: codes"));
  RETURN_IF_ERROR(CheckCast(args.cast, "CastRows: cast"));
  LaunchRows(args.dim, [&](auto vectors, int threads) {
    CastRowsKernel<vectors><<<static_cast<unsigned>(args.rows), threads, 0, stream>>>(args);
  });
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "CastRows");
  return absl::OkStatus();
}

absl::Status TurnCodes(const TurnCodesArgs& args, cudaStream_t stream) {
  RETURN_IF_ERROR(CheckSize(args.dim, "TurnCodes: dim", 16, INT32_MAX, 16));
  RETURN_IF_ERROR(CheckSize(args.rows, "TurnCodes: rows", 1, int64_t{kTurned} * 65535));
  RETURN_IF_ERROR(CheckPointer(args.codes, "TurnCodes: codes"));
  RETURN_IF_ERROR(CheckPointer(args.turned, "TurnCodes: turned"));
  if (args.scales == nullptr || args.scale == nullptr) {
    return absl::InvalidArgumentError("TurnCodes: scales or scale is null");
  }
  RETURN_IF_CUDA_ERROR(cudaMemsetAsync(args.scale, 0, sizeof(float), stream), "TurnCodes");
  LargestScaleKernel<<<std::min(64u, Blocks(args.rows, kScaleThreads)), kScaleThreads, 0, stream>>>(
      args.scales, args.rows, reinterpret_cast<uint32_t*>(args.scale));
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "TurnCodes: scale");
  const dim3 tiles(Blocks(args.dim, kTurned), Blocks(args.rows, kTurned));
  TurnCodesKernel<<<tiles, kTurnThreads, 0, stream>>>(args, PaddedRows(args.rows));
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "TurnCodes");
  return absl::OkStatus();
}

}  // namespace ringleader::kernels::fused
