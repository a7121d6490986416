// One attention problem of the CPU engine's tests: what goes in, what a call leaves behind, and
// what the oracle says.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/reference/attention/columns.h"
#include "kernels/reference/math/engine.h"
#include "kernels/reference/testing/masked_attention.h"

namespace ringleader::kernels::reference::testing {

struct AttentionResult {
  Tensor out, dq, dk, dv;
  std::vector<float> lse;  // [heads, n]
};

// q, k, v and d_out of a whole sequence.
struct AttentionProblem {
  Tensor q, k, v, d_out;
  float scale;

  AttentionProblem(int64_t tokens, int heads, int kv_heads, int head_dim, int seed);

  ShardLayout layout() const { return {.tokens = q.tokens}; }

  // Forward and backward over `tiles` and, where given, the `columns` that they do not cover.
  AttentionResult Run(Engine& engine, const TileSelection& tiles,
                      const ColumnSelection* columns = nullptr) const;
  // The same dealt to the ranks of `layout`, one call for each pair of ranks, as a ring does it,
  // and put together again. document_starts and intervals of `tiles` are those of the whole
  // sequence.
  AttentionResult RunRing(Engine& engine, const TileSelection& tiles,
                          const ColumnSelection* columns, const ShardLayout& layout) const;
  MaskedAttention Expected(const Visible& visible) const;
};

// Output, log-sum-exp and gradients within 1e-5, relative.
void ExpectNear(const AttentionResult& actual, const MaskedAttention& expected);
void ExpectNear(const AttentionResult& actual, const AttentionResult& expected);

}  // namespace ringleader::kernels::reference::testing
