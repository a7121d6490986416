// What every attention call does before a kernel starts: it checks its arguments and puts them into
// the form that the kernels read.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_format.h"
#include "kernels/sm90/attention.h"
#include "kernels/sm90/walk/column_walk.cuh"
#include "kernels/sm90/walk/tile_walk.cuh"
#include "ringleader/kernels/attention.h"

namespace ringleader::kernels::sm90 {

// A workspace starts with the counters that hand out work items.
constexpr int64_t kCounterBytes = 256;

// Shapes, layouts and tiles that forward and backward share.
struct AttentionShape {
  int64_t query_tokens = 0;
  int64_t key_tokens = 0;
  int32_t heads = 0;
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
  float scale = 0;
  const void* mask_memory = nullptr;  // TileSelection::intervals: what PrepareMask has filled
};

// The shape that the arguments of forward or backward have.
template <typename Args>
AttentionShape TileShape(const Args& args) {
  return {.query_tokens = args.q.tokens,
          .key_tokens = args.k.tokens,
          .heads = args.q.heads,
          .kv_heads = args.k.heads,
          .head_dim = args.q.head_dim,
          .scale = args.scale};
}

// INVALID_ARGUMENT, saying what to change, unless the kernels support the shape, layouts and tiles.
absl::Status CheckShape(const AttentionShape& shape, const ShardLayout& query_layout,
                        const ShardLayout& key_layout, const TileSelection& tiles);

// INVALID_ARGUMENT naming the tensor unless it has data and the expected dimensions.
absl::Status CheckTensor(const char* name, const void* data, int64_t tokens, int32_t heads,
                         int32_t head_dim, int64_t expected_tokens, int32_t expected_heads,
                         int32_t expected_head_dim);

// INVALID_ARGUMENT unless kernels can read and write `tensor` 16 bytes at a time.
template <typename T>
absl::Status CheckVectors(const char* name, const TokenMajor<T>& tensor) {
  constexpr int64_t kVector = 16 / sizeof(T);
  if (reinterpret_cast<uintptr_t>(tensor.data) % 16 != 0 || tensor.token_stride % kVector != 0 ||
      tensor.head_stride % kVector != 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: data must be aligned to 16 bytes and strides be multiples of %d", name, kVector));
  }
  return absl::OkStatus();
}

// INVALID_ARGUMENT unless positions and counts are set and every KV head has the same number of
// query heads.
absl::Status CheckColumns(const ColumnSelection& columns, int32_t heads, int32_t kv_heads);

// Attention to selected columns is attention of every head to max_columns keys of its own.
absl::StatusOr<AttentionShape> ColumnShape(const TokenMajor<const __nv_bfloat16>& q,
                                           const ColumnSelection& columns,
                                           const TileSelection& tiles,
                                           const ShardLayout& query_layout, float scale);
template <typename T>
TokenMajor<T> ColumnRows(T* data, const AttentionShape& shape) {
  return {.data = data,
          .tokens = shape.key_tokens,
          .heads = shape.heads,
          .head_dim = shape.head_dim,
          .token_stride = shape.head_dim,
          .head_stride = shape.key_tokens * shape.head_dim};
}
inline ColumnWalk ColumnWalkOf(const ColumnSelection& columns) {
  return {columns.positions, columns.counts, columns.max_columns};
}

// INVALID_ARGUMENT unless `data` is set and aligned to 16 bytes.
absl::Status CheckDense(const char* name, const void* data);

// INVALID_ARGUMENT unless the workspace is aligned and holds `needed_bytes`.
absl::Status CheckWorkspace(const Workspace& workspace, int64_t needed_bytes);

// What the producers of a kernel need to find a row's tiles (or, with by_column, a column's).
TileWalk MakeTileWalk(const AttentionShape& shape, const ShardLayout& query_layout,
                      const ShardLayout& key_layout, const TileSelection& tiles, bool by_column);

}  // namespace ringleader::kernels::sm90
