#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "patterns/index/key_sums.h"
#include "patterns/index/moved_choice.h"
#include "patterns/kinds/chosen_blocks.h"
#include "patterns/pattern.h"

namespace ringleader::patterns {
namespace {

// clang-format off
constexpr PatternField kFields[] = {
    {"attention.block_size", "512", {1, kMaxTokens},
     "Keys in one block; a multiple of `attention.tile`.",
     Read<&AttentionOptions::block_size>},
    {"attention.topk_blocks", "8", {1, kMaxTokens},
     "Blocks that a query block keeps besides its own.",
     Read<&AttentionOptions::topk_blocks>},
    {"attention.head_budgets", "equal", {},
     "Whether a tile of queries keeps as many blocks in all heads (`equal`), or besides its own half more in those that "
     "recall little and half of them in as many that recall much, by the probes of earlier steps (`by_probe`, with "
     "`attention.probe_every`; `attention.topk_blocks` is at least 2 then). `by_recall` is refused.",
     ReadHeadBudgets},
};
// clang-format on

// The fewest blocks of which half is fewer and half more is more.
constexpr int kLeastHalved = 2;

absl::Status Check(const AttentionOptions& options) {
  if (options.block_size < options.tile || options.block_size % options.tile != 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("attention.block_size: %d is no multiple of attention.tile (%d)",
                        options.block_size, options.tile));
  }
  if (options.topk_blocks < 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "attention.topk_blocks is %d; it must not be negative", options.topk_blocks));
  }
  RETURN_IF_ERROR(CheckProbedAlone(options, "block_topk"));
  return CheckHeadBlocks(options, kLeastHalved);
}

// Blocks that a tile keeps besides its own, in a head of the most budget.
int64_t Most(const AttentionOptions& options) {
  return kernels::OfHalves(options.topk_blocks, options.adapt_by_probe ? 3 : 2);
}

absl::Status Build(const AttentionOptions& options, const IndexInputs& inputs, IndexDevice& device,
                   LayerIndex& index) {
  const kernels::ShardLayout& layout = inputs.layout;
  const int64_t local_tiles = (layout.local_tokens() + options.tile - 1) / options.tile;
  ASSIGN_OR_RETURN(const DeviceArray<float> key_sums, GatherKeySums(inputs, options.tile, device));
  const int64_t blocks = (layout.tokens + options.block_size - 1) / options.block_size;
  index.pattern = kernels::TilePattern::kCsr;
  index.block_size = options.block_size;
  index.kept_blocks =
      static_cast<int32_t>(std::min<int64_t>(options.balance.RoomFor(Most(options) + 1), blocks));
  index.chosen = AllocateArray<uint32_t>(
      device, inputs.heads * local_tiles * kernels::BlockWords(static_cast<int32_t>(blocks)));
  const DeviceArray<int32_t> head_halves = UploadHeadHalves(options, inputs, device);
  return ChooseBlocks(options.balance, options.tile, /*tells_work_before=*/false, inputs, device,
                      index, [&](const kernels::ChoiceMove& move) {
                        return device.Run(kernels::MeanGateStep{
                            .key_sums = key_sums.data(),
                            .counted = MeanKeysOf(inputs),
                            .query_layout = layout,
                            .seen = index.seen(),
                            .tile = options.tile,
                            .block_size = options.block_size,
                            .topk_blocks = options.topk_blocks,
                            .head_halves = head_halves.data(),
                            .choosing = ContentRows(inputs),
                            .first_query_gates = options.selection == Selection::kCausal,
                            .scale = inputs.scale,
                            .move = move,
                            .chosen = index.chosen.data()});
                      });
}

IndexMemory MemoryOf(const AttentionOptions& options, const IndexShape& shape) {
  return MemoryOfChosenBlocks(shape, options.tile, options.block_size,
                              options.balance.RoomFor(Most(options) + 1));
}

int64_t ListedTiles(const AttentionOptions& options, int64_t blocks) {
  return ListedTilesOf(blocks, options.block_size / options.tile, options.topk_blocks);
}

ring::HeadPattern Sample(const AttentionOptions& options, int64_t blocks, const PatternHints&,
                         Random* random) {
  const int64_t kept = options.topk_blocks;
  return SampleChosenBlocks(
      options, blocks, std::max(1, options.block_size / options.tile), kept,
      [&](int64_t others) { return std::min(others, kept); }, random);
}

void SetDensity(AttentionOptions* options, int64_t tokens, double density) {
  const double blocks = static_cast<double>(tokens) / options->block_size;
  options->topk_blocks = std::max(options->adapt_by_probe ? kLeastHalved : 1,
                                  static_cast<int>(std::lround(ShareOfLength(density) * blocks)));
}

}  // namespace

extern constinit const PatternDefinition kBlockTopKDefinition = {
    .pattern = Pattern::kBlockTopK,
    .name = "block_topk",
    .sees = "key blocks chosen per query block",
    .count_tiles = nullptr,
    .causal_choice = CausalChoice::kOnAsk,
    .takes_masks = true,
    .balancing = Balancing::kByAnother,
    .needs_whole_tiles = true,
    .fields = kFields,
    .check = Check,
    .build = Build,
    .sample = Sample,
    .listed_tiles = ListedTiles,
    .index_memory = MemoryOf,
    .set_density = SetDensity,
    .silence = 0.0f,
    .page =
        R"(Mixture of Block Attention (MoBA, arXiv 2502.13189) with a gate for each tile of queries, not for each query, which is
faster and coarser. Keys are cut into blocks of `attention.block_size` tokens. A tile of queries sees its own block up
to the diagonal, and the `attention.topk_blocks` earlier blocks whose mean key has the largest product with the tile's
mean query (of the block in which a document begins, the mean of that document's keys); under an `attention.mask` that shows later
tokens, of all the other blocks of which a query of the tile sees a key. Which those are is chosen per layer, head and step; the kernels get lists of tiles, per query tile and,
for backward, per key tile. `moba` has the gate as published. With `attention.selection: causal` the tile's first
query chooses alone, which no query of the tile precedes. Of blocks with equal scores even heads take the earlier, odd
heads the later. With `attention.head_budgets: by_probe` levels come from the probes of earlier steps, as under `vertical_slash`: what
a tile keeps besides its own block is half of `attention.topk_blocks` in some heads and half more in as many, as far as there
are so many blocks. The planner assumes that half of the choices are blocks that the whole head favours.
)",
};

}  // namespace ringleader::patterns
