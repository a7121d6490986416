// What patterns whose rows keep blocks of keys share: how many blocks there may be, and samples,
// in which half of each row's choices are blocks that the whole head favours.
#pragma once

#include <cstdint>
#include <string_view>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "patterns/index/index_device.h"
#include "patterns/pattern.h"
#include "patterns/sample.h"
#include "ring/tile_loads.h"

namespace ringleader::patterns {

// Blocks of `size` tokens, the last of which may be shorter.
inline int64_t BlocksOf(int64_t tokens, int64_t size) {
  return (tokens + size - 1) / size;
}

// INVALID_ARGUMENT, with `advice`, where `field`, the size of the blocks of `pattern`, makes more
// than `most` of them.
absl::Status CheckBlocks(std::string_view field, int64_t size, int64_t tokens,
                         std::string_view pattern, int64_t most, std::string_view advice);

// INVALID_ARGUMENT where heads' budgets are to follow what the choice estimates of its recall,
// which `pattern` does not.
absl::Status CheckProbedAlone(const AttentionOptions& options, std::string_view pattern);
// INVALID_ARGUMENT where heads' budgets are to follow the probes, but of attention.topk_blocks
// fewer than `fewest`, so that no head would keep another number.
absl::Status CheckHeadBlocks(const AttentionOptions& options, int fewest);
// INVALID_ARGUMENT where a head with half more than attention.density would keep more than all.
absl::Status CheckHeadDensity(const AttentionOptions& options);
// The largest share of which half more is not.
inline constexpr double kMostHeadDensity = 2.0 / 3.0;

// Bytes of a choice in which a tile keeps up to `most` of the sequence's blocks of `block_size`
// tokens: a bit for each, and, while a layer runs, lists of a hop's tiles in both directions.
IndexMemory MemoryOfChosenBlocks(const IndexShape& shape, int64_t tile, int64_t block_size,
                                 int64_t most);
// Bytes that GatherSequenceKeys takes beside this rank's own keys.
int64_t GatheredKeyBytes(const IndexShape& shape);

// Returns inputs.head_halves on the device; null where all heads have the same budget.
DeviceArray<int32_t> UploadHeadHalves(const AttentionOptions& options, const IndexInputs& inputs,
                                      IndexDevice& device);

// Returns how many tiles of a row a sampled head of `blocks` rows lists at most.
int64_t MostListed(int64_t blocks);

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
