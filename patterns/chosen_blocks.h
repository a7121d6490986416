// Samples of patterns whose rows, tiles of queries, choose blocks of keys: half of each row's
// choices are blocks that the whole head favours.
#pragma once

#include <cstdint>

#include "absl/functional/function_ref.h"
#include "patterns/sample.h"
#include "ring/tile_loads.h"

namespace ringleader::patterns {

// Returns the most tiles that a sampled head lists one by one, where blocks have `span` tiles and a
// row keeps up to `kept` of them besides its own.
int64_t ListedTilesOf(int64_t blocks, int64_t span, int64_t kept);

// Samples a head of `blocks` tiles. Each row sees its own block and kept_of(others), at most
// `kept`, of the `others` that the mask of `options` shows, as far as it shows them.
ring::HeadPattern SampleChosenBlocks(const AttentionOptions& options, int64_t blocks, int64_t span,
                                     int64_t kept,
                                     absl::FunctionRef<int64_t(int64_t others)> kept_of,
                                     Random* random);

}  // namespace ringleader::patterns
