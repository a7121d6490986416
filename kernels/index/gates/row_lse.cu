#include <cmath>

#include "base/status_macros.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/index/gates/row_lse.h"
#include "kernels/sm90/attention.h"

namespace ringleader::kernels::index {
namespace {

constexpr int kFillThreads = 256;
constexpr int64_t kAlignment = 256;

__global__ void FillKernel(float* values, int64_t count, float value) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kFillThreads + threadIdx.x;
  if (i < count) values[i] = value;
}

int64_t Aligned(int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// Memory of a call: outputs that nobody reads, and a bit for each block diagonal, all set.
struct Parts {
  int64_t out_bytes, diagonal_bytes;
  int32_t diagonal_words;
};
Parts PartsOf(const TokenMajor<const __nv_bfloat16>& q, int32_t kv_heads, const RowLseStep& step) {
  const int64_t group = q.heads / kv_heads,
                blocks = (step.of.query_layout.tokens + step.of.tile - 1) / step.of.tile,
                words = (blocks + 63) / 64;
  const auto size = [](size_t bytes) { return static_cast<int64_t>(bytes); };
  return {.out_bytes = Aligned(size(sizeof(float)) * q.tokens * group * q.head_dim),
          .diagonal_bytes = Aligned(size(sizeof(uint64_t)) * group * words),
          .diagonal_words = static_cast<int32_t>(words)};
}

// What dense attention of a KV head's queries takes. Pointers may be null where only sizes matter.
// With all diagonals rather than as causal attention each tile of queries walks by itself, as it
// does under intervals: two that share stages would add up in an order that depends on which two a
// rank has.
AttentionForwardArgs<__nv_bfloat16> ArgsOf(const TokenMajor<const __nv_bfloat16>& q,
                                           const TokenMajor<const __nv_bfloat16>& k,
                                           const RowLseStep& step, int32_t kv_head, char* memory) {
  const Parts parts = PartsOf(q, k.heads, step);
  auto* const out = reinterpret_cast<float*>(memory);
  const auto* const diagonals =
      reinterpret_cast<const uint64_t*>(memory == nullptr ? nullptr : memory + parts.out_bytes);
  const int32_t group = q.heads / k.heads;
  TokenMajor<const __nv_bfloat16> queries = q, keys = k;
  queries.heads = group;
  queries.data += kv_head * group * q.head_stride;
  keys.heads = 1;
  keys.data += kv_head * k.head_stride;
  const ExactQueries& of = step.of;
  const bool is_causal = of.seen.intervals == nullptr;
  return {.q = queries,
          .k = keys,
          .v = keys,
          .out = {out, q.tokens, group, q.head_dim, int64_t{group} * q.head_dim, q.head_dim},
          .lse = step.lse + int64_t{kv_head} * group * q.tokens,
          .query_layout = of.query_layout,
          .key_layout = {.tokens = of.query_layout.tokens},
          .tiles = {.pattern = is_causal ? TilePattern::kToeplitz : TilePattern::kFull,
                    .tile = of.tile,
                    .diagonals = diagonals,
                    .diagonal_words = parts.diagonal_words,
                    .document_starts = of.seen.document_starts,
                    .intervals = of.seen.intervals},
          .scale = of.scale};
}

}  // namespace

size_t RowLseWorkspaceBytes(const TokenMajor<const __nv_bfloat16>& q, int32_t kv_heads,
                            const RowLseStep& step) {
  const TokenMajor<const __nv_bfloat16> keys = {
      q.data,     step.of.query_layout.tokens,    kv_heads,
      q.head_dim, int64_t{kv_heads} * q.head_dim, q.head_dim};
  const Parts parts = PartsOf(q, kv_heads, step);
  const auto args = ArgsOf(q, keys, step, /*kv_head=*/0, /*memory=*/nullptr);
  return parts.out_bytes + parts.diagonal_bytes + sm90::ForwardWorkspaceBytes(args);
}

absl::Status RowLse(const TokenMajor<const __nv_bfloat16>& q,
                    const TokenMajor<const __nv_bfloat16>& k, const RowLseStep& step,
                    void* workspace, cudaStream_t stream) {
  RETURN_IF_ERROR(fused::CheckSize(k.heads, "RowLse: heads of k", 1, 65535));
  RETURN_IF_ERROR(fused::CheckSize(q.heads, "RowLse: heads of q", k.heads, 65535, k.heads));
  RETURN_IF_ERROR(fused::CheckPointer(step.lse, "RowLse: lse"));
  RETURN_IF_ERROR(fused::CheckPointer(workspace, "RowLse: workspace"));
  const int64_t rows = q.heads * q.tokens;
  if (rows == 0) return absl::OkStatus();
  const Parts parts = PartsOf(q, k.heads, step);
  auto* const memory = static_cast<char*>(workspace);
  RETURN_IF_CUDA_ERROR(
      cudaMemsetAsync(memory + parts.out_bytes, 0xFF, parts.diagonal_bytes, stream),
      "RowLse: diagonals");
  FillKernel<<<static_cast<unsigned>((rows + kFillThreads - 1) / kFillThreads), kFillThreads, 0,
               stream>>>(step.lse, rows, -INFINITY);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "RowLse: fill");
  for (int32_t kv_head = 0; kv_head < k.heads; ++kv_head) {
    const auto args = ArgsOf(q, k, step, kv_head, memory);
    RETURN_IF_CUDA_ERROR(cudaMemsetAsync(memory, 0, parts.out_bytes, stream), "RowLse: out");
    RETURN_IF_ERROR(sm90::AttentionForward(args,
                                           {.data = memory + parts.out_bytes + parts.diagonal_bytes,
                                            .bytes = sm90::ForwardWorkspaceBytes(args)},
                                           stream));
  }
  return absl::OkStatus();
}

}  // namespace ringleader::kernels::index
