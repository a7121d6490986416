// Moving selected columns between their owners' shards and dense rows.
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/sm90/columns.h"
#include "kernels/sm90/launch/launch.h"
#include "kernels/sm90/walk/find_column.cuh"

namespace ringleader::kernels::sm90 {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxScatteredDim = 32 * 4;  // a warp's row of float4

// The slots of all heads, `chunks` threads each. Thread -> (head, slot, chunk).
struct SlotGrid {
  const int64_t* positions;
  const int32_t* counts;
  int32_t max_columns;
  int32_t heads;
  int32_t chunks;
  __host__ __device__ int64_t threads() const {
    return static_cast<int64_t>(heads) * max_columns * chunks;
  }
};

__global__ void GatherKernel(SlotGrid grid, ShardLayout owner, TokenMajor<const __nv_bfloat16> k,
                             TokenMajor<const __nv_bfloat16> v, int32_t group, uint4* keys,
                             uint4* values) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (thread >= grid.threads()) return;
  const int32_t chunk = thread % grid.chunks;
  const int64_t slot = thread / grid.chunks;
  const int32_t head = slot / grid.max_columns;
  if (slot % grid.max_columns >= grid.counts[head]) {
    keys[thread] = values[thread] = make_uint4(0, 0, 0, 0);
    return;
  }
  const int64_t position = grid.positions[slot];
  if (owner.Owner(position) != owner.rank) return;
  const int64_t token = owner.LocalIndex(position);
  const int32_t kv_head = head / group;
  const auto source = [&](const TokenMajor<const __nv_bfloat16>& tensor) {
    return *reinterpret_cast<const uint4*>(tensor.data + token * tensor.token_stride +
                                           kv_head * tensor.head_stride + chunk * 8);
  };
  keys[thread] = source(k);
  values[thread] = source(v);
}

__device__ __forceinline__ float4 Sum(const float4& a, const float4& b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
__device__ __forceinline__ void Add(float* target, const float4& terms) {
  float4& sum = *reinterpret_cast<float4*>(target);
  sum = Sum(sum, terms);
}
__device__ __forceinline__ void Add(__nv_bfloat16* target, const float4& terms) {
  auto* const pairs = reinterpret_cast<__nv_bfloat162*>(target);
  const float2 low = __bfloat1622float2(pairs[0]), high = __bfloat1622float2(pairs[1]);
  pairs[0] = __floats2bfloat162_rn(low.x + terms.x, low.y + terms.y);
  pairs[1] = __floats2bfloat162_rn(high.x + terms.z, high.y + terms.w);
}

// A warp takes one (head, column), a lane four elements of its row. Of the heads of a KV group that
// chose a position the first one's warp adds the terms of all, so that no two warps add to one
// element.
template <typename T>
__global__ void ScatterKernel(ColumnSelection columns, ShardLayout owner, int32_t heads,
                              const float4* d_keys, const float4* d_values, TokenMajor<T> dk,
                              TokenMajor<T> dv) {
  const int32_t lane = threadIdx.x % 32;
  const int64_t slot = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32;
  const auto head = static_cast<int32_t>(slot / columns.max_columns);
  if (head >= heads || slot % columns.max_columns >= columns.counts[head]) return;
  const int64_t position = columns.positions[slot];
  if (owner.Owner(position) != owner.rank) return;
  const int32_t group = heads / dk.heads, kv_head = head / group, chunks = dk.head_dim / 4;
  float4 key_terms = {}, value_terms = {};
  for (int32_t first = kv_head * group; first < (kv_head + 1) * group; first += 32) {
    // Each lane looks in the columns of another head.
    const int32_t mine = first + lane;
    const int32_t column = mine < (kv_head + 1) * group
                               ? FindColumn(columns.positions + int64_t{mine} * columns.max_columns,
                                            columns.counts[mine], position)
                               : -1;
    uint32_t found = __ballot_sync(0xffffffffu, column >= 0);
    if (found != 0 && first + __ffs(static_cast<int>(found)) - 1 < head) return;
    for (; found != 0; found &= found - 1) {
      const int32_t from = __ffs(static_cast<int>(found)) - 1;
      const int64_t row =
          int64_t{first + from} * columns.max_columns + __shfl_sync(0xffffffffu, column, from);
      if (lane >= chunks) continue;
      key_terms = Sum(key_terms, d_keys[row * chunks + lane]);
      value_terms = Sum(value_terms, d_values[row * chunks + lane]);
    }
  }
  if (lane >= chunks) return;
  const int64_t token = owner.LocalIndex(position);
  Add(dk.data + token * dk.token_stride + kv_head * dk.head_stride + lane * 4, key_terms);
  Add(dv.data + token * dv.token_stride + kv_head * dv.head_stride + lane * 4, value_terms);
}

template <typename T>
absl::Status Check(const char* name_k, const TokenMajor<T>& k, const char* name_v,
                   const TokenMajor<T>& v, const ShardLayout& owner, const ColumnSelection& columns,
                   int32_t heads) {
  RETURN_IF_ERROR(CheckColumns(columns, heads, k.heads));
  RETURN_IF_ERROR(CheckTensor(name_k, k.data, k.tokens, k.heads, k.head_dim, owner.local_tokens(),
                              k.heads, k.head_dim));
  RETURN_IF_ERROR(CheckTensor(name_v, v.data, v.tokens, v.heads, v.head_dim, owner.local_tokens(),
                              k.heads, k.head_dim));
  if (k.head_dim % 8 != 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s.head_dim is %d; it must be a multiple of 8", name_k, k.head_dim));
  }
  RETURN_IF_ERROR(CheckVectors(name_k, k));
  return CheckVectors(name_v, v);
}

unsigned Blocks(int64_t threads) {
  return static_cast<unsigned>((threads + kThreads - 1) / kThreads);
}

template <typename T>
absl::Status Scatter(const float* d_keys, const float* d_values, const ShardLayout& owner,
                     const ColumnSelection& columns, int32_t heads, const TokenMajor<T>& dk,
                     const TokenMajor<T>& dv, cudaStream_t stream) {
  RETURN_IF_ERROR(Check("dk", dk, "dv", dv, owner, columns, heads));
  RETURN_IF_ERROR(CheckDense("d_keys", d_keys));
  RETURN_IF_ERROR(CheckDense("d_values", d_values));
  if (dk.head_dim > kMaxScatteredDim) {
    return absl::InvalidArgumentError(
        absl::StrFormat("dk.head_dim is %d; it must be at most %d", dk.head_dim, kMaxScatteredDim));
  }
  const int64_t threads = int64_t{heads} * columns.max_columns * 32;
  ScatterKernel<T><<<Blocks(threads), kThreads, 0, stream>>>(
      columns, owner, heads, reinterpret_cast<const float4*>(d_keys),
      reinterpret_cast<const float4*>(d_values), dk, dv);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "scatter columns: launch");
  return absl::OkStatus();
}

}  // namespace

absl::Status GatherColumns(const TokenMajor<const __nv_bfloat16>& k,
                           const TokenMajor<const __nv_bfloat16>& v, const ShardLayout& owner,
                           const ColumnSelection& columns, int32_t heads, __nv_bfloat16* keys,
                           __nv_bfloat16* values, cudaStream_t stream) {
  RETURN_IF_ERROR(Check("k", k, "v", v, owner, columns, heads));
  RETURN_IF_ERROR(CheckDense("keys", keys));
  RETURN_IF_ERROR(CheckDense("values", values));
  const SlotGrid grid = {columns.positions, columns.counts, columns.max_columns, heads,
                         k.head_dim / 8};
  GatherKernel<<<Blocks(grid.threads()), kThreads, 0, stream>>>(grid, owner, k, v, heads / k.heads,
                                                                reinterpret_cast<uint4*>(keys),
                                                                reinterpret_cast<uint4*>(values));
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "gather columns: launch");
  return absl::OkStatus();
}

absl::Status ScatterColumns(const float* d_keys, const float* d_values, const ShardLayout& owner,
                            const ColumnSelection& columns, int32_t heads,
                            const TokenMajor<float>& dk, const TokenMajor<float>& dv,
                            cudaStream_t stream) {
  return Scatter(d_keys, d_values, owner, columns, heads, dk, dv, stream);
}

absl::Status ScatterColumns(const float* d_keys, const float* d_values, const ShardLayout& owner,
                            const ColumnSelection& columns, int32_t heads,
                            const TokenMajor<__nv_bfloat16>& dk,
                            const TokenMajor<__nv_bfloat16>& dv, cudaStream_t stream) {
  return Scatter(d_keys, d_values, owner, columns, heads, dk, dv, stream);
}

}  // namespace ringleader::kernels::sm90
