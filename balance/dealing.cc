#include "balance/dealing.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <numeric>
#include <set>
#include <tuple>
#include <utility>

#include "base/numbers/ceil_div.h"

namespace ringleader::balance {
namespace {

using Samples = std::vector<uint32_t>;

// The most pairs of samples that are compared, some milliseconds' work. Among more, longest-first
// leaves little to gain.
constexpr size_t kMostCompared = 4'000'000;

// The most micro-batches that are asked for room, the least loaded first, so that a sample costs no
// more in a group of many.
constexpr size_t kMostTried = 16;

// Deals samples to groups: the longest first to the group that ends first, then by moves and
// swaps while they shorten the slowest group.
class GroupDealer {
 public:
  GroupDealer(const std::vector<int64_t>& weights, const DealingRules& rules)
      : weights_(weights), rules_(rules), groups_(rules.groups), load_(rules.groups, 0) {}

  std::vector<Samples> Deal() {
    LongestFirst();
    // Each exchange shortens the slowest group or lowers the number of groups that are as slow.
    while (Improve()) {
    }
    return std::move(groups_);
  }

 private:
  void LongestFirst() {
    Samples order(weights_.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](uint32_t a, uint32_t b) { return weights_[a] > weights_[b]; });
    std::set<std::pair<int64_t, size_t>> open;  // time, group
    for (size_t g = 0; g < groups_.size(); ++g) open.emplace(0, g);
    for (const uint32_t sample : order) {
      const size_t least = open.begin()->second;
      open.erase(open.begin());
      groups_[least].push_back(sample);
      load_[least] += weights_[sample];
      open.emplace(Time(least, load_[least]), least);
    }
  }
  int64_t Time(size_t group, int64_t load) const {
    return rules_.group_permille.empty() ? load : load * 1000 / rules_.PermilleOf(group);
  }

  // Makes the move or swap that brings the slowest group and its partner lowest, if any does.
  bool Improve() {
    size_t slow = 0;
    for (size_t g = 1; g < groups_.size(); ++g) {
      if (Time(g, load_[g]) > Time(slow, load_[slow])) slow = g;
    }
    Samples& mine = groups_[slow];
    compared_ += mine.size() * weights_.size();
    if (compared_ > kMostCompared) return false;
    int64_t best_peak = Time(slow, load_[slow]);
    size_t best_group = slow, best_mine = 0, best_theirs = 0;  // theirs: its size for a move
    for (size_t g = 0; g < groups_.size(); ++g) {
      if (g == slow) continue;
      const Samples& theirs = groups_[g];
      for (size_t i = 0; i < mine.size(); ++i) {
        for (size_t k = 0; k <= theirs.size(); ++k) {
          if (k == theirs.size() && mine.size() == 1) continue;
          const int64_t delta = weights_[mine[i]] - (k == theirs.size() ? 0 : weights_[theirs[k]]);
          const int64_t peak = std::max(Time(slow, load_[slow] - delta), Time(g, load_[g] + delta));
          if (peak >= best_peak) continue;
          std::tie(best_peak, best_group, best_mine, best_theirs) = std::tuple(peak, g, i, k);
        }
      }
    }
    if (best_group == slow) return false;
    Exchange(slow, best_mine, best_group, best_theirs);
    return true;
  }

  void Exchange(size_t from, size_t i, size_t to, size_t k) {
    Samples &mine = groups_[from], &theirs = groups_[to];
    int64_t delta = weights_[mine[i]];
    if (k == theirs.size()) {
      theirs.push_back(mine[i]);
      mine.erase(mine.begin() + static_cast<std::ptrdiff_t>(i));
    } else {
      delta -= weights_[theirs[k]];
      std::swap(mine[i], theirs[k]);
    }
    load_[from] -= delta;
    load_[to] += delta;
  }

  const std::vector<int64_t>& weights_;
  const DealingRules& rules_;
  std::vector<Samples> groups_;
  std::vector<int64_t> load_;
  size_t compared_ = 0;
};

// Packs one group's samples into micro-batches.
class Packer {
 public:
  Packer(std::span<const uint64_t> tokens, const std::vector<int64_t>& weights,
         const DealingRules& rules)
      : tokens_(tokens), weights_(weights), rules_(rules) {}

  std::vector<MicroBatch> Pack(const Samples& samples, int64_t permille) const {
    std::vector<MicroBatch> batches =
        rules_.one_sample ? OneEach(samples) : Even(samples, Fewest(samples));
    for (MicroBatch& batch : batches) {
      std::sort(batch.samples.begin(), batch.samples.end());
      batch.padded = RoundUp(batch.tokens, rules_.multiple);
      batch.microseconds = batch.microseconds * 1000 / permille;
    }
    std::sort(batches.begin(), batches.end(), [](const MicroBatch& a, const MicroBatch& b) {
      return std::pair(-a.microseconds, a.samples[0]) < std::pair(-b.microseconds, b.samples[0]);
    });
    return batches;
  }

 private:
  void Add(uint32_t sample, MicroBatch* batch) const {
    batch->samples.push_back(sample);
    batch->tokens += static_cast<int64_t>(tokens_[sample]);
    batch->microseconds += weights_[sample];
  }
  bool HasRoom(const MicroBatch& batch, uint32_t sample) const {
    return batch.tokens + static_cast<int64_t>(tokens_[sample]) <= rules_.capacity;
  }
  // Sorts by `key`, the largest first.
  template <typename Key>
  static Samples Sorted(Samples samples, Key key) {
    std::sort(samples.begin(), samples.end(),
              [&](uint32_t a, uint32_t b) { return key(a) != key(b) ? key(a) > key(b) : a < b; });
    return samples;
  }

  std::vector<MicroBatch> OneEach(const Samples& samples) const {
    std::vector<MicroBatch> batches(samples.size());
    for (size_t i = 0; i < samples.size(); ++i) Add(samples[i], &batches[i]);
    return batches;
  }

  // Packs few micro-batches: the longest sample first, each where it leaves least room.
  std::vector<MicroBatch> Fewest(const Samples& samples) const {
    std::vector<MicroBatch> batches;
    std::set<std::pair<int64_t, size_t>> open;  // room, batch
    for (const uint32_t sample : Sorted(samples, [&](uint32_t s) { return tokens_[s]; })) {
      auto place = open.lower_bound({static_cast<int64_t>(tokens_[sample]), 0});
      size_t number = batches.size();
      if (place == open.end()) {
        batches.emplace_back();
      } else {
        number = place->second;
        open.erase(place);
      }
      Add(sample, &batches[number]);
      open.emplace(rules_.capacity - batches[number].tokens, number);
    }
    return batches;
  }

  // Packs as many, even by predicted time; where a sample then finds no room, returns `fewest`.
  std::vector<MicroBatch> Even(const Samples& samples, std::vector<MicroBatch> fewest) const {
    std::vector<MicroBatch> batches(fewest.size());
    std::set<std::pair<int64_t, size_t>> open;  // predicted time, batch
    for (size_t b = 0; b < batches.size(); ++b) open.emplace(0, b);
    for (const uint32_t sample : Sorted(samples, [&](uint32_t s) { return weights_[s]; })) {
      const auto tried =
          std::next(open.begin(), static_cast<std::ptrdiff_t>(std::min(kMostTried, open.size())));
      const auto place = std::find_if(open.begin(), tried, [&](const auto& entry) {
        return HasRoom(batches[entry.second], sample);
      });
      if (place == tried) return fewest;
      const size_t number = place->second;
      open.erase(place);
      Add(sample, &batches[number]);
      open.emplace(batches[number].microseconds, number);
    }
    return batches;
  }

  const std::span<const uint64_t> tokens_;
  const std::vector<int64_t>& weights_;
  const DealingRules& rules_;
};

std::vector<int64_t> WeightsOf(std::span<const uint64_t> tokens, const SampleWeights& weights) {
  std::vector<int64_t> microseconds;
  microseconds.reserve(tokens.size());
  for (const uint64_t length : tokens) microseconds.push_back(weights.Microseconds(length));
  return microseconds;
}

}  // namespace

DealingRules RulesForSamples(int groups, int64_t capacity, const ring::Division& division,
                             bool goes_by_distance) {
  return {.groups = groups,
          .capacity = capacity,
          .multiple = std::lcm(division.tile, division.Multiple()),
          // Blocks are chosen for a whole micro-batch, unless documents lie by themselves: a sample
          // that shares it with others would attend to something else wherever it is dealt with
          // others.
          .one_sample = !division.by_documents && !goes_by_distance};
}

size_t Dealing::MostMicroBatches() const {
  size_t most = 0;
  for (const auto& group : groups) most = std::max(most, group.size());
  return most;
}

size_t Dealing::MicroBatches() const {
  size_t sum = 0;
  for (const auto& group : groups) sum += group.size();
  return sum;
}

int64_t Dealing::PaddingTokens() const {
  int64_t sum = 0;
  for (const auto& group : groups) {
    for (const MicroBatch& batch : group) sum += batch.padded - batch.tokens;
  }
  return sum;
}

double Dealing::Imbalance() const {
  int64_t most = 0, sum = 0;
  for (const auto& group : groups) {
    int64_t load = 0;
    for (const MicroBatch& batch : group) load += batch.microseconds;
    most = std::max(most, load);
    sum += load;
  }
  return sum == 0 ? 1
                  : static_cast<double>(most) * static_cast<double>(groups.size()) /
                        static_cast<double>(sum);
}

Dealing Deal(std::span<const uint64_t> tokens, const SampleWeights& weights,
             const DealingRules& rules) {
  const std::vector<int64_t> microseconds = WeightsOf(tokens, weights);
  const Packer packer(tokens, microseconds, rules);
  Dealing dealing;
  for (const Samples& samples : GroupDealer(microseconds, rules).Deal()) {
    dealing.groups.push_back(packer.Pack(samples, rules.PermilleOf(dealing.groups.size())));
  }
  return dealing;
}

Dealing DealInOrder(std::span<const uint64_t> tokens, const SampleWeights& weights,
                    const DealingRules& rules) {
  const std::vector<int64_t> microseconds = WeightsOf(tokens, weights);
  Dealing dealing;
  dealing.groups.resize(rules.groups);
  for (size_t i = 0; i < tokens.size(); ++i) {
    const auto length = static_cast<int64_t>(tokens[i]);
    dealing.groups[i % rules.groups].push_back(
        {.samples = {static_cast<uint32_t>(i)},
         .tokens = length,
         .padded = RoundUp(length, rules.multiple),
         .microseconds = microseconds[i] * 1000 / rules.PermilleOf(i % rules.groups)});
  }
  return dealing;
}

}  // namespace ringleader::balance
