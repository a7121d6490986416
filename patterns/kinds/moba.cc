#include <algorithm>
#include <vector>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "patterns/index/key_sums.h"
#include "patterns/index/moved_choice.h"
#include "patterns/kinds/chosen_blocks.h"
#include "patterns/pattern.h"
#include "ringleader/kernels/earlier_blocks.h"
#include "ringleader/kernels/shares.h"

namespace ringleader::patterns {
namespace {

// clang-format off
constexpr PatternField kFields[] = {
    {"attention.block_size", "1024", {1, kMaxTokens},
     "Keys in one block; a multiple of `attention.tile`. A sequence may have 640 blocks.",
     Read<&AttentionOptions::block_size>},
    {"attention.density", "0", {0, 1},
     "Share of the blocks up to its own that a query keeps, whatever the length, and its own at least; 0: "
     "`attention.topk_blocks` holds instead. With `attention.head_budgets: by_probe` at most 2/3.",
     Read<&AttentionOptions::density>},
    {"attention.topk_blocks", "8", {1, kMaxTokens},
     "Blocks that a query keeps, its own counted.",
     Read<&AttentionOptions::topk_blocks>, "attention.density", "0"},
    {"attention.head_budgets", "equal", {},
     "Whether queries keep as many blocks in all heads (`equal`), or besides their own half more in those that recall "
     "little and half of them in as many that recall much, by the probes of earlier steps (`by_probe`, with "
     "`attention.probe_every`; `attention.topk_blocks` is at least 3 then). `by_recall` is refused.",
     ReadHeadBudgets},
};
// clang-format on

absl::Status Check(const AttentionOptions& options) {
  if (options.block_size < options.tile || options.block_size % options.tile != 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("attention.block_size: %d is no multiple of attention.tile (%d)",
                        options.block_size, options.tile));
  }
  if (!(options.density >= 0.0 && options.density <= 1.0)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("attention.density must lie in [0, 1]; got %g", options.density));
  }
  if (options.topk_blocks < 1) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "attention.topk_blocks is %d; a query keeps its own block at least", options.topk_blocks));
  }
  RETURN_IF_ERROR(CheckProbedAlone(options, "moba"));
  if (options.density > 0.0) return CheckHeadDensity(options);
  constexpr int kOwnAndTwo = 3;
  return CheckHeadBlocks(options, kOwnAndTwo);
}

absl::Status CheckLength(const AttentionOptions& options, int64_t tokens) {
  return CheckBlocks("attention.block_size", options.block_size, tokens, "moba",
                     kernels::kMaxGatedBlocks, "make it larger");
}

kernels::EarlierBlocks CountEarlierBlocks(const AttentionOptions& options,
                                          const kernels::ShardLayout& queries, bool is_moved,
                                          bool has_head_budgets) {
  return kernels::CountEarlierBlocks(queries, options.tile, options.block_size, options.topk_blocks,
                                     kernels::ShareToRoundDown(options.density), is_moved,
                                     has_head_budgets);
}

absl::Status Build(const AttentionOptions& options, const IndexInputs& inputs, IndexDevice& device,
                   LayerIndex& index) {
  const kernels::ShardLayout& layout = inputs.layout;
  RETURN_IF_ERROR(CheckLength(options, layout.tokens));
  const int64_t blocks = BlocksOf(layout.tokens, options.block_size);
  ASSIGN_OR_RETURN(const DeviceArray<float> key_sums, GatherKeySums(inputs, options.tile, device));
  const int64_t local_tiles = (layout.local_tokens() + options.tile - 1) / options.tile;
  index.pattern = kernels::TilePattern::kCsr;
  index.block_size = options.block_size;
  index.kept_blocks = static_cast<int32_t>(blocks);  // of a tile, whose queries choose apart
  index.queries_chosen = AllocateArray<uint32_t>(
      device, inputs.heads * blocks * kernels::QueryWords(layout.local_tokens()));
  index.chosen = AllocateArray<uint32_t>(
      device, inputs.heads * local_tiles * kernels::BlockWords(static_cast<int32_t>(blocks)));
  const DeviceArray<int32_t> head_halves = UploadHeadHalves(options, inputs, device);
  const bool has_head_budgets = head_halves.data() != nullptr;
  return ChooseBlocks(options.balance, options.tile, /*tells_work_before=*/false, inputs, device,
                      index, [&](const kernels::ChoiceMove& move) {
                        index.earlier_blocks = CountEarlierBlocks(
                            options, layout, move.factor != nullptr, has_head_budgets);
                        return device.Run(kernels::QueryGateStep{
                            .key_sums = key_sums.data(),
                            .counted = MeanKeysOf(inputs),
                            .query_layout = layout,
                            .document_starts = index.document_starts(),
                            .tile = options.tile,
                            .block_size = options.block_size,
                            .topk_blocks = options.topk_blocks,
                            .density = kernels::ShareToRoundDown(options.density),
                            .head_halves = head_halves.data(),
                            .scale = inputs.scale,
                            .move = move,
                            .queries = index.queries_chosen.data(),
                            .chosen = index.chosen.data()});
                      });
}

int64_t Span(const AttentionOptions& options) {
  return std::max(1, options.block_size / options.tile);
}

IndexMemory MemoryOf(const AttentionOptions& options, const IndexShape& shape) {
  const int64_t local = shape.tokens / shape.ranks, tiles = BlocksOf(local, options.tile),
                blocks = BlocksOf(shape.tokens, options.block_size);
  const auto of_word = static_cast<int64_t>(sizeof(uint32_t));
  const int64_t bits = shape.heads * blocks * kernels::QueryWords(local) * of_word,
                chosen = shape.heads * tiles * kernels::BlockWords(static_cast<int32_t>(blocks)) *
                         of_word;
  IndexMemory memory = {.kept = bits + chosen};
  if (shape.element_bytes != sizeof(uint16_t)) return memory;  // CPUs visit tiles whole
  kernels::ShardLayout layout = {.kind = options.layout,
                                 .ranks = shape.ranks,
                                 .stripe = std::max(options.stripe, options.tile),
                                 .tokens = shape.tokens};
  int64_t capacity = 0;  // of the rank that has the most
  for (layout.rank = 0; layout.rank < shape.ranks; ++layout.rank) {
    const kernels::EarlierBlocks pairs =
        CountEarlierBlocks(options, layout, options.balance.is_on(), options.adapt_by_probe);
    if (!kernels::GathersQueries(pairs)) continue;
    capacity = std::max(capacity, kernels::RowCapacity(pairs, blocks, options.tile));
  }
  if (capacity == 0) return memory;
  // Lists in both directions, and how many rows come before those of each word.
  const int64_t entries =
      std::min(capacity, kernels::kMostQueryRows) / options.tile * Span(options);
  memory.working = kernels::MostRowsAtOnce(capacity, shape.heads / shape.kv_heads) *
                       shape.head_dim * kernels::kQueryRowBytes +
                   bits + chosen + 2 * shape.heads * entries * of_word;
  return memory;
}

// Returns how many blocks besides its own a tile of queries computes with: where they are gathered,
// as many as one of them keeps, else it is taken to be twice as many.
int64_t Kept(const AttentionOptions& options, int64_t own, bool gathers) {
  const int64_t of_query =
      options.density > 0.0 ? static_cast<int64_t>(options.density * static_cast<double>(own + 1))
                            : options.topk_blocks;
  return std::clamp<int64_t>((gathers ? 1 : 2) * (of_query - 1), 0, own);
}

bool Gathers(const AttentionOptions& options, int64_t blocks) {
  return kernels::GathersQueries(CountEarlierBlocks(options, {.tokens = blocks * options.tile},
                                                    /*is_moved=*/false,
                                                    /*has_head_budgets=*/false));
}

int64_t MostKept(const AttentionOptions& options, int64_t blocks) {
  return Kept(options, (blocks - 1) / Span(options), Gathers(options, blocks));
}

int64_t ListedTiles(const AttentionOptions& options, int64_t blocks) {
  return ListedTilesOf(blocks, Span(options), MostKept(options, blocks));
}

// Where a block has one owner, its queries are gathered once, and else in each hop that brings a
// part of it. Stripes that each rank has few of spread the work unevenly.
int64_t StripeOnGpus(const AttentionOptions& options, int64_t tokens, int ranks) {
  constexpr int64_t kLeastRounds = 8;
  const int64_t round = int64_t{options.block_size} * ranks;
  const bool is_dealt = tokens % round == 0 && tokens / round >= kLeastRounds;
  return is_dealt && Gathers(options, BlocksOf(tokens, options.tile)) ? options.block_size
                                                                      : options.tile;
}

ring::HeadPattern Sample(const AttentionOptions& options, int64_t blocks, const PatternHints&,
                         Random* random) {
  const bool gathers = Gathers(options, blocks);
  return SampleChosenBlocks(
      options, blocks, Span(options), MostKept(options, blocks),
      [&](int64_t own) { return Kept(options, own, gathers); }, random);
}

void SetDensity(AttentionOptions* options, int64_t /*tokens*/, double density) {
  options->density = density;
}

}  // namespace

extern constinit const PatternDefinition kMobaDefinition = {
    .pattern = Pattern::kMoba,
    .name = "moba",
    .sees = "key blocks chosen by each query",
    .count_tiles = nullptr,
    .causal_choice = CausalChoice::kAlways,
    .takes_masks = false,
    .balancing = Balancing::kByAnother,
    .needs_whole_tiles = true,
    .fields = kFields,
    .check = Check,
    .build = Build,
    .check_length = CheckLength,
    .sample = Sample,
    .listed_tiles = ListedTiles,
    .index_memory = MemoryOf,
    .stripe_on_gpus = StripeOnGpus,
    .set_density = SetDensity,
    .page =
        R"(Mixture of Block Attention as published (MoBA, arXiv 2502.13189): the gate is each query's own, where `block_topk` has
one for a tile of queries. Keys are cut into blocks of `attention.block_size` tokens. A query sees its own block up to
itself, and of the earlier ones, from the one on in which its document starts, those whose mean key it scores highest
(a mean of keys of its document alone): with its own, `attention.topk_blocks` or a share of them. Which those are is chosen per layer, head and step.

With `attention.head_budgets: by_probe` levels come from the probes of earlier steps, as under `vertical_slash`: what a query
keeps besides its own block is half of it in some heads and half more in as many, as far as there are so many blocks.

On GPUs the queries of each block are gathered, so that what is computed, and reported as visited, is the share asked
for and each query's own block, where queries choose no more than 80 % of the blocks before their own (and one head's rows
are no more than 8,388,608). In stripes, a block should have one owner: the planner's stripes are of `attention.block_size`
tokens where sequences divide into eight and more for each trainer, and of a tile with `data.batching: samples`, which would be
filled up to them. Elsewhere, and with the CPU engine, a tile is visited if one of its queries chose its block, and the others
are masked in it: that can be several times as much where neighbours choose apart (41 % for 5 % of 256 blocks, with a new model).

The choice takes a bit for each query, block and head (16 MiB a layer for 16 heads, 65,536 local tokens and 128
blocks), kept for backward; gathered rows take up to 4 GiB, or as much as one head needs, during a layer, with lists of all heads,
and else the lists of a hop's tiles up to 8 bytes for each pair of local tiles and head. Recall is estimated by the probe alone. The planner
reckons with what a query keeps, half of it blocks that the whole head favours, and above 80 % with twice
as much, until a job's reports say how many tiles are visited (with the CPU engine these are more).
)",
};

}  // namespace ringleader::patterns
