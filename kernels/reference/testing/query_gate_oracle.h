// The oracle of MoBA's gate by query: fp64, over the whole sequence, as QueryGateStep
// (ringleader/kernels/block_choice.h) defines it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ringleader/kernels/attention.h"
#include "ringleader/kernels/block_choice.h"

namespace ringleader::kernels::reference::testing {

// What is wrong with `queries`, a rank's QueryGateStep::queries; "" if nothing. q: [tokens, heads,
// d] and k: [tokens, kv_heads, d], the whole sequence. starts: by position, where the document
// starts; empty: the sequence is one. Reads the step's block_size, topk_blocks, density and
// head_halves, in the host's memory. Scores count as equal within `tolerance`.
std::string QueryGateComplaint(const TokenMajor<const float>& q, const TokenMajor<const float>& k,
                               const QueryGateStep& step, const std::vector<int32_t>& starts,
                               const ShardLayout& layout, const std::vector<uint32_t>& queries,
                               double tolerance);

// What is wrong with `chosen`, QueryGateStep::chosen, if `queries` is right.
std::string ChosenByTileComplaint(const QueryGateStep& step, int heads, const ShardLayout& layout,
                                  const std::vector<uint32_t>& queries,
                                  const std::vector<uint32_t>& chosen);

}  // namespace ringleader::kernels::reference::testing
