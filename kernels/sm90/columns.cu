// Moving selected columns between their owners' shards and dense rows.
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "kernels/sm90/columns.h"
#include "kernels/sm90/launch.h"
#include "kernels/sm90/rounded_sum.cuh"

namespace ringleader::kernels::sm90 {
namespace {

constexpr int kThreads = 256;

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

// Heads first_head, first_head + group, ...: one a KV group, so that no two threads add to one
// element.
__global__ void ScatterKernel(SlotGrid grid, ShardLayout owner, const float4* d_keys,
                              const float4* d_values, int32_t group, int32_t first_head,
                              TokenMajor<float> dk, TokenMajor<float> dv) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (thread >= grid.threads()) return;
  const int32_t chunk = thread % grid.chunks;
  const int32_t kv_head = thread / grid.chunks / grid.max_columns;
  const int32_t column = thread / grid.chunks % grid.max_columns;
  const int32_t head = first_head + kv_head * group;
  if (column >= grid.counts[head]) return;
  const int64_t slot = static_cast<int64_t>(head) * grid.max_columns + column;
  const int64_t position = grid.positions[slot];
  if (owner.Owner(position) != owner.rank) return;
  const int64_t token = owner.LocalIndex(position);
  const auto add = [&](const TokenMajor<float>& tensor, const float4& term) {
    float4& target = *reinterpret_cast<float4*>(tensor.data + token * tensor.token_stride +
                                                kv_head * tensor.head_stride + chunk * 4);
    const float4 sum = target;
    target = make_float4(sum.x + term.x, sum.y + term.y, sum.z + term.z, sum.w + term.w);
  };
  add(dk, d_keys[slot * grid.chunks + chunk]);
  add(dv, d_values[slot * grid.chunks + chunk]);
}

// Gradients in bf16 take all heads of a group in one thread, which rounds their sum once. Thread ->
// (token, kv_head, chunk of 8); it looks its position up in the heads' columns, which ascend.
__global__ void ScatterRoundedKernel(ColumnSelection columns, ShardLayout owner,
                                     const float* d_keys, const float* d_values, int32_t group,
                                     TokenMajor<__nv_bfloat16> dk, TokenMajor<__nv_bfloat16> dv,
                                     int64_t threads) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (thread >= threads) return;
  const int32_t chunks = dk.head_dim / 8;
  const int32_t chunk = thread % chunks;
  const int32_t kv_head = thread / chunks % dk.heads;
  const int64_t token = thread / chunks / dk.heads;
  const int64_t position = owner.Position(token);
  float key_terms[8] = {}, value_terms[8] = {};
  bool found = false;
  for (int32_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    const int64_t* const positions =
        columns.positions + static_cast<int64_t>(head) * columns.max_columns;
    const int32_t count = columns.counts[head];
    int32_t low = 0, high = count;  // the first column that is not before `position`
    while (low < high) {
      const int32_t middle = (low + high) / 2;
      if (positions[middle] < position) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    if (low == count || positions[low] != position) continue;
    found = true;
    const int64_t source =
        (static_cast<int64_t>(head) * columns.max_columns + low) * dk.head_dim + chunk * 8;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      key_terms[i] += d_keys[source + i];
      value_terms[i] += d_values[source + i];
    }
  }
  if (!found) return;
  AddRoundedVector(dk.data + token * dk.token_stride + kv_head * dk.head_stride + chunk * 8,
                   key_terms);
  AddRoundedVector(dv.data + token * dv.token_stride + kv_head * dv.head_stride + chunk * 8,
                   value_terms);
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
  return CudaStatus(cudaGetLastError(), "gather columns: launch");
}

absl::Status ScatterColumns(const float* d_keys, const float* d_values, const ShardLayout& owner,
                            const ColumnSelection& columns, int32_t heads,
                            const TokenMajor<float>& dk, const TokenMajor<float>& dv,
                            cudaStream_t stream) {
  RETURN_IF_ERROR(Check("dk", dk, "dv", dv, owner, columns, heads));
  RETURN_IF_ERROR(CheckDense("d_keys", d_keys));
  RETURN_IF_ERROR(CheckDense("d_values", d_values));
  const int32_t group = heads / dk.heads;
  const SlotGrid grid = {columns.positions, columns.counts, columns.max_columns, dk.heads,
                         dk.head_dim / 4};
  for (int32_t head = 0; head < group; ++head) {
    ScatterKernel<<<Blocks(grid.threads()), kThreads, 0, stream>>>(
        grid, owner, reinterpret_cast<const float4*>(d_keys),
        reinterpret_cast<const float4*>(d_values), group, head, dk, dv);
    RETURN_IF_ERROR(CudaStatus(cudaGetLastError(), "scatter columns: launch"));
  }
  return absl::OkStatus();
}

absl::Status ScatterColumns(const float* d_keys, const float* d_values, const ShardLayout& owner,
                            const ColumnSelection& columns, int32_t heads,
                            const TokenMajor<__nv_bfloat16>& dk,
                            const TokenMajor<__nv_bfloat16>& dv, cudaStream_t stream) {
  RETURN_IF_ERROR(Check("dk", dk, "dv", dv, owner, columns, heads));
  RETURN_IF_ERROR(CheckDense("d_keys", d_keys));
  RETURN_IF_ERROR(CheckDense("d_values", d_values));
  const int64_t threads = dk.tokens * dk.heads * (dk.head_dim / 8);
  ScatterRoundedKernel<<<Blocks(threads), kThreads, 0, stream>>>(columns, owner, d_keys, d_values,
                                                                 heads / dk.heads, dk, dv, threads);
  return CudaStatus(cudaGetLastError(), "scatter columns: launch");
}

}  // namespace ringleader::kernels::sm90
