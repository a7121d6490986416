#include <cuda_fp8.h>

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/index/groups/narrow_rows.h"
#include "ringleader/kernels/e4m3.h"

namespace ringleader::kernels::index {
namespace {

using fused::CheckPointer;
using fused::CheckSize;
using Rows = TokenMajor<const __nv_bfloat16>;

constexpr int kMostDims = 128;
constexpr int kThreads = 256;
constexpr int kEnergyTokens = 2048;  // of a block
constexpr int kNarrowTokens = 128;   // of a block: 16 of a warp

// Queries and keys in one grid: blocks [0, q.heads) of y are of queries, the others of keys. What a
// block works on.
struct BlockRows {
  const __nv_bfloat16* head;  // the first token's row
  int64_t tokens, token_stride;
  int heads, index;  // of queries or keys
  bool of_keys;
  int kv_head;
  int slot;  // of a [2, kv_heads] array

  __device__ __forceinline__ BlockRows(const Rows& q, const Rows& k)
      : tokens(q.tokens), of_keys(static_cast<int>(blockIdx.y) >= q.heads) {
    index = static_cast<int>(blockIdx.y) - (of_keys ? q.heads : 0);
    heads = of_keys ? k.heads : q.heads;
    token_stride = of_keys ? k.token_stride : q.token_stride;
    head = of_keys ? k.data + index * k.head_stride : q.data + index * q.head_stride;
    kv_head = of_keys ? index : index / (q.heads / k.heads);
    slot = of_keys ? k.heads + kv_head : kv_head;
  }
};

__device__ __forceinline__ bool IsFinite(float x) {
  return fabsf(x) <= FLT_MAX;
}

__device__ __forceinline__ float LowBf16(uint32_t pair) {
  return __uint_as_float(pair << 16);
}
__device__ __forceinline__ float HighBf16(uint32_t pair) {
  return __uint_as_float(pair & 0xFFFF0000u);
}

// Floats that are not negative compare as their bits do.
__device__ __forceinline__ void RaiseTo(float* largest, float value) {
  atomicMax(reinterpret_cast<int*>(largest), __float_as_int(value));
}

__device__ __forceinline__ void AddTo(int64_t* sum, int64_t value) {
  atomicAdd(reinterpret_cast<unsigned long long*>(sum), static_cast<unsigned long long>(value));
}

// A thread takes eight dimensions of every so many tokens of a head.
__global__ void __launch_bounds__(kThreads)
    SumDimEnergyKernel(const Rows q, const Rows k, const DimEnergyStep step) {
  __shared__ int64_t energy[kMostDims];
  __shared__ float largest[kMostDims];
  const BlockRows rows(q, k);
  const int head_dim = q.head_dim, row_threads = head_dim / 8;
  const int dim = static_cast<int>(threadIdx.x) % row_threads * 8;
  for (int i = threadIdx.x; i < head_dim; i += kThreads) {
    energy[i] = 0;
    largest[i] = 0.0f;
  }
  __syncthreads();
  const float most = MostEnergy(step.tokens * (rows.of_keys ? 1 : q.heads / k.heads));
  const int at_once = kThreads / row_threads;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kEnergyTokens,
                end = min(first + kEnergyTokens, step.rows);
  int64_t sums[8] = {};
  float maxima[8] = {};
#pragma unroll 4
  for (int64_t i = first + threadIdx.x / row_threads; i < end; i += at_once) {
    const uint4 loaded = *reinterpret_cast<const uint4*>(rows.head + i * rows.token_stride + dim);
    const uint32_t pairs[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float value = j % 2 == 0 ? LowBf16(pairs[j / 2]) : HighBf16(pairs[j / 2]);
      const float finite = IsFinite(value) ? value : 0.0f;
      sums[j] += __float2ll_rn(fminf(finite * finite * (1 << kEnergyBits), most));
      maxima[j] = fmaxf(maxima[j], fabsf(finite));
    }
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    AddTo(&energy[dim + j], sums[j]);
    RaiseTo(&largest[dim + j], maxima[j]);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < head_dim; i += kThreads) {
    AddTo(step.energy + rows.slot * head_dim + i, energy[i]);
    RaiseTo(step.largest + rows.slot * head_dim + i, largest[i]);
  }
}

// A block a KV head, a thread a dimension.
__global__ void PickDimsKernel(int head_dim, const PickDimsStep step) {
  __shared__ double products[kMostDims];
  __shared__ bool picked[kMostDims];
  __shared__ float largest[2];
  const int dim = static_cast<int>(threadIdx.x), head = static_cast<int>(blockIdx.x),
            heads = static_cast<int>(gridDim.x);
  const int slots[2] = {head, heads + head};
  products[dim] = static_cast<double>(step.energy[slots[0] * head_dim + dim]) *
                  static_cast<double>(step.energy[slots[1] * head_dim + dim]);
  if (dim < 2) largest[dim] = 0.0f;
  __syncthreads();
  int before = 0;  // that are picked rather than this one
  for (int i = 0; i < head_dim; ++i) {
    before += products[i] > products[dim] || (products[i] == products[dim] && i < dim) ? 1 : 0;
  }
  picked[dim] = before < kScoreDims;
  __syncthreads();
  if (picked[dim]) {
    int place = 0;
    for (int i = 0; i < dim; ++i) place += picked[i] ? 1 : 0;
    step.dims[head * kScoreDims + place] = dim;
    for (int side = 0; side < 2; ++side) {
      RaiseTo(&largest[side], step.largest[slots[side] * head_dim + dim]);
    }
  }
  __syncthreads();
  if (dim < 2) {
    step.inverses[slots[dim]] = kScoreScaling * E4m3ScaleOf(__float_as_uint(largest[dim])).inverse;
  }
}

// Where a lane finds a dimension of a row that a warp has loaded, kWords pairs a lane.
template <int kWords>
struct Source {
  int lane, word;
  bool high;

  __device__ explicit Source(int dim)
      : lane(dim / (2 * kWords)), word(dim / 2 % kWords), high(dim % 2 != 0) {}
  __device__ __forceinline__ float Take(const uint32_t (&words)[kWords]) const {
    uint32_t pair = 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const uint32_t of_lane = __shfl_sync(0xFFFFFFFFu, words[i], lane);
      if (i == word) pair = of_lane;
    }
    return high ? HighBf16(pair) : LowBf16(pair);
  }
};

// A warp takes a row at a time, a lane two of its picked dimensions.
template <int kWords>
__global__ void __launch_bounds__(kThreads)
    NarrowRowsKernel(const Rows q, const Rows k, const NarrowRowsStep step) {
  const BlockRows rows(q, k);
  const int lane = threadIdx.x % 32;
  const int32_t* const dims = step.dims + rows.kv_head * kScoreDims;
  const Source<kWords> first(dims[2 * lane]), second(dims[2 * lane + 1]);
  const float inverse = step.inverses[rows.slot];
  uint8_t* const narrow = rows.of_keys ? step.keys : step.queries;
  const SpreadRows spread = rows.of_keys ? SpreadRows() : step.rows;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kNarrowTokens,
                end = min(begin + kNarrowTokens, rows.tokens);
#pragma unroll 4
  for (int64_t i = begin + threadIdx.x / 32; i < end; i += kThreads / 32) {
    const auto* const row = reinterpret_cast<const uint32_t*>(rows.head + i * rows.token_stride);
    uint32_t words[kWords];
    bool is_finite = true;
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      words[j] = row[lane * kWords + j];
      is_finite = is_finite && IsFinite(LowBf16(words[j])) && IsFinite(HighBf16(words[j]));
    }
    is_finite = __all_sync(0xFFFFFFFFu, is_finite);
    float2 values = {first.Take(words) * inverse, second.Take(words) * inverse};
    if (!is_finite) values = {NAN, NAN};
    const auto codes =
        static_cast<uint16_t>(__nv_cvt_float2_to_fp8x2(values, __NV_SATFINITE, __NV_E4M3));
    const int64_t to = spread.RowOf(i) * rows.heads + rows.index;
    reinterpret_cast<uint16_t*>(narrow + to * kScoreDims)[lane] = codes;
  }
}

absl::Status CheckRows(const Rows& x, const char* name) {
  RETURN_IF_ERROR(CheckPointer(x.data, name));
  RETURN_IF_ERROR(CheckSize(x.token_stride, name, 1, INT64_MAX, 8));
  return CheckSize(x.head_stride, name, 1, INT64_MAX, 8);
}

absl::Status CheckHeadDim(int head_dim) {
  if (head_dim == 64 || head_dim == kMostDims) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("scores of key groups: head_dim is %d; 64 and 128 are supported", head_dim));
}

absl::Status CheckBoth(const Rows& q, const Rows& k) {
  RETURN_IF_ERROR(CheckHeadDim(q.head_dim));
  RETURN_IF_ERROR(
      CheckSize(k.head_dim, "scores of key groups: head_dim of k", q.head_dim, q.head_dim));
  RETURN_IF_ERROR(CheckSize(k.heads, "scores of key groups: heads of k", 1, 32767));
  RETURN_IF_ERROR(CheckSize(q.heads, "scores of key groups: heads of q", k.heads, 32767, k.heads));
  RETURN_IF_ERROR(CheckSize(k.tokens, "scores of key groups: tokens of k", q.tokens, q.tokens));
  RETURN_IF_ERROR(CheckRows(q, "scores of key groups: q and its strides"));
  return CheckRows(k, "scores of key groups: k and its strides");
}

unsigned Parts(int64_t tokens, int of_block) {
  return static_cast<unsigned>((tokens + of_block - 1) / of_block);
}

}  // namespace

absl::Status SumDimEnergy(const Rows& q, const Rows& k, const DimEnergyStep& step,
                          cudaStream_t stream) {
  RETURN_IF_ERROR(CheckBoth(q, k));
  RETURN_IF_ERROR(CheckSize(step.rows, "DimEnergyStep: rows", 0, q.tokens));
  RETURN_IF_ERROR(CheckSize(step.tokens, "DimEnergyStep: tokens", step.rows, 1 << 30));
  RETURN_IF_ERROR(CheckPointer(step.energy, "DimEnergyStep: energy"));
  RETURN_IF_ERROR(CheckPointer(step.largest, "DimEnergyStep: largest"));
  const size_t values = size_t{2} * k.heads * k.head_dim;
  RETURN_IF_CUDA_ERROR(cudaMemsetAsync(step.energy, 0, sizeof(int64_t) * values, stream),
                       "SumDimEnergy");
  RETURN_IF_CUDA_ERROR(cudaMemsetAsync(step.largest, 0, sizeof(float) * values, stream),
                       "SumDimEnergy");
  if (step.rows == 0) return absl::OkStatus();
  SumDimEnergyKernel<<<dim3(Parts(step.rows, kEnergyTokens), q.heads + k.heads), kThreads, 0,
                       stream>>>(q, k, step);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "SumDimEnergy");
  return absl::OkStatus();
}

absl::Status PickDims(int kv_heads, int head_dim, const PickDimsStep& step, cudaStream_t stream) {
  RETURN_IF_ERROR(CheckHeadDim(head_dim));
  RETURN_IF_ERROR(CheckPointer(step.energy, "PickDimsStep: energy"));
  RETURN_IF_ERROR(CheckPointer(step.largest, "PickDimsStep: largest"));
  RETURN_IF_ERROR(CheckPointer(step.dims, "PickDimsStep: dims"));
  RETURN_IF_ERROR(CheckPointer(step.inverses, "PickDimsStep: inverses"));
  PickDimsKernel<<<kv_heads, head_dim, 0, stream>>>(head_dim, step);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "PickDims");
  return absl::OkStatus();
}

absl::Status NarrowRows(const Rows& q, const Rows& k, const NarrowRowsStep& step,
                        cudaStream_t stream) {
  RETURN_IF_ERROR(CheckBoth(q, k));
  RETURN_IF_ERROR(CheckPointer(step.dims, "NarrowRowsStep: dims"));
  RETURN_IF_ERROR(CheckPointer(step.inverses, "NarrowRowsStep: inverses"));
  RETURN_IF_ERROR(CheckPointer(step.queries, "NarrowRowsStep: queries"));
  RETURN_IF_ERROR(CheckPointer(step.keys, "NarrowRowsStep: keys"));
  if (step.rows.is_spread()) {
    const size_t bytes = static_cast<size_t>(step.rows.Rows(q.tokens)) * q.heads * kScoreDims;
    RETURN_IF_CUDA_ERROR(cudaMemsetAsync(step.queries, kE4m3Nan, bytes, stream), "NarrowRows");
  }
  const auto kernel = q.head_dim == 64 ? NarrowRowsKernel<1> : NarrowRowsKernel<2>;
  kernel<<<dim3(Parts(q.tokens, kNarrowTokens), q.heads + k.heads), kThreads, 0, stream>>>(q, k,
                                                                                           step);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "NarrowRows");
  return absl::OkStatus();
}

}  // namespace ringleader::kernels::index
