// Which rows of a sequence's tensors a rank holds.
#pragma once

#include <torch/types.h>

#include "patterns/attention_options.h"

namespace ringleader::attention::testing {

// Positions [n] of `rank`'s tokens in a sequence of `tokens` over the ranks of options.ring.
inline torch::Tensor PositionsOf(patterns::AttentionOptions options, int rank, int64_t tokens) {
  if (options.stripe == 0) options.stripe = options.tile;
  const int ranks = options.ring.ranks();
  const kernels::ShardLayout layout = patterns::LayoutOf(options, ranks, rank, tokens / ranks);
  torch::Tensor positions = torch::empty({layout.local_tokens()}, torch::kLong);
  for (int64_t i = 0; i < layout.local_tokens(); ++i) {
    positions.data_ptr<int64_t>()[i] = layout.Position(i);
  }
  return positions;
}

}  // namespace ringleader::attention::testing
