#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "patterns/index/sequence_keys.h"
#include "patterns/kinds/chosen_blocks.h"
#include "patterns/pattern.h"

namespace ringleader::patterns {
namespace {

using kernels::kGroupKeys;
using kernels::kGroupTile;
using kernels::kScoreDims;

// The most bytes of scores in memory at once (kernels/index/groups/key_groups.h).
constexpr int64_t kMostScoreBytes = int64_t{256} << 20;

// A fifth of 16,384 tokens, and of other sequences so much that a query keeps as many keys wherever
// its sequence ends, for a budget grows with the square root of how far the query is into it. Keeps
// 0.91 to 0.97 of the attention of queries that choose, by length and model, and their answers
// (docs/quality.md). Two digits.
double DefaultDensity(uint64_t sequence_length) {
  constexpr double kShare = 0.2, kOfTokens = 16384, kMost = 0.28;
  const double share = kShare * std::sqrt(kOfTokens / static_cast<double>(sequence_length));
  double rounded = kMost;
  if (share < kMost) (void)absl::SimpleAtod(absl::StrFormat("%.2g", share), &rounded);
  return rounded;
}

// Queries that choose together, where they are not a whole tile of the kernels.
constexpr int kFewQueries = 16;

// clang-format off
constexpr PatternField kFields[] = {
    {.path = "attention.density", .default_value = "by length", .range = {0, 1, true},
     .help = "Share of the keys before them that a tile of queries keeps, the tile itself "
     "counted. Left out, 0.2 with a data.sequence_length of 16,384, and of other lengths so much that a query keeps as many keys "
     "wherever its sequence ends: 0.2 x sqrt(16384 / length), in two digits, 0.28 at most (0.1 of 65,536, 0.05 of 262,144, 0.025 of 1,048,576).",
     .read = Read<&AttentionOptions::density>, .default_for = DefaultDensity},
    {.path = "attention.group_queries", .default_value = "64", .range = {16, 64},
     .help = "Queries that choose together, 64 or 16. 16 find more of what each looks for in the same share of the keys; the "
     "choice and attention to what it keeps multiply four times as much.",
     .read = Read<&AttentionOptions::group_queries>},
    {.path = "attention.group_heads", .default_value = "1", .range = {0, 2},
     .help = "Query heads of a KV head that choose together: 1, 2 neighbours, which takes an even number of them for each KV head, or 0: 2 where that "
     "number is even, else 1. 2 share what they keep, so that each finds less of what it looks for in the same share of the keys, and GPUs read and add to it once "
     "instead of twice.",
     .read = Read<&AttentionOptions::group_heads>},
    {.path = "attention.head_budgets", .default_value = "equal", .range = {},
     .help = "Whether a tile keeps as many groups in all heads (`equal`), or besides its own half more in those that recall "
     "little and half of them in as many that recall much, by the probes of earlier steps (`by_probe`, with "
     "`attention.probe_every`; the density is at most 2/3 then). `by_recall` is refused.",
     .read = ReadHeadBudgets},
};
// clang-format on

absl::Status Check(const AttentionOptions& options) {
  if (options.tile != kGroupTile) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "attention.tile is %d; attention.pattern: key_groups takes 64: leave one of them out",
        options.tile));
  }
  if (options.group_queries != kGroupTile && options.group_queries != kFewQueries) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "attention.group_queries is %d; allowed are 64 and 16", options.group_queries));
  }
  if (options.group_heads < 0 || options.group_heads > 2) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "attention.group_heads is %d; allowed are 1, 2 and 0", options.group_heads));
  }
  if (!(options.density > 0.0 && options.density <= 1.0)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("attention.density must lie in (0, 1]; got %g", options.density));
  }
  RETURN_IF_ERROR(CheckProbedAlone(options, "key_groups"));
  return CheckHeadDensity(options);
}

int64_t TilesOf(int64_t tokens) {
  return (tokens + kGroupTile - 1) / kGroupTile;
}

kernels::KeyGroupBudget BudgetOf(const AttentionOptions& options, int64_t tokens) {
  return kernels::KeyGroupBudgetOf(static_cast<float>(options.density),
                                   options.sequence_length > 0 ? options.sequence_length : tokens,
                                   options.group_queries);
}

// Returns how many groups the sequence's last tile keeps at most, which keeps most; at least 1.
int32_t Capacity(const AttentionOptions& options, int64_t tokens) {
  const int64_t last = (tokens - 1) / options.group_queries * options.group_queries;
  kernels::KeyGroupBudget budget = BudgetOf(options, tokens);
  if (options.balance.is_on()) budget.move = kernels::kMostMove;
  return std::max(1, budget.MostGroups(last, 0, options.adapt_by_probe ? 3 : 2));
}

// Returns how many groups the tiles of each rank's queries keep in a head, their own counted.
std::vector<int64_t> WorksOf(const kernels::KeyGroupBudget& budget, const IndexInputs& inputs) {
  std::vector<int64_t> works(inputs.layout.ranks, 0), firsts = {0};
  if (inputs.documents != nullptr) firsts = inputs.documents->host->firsts;
  auto document = firsts.begin();
  for (int64_t first = 0; first < inputs.layout.tokens; first += budget.tile) {
    while (document + 1 != firsts.end() && document[1] <= first) ++document;
    works[inputs.layout.Owner(first)] +=
        budget.MostGroups(first, *document) + budget.tile / kGroupKeys;
  }
  return works;
}

// Returns by what this rank's choice is moved, and counts the move. Positions say how much each
// rank keeps, so that ranks need not tell each other, and nothing is chosen twice.
absl::StatusOr<float> FindMove(const AttentionOptions& options, const IndexInputs& inputs,
                               IndexDevice& device) {
  const BalanceOptions& balance = options.balance;
  float move = 1.0f;
  if (!balance.is_on() || !inputs.is_balanced) return move;
  kernels::KeyGroupBudget budget = BudgetOf(options, inputs.layout.tokens);
  const std::vector<int64_t> works = WorksOf(budget, inputs);
  kernels::FindMove({.works = works.data(),
                     .ranks = inputs.layout.ranks,
                     .rank = inputs.layout.rank,
                     .anchor = balance.anchor,
                     .wanted = inputs.move,
                     .factor = &move});
  if (move == 1.0f) return move;
  budget.move = move;
  budget.tolerance = balance.tolerance;
  const int rank = inputs.layout.rank;
  const auto before = UploadArray(device, std::vector{works[rank]}),
             after = UploadArray(device, std::vector{WorksOf(budget, inputs)[rank]});
  const auto factor = UploadArray(device, std::vector{move});
  RETURN_IF_ERROR(device.CountMove(before.data(), after.data(), factor.data()));
  return move;
}

// Queries and keys as KeyGroupGateStep reads them.
struct NarrowRows {
  DeviceArray<uint8_t> queries;  // this rank's
  DeviceArray<std::byte> keys;   // the sequence's
};

absl::StatusOr<NarrowRows> Narrow(const IndexInputs& inputs, const kernels::SpreadRows& tiles,
                                  IndexDevice& device) {
  const kernels::ShardLayout& layout = inputs.layout;
  const int64_t values = int64_t{2} * inputs.kv_heads * inputs.head_dim;
  const auto energy = AllocateArray<int64_t>(device, values);
  const auto largest = AllocateArray<float>(device, values);
  RETURN_IF_ERROR(device.Run(kernels::DimEnergyStep{.tokens = ContentOf(inputs),
                                                    .rows = ContentRows(inputs),
                                                    .energy = energy.data(),
                                                    .largest = largest.data()}));
  if (layout.ranks > 1) {
    RETURN_IF_ERROR(device.Sum(SumType::kInt64, energy.data(), values));
    RETURN_IF_ERROR(device.Max(largest.data(), values));
  }
  const auto dims = AllocateArray<int32_t>(device, int64_t{inputs.kv_heads} * kScoreDims);
  const auto inverses = AllocateArray<float>(device, int64_t{2} * inputs.kv_heads);
  RETURN_IF_ERROR(device.Run(kernels::PickDimsStep{.energy = energy.data(),
                                                   .largest = largest.data(),
                                                   .dims = dims.data(),
                                                   .inverses = inverses.data()}));
  NarrowRows rows;
  rows.queries =
      AllocateArray<uint8_t>(device, tiles.Rows(layout.local_tokens()) * inputs.heads * kScoreDims);
  const auto write = [&](std::byte* own) {
    return device.Run(kernels::NarrowRowsStep{.dims = dims.data(),
                                              .inverses = inverses.data(),
                                              .rows = tiles,
                                              .queries = rows.queries.data(),
                                              .keys = reinterpret_cast<uint8_t*>(own)});
  };
  ASSIGN_OR_RETURN(
      rows.keys,
      GatherSequenceRows(layout, kGroupTile, int64_t{inputs.kv_heads} * kScoreDims, write, device));
  return rows;
}

// What attention to tiles of fewer than 64 queries needs beside the groups.
void SpreadTiles(const IndexInputs& inputs, IndexDevice& device, LayerIndex& index) {
  const kernels::ShardLayout& layout = inputs.layout;
  const kernels::SpreadRows& tiles = index.group_tiles;
  const int64_t queries = layout.local_tokens();
  const SequenceDocuments* documents =
      inputs.documents == nullptr ? nullptr : inputs.documents->host.get();
  if (documents != nullptr && documents->local_starts.empty()) documents = nullptr;  // one
  const auto start_of = [&](int64_t query) {
    return documents == nullptr ? 0 : documents->local_starts[std::min(query, queries - 1)];
  };
  std::vector<int32_t> own(queries);
  for (int64_t i = 0; i < queries; ++i) {
    const int64_t first = layout.Position(i) / tiles.tile * tiles.tile;
    own[i] = std::max(start_of(i), static_cast<int32_t>(first));
  }
  index.own_starts = UploadArray(device, own);
  if (documents != nullptr) {
    std::vector<int32_t> by_row(tiles.Rows(queries));
    for (int64_t row = 0; row < std::ssize(by_row); ++row)
      by_row[row] = start_of(tiles.QueryOf(row));
    index.row_starts = UploadArray(device, by_row);
  }
}

absl::Status Build(const AttentionOptions& options, const IndexInputs& inputs, IndexDevice& device,
                   LayerIndex& index) {
  const kernels::ShardLayout& layout = inputs.layout;
  index.pattern = kernels::TilePattern::kToeplitz;
  index.diagonal_words = static_cast<int32_t>((TilesOf(layout.tokens) + 63) / 64);
  std::vector<uint64_t> own_tile(int64_t{inputs.heads} * index.diagonal_words, 0);
  for (int64_t head = 0; head < inputs.heads; ++head) own_tile[head * index.diagonal_words] = 1;
  index.diagonals = UploadArray(device, own_tile);
  index.most_groups = Capacity(options, layout.tokens);
  index.group_tiles = {options.group_queries};
  if (index.group_tiles.is_spread()) SpreadTiles(inputs, device, index);
  const std::vector<int64_t> rows = kernels::GroupRows(layout, options.group_queries);
  index.group_rows = UploadArray(device, rows);
  index.heads_together = HeadsTogether(options, inputs.heads, inputs.kv_heads);
  index.groups_chosen =
      AllocateArray<uint32_t>(device, inputs.heads / index.heads_together * rows.back());
  ASSIGN_OR_RETURN(const float move, FindMove(options, inputs, device));
  ASSIGN_OR_RETURN(const NarrowRows narrow, Narrow(inputs, index.group_tiles, device));
  const DeviceArray<int32_t> head_halves = UploadHeadHalves(options, inputs, device);
  return device.Run(
      kernels::KeyGroupGateStep{.queries = narrow.queries.data(),
                                .keys = reinterpret_cast<const uint8_t*>(narrow.keys.data()),
                                .query_layout = layout,
                                .tile = options.group_queries,
                                .document_starts = index.document_starts(),
                                .scale = inputs.scale,
                                .density = static_cast<float>(options.density),
                                .budget_tokens = options.sequence_length,
                                .heads_together = index.heads_together,
                                .head_halves = head_halves.data(),
                                .move = move,
                                .tolerance = options.balance.tolerance,
                                .rows = index.group_rows.data(),
                                .chosen = index.groups_chosen.data()});
}

// Returns how many words the rows of a rank's tiles take at most, of a head (kernels::GroupRows).
int64_t MostWords(const AttentionOptions& options, const IndexShape& shape) {
  int64_t most = 0;
  kernels::ShardLayout layout = {.kind = options.layout,
                                 .ranks = shape.ranks,
                                 .stripe = std::max(options.stripe, kGroupTile),
                                 .tokens = shape.tokens};
  for (layout.rank = 0; layout.rank < shape.ranks; ++layout.rank) {
    most = std::max(most, kernels::GroupRows(layout, options.group_queries).back());
  }
  return most;
}

bool MaySample(const AttentionOptions& options, const IndexShape& shape) {
  const int64_t last = (shape.tokens - 1) / options.group_queries * options.group_queries;
  return BudgetOf(options, shape.tokens)
      .IsSampled(last, 0, options.adapt_by_probe ? 3 : 2,
                 HeadsTogether(options, shape.heads, shape.kv_heads));
}

IndexMemory MemoryOf(const AttentionOptions& options, const IndexShape& shape) {
  const kernels::SpreadRows of_tiles = {options.group_queries};
  const int64_t local = shape.tokens / shape.ranks, tiles = of_tiles.Tiles(local),
                rows = shape.heads * tiles;
  const int64_t queries = of_tiles.Rows(local) * shape.heads * kScoreDims,
                keys = shape.tokens * shape.kv_heads * kScoreDims;
  const int64_t scores = rows * TilesOf(shape.tokens) * (kGroupTile / kGroupKeys) *
                         static_cast<int64_t>(sizeof(uint16_t));
  const int64_t choosing = std::min(scores, kMostScoreBytes) + queries +
                           (shape.ranks == 1 ? 1 : 2) * keys +
                           (MaySample(options, shape) ? keys / kernels::kSampleEvery : 0);
  const int together = HeadsTogether(options, shape.heads, shape.kv_heads);
  const int64_t lists = rows / together * (Capacity(options, shape.tokens) + shape.ranks + 1) *
                        static_cast<int64_t>(sizeof(int32_t));
  // Backward has the most tensors by row: queries, their output's gradient, and, in fp32, theirs.
  const int64_t spread = of_tiles.is_spread() ? of_tiles.Rows(local) * shape.heads *
                                                    shape.head_dim * (2 * shape.element_bytes + 4)
                                              : 0;
  return {.kept = shape.heads / together * MostWords(options, shape) *
                      static_cast<int64_t>(sizeof(uint32_t)) +
                  (tiles + 1) * static_cast<int64_t>(sizeof(int64_t)),
          .working = std::max(choosing, lists + spread)};
}

// Returns how many tiles the groups that the `own`-th tile of queries keeps come to.
int64_t Kept(const AttentionOptions& options, int64_t own, int64_t blocks) {
  return kernels::TilesOfGroups(
      BudgetOf(options, blocks * kGroupTile).MostGroups(own * kGroupTile, 0));
}

int64_t ListedTiles(const AttentionOptions& options, int64_t blocks) {
  return ListedTilesOf(blocks, /*span=*/1, Kept(options, blocks - 1, blocks));
}

ring::HeadPattern Sample(const AttentionOptions& options, int64_t blocks, const PatternHints&,
                         Random* random) {
  return SampleChosenBlocks(
      options, blocks, /*span=*/1, Kept(options, blocks - 1, blocks),
      [&](int64_t own) { return Kept(options, own, blocks); }, random);
}

// Kernels multiply 64 rows for each query's tile, however many of them are queries.
double TileFactor(const AttentionOptions& options) {
  return static_cast<double>(kGroupTile) / options.group_queries;
}

// The share of the pairs of a sequence whose tiles compare with all keys, where heads have so many
// halves of the budget. What a tile keeps grows with the square root of the keys before it, and the
// pairs of all tiles up to one with the square of these: so with the fourth power of the share that
// the last tile to do so keeps of what the very last one does. Documents in a sequence have more.
double ShareOfAll(const AttentionOptions& options, int halves) {
  const int64_t tokens = options.sequence_length,
                last = (tokens - 1) / options.group_queries * options.group_queries;
  const double most = BudgetOf(options, tokens).MostGroups(last, 0, halves),
               from = kernels::SampledFrom(options.group_queries, options.group_heads);
  return std::pow(std::min(1.0, from / std::max(1.0, most)), 4);
}

// Products in 64 dimensions, in e4m3, of rows: one of each pair and, for what they are compared
// with, another of all or of the sample.
double PairOperations(const AttentionOptions& options, int64_t /*head_dim*/) {
  const double of_all = options.adapt_by_probe
                            ? (ShareOfAll(options, 1) + ShareOfAll(options, 3)) / 2
                            : ShareOfAll(options, 2);
  const double products = 1.0 + of_all + (1.0 - of_all) / kernels::kSampleEvery;
  return products * (2 * 64) / 2.0 * TileFactor(options);
}

// Gradients of groups are added in memory: 36 ms a layer of 131,072 tokens and 16 heads of 128 on
// an H200 at 5 %, of heads that choose in pairs 24 (kernels/EXPERIMENTS.md).
double BackwardFactor(int heads_together) {
  return heads_together == 1 ? 2.2 : 1.5;
}

void SetDensity(AttentionOptions* options, int64_t /*tokens*/, double density) {
  options->density = options->adapt_heads ? std::min(density, kMostHeadDensity) : density;
}

}  // namespace

extern constinit const PatternDefinition kKeyGroupsDefinition = {
    .pattern = Pattern::kKeyGroups,
    .name = "key_groups",
    .sees = "groups of 8 keys chosen by their best pairs with a tile of queries",
    .count_tiles = nullptr,
    .causal_choice = CausalChoice::kNever,
    .takes_masks = false,
    .balancing = Balancing::kAtOnce,
    .needs_whole_tiles = true,
    .fields = kFields,
    .check = Check,
    .build = Build,
    .sample = Sample,
    .listed_tiles = ListedTiles,
    .index_memory = MemoryOf,
    .set_density = SetDensity,
    .pair_operations = PairOperations,
    .gpu_tile_factor = TileFactor,
    .backward_factor = BackwardFactor,
    .repeats_on_gpus = false,
    .silence = std::numeric_limits<float>::quiet_NaN(),
    .reads_kv_heads_queries = true,
    .page =
        R"(Block-sparse attention with blocks of 64 or 16 queries and 8 keys. Per layer, head and step, each tile
of `attention.group_queries` queries sees its own tile, up to each query, and the groups of 8 consecutive keys before it that score highest. The
score of a group is the largest, over all pairs of a query of the tile and a key of the group, of the pair's logit less
the query's largest logit over all the keys that it sees: each query has a say, so that a key which one query of 64 looks
for is found, and little is kept beside it. Where a tile keeps at least six groups for each of its queries, of both heads where two choose together (384 of 64 queries of one head: of 5 % of 131,072 tokens six tiles of ten do, of 5 % of
16,384 none), its own keys and one of each four before it, picked by a hash, stand for all: a query then has three more keys on average, whose logits may be larger than the largest of these and count as much. The fewer queries choose together, the more of a share is there for each: in short sequences, of which a share is few keys, 16
find what 64 do not ([quality](quality.md#at-4096-8192-and-65536-tokens)). Kernels multiply 64 rows at a time, of which 48 are empty then, in the choice and in
attention to what it keeps. Ties go to the earlier group in even heads and to the later one in odd heads.

With `attention.group_heads: 2` two neighbouring query heads of a KV head choose together: a tile is then the queries of both, scores are the largest
over these, and both attend to the groups that it keeps. They read the same keys and add to the same gradients, so that GPUs load and add
half as often, and what is kept of a choice is half as large; but what a head finds in the same share of the keys is less, for it shares it with the
other ([quality](quality.md#two-heads-that-choose-together)). Ties go by the number of the pair, and a pair has one budget.

How many are kept grows with the square root of how far the tile is into its document, and adds up to `attention.density` of
a sequence of `data.sequence_length` tokens, own tiles counted: early queries look for nearly as many keys as late ones. A short sequence may see its
own tiles alone; short documents in a long sequence keep more than the share.

With `attention.head_budgets: by_probe` levels come from the probes of earlier steps, as under `vertical_slash`: the groups
that a tile keeps are half as many in some heads and half more in as many, as far as there are so many before it.

Logits are those of the 64 dimensions of a KV head that hold most of its energy (the sum of squares over the sequence, of
queries times that of keys), with queries and keys rounded to 8 bits (e4m3), one scale for a KV head's queries and one for its keys; attention itself
reads all of them in full. GPUs multiply them twice (where one of four stands for all, one and a quarter times), summed to half precision, at a quarter of the time of
dense attention's first product each, whatever the share; the rest of a layer, above all backward, gets faster with it. Queries and keys
that are not finite have no say. On several ranks the narrow keys of the whole sequence, 64 bytes a token and KV head, are gathered,
twice in memory until the choice is made. A choice is kept for backward as a bit for each tile of queries, head and earlier
group (tokens² / 8,192 bytes a head, of the whole sequence; four times as many with 16 queries), at any density; a layer at a time it is spelled out as lists, 4 bytes for each
tile, head and group kept (half of both where heads choose in pairs). Memory estimates count both and, where 16 queries choose, what these take in 64 rows: queries, gradients and sums. In packed documents a
tile chooses from the document of its first query on. `attention.tile` is 64. The choice looks at later queries of a tile:
`attention.selection: causal` is refused. On GPUs gradients of groups are added in any order: `training.deterministic`
is refused there, and works on the CPU, where a tile of 64 keys is computed in full if one of its groups is kept.

Reports say what was visited, 8 groups counted as a tile (32 of 16 queries), rounded in each tile of queries. Recall is estimated in steps that probe. The planner knows how many groups a tile keeps and draws which, half of them ones that the whole head
favours; until it has measured, it takes 16 queries' attention on GPUs to last four times as long as 64 queries' of the share, and backward of pairs of heads
two thirds of that of heads that choose alone.
)",
};

}  // namespace ringleader::patterns
