#include "coordinator/planner/simulate/stand_ins.h"

#include <algorithm>
#include <numbers>
#include <numeric>
#include <set>
#include <utility>

#include "base/numbers/ceil_div.h"
#include "jobspec/jobspec.h"
#include "jobspec/values/attention_spec.h"
#include "patterns/pattern.h"

namespace ringleader::planner {
namespace {

// More layers and heads change predictions by less than patterns vary.
constexpr int kSampledLayers = 3;
constexpr int kSampledHeads = 4;
// Work grows with the square of the ranks, while layers look more and more alike.
constexpr int kManyRanks = 256;
constexpr int64_t kManyTiles = int64_t{1} << 18;

}  // namespace

int SampledLayers(const patterns::AttentionOptions& attention, int64_t layers, int ranks) {
  const bool one_is_enough =
      patterns::DefinitionOf(attention.pattern).is_known_before_data() || ranks > kManyRanks;
  return static_cast<int>(std::min<int64_t>(layers, one_is_enough ? 1 : kSampledLayers));
}

int SampledHeads(const patterns::AttentionOptions& attention, int ranks, int64_t blocks) {
  const patterns::PatternDefinition& pattern = patterns::DefinitionOf(attention.pattern);
  if (pattern.is_known_before_data()) return 1;
  // What is listed tile by tile takes memory by tiles where there are more pairs of ranks, and time
  // by tiles anywhere; of a head that lists many, others tell little more.
  const bool is_large =
      pattern.listed_tiles != nullptr &&
      (ranks > kManyRanks || pattern.listed_tiles(attention, blocks) > kManyTiles);
  return is_large ? 1 : kSampledHeads;
}

absl::StatusOr<balance::SampleWeights> WeightsOf(const v1::StepPlan& plan) {
  std::vector<balance::SampleWeight> rows;
  for (const v1::SampleWeight& row : plan.sample_weights()) {
    rows.push_back({row.tokens(), row.milliseconds(), row.attention_milliseconds(),
                    row.travel_milliseconds()});
  }
  return balance::SampleWeights::Create(std::move(rows));
}

std::vector<uint64_t> WeighedLengths(const v1::JobSpec& spec, v1::ParallelismSpec::Layout layout) {
  const bool weighs =
      spec.data().batching() == v1::DataSpec::SAMPLES || jobspec::IsByDocuments(layout);
  if (!weighs) return {};
  // Each costs a walk of the ring, and what its heads list.
  const uint32_t ranks = jobspec::RingRanks(spec.parallelism());
  const int most_lengths = ranks <= kManyRanks ? 16 : ranks <= 16 * kManyRanks ? 4 : 2;
  const double apart = ranks <= kManyRanks ? std::numbers::sqrt2 : 2;
  // Whatever the layout.
  const int64_t multiple =
      std::lcm(int64_t{ranks} * std::max(2 * spec.attention().tile(), spec.parallelism().stripe()),
               int64_t{spec.parallelism().context()});
  const auto longest = static_cast<int64_t>(spec.data().sequence_length());
  std::set<uint64_t> lengths;
  auto length = static_cast<double>(longest);
  for (int i = 0; i < most_lengths && length >= 1; ++i, length /= apart) {
    const int64_t whole = RoundUp(static_cast<int64_t>(length), multiple);
    lengths.insert(std::min(whole, longest));
  }
  return {lengths.begin(), lengths.end()};
}

}  // namespace ringleader::planner
