#include <algorithm>
#include <cmath>
#include <iterator>

#include "absl/strings/str_format.h"
#include "patterns/pattern.h"
#include "ringleader/kernels/index.h"

namespace ringleader::patterns {
namespace {

bool ReadSelect(std::string_view text, AttentionOptions* options) {
  options->select = text == "top_k" ? Select::kTopK : Select::kTopP;
  return text == "top_k" || text == "top_p";
}

// clang-format off
constexpr PatternField kFields[] = {
    {"attention.select", "top_p", {},
     "How columns and diagonals are chosen: by the share of attention mass that they cover "
     "(`top_p`) or by number (`top_k`).",
     ReadSelect},
    {"attention.vertical_mass", "0.9", {0, 1, true},
     "Share of estimated attention mass that the chosen columns must cover.",
     ReadBudget<&LayerBudget::vertical_mass>, "attention.select", "top_p"},
    {"attention.slash_mass", "0.9", {0, 1, true},
     "Share of estimated attention mass that the chosen block diagonals must cover.",
     ReadBudget<&LayerBudget::slash_mass>, "attention.select", "top_p"},
    {"attention.balance_tolerance", "0", {0, 0.5},
     "How far the planner may move a layer's masses from the above, to even out the layers' "
     "work; 0: never, which keeps runs reproducible.",
     nullptr, "attention.select", "top_p"},
    {"attention.max_verticals", "4096", {1, kMaxTokens},
     "Columns a head keeps (`top_k`), or at most keeps (`top_p`).",
     ReadBudget<&LayerBudget::max_verticals>},
    {"attention.max_slashes", "1024", {1, kMaxTokens},
     "Block diagonals a head keeps (`top_k`), or at most keeps (`top_p`).",
     ReadBudget<&LayerBudget::max_slashes>},
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
  const LayerBudget& budget = options.budget;
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
    .is_known_before_data = false,
    .needs_whole_tiles = true,
    .fields = kFields,
    .check = Check,
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
