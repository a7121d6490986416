// Ranks that share out the heads of attention (parallelism.heads): DeepSpeed-Ulysses (arXiv
// 2309.14509, section 3), and USP (arXiv 2405.07719) where a ring goes around it. Of the ranks that
// share a sequence, `heads` neighbours hold the tokens of one rank of the ring, each a part of them
// in its local order. For attention they exchange: each gets all of these tokens, of its own heads
// alone. Ranks are numbered with the heads inside: rank = rank in the ring × heads + member.
#pragma once

#include <algorithm>
#include <cstdint>

#include "absl/status/status.h"

namespace ringleader::ring {

// Which of the ranks that hold the tokens of one rank of the ring.
struct HeadPlace {
  int ranks = 1;   // that share them
  int member = 0;  // below ranks
};

// A model's heads over these ranks.
struct HeadShares {
  int ranks = 1;
  int64_t heads = 0, kv_heads = 0;  // of the model

  int64_t local_heads() const { return heads / ranks; }
  // Where there are more ranks than KV heads, neighbours have the same one.
  int64_t local_kv_heads() const { return std::max<int64_t>(1, kv_heads / ranks); }

  // Values that a rank with `tokens` tokens sends to the others in a layer's forward: queries, keys
  // and values of their heads, and what its own heads have found for their tokens.
  int64_t ForwardValues(int64_t tokens, int64_t head_dim) const {
    return (ranks - 1) * tokens * 2 * (local_heads() + local_kv_heads()) * head_dim;
  }
  // In backward: the same, with the output and its gradient, and the gradients of all three back.
  int64_t BackwardValues(int64_t tokens, int64_t head_dim) const {
    return 2 * ForwardValues(tokens, head_dim);
  }
};

// INVALID_ARGUMENT names parallelism.heads and the numbers that divide, unless every rank gets as
// many heads as any other, and one KV head or several for them.
absl::Status CheckHeadShares(const HeadShares& shares);

}  // namespace ringleader::ring
