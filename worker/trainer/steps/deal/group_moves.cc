#include "worker/trainer/steps/deal/group_moves.h"

#include <algorithm>
#include <numeric>

namespace ringleader::trainer {
namespace {

// The slowest over the mean.
double ApartBy(const std::vector<int64_t>& all) {
  const auto sum = static_cast<double>(std::accumulate(all.begin(), all.end(), int64_t{0}));
  const auto most = static_cast<double>(*std::max_element(all.begin(), all.end()));
  return most * static_cast<double>(all.size()) / sum;
}

}  // namespace

double WorthMoving(patterns::Pattern pattern) {
  // What weights predict is off by some percent; to choose again takes up to 3 % of a step, and
  // groups that were closer than 1.2 lost by it (docs/balance.md). In a ring the choice is made
  // again in any case, or never.
  const bool is_free = patterns::DefinitionOf(pattern).balancing == patterns::Balancing::kAtOnce;
  return is_free ? 1.05 : 1.2;
}

std::vector<float> GroupMoves(const balance::Dealing& dealing, std::span<const uint64_t> tokens,
                              const balance::SampleWeights& weights, size_t group, int64_t permille,
                              kernels::Anchor anchor, double worth_moving, bool once) {
  const std::vector<balance::MicroBatch>& mine = dealing.groups[group];
  const auto attention_of = [&](const balance::MicroBatch& batch) {
    int64_t sum = 0;
    for (const uint32_t sample : batch.samples)
      sum += weights.AttentionMicroseconds(tokens[sample]);
    return sum * 1000 / permille;
  };
  // Returns the factor of attention that brings `own` microseconds to the anchor of `all`.
  const auto move_of = [&](const std::vector<int64_t>& all, int64_t own, int64_t attention) {
    if (attention <= 0 || ApartBy(all) < worth_moving) return 1.0f;
    const double wanted = kernels::AnchorOf(anchor, all.data(), static_cast<int32_t>(all.size()));
    return kernels::BoundedMove(1.0 + (wanted - static_cast<double>(own)) /
                                          static_cast<double>(attention));
  };
  std::vector<float> moves;
  if (once) {
    std::vector<int64_t> all;
    int64_t attention = 0;
    for (const auto& batches : dealing.groups) {
      int64_t& sum = all.emplace_back(0);
      for (const balance::MicroBatch& batch : batches) sum += batch.microseconds;
    }
    for (const balance::MicroBatch& batch : mine) attention += attention_of(batch);
    moves.assign(mine.size(), move_of(all, all[group], attention));
    return moves;
  }
  for (size_t i = 0; i < mine.size(); ++i) {
    std::vector<int64_t> all;
    for (const auto& batches : dealing.groups) {
      if (i < batches.size()) all.push_back(batches[i].microseconds);
    }
    moves.push_back(move_of(all, mine[i].microseconds, attention_of(mine[i])));
  }
  return moves;
}

}  // namespace ringleader::trainer
