// What each query of a rank sees where the mask is not causal, as intervals of keys, which the
// kernels take.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "patterns/index/mask.h"
#include "ringleader/kernels/attention.h"
#include "ringleader/kernels/shard_layout.h"

namespace ringleader::patterns {

// A mask, and what the data says for it.
struct MaskRule {
  Mask mask = Mask::kCausal;
  int64_t block = 0;                          // kBlockCausal: tokens
  std::span<const int64_t> prefix_ends = {};  // kPrefixLm: [documents], CheckPrefixes'
  // The last document, of so many tokens, is padding. Under every mask its queries see nothing that
  // comes later, so that what the tokens before it choose does not depend on how long it is.
  int64_t padding = 0;
};

// INVALID_ARGUMENT unless prefix_ends holds for each document, which starts at firsts[i] of a
// sequence of `tokens`, where in the sequence its prefix ends: at its first token where it has
// none.
absl::Status CheckPrefixes(std::span<const int64_t> firsts, int64_t tokens,
                           std::span<const int64_t> prefix_ends);

// The positions [first, second) of the keys that the query at `position` sees, itself among them.
// `firsts`: where the documents of a sequence of `tokens` start, at least one. `window` > 0: keys
// alone that are less than so many tokens away, to either side.
std::pair<int64_t, int64_t> VisibleAt(const MaskRule& rule, int64_t tokens,
                                      std::span<const int64_t> firsts, int64_t window,
                                      int64_t position);

// TileSelection::intervals of this rank's tokens, one interval each: VisibleAt's.
std::vector<kernels::KeyIntervals> VisibleKeys(const MaskRule& rule,
                                               const kernels::ShardLayout& layout,
                                               std::span<const int64_t> firsts, int64_t window);

}  // namespace ringleader::patterns
