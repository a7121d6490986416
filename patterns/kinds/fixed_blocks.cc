#include <algorithm>
#include <cmath>
#include <vector>

#include "absl/strings/str_format.h"
#include "patterns/kinds/chosen_blocks.h"
#include "patterns/pattern.h"

namespace ringleader::patterns {
namespace {

// clang-format off
constexpr PatternField kFields[] = {
    {"attention.local_blocks", "8", {0, kMaxTokens},
     "Blocks next to a tile's own that it keeps; its own it always does.",
     Read<&AttentionOptions::local_blocks>},
    {"attention.sink_blocks", "1", {0, kMaxTokens},
     "Blocks at the start of its document that a tile keeps.",
     Read<&AttentionOptions::sink_blocks>},
    {"attention.stride_blocks", "16", {0, kMaxTokens},
     "Of every so many blocks of the sequence all that see it keep the last; 0: of none.",
     Read<&AttentionOptions::stride_blocks>},
};
// clang-format on

absl::Status Check(const AttentionOptions& options) {
  const auto [least, most] =
      std::minmax({options.local_blocks, options.sink_blocks, options.stride_blocks});
  if (least >= 0 && most <= static_cast<int>(kMaxTokens)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "attention.local_blocks (%d), attention.sink_blocks (%d) and attention.stride_blocks (%d) "
      "must lie in [0, %d]",
      options.local_blocks, options.sink_blocks, options.stride_blocks,
      static_cast<int>(kMaxTokens)));
}

// The blocks [0, blocks) that a tile of queries keeps wherever it is.
std::vector<int32_t> LandmarksOf(const AttentionOptions& options, int64_t blocks) {
  const kernels::FixedBlocks kept = FixedBlocksOf(options);
  std::vector<int32_t> landmarks;
  for (int64_t block = 0; block < blocks; ++block) {
    if (block < kept.sinks || kept.IsLandmark(block)) {
      landmarks.push_back(static_cast<int32_t>(block));
    }
  }
  return landmarks;
}

// Returns how many blocks a tile of queries keeps at most.
int64_t MostKept(const AttentionOptions& options, int64_t blocks) {
  const int64_t sides = options.mask == Mask::kCausal ? 1 : 2;
  const int64_t strided = options.stride_blocks == 0 ? 0 : blocks / options.stride_blocks;
  return std::min(blocks, 1 + sides * options.local_blocks + options.sink_blocks + strided);
}

int64_t ChosenWords(const AttentionOptions& options, int64_t heads, int64_t local_tokens,
                    int64_t tokens) {
  const auto blocks = static_cast<int32_t>(BlocksOf(tokens, options.tile));
  return heads * BlocksOf(local_tokens, options.tile) * kernels::BlockWords(blocks);
}

absl::Status Build(const AttentionOptions& options, const IndexInputs& inputs, IndexDevice& device,
                   LayerIndex& index) {
  const kernels::ShardLayout& layout = inputs.layout;
  index.pattern = kernels::TilePattern::kCsr;
  index.block_size = options.tile;
  index.kept_blocks =
      static_cast<int32_t>(MostKept(options, BlocksOf(layout.tokens, options.tile)));
  index.chosen = AllocateArray<uint32_t>(
      device, ChosenWords(options, inputs.heads, layout.local_tokens(), layout.tokens));
  return device.Run(kernels::FixedBlocksStep{.kept = FixedBlocksOf(options),
                                             .query_layout = layout,
                                             .seen = index.seen(),
                                             .heads = inputs.heads,
                                             .tile = options.tile,
                                             .chosen = index.chosen.data()});
}

int64_t ListedTiles(const AttentionOptions& options, int64_t blocks) {
  return ListedTilesOf(blocks, /*span=*/1, MostKept(options, blocks));
}

// What lies around the main diagonal, and the landmarks beside it one by one or, where they are too
// many to list, every so many of them.
ring::HeadPattern Sample(const AttentionOptions& options, int64_t blocks, const PatternHints&,
                         Random*) {
  ring::HeadPattern head = Visible(options, blocks, int64_t{options.local_blocks} + 1);
  const std::vector<int32_t> landmarks = LandmarksOf(options, blocks);
  const auto before = [&](int64_t block) {
    return std::ranges::lower_bound(landmarks, block) - landmarks.begin();
  };
  const int64_t most = MostListed(blocks);
  head.row_offsets.push_back(0);
  for (int64_t q = 0; q < blocks; ++q) {
    const int64_t seen = SeenTiles(options, blocks, q);
    const int64_t left = before(std::max<int64_t>(0, q - options.local_blocks)),
                  right = before(std::min(seen, q + options.local_blocks + 1));
    const int64_t beside = left + before(seen) - right, listed = std::min(beside, most);
    for (int64_t i = 0; i < listed; ++i) {
      const int64_t place = i * beside / listed;
      head.columns.push_back(landmarks[place < left ? place : place - left + right]);
    }
    head.row_weights.push_back(
        listed == 0 ? 1 : static_cast<double>(beside) / static_cast<double>(listed));
    head.row_offsets.push_back(std::ssize(head.columns));
  }
  return head;
}

IndexMemory MemoryOf(const AttentionOptions& options, const IndexShape& shape) {
  const int64_t local_tokens = shape.tokens / shape.ranks;
  const int64_t words = ChosenWords(options, shape.heads, local_tokens, shape.tokens),
                tiles = BlocksOf(local_tokens, options.tile);
  // A hop's lists, by queries and by keys.
  const int64_t listed = 2 * shape.heads * tiles *
                         std::min(tiles, MostKept(options, BlocksOf(shape.tokens, options.tile)));
  return {.kept = words * static_cast<int64_t>(sizeof(uint32_t)),
          .working = listed * static_cast<int64_t>(sizeof(int32_t))};
}

// At most half of the share lies around the main diagonal; what sinks take comes off the landmarks.
void SetDensity(AttentionOptions* options, int64_t tokens, double density) {
  const auto blocks = static_cast<double>(BlocksOf(tokens, options->tile));
  const auto most_local = static_cast<int>(std::lround(density * blocks / 4));
  options->local_blocks = std::min(options->local_blocks, std::max(0, most_local - 1));
  const double left = density - 2.0 * (options->local_blocks + 1 + options->sink_blocks) / blocks;
  options->stride_blocks = left <= 0.0 ? 0 : static_cast<int>(std::lround(1.0 / left));
}

}  // namespace

extern constinit const PatternDefinition kFixedBlocksDefinition = {
    .pattern = Pattern::kFixedBlocks,
    .name = "fixed_blocks",
    .sees = "key blocks that positions say",
    .known = [](const AttentionOptions&) { return KnownKeys{.by_blocks = true}; },
    .count_tiles = nullptr,
    .causal_choice = CausalChoice::kAlways,
    .takes_masks = true,
    .balancing = Balancing::kNever,
    .needs_whole_tiles = true,
    .fields = kFields,
    .check = Check,
    .build = Build,
    .sample = Sample,
    .listed_tiles = ListedTiles,
    .index_memory = MemoryOf,
    .set_density = SetDensity,
    .page =
        R"(Keys are cut into blocks of `attention.tile` tokens. A tile of queries sees, of the blocks that `attention.mask` shows
it, its own and the `attention.local_blocks` next to it, the first `attention.sink_blocks` of its first query's document, and the last of
every `attention.stride_blocks` blocks of the sequence, whatever is in them: the fixed pattern of Sparse Transformers (arXiv 1904.10509,
section 4.3) in blocks, with the attention sinks of StreamingLLM (arXiv 2309.17453). It is a baseline for patterns that choose, and
what a model attends to that was trained with such a pattern.

All ranks know before a pass which blocks each will visit, so that a ring's hops carry those alone and no others ([attention](attention.md#schedules-who-holds-whose-keys-when)):
in contiguous shards one block of `attention.stride_blocks`, and to the next rank the last few. In stripes nearly
every block is local to somebody's queries, and all of them travel. The planner's count is exact for one document.
)",
};

}  // namespace ringleader::patterns
