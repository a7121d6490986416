// Sparse attention of whole sequences, causal or under another mask, as LibTorch operators,
// torch.ops.ringleader.*, for the CPU engine (cpu_ops.cc) and for Hopper (cuda_ops.cc): what
// python/ offers, and C++ calls here. attention_ops.cc has their schemas and autograd. Rings over
// several ranks call the kernels themselves (worker/attention).
#pragma once

#include <torch/types.h>

#include <optional>
#include <tuple>

#include "ringleader/kernels/attention.h"

namespace ringleader::kernels::ops {

// What attention visits; kernels/ops/visit/visit.h says which `lists` each pattern has, and `size`.
struct Visited {
  TilePattern pattern = TilePattern::kCausal;
  torch::TensorList lists = {};
  std::optional<torch::Tensor> documents = std::nullopt;  // [batch, tokens] int32: starts
  // [batch, tokens, 4] int32: TileSelection::intervals
  std::optional<torch::Tensor> intervals = std::nullopt;
  int64_t tile = 128;
  int64_t size = 0;
  // KeptBlocks, of queries that chose blocks: with either, GPUs gather them.
  int64_t topk_blocks = 0;
  double density = 0;
};

// q: [batch, heads, tokens, d], k and v: [batch, kv_heads, tokens, d]; bf16 and d of 64 or 128 on
// GPUs, float32 or bf16 and d up to 256 on the CPU. Returns out, like q but dense as [batch,
// tokens, heads, d], and the logarithm of each row's sum, [batch, heads, tokens] float32. A query
// without a key gets zeros and -infinity. Differentiable in both. `deterministic`: gradients have
// the same bits every time. Enqueues on the current stream and never waits for the device.
std::tuple<torch::Tensor, torch::Tensor> Attention(const torch::Tensor& q, const torch::Tensor& k,
                                                   const torch::Tensor& v, const Visited& visited,
                                                   double scale, bool deterministic);

// The vertical-slash index (ringleader/kernels/index.h) of each sequence.
struct VerticalSlashOptions {
  int64_t tile = 128;
  int64_t sink_tokens = 64;
  int64_t local_blocks = 1;
  int64_t max_columns = 4096;
  double column_mass = 0.9;
  double diagonal_mass = 0.9;
  int64_t max_diagonals = 256;
  // Above 0: diagonals are taken while their tiles are at most four fifths of this share of the
  // causal ones, and max_diagonals does not hold (docs/patterns.md).
  double density = 0.0;
};
struct VerticalSlashChoice {
  torch::Tensor diagonals;         // [batch, heads, words] int64 (bits)
  torch::Tensor column_positions;  // [batch, heads, max_columns] int64
  torch::Tensor column_counts;     // [batch, heads] int32
  torch::Tensor visited;           // [batch] int64: tiles of the diagonals, over all heads
};
// `positions`: [E] int64, ascending, of the queries that choose, at most kMaxEstimateQueries.
// `starts`: [batch, E] int64, where their documents start, or none.
VerticalSlashChoice ChooseVerticalSlash(const torch::Tensor& q, const torch::Tensor& k,
                                        const torch::Tensor& positions,
                                        const std::optional<torch::Tensor>& starts, double scale,
                                        const VerticalSlashOptions& options);

}  // namespace ringleader::kernels::ops
