#include "patterns/index/vertical_slash.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "patterns/index/head_budgets.h"
#include "patterns/index/moved_choice.h"
#include "patterns/pattern.h"
#include "ringleader/kernels/index.h"

namespace ringleader::patterns {
namespace {

bool ReadSelect(std::string_view text, AttentionOptions* options) {
  options->select = text == "top_k" ? Select::kTopK : Select::kTopP;
  return text == "top_k" || text == "top_p";
}

bool ReadEstimateAt(std::string_view text, AttentionOptions* options) {
  options->estimate_at = text == "spread" ? EstimateAt::kSpread : EstimateAt::kEnd;
  return text == "spread" || text == "end";
}

template <auto member>
bool ReadBudget(std::string_view text, AttentionOptions* options) {
  return ReadNumber(text, &(options->budget.*member));
}

// clang-format off
constexpr PatternField kFields[] = {
    {"attention.select", "top_p", {},
     "How columns and diagonals are chosen: by the share of attention mass that they cover "
     "(`top_p`) or by number (`top_k`).",
     ReadSelect},
    {"attention.vertical_mass", "0.9", {0, 1, true},
     "Share of estimated attention mass that the chosen columns must cover.",
     ReadBudget<&VerticalSlashBudget::vertical_mass>, "attention.select", "top_p"},
    {"attention.slash_mass", "0.9", {0, 1, true},
     "Share of estimated attention mass that the chosen block diagonals must cover.",
     ReadBudget<&VerticalSlashBudget::slash_mass>, "attention.select", "top_p"},
    {"attention.density", "0", {0, 1},
     "Budget as a share of the causal tiles that a head keeps (`top_k`), or at most keeps (`top_p`), "
     "whatever the length; 0: `attention.max_verticals` and `attention.max_slashes` hold instead.",
     ReadBudget<&VerticalSlashBudget::density>},
    {"attention.max_verticals", "4096", {1, kMaxTokens},
     "Columns a head keeps (`top_k`), or at most keeps (`top_p`).",
     ReadBudget<&VerticalSlashBudget::max_verticals>, "attention.density", "0"},
    {"attention.max_slashes", "1024", {1, kMaxTokens},
     "Block diagonals a head keeps (`top_k`), or at most keeps (`top_p`).",
     ReadBudget<&VerticalSlashBudget::max_slashes>, "attention.density", "0"},
    {"attention.head_budgets", "equal", {},
     "Whether all heads have the budget (`equal`), or those that recall little half more and as many "
     "that recall much half of it: by what each choice keeps of its own queries' attention "
     "(`by_recall`), or by the probes of earlier steps (`by_probe`, with `attention.probe_every`).",
     ReadHeadBudgets},
    {"attention.estimate_queries", "64", {1, kernels::kMaxEstimateQueries},
     "Queries from which the pattern is estimated.",
     Read<&AttentionOptions::estimate_queries>},
    {"attention.estimate_at", "end", {},
     "Where they lie: at the end of the sequence, with `data.document_mask` at the ends of its "
     "documents, by their tokens (`end`), or all over it (`spread`).",
     ReadEstimateAt},
    {"attention.sink_tokens", "64", {0, kMaxTokens},
     "Columns at the start of the sequence, not of each document in it, that are always kept.",
     Read<&AttentionOptions::sink_tokens>},
    {"attention.local_blocks", "1", {0, kMaxTokens},
     "Block diagonals next to the main one that are always kept; the main one always is.",
     Read<&AttentionOptions::local_blocks>},
};
// clang-format on

absl::Status Check(const AttentionOptions& options) {
  for (const double mass : {options.budget.vertical_mass, options.budget.slash_mass}) {
    if (mass > 0.0 && mass <= 1.0) continue;
    return absl::InvalidArgumentError(
        absl::StrFormat("attention.vertical_mass and slash_mass must lie in (0, 1]; got %g", mass));
  }
  const VerticalSlashBudget& budget = options.budget;
  if (!(budget.density >= 0.0 && budget.density <= 1.0)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("attention.density must lie in [0, 1]; got %g", budget.density));
  }
  if (options.estimate_queries < 1 || options.estimate_queries > kernels::kMaxEstimateQueries) {
    return absl::InvalidArgumentError(
        absl::StrFormat("attention.estimate_queries is %d; allowed are 1 to %d",
                        options.estimate_queries, kernels::kMaxEstimateQueries));
  }
  if (options.sink_tokens >= 0 && options.local_blocks >= 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "attention.sink_tokens (%d) and attention.local_blocks (%d) must not be negative",
      options.sink_tokens, options.local_blocks));
}

// A row of the longest sequence, all of one logit, does not overflow.
static_assert(kMaxTokens * static_cast<double>(int64_t{1} << kernels::kRowSumBits) < 0x1p63);

// What a budget allows in a sequence of `tokens`.
struct Counts {
  int64_t columns;
  int64_t diagonals;  // the sum of their DiagonalCost
  bool by_tiles;
};

// Columns of a head that the choice on GPUs sorts (kernels/index/select.h).
constexpr int64_t kMostColumns = int64_t{1} << 20;

// Splits a share of the causal tiles. A tenth of it, as a share of the tokens, goes to columns,
// which cost at most twice that, if they all are at the start; what is left then goes to diagonals.
Counts CountsOf(const VerticalSlashBudget& budget, int64_t tokens, int tile) {
  if (budget.density == 0.0) return {budget.max_verticals, budget.max_slashes, false};
  const int64_t blocks = (tokens + tile - 1) / tile;
  int64_t all = 0;
  for (int64_t delta = 0; delta < blocks; ++delta) {
    all += kernels::DiagonalCost(/*by_tiles=*/true, blocks, delta);
  }
  return {std::max<int64_t>(1, std::llround(0.1 * budget.density * static_cast<double>(tokens))),
          std::max<int64_t>(1, std::llround(0.8 * budget.density * static_cast<double>(all))),
          true};
}

// Returns how many diagonals besides the main one are always kept. Documents without an estimate
// query are kept whole: they are short, and nothing says what they attend to.
int32_t LocalBlocks(const AttentionOptions& options, const IndexInputs& inputs) {
  const int64_t longest = inputs.documents == nullptr ? 0 : inputs.documents->longest_without;
  const int64_t blocks = (std::max<int64_t>(longest - 1, 0) + options.tile - 1) / options.tile;
  return static_cast<int32_t>(std::max<int64_t>(options.local_blocks, blocks));
}

// Slots for the columns of the head that gets most, and one at least, so that no list is empty
// memory.
int64_t MaxColumns(const AttentionOptions& options, int64_t columns, int64_t tokens) {
  const int64_t most = options.adapt_heads ? columns + columns / 2 : columns;
  return std::min(tokens,
                  std::max<int64_t>({options.balance.RoomFor(most), options.sink_tokens, 1}));
}

absl::Status CheckLength(const AttentionOptions& options, int64_t tokens) {
  const int64_t columns =
      MaxColumns(options, CountsOf(options.budget, tokens, options.tile).columns, tokens);
  if (columns <= kMostColumns) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "attention.pattern: vertical_slash: a head may keep %d columns of %d tokens; there may be "
      "%d: give less attention.density, attention.max_verticals or attention.sink_tokens",
      columns, tokens, kMostColumns));
}

// Sets the numbers of a build and allocates nothing.
VerticalSlash Plan(const AttentionOptions& options, const IndexInputs& inputs) {
  const int64_t tokens = inputs.layout.tokens, blocks = (tokens + options.tile - 1) / options.tile;
  const bool top_k = options.select == Select::kTopK;
  const int64_t content = ContentOf(inputs);
  Counts counts = CountsOf(options.budget, content, options.tile);
  if (!counts.by_tiles) counts.diagonals = std::min(counts.diagonals, blocks);
  const auto max_columns = static_cast<int32_t>(MaxColumns(options, counts.columns, tokens));
  return {.layout = inputs.layout,
          .heads = inputs.heads,
          .tile = options.tile,
          .blocks = blocks,
          .content = content,
          .scale = inputs.scale,
          .queries = static_cast<int32_t>(inputs.documents == nullptr
                                              ? std::min<int64_t>(options.estimate_queries, tokens)
                                              : inputs.documents->estimate_positions.size),
          .spread = options.estimate_at == EstimateAt::kSpread,
          .documents = inputs.documents.get(),
          .column_mass = top_k ? 1.0f : static_cast<float>(options.budget.vertical_mass),
          .diagonal_mass = top_k ? 1.0f : static_cast<float>(options.budget.slash_mass),
          .max_verticals = static_cast<int32_t>(std::min<int64_t>(counts.columns, max_columns)),
          .max_slashes = static_cast<int32_t>(counts.diagonals),
          .slashes_by_tiles = counts.by_tiles,
          .sink_tokens = std::min(options.sink_tokens, max_columns),
          .local_blocks = LocalBlocks(options, inputs),
          .max_columns = max_columns};
}

// Steps 1 to 3 sum up what the estimate queries attend to, by column of this rank and by diagonal.
absl::Status Estimate(VerticalSlash& work, const IndexInputs& inputs, IndexDevice& device) {
  work.column_mass_of = AllocateArray<int32_t>(device, work.heads * work.layout.local_tokens());
  work.diagonal_mass_of = AllocateArray<int32_t>(device, work.heads * work.blocks);
  RETURN_IF_ERROR(EstimateRows(work, inputs, device));
  RETURN_IF_ERROR(device.Mass(work));
  if (work.layout.ranks == 1) return absl::OkStatus();
  return device.Sum(SumType::kInt32, work.diagonal_mass_of.data(), work.diagonal_mass_of.size);
}

// Step 4 gathers every rank's best columns.
absl::Status GatherCandidates(VerticalSlash& work, IndexDevice& device) {
  const int64_t part = 2 * work.candidate_slots();
  work.candidates = AllocateArray<int32_t>(device, work.layout.ranks * part);
  RETURN_IF_ERROR(device.Candidates(work));
  if (work.layout.ranks == 1) return absl::OkStatus();
  return device.Gather(work.candidates.data(), part * static_cast<int64_t>(sizeof(int32_t)));
}

// Replaces the budgets that PrepareEstimate wrote.
void TakeHeadBudgets(std::span<const int32_t> halves, VerticalSlash& work, IndexDevice& device) {
  std::vector<int32_t> counts;
  for (const int32_t of_head : halves) {
    counts.push_back(std::min(kernels::OfHalves(work.max_verticals, of_head), work.max_columns));
  }
  for (const int32_t of_head : halves)
    counts.push_back(kernels::OfHalves(work.max_slashes, of_head));
  work.budget_counts = UploadArray(device, counts);
}

absl::Status Build(const AttentionOptions& options, const IndexInputs& inputs, IndexDevice& device,
                   LayerIndex& index) {
  RETURN_IF_ERROR(CheckLength(options, inputs.layout.tokens));
  VerticalSlash work = Plan(options, inputs);
  RETURN_IF_ERROR(Estimate(work, inputs, device));
  RETURN_IF_ERROR(GatherCandidates(work, device));
  if (!inputs.head_halves.empty()) TakeHeadBudgets(inputs.head_halves, work, device);
  // Step 5 selects.
  const int64_t heads = work.heads, columns = heads * work.max_columns;
  index.pattern = kernels::TilePattern::kToeplitz;
  index.max_columns = work.max_columns;
  index.column_positions = AllocateArray<int64_t>(device, columns);
  index.column_counts = AllocateArray<int32_t>(device, heads);
  index.diagonal_words = static_cast<int32_t>((work.blocks + 63) / 64);
  index.diagonals = AllocateArray<uint64_t>(device, heads * index.diagonal_words);
  RETURN_IF_ERROR(device.Select(work, index));
  if (options.adapt_heads && !options.adapt_by_probe) {
    RETURN_IF_ERROR(device.AdaptBudgets(work));
    RETURN_IF_ERROR(device.Select(work, index));
  }
  RETURN_IF_ERROR(MoveColumnsAndDiagonals(options.balance, inputs, work, device, index));
  RETURN_IF_ERROR(device.CountSelection(work, index));
  const int64_t bytes = columns * inputs.head_dim * device.element_bytes();
  index.column_keys = AllocateArray<std::byte>(device, bytes);
  index.column_values = AllocateArray<std::byte>(device, bytes);
  return absl::OkStatus();
}

// Columns, with their keys and values, and diagonals are kept; in backward their keys' and values'
// gradients are summed up in fp32. The choice works in masses of columns and diagonals, and on
// several ranks in every rank's candidates.
IndexMemory MemoryOf(const AttentionOptions& options, const IndexShape& shape) {
  const int64_t local = shape.tokens / shape.ranks,
                blocks = (shape.tokens + options.tile - 1) / options.tile,
                columns = shape.heads *
                          MaxColumns(options,
                                     CountsOf(options.budget, shape.tokens, options.tile).columns,
                                     shape.tokens);
  const auto of_word = static_cast<int64_t>(sizeof(int32_t)),
             of_position = static_cast<int64_t>(sizeof(int64_t));
  const int64_t choosing =
                    shape.heads * (local + blocks) * of_word + 2 * shape.ranks * columns * of_word,
                gradients = 2 * columns * shape.head_dim * of_word;
  return {.kept = columns * (of_position + 2 * shape.head_dim * shape.element_bytes) +
                  shape.heads * ((blocks + 63) / 64) * of_position,
          .working = std::max(choosing, gradients)};
}

// Attention mass falls off about exponentially over sorted diagonals and columns, so the number
// that covers mass p grows like -ln(1 - p). 1 at p = 0.9.
double Strength(double mass) {
  return std::log(1 - std::min(mass, 0.999)) / std::log(0.1);
}

// Where there are more columns, each that is drawn stands for several.
constexpr int64_t kMaxDrawnColumns = int64_t{1} << 18;

// Draws a third of `wanted` diagonals next to the main one, the rest in clusters that thin out with
// distance, while their costs are below `most`.
ring::HeadPattern Diagonals(int64_t blocks, int64_t local, int64_t wanted, int64_t most,
                            bool by_tiles, Random* random) {
  ring::HeadPattern head = Band(blocks, local);
  const auto cost = [&](int64_t delta) { return kernels::DiagonalCost(by_tiles, blocks, delta); };
  int64_t set = std::min(blocks, local), taken = 0;
  for (int64_t delta = 0; delta < set; ++delta) taken += cost(delta);
  const auto take = [&](int64_t delta) {
    if (delta >= blocks || head.diagonals[delta] != 0) return;
    head.diagonals[delta] = 1;
    taken += cost(delta);
    ++set;
  };
  const auto wants_more = [&] { return set < wanted && taken < most; };
  for (int64_t delta = local; delta < wanted / 3 && wants_more(); ++delta) take(delta);
  constexpr int64_t kWidths[] = {1, 1, 1, 2, 4, 8};
  // Where nearly all are wanted, draws hardly hit the last ones, which are taken in turn below.
  for (int64_t draws = 0; wants_more() && draws < 4 * blocks; ++draws) {
    const double u = random->Unit();
    auto at = static_cast<int64_t>(static_cast<double>(blocks) * u * u);
    for (int64_t width = kWidths[random->Below(std::ssize(kWidths))]; width > 0 && wants_more();
         --width, ++at) {
      take(at);
    }
  }
  for (int64_t at = 0; at < blocks && wants_more(); ++at) take(at);
  return head;
}

ring::HeadPattern Sample(const AttentionOptions& options, int64_t blocks, const PatternHints& hints,
                         Random* random) {
  const VerticalSlashBudget& budget = options.budget;
  const int64_t tokens = blocks * options.tile;
  // 2 to 10 % of the diagonals, and 64 to 2048 columns at half a million tokens.
  double slashes =
      (0.02 + 0.08 * random->Unit()) * static_cast<double>(blocks) * Strength(budget.slash_mass);
  double verticals = (64 + 1984 * random->Unit()) * Strength(budget.vertical_mass) *
                     std::sqrt(static_cast<double>(tokens) / 524288.0);
  if (hints.slashes > 0) slashes = hints.slashes * (0.7 + 0.6 * random->Unit());
  if (hints.verticals > 0) verticals = hints.verticals * (0.7 + 0.6 * random->Unit());
  const Counts counts = CountsOf(budget, tokens, options.tile);
  const int64_t local = 1 + options.local_blocks;
  // As many as the costs allow: where Diagonals draws them they cost 3/4 of the main one.
  const int64_t diagonals =
      counts.by_tiles
          ? 4 * counts.diagonals /
                (3 * int64_t{kernels::DiagonalCost(/*by_tiles=*/true, blocks, /*delta=*/0)})
          : counts.diagonals;
  if (options.select == Select::kTopK) {
    slashes = static_cast<double>(diagonals);
    verticals = static_cast<double>(counts.columns);
  }
  const auto wanted = std::clamp<int64_t>(std::llround(slashes), std::min(local, blocks),
                                          std::min<int64_t>(blocks, local + diagonals));
  ring::HeadPattern head = Diagonals(
      blocks, local, wanted, counts.by_tiles ? counts.diagonals : blocks, counts.by_tiles, random);

  head.columns_in_block.assign(blocks, 0.0);
  for (int64_t i = 0; i < std::min<int64_t>(options.sink_tokens, tokens); ++i) {
    head.columns_in_block[i / options.tile] += 1;
  }
  const int64_t columns = std::min({int64_t{std::llround(verticals)}, counts.columns, tokens});
  const int64_t drawn = std::min(columns, kMaxDrawnColumns);
  for (int64_t i = 0; i < drawn; ++i) {
    head.columns_in_block[random->Below(blocks)] +=
        static_cast<double>(columns) / static_cast<double>(drawn);
  }
  for (double& count : head.columns_in_block) {
    count = std::min(count, static_cast<double>(options.tile));
  }
  return head;
}

void SetDensity(AttentionOptions* options, int64_t /*tokens*/, double density) {
  options->select = Select::kTopP;
  options->budget = {.vertical_mass = 1,
                     .slash_mass = 1,
                     .max_verticals = std::numeric_limits<int32_t>::max(),
                     .max_slashes = std::numeric_limits<int32_t>::max(),
                     .density = density};
}

}  // namespace

absl::Status EstimateRows(VerticalSlash& work, const IndexInputs& inputs, IndexDevice& device) {
  const bool ranks = work.layout.ranks > 1;
  const int64_t slots = int64_t{work.heads} * work.queries;
  const int64_t query_elements = slots * inputs.head_dim;
  if (ranks || work.spread || work.documents != nullptr) {
    work.query_rows = AllocateArray<std::byte>(device, query_elements * device.element_bytes());
  }
  work.query_positions = AllocateArray<int64_t>(device, work.queries);
  work.budget_masses = AllocateArray<float>(device, int64_t{2} * work.heads);
  work.budget_counts = AllocateArray<int32_t>(device, int64_t{2} * work.heads);
  RETURN_IF_ERROR(device.PrepareEstimate(work));
  // One rank has each of the estimate queries; all others add zeros.
  if (ranks) {
    RETURN_IF_ERROR(device.Sum(SumType::kQueries, work.query_rows.data(), query_elements));
  }
  work.row_max = AllocateArray<float>(device, slots);
  work.row_sum = AllocateArray<int64_t>(device, slots);
  RETURN_IF_ERROR(device.RowMax(work));
  if (ranks) RETURN_IF_ERROR(device.Max(work.row_max.data(), slots));
  RETURN_IF_ERROR(device.RowSum(work));
  if (ranks) RETURN_IF_ERROR(device.Sum(SumType::kInt64, work.row_sum.data(), slots));
  return absl::OkStatus();
}

extern constinit const PatternDefinition kVerticalSlashDefinition = {
    .pattern = Pattern::kVerticalSlash,
    .name = "vertical_slash",
    .sees = "columns and block diagonals chosen per head and step",
    .count_tiles = nullptr,
    .causal_choice = CausalChoice::kNever,
    .takes_masks = false,
    .balancing = Balancing::kByAnother,
    .needs_whole_tiles = true,
    .fields = kFields,
    .check = Check,
    .build = Build,
    .check_length = CheckLength,
    .sample = Sample,
    .index_memory = MemoryOf,
    .set_density = SetDensity,
    .counts_recall = true,
    .page =
        R"(MTraining (arXiv 2510.18830), Algorithm 1. Per layer, head and step, the softmax of
`attention.estimate_queries` queries over all keys says how much attention mass each column (one key) and each
diagonal of tiles holds. The heaviest are kept until they cover a share of the mass or reach a budget; the
first columns (sinks) and the diagonals next to the main one always are. The kernels get one bitmap of diagonals
a head, which is Toeplitz over blocks, and the list of its columns, which are computed outside the ring
([attention.md](attention.md) has the steps). The planner assumes, until a job's reports say how many columns
and diagonals it keeps, 2 to 10 % of the diagonals, a third of them next to the main one and the rest in
clusters that thin out with distance, and columns that lie anywhere; no more than the budget, and with `top_k` all of it.

The queries are the sequence's last ones, as in the paper, or with `attention.estimate_at: spread` one from each of as
many equal parts of it: what only earlier queries attend to counts then, and a key counts by how many see it. `end` is
the default: it keeps more of what is asked at the end and of far recall, while `spread` keeps more attention by the
probe and costs text less ([quality](quality.md)).

The budget is a number of columns and of diagonals, or with `attention.density` a share of the causal tiles, at any
length: columns are a tenth of that share of the tokens, and diagonals are taken while the tiles they have come to four
fifths of the share, so that a head visits no more than the share (columns cost at most twice theirs, if they all are at
the start) and what is always kept. Of the two, budget and mass, the one that is reached first ends the choice; step
reports and `ringctl report` say of how many heads it was the budget. With `attention.head_budgets: by_recall` the choice
is made twice: after the first, the heads whose columns and diagonals come to more than 0.8 of the mass (what both hold counts twice), at most half of all, get half of
the budget, and as many with the least get half more, so that the mean stays (the levels are AdaSpa's, arXiv 2502.21079).

With `attention.head_budgets: by_probe` budgets move between steps, by queries that had no part in the choice: after each step
that probes (`attention.probe_every`), the head of a layer whose probed recall is highest is matched with the one whose is
lowest, the next with the next, and the first of a pair gives half of its budget to the other if it recalls more than 0.8.
What it gave it gets back when it recalls no more than the other. Recall is a mean over probes, of which the newest counts a quarter. The
choice is made once, budgets start equal, hold in evaluations and are part of checkpoints; all ranks and groups have the same. It goes with
neither `attention.balance.anchor` nor `parallelism.layout: documents`.
)",
};

}  // namespace ringleader::patterns
