#include "patterns/index/vertical_slash.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "patterns/pattern.h"
#include "ringleader/kernels/index.h"

namespace ringleader::patterns {
namespace {

bool ReadSelect(std::string_view text, AttentionOptions* options) {
  options->select = text == "top_k" ? Select::kTopK : Select::kTopP;
  return text == "top_k" || text == "top_p";
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
    {"attention.balance_tolerance", "0", {0, 0.5},
     "How far the planner may move a layer's masses from the above, to even out the layers' "
     "work; 0: never, which keeps runs reproducible.",
     nullptr, "attention.select", "top_p"},
    {"attention.max_verticals", "4096", {1, kMaxTokens},
     "Columns a head keeps (`top_k`), or at most keeps (`top_p`).",
     ReadBudget<&VerticalSlashBudget::max_verticals>},
    {"attention.max_slashes", "1024", {1, kMaxTokens},
     "Block diagonals a head keeps (`top_k`), or at most keeps (`top_p`).",
     ReadBudget<&VerticalSlashBudget::max_slashes>},
    {"attention.estimate_queries", "64", {1, kernels::kMaxEstimateQueries},
     "Queries at the end of the sequence from which the pattern is estimated; with "
     "`data.document_mask` they are dealt to the ends of its documents, by their tokens.",
     Read<&AttentionOptions::estimate_queries>},
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

// The numbers of a build, no memory yet.
VerticalSlash Plan(const AttentionOptions& options, const IndexInputs& inputs) {
  const VerticalSlashBudget& budget = options.budget;
  const int64_t tokens = inputs.layout.tokens, blocks = (tokens + options.tile - 1) / options.tile;
  const bool top_k = options.select == Select::kTopK;
  // A slot at least, so that no list is empty memory.
  const auto max_columns = static_cast<int32_t>(
      std::min(tokens, std::max<int64_t>({budget.max_verticals, options.sink_tokens, 1})));
  return {
      .layout = inputs.layout,
      .heads = inputs.heads,
      .tile = options.tile,
      .scale = inputs.scale,
      .queries = static_cast<int32_t>(inputs.documents == nullptr
                                          ? std::min<int64_t>(options.estimate_queries, tokens)
                                          : inputs.documents->estimate_positions.size),
      .documents = inputs.documents.get(),
      .column_mass = top_k ? 1.0f : static_cast<float>(budget.vertical_mass),
      .diagonal_mass = top_k ? 1.0f : static_cast<float>(budget.slash_mass),
      .max_verticals = static_cast<int32_t>(std::min<int64_t>(budget.max_verticals, max_columns)),
      .max_slashes = static_cast<int32_t>(std::min<int64_t>(budget.max_slashes, blocks)),
      .sink_tokens = std::min(options.sink_tokens, max_columns),
      .local_blocks = options.local_blocks,
      .parts = {.heads = inputs.heads, .blocks = blocks, .max_columns = max_columns}};
}

// Steps 1 to 3: what the estimate queries attend to, by column of this rank and by diagonal.
absl::Status Estimate(VerticalSlash& work, const IndexInputs& inputs, IndexDevice& device) {
  const bool ranks = work.layout.ranks > 1;
  const int64_t slots = int64_t{work.heads} * work.queries;
  const int64_t query_elements = slots * inputs.head_dim;
  if (ranks || work.documents != nullptr) {
    work.query_rows = AllocateArray<std::byte>(device, query_elements * device.element_bytes());
  }
  work.query_positions = AllocateArray<int64_t>(device, work.queries);
  RETURN_IF_ERROR(device.PrepareEstimate(work));
  // One rank has each of the estimate queries; all others add zeros.
  if (ranks) {
    RETURN_IF_ERROR(device.Sum(SumType::kQueries, work.query_rows.data(), query_elements));
  }
  work.gathered = AllocateArray<int32_t>(device, work.layout.ranks * work.parts.elements());
  work.row_max = AllocateArray<float>(device, slots);
  work.row_sum = AllocateArray<int64_t>(device, slots);
  work.column_mass_of = AllocateArray<int32_t>(device, work.heads * work.layout.local_tokens());
  RETURN_IF_ERROR(device.RowMax(work));
  if (ranks) RETURN_IF_ERROR(device.Max(work.row_max.data(), slots));
  RETURN_IF_ERROR(device.RowSum(work));
  if (ranks) RETURN_IF_ERROR(device.Sum(SumType::kInt64, work.row_sum.data(), slots));
  return device.Mass(work);
}

// Step 4: every rank's best columns and masses of diagonals, in one exchange.
absl::Status Merge(VerticalSlash& work, IndexDevice& device) {
  RETURN_IF_ERROR(device.Candidates(work));
  if (work.layout.ranks == 1) {
    work.merged = work.gathered;
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(device.Gather(work.gathered.data(),
                                work.parts.elements() * static_cast<int64_t>(sizeof(int32_t))));
  work.merged = AllocateArray<int32_t>(device, work.merged_parts().elements());
  return device.MergeParts(work);
}

absl::Status Build(const AttentionOptions& options, const IndexInputs& inputs, IndexDevice& device,
                   LayerIndex& index) {
  VerticalSlash work = Plan(options, inputs);
  RETURN_IF_ERROR(Estimate(work, inputs, device));
  RETURN_IF_ERROR(Merge(work, device));
  // Step 5.
  const int64_t heads = work.heads, columns = heads * work.parts.max_columns;
  index.pattern = kernels::TilePattern::kToeplitz;
  index.max_columns = work.parts.max_columns;
  index.column_positions = AllocateArray<int64_t>(device, columns);
  index.column_counts = AllocateArray<int32_t>(device, heads);
  index.diagonal_words = static_cast<int32_t>((work.parts.blocks + 63) / 64);
  index.diagonals = AllocateArray<uint64_t>(device, heads * index.diagonal_words);
  RETURN_IF_ERROR(device.Select(work, index));
  RETURN_IF_ERROR(device.CountSelection(work, index));
  const int64_t bytes = columns * inputs.head_dim * device.element_bytes();
  index.column_keys = AllocateArray<std::byte>(device, bytes);
  index.column_values = AllocateArray<std::byte>(device, bytes);
  return absl::OkStatus();
}

// Attention mass falls off about exponentially over sorted diagonals and columns, so the number
// that covers mass p grows like -ln(1 - p). 1 at p = 0.9.
double Strength(double mass) {
  return std::log(1 - std::min(mass, 0.999)) / std::log(0.1);
}

// A third of `wanted` diagonals next to the main one, the rest in clusters that thin out with
// distance.
ring::HeadPattern Diagonals(int64_t blocks, int64_t local, int64_t wanted, Random* random) {
  ring::HeadPattern head = Band(blocks, std::max(local, wanted / 3));
  int64_t set = std::count(head.diagonals.begin(), head.diagonals.end(), 1);
  constexpr int64_t kWidths[] = {1, 1, 1, 2, 4, 8};
  while (set < wanted) {
    const double u = random->Unit();
    auto at = static_cast<int64_t>(static_cast<double>(blocks) * u * u);
    for (int64_t width = kWidths[random->Below(std::ssize(kWidths))];
         width > 0 && at < blocks && set < wanted; --width, ++at) {
      set += head.diagonals[at] == 0;
      head.diagonals[at] = 1;
    }
  }
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
  if (options.select == Select::kTopK) {
    slashes = budget.max_slashes;
    verticals = budget.max_verticals;
  }
  const int64_t local = 1 + options.local_blocks;
  const auto wanted = std::clamp<int64_t>(std::llround(slashes), std::min(local, blocks),
                                          std::min<int64_t>(blocks, local + budget.max_slashes));
  ring::HeadPattern head = Diagonals(blocks, local, wanted, random);

  head.columns_in_block.assign(blocks, 0.0);
  for (int64_t i = 0; i < std::min<int64_t>(options.sink_tokens, tokens); ++i) {
    head.columns_in_block[i / options.tile] += 1;
  }
  const int64_t columns =
      std::min({int64_t{std::llround(verticals)}, int64_t{budget.max_verticals}, tokens});
  for (int64_t i = 0; i < columns; ++i) head.columns_in_block[random->Below(blocks)] += 1;
  for (double& count : head.columns_in_block) {
    count = std::min(count, static_cast<double>(options.tile));
  }
  return head;
}

}  // namespace

extern constinit const PatternDefinition kVerticalSlashDefinition = {
    .pattern = Pattern::kVerticalSlash,
    .name = "vertical_slash",
    .sees = "columns and block diagonals chosen per head and step",
    .count_tiles = nullptr,
    .needs_whole_tiles = true,
    .fields = kFields,
    .check = Check,
    .build = Build,
    .sample = Sample,
    .page =
        R"(MTraining (arXiv 2510.18830), Algorithm 1. Per layer, head and step, the softmax of the last
`attention.estimate_queries` queries over all keys says how much attention mass each column (one key) and each
diagonal of tiles holds. The heaviest are kept until they cover a share of the mass or reach a number; the
first columns (sinks) and the diagonals next to the main one always are. The kernels get one bitmap of diagonals
a head, which is Toeplitz over blocks, and the list of its columns, which are computed outside the ring
([attention.md](attention.md) has the steps). The planner assumes, until a job's reports say how many columns
and diagonals it keeps, 2 to 10 % of the diagonals, a third of them next to the main one and the rest in
clusters that thin out with distance, and columns that lie anywhere.
)",
};

}  // namespace ringleader::patterns
