// Sparse attention of one rank as differentiable operators, over kernels/sm90 and kernels/index.
// Rings over several ranks call those kernels themselves (worker/attention). Gradients have the
// same bits every time under LibTorch's deterministic algorithms
// (torch.use_deterministic_algorithms).
#pragma once

#include <torch/types.h>

#include "kernels/index/select.h"
#include "ringleader/kernels/attention.h"

namespace ringleader::kernels::ops {

// Attention over the tiles of `tiles`; q: [n, heads, d], k and v: [n, kv_heads, d] in bf16, d 64 or
// 128. `lists` holds what `tiles` points to until backward is done. Returns [n, heads, d] in bf16;
// a query without a key gets zeros.
torch::Tensor SparseAttention(const torch::Tensor& q, const torch::Tensor& k,
                              const torch::Tensor& v, const TileSelection& tiles,
                              const torch::TensorList& lists, double scale);

struct VerticalSlashOptions {
  int32_t tile = 128;
  int32_t estimate_queries = 64;  // the last ones, at most kMaxEstimateQueries
  int32_t sink_tokens = 64;
  int32_t local_blocks = 1;
  int32_t max_columns = 4096;
  float column_mass = 0.9f;
  float diagonal_mass = 0.9f;
  int32_t max_diagonals = 256;
};

// The vertical-slash index of one rank's whole sequence, as the tensors that the kernels point
// into.
struct VerticalSlashIndex {
  torch::Tensor column_positions;  // [heads, max_columns] int64
  torch::Tensor column_counts;     // [heads] int32
  torch::Tensor diagonals;         // [heads, words] int64 (bits)
  torch::Tensor diagonal_counts;   // [heads] int32
  torch::Tensor load;              // [1] int64, tiles
  torch::Tensor masses;            // [heads, 5] int64: index::IndexMass
  int32_t tile = 128;

  TileSelection Tiles() const;
  ColumnSelection Columns() const;
};
VerticalSlashIndex BuildVerticalSlashIndex(const torch::Tensor& q, const torch::Tensor& k,
                                           const VerticalSlashOptions& options, double scale);

// Attention over an index: its block diagonals, and its columns where no diagonal covers them.
// `document_starts`: [n] int32 as in TileSelection, or undefined for one document.
torch::Tensor VerticalSlashAttention(const torch::Tensor& q, const torch::Tensor& k,
                                     const torch::Tensor& v, const VerticalSlashIndex& index,
                                     double scale, const torch::Tensor& document_starts = {});

}  // namespace ringleader::kernels::ops
