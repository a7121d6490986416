#include "coordinator/planner/plan_cost.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/numbers/ceil_div.h"
#include "coordinator/planner/simulate/pricer.h"
#include "jobspec/values/attention_spec.h"
#include "patterns/carried/carried_rows.h"
#include "patterns/pattern.h"

namespace ringleader::planner {
namespace {

// Measured, rounded down (docs/planner.md).
constexpr double kRankStepsPerSecond = 2e9;
constexpr double kBlocksPerSecond = 1e8;
constexpr double kTilesPerSecond = 1e7;
// A rank's loads and times; a tile that is listed, in each layout; a block of a sampled head.
constexpr double kBytesPerRank = 400;
constexpr double kBytesPerListedTile = 16;
constexpr double kBytesPerBlock = 24;
constexpr double kMiB = 1024.0 * 1024;

}  // namespace

double PlanCost::seconds() const {
  return static_cast<double>(rank_steps) / kRankStepsPerSecond +
         static_cast<double>(blocks) / kBlocksPerSecond +
         static_cast<double>(tiles) / kTilesPerSecond;
}

PlanCost& PlanCost::operator+=(const PlanCost& other) {
  rank_steps += other.rank_steps;
  blocks += other.blocks;
  tiles += other.tiles;
  bytes += other.bytes;
  return *this;
}

PlanCost CostOf(const v1::JobSpec& spec, const model::ModelConfig& model, int layouts,
                int compared) {
  const auto attention = jobspec::AttentionOptionsOf(spec.attention());
  if (!attention.ok()) return {};  // which whoever plans will say
  const int64_t ranks = jobspec::RingRanks(spec.parallelism());
  const bool is_sparse = attention->pattern != patterns::Pattern::kDense;
  const int samples =
      is_sparse ? SampledLayers(*attention, model.layers, static_cast<int>(ranks)) : 0;
  const int64_t layers = samples + (is_sparse && attention->dense_layers.empty() ? 0 : 1);
  const patterns::PatternDefinition& pattern = patterns::DefinitionOf(attention->pattern);
  const bool is_known = pattern.is_known_before_data() || !attention->dense_layers.empty();
  PlanCost cost;
  double at_work = 0;  // bytes, while heads are counted or played
  // A walk is one forward or backward; what is exposed takes walks on infinitely fast links, too.
  // Returns the bytes of what is kept.
  const auto add = [&](uint64_t length, int64_t of_layouts, int64_t walks) {
    const int64_t blocks = CeilDiv(static_cast<int64_t>(length), attention->tile);
    const int64_t heads = SampledHeads(*attention, static_cast<int>(ranks), blocks);
    const int64_t tiles =
        pattern.listed_tiles == nullptr ? 0 : pattern.listed_tiles(*attention, blocks);
    cost.rank_steps += walks * layers * ranks * ranks;
    cost.blocks += of_layouts * layers * heads * blocks;
    // Whoever sees which blocks of each rank's, for what the hops of each walk carry.
    if (is_known && ranks > 1 && ranks <= patterns::kMostRanksOfRows) {
      cost.blocks += walks * ranks * (blocks + ranks);
    }
    cost.tiles += of_layouts * samples * heads * tiles;
    const double listed = static_cast<double>(std::min(ranks * ranks, heads * tiles));
    at_work = std::max(at_work, static_cast<double>(heads * blocks) * kBytesPerBlock +
                                    static_cast<double>(heads * tiles) * sizeof(int32_t) +
                                    listed * kBytesPerListedTile);
    return static_cast<double>(of_layouts) *
           (static_cast<double>(layers * ranks) * kBytesPerRank +
            static_cast<double>(samples) * listed * kBytesPerListedTile);
  };
  cost.bytes = add(spec.data().sequence_length(), layouts, 2 * compared + 4);
  double largest = 0;  // of the weighed lengths, one after the other
  for (const uint64_t length : WeighedLengths(spec, spec.parallelism().layout()))
    largest = std::max(largest, add(length, 1, 2));
  cost.bytes += largest + at_work;
  return cost;
}

absl::Status CheckCost(const PlanCost& cost, const v1::JobSpec& spec, const PlanLimits& limits) {
  if (cost.seconds() <= limits.seconds && cost.bytes <= limits.bytes) return absl::OkStatus();
  const std::string amount =
      cost.seconds() > limits.seconds
          ? absl::StrFormat("about %.0f s of a processor, and may take %.0f s", cost.seconds(),
                            limits.seconds)
          : absl::StrFormat("about %.0f MiB, and may take %.0f MiB", cost.bytes / kMiB,
                            limits.bytes / kMiB);
  const bool by_tiles = static_cast<double>(cost.tiles) / kTilesPerSecond >
                        static_cast<double>(cost.rank_steps) / kRankStepsPerSecond;
  return absl::ResourceExhaustedError(absl::StrCat(
      "its plan, for ", jobspec::RingRanks(spec.parallelism()),
      " ranks in a ring (parallelism.context), ", "takes ", amount,
      by_tiles ? "; have the coordinator started with more (--plan-seconds, --plan-mebibytes)"
               : "; lower parallelism.context",
      ", or set parallelism.layout and parallelism.ring, so that less is compared"));
}

}  // namespace ringleader::planner
