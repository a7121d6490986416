#include "coordinator/planner/deal/micro_batches.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <tuple>

#include "absl/strings/str_format.h"
#include "jobspec/jobspec.h"

namespace ringleader::planner {
namespace {

// Gains below this share of the slowest group are rounding.
constexpr double kWorthwhile = 1e-9;
// Pairs of sequences that are compared: a second's work. What longest-first leaves to gain among so
// many is little.
constexpr size_t kMostCompared = 500'000'000;

class Dealer {
 public:
  Dealer(const std::vector<double>& seconds, int groups, GroupSizes sizes)
      : seconds_(seconds),
        moves_(sizes == GroupSizes::kAny),
        most_(moves_ ? seconds.size() : seconds.size() / groups),
        groups_(groups),
        load_(groups, 0.0) {}

  void LongestFirst() {
    std::vector<uint32_t> order(seconds_.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](uint32_t a, uint32_t b) { return seconds_[a] > seconds_[b]; });
    // Least loaded; among equals the one with fewest sequences, so that none stays empty.
    std::set<std::tuple<double, size_t, int>> open;  // load, sequences, group
    for (int g = 0; g < static_cast<int>(load_.size()); ++g) open.emplace(0.0, 0, g);
    for (const uint32_t sequence : order) {
      const int best = std::get<int>(*open.begin());
      open.erase(open.begin());
      groups_[best].push_back(sequence);
      load_[best] += seconds_[sequence];
      if (groups_[best].size() < most_) open.emplace(load_[best], groups_[best].size(), best);
    }
  }

  // One move or swap that brings the slowest group and its partner below the slowest's seconds.
  bool Improve() {
    const int slow = Slowest();
    compared_ += groups_[slow].size() * seconds_.size();
    if (compared_ > kMostCompared) return false;
    double best_peak = load_[slow] * (1 - kWorthwhile);
    int best_group = -1, best_mine = -1, best_theirs = -1;
    for (int g = 0; g < static_cast<int>(load_.size()); ++g) {
      if (g == slow) continue;
      for (int i = 0; i < static_cast<int>(groups_[slow].size()); ++i) {
        // theirs == -1: a move.
        const int first = moves_ && groups_[slow].size() > 1 ? -1 : 0;
        for (int k = first; k < static_cast<int>(groups_[g].size()); ++k) {
          const double delta = seconds_[groups_[slow][i]] - (k < 0 ? 0.0 : seconds_[groups_[g][k]]);
          const double peak = std::max(load_[slow] - delta, load_[g] + delta);
          if (peak >= best_peak) continue;
          best_peak = peak;
          best_group = g;
          best_mine = i;
          best_theirs = k;
        }
      }
    }
    if (best_group < 0) return false;
    Exchange(slow, best_group, best_mine, best_theirs);
    return true;
  }

  Assignment Finish() {
    for (auto& group : groups_) std::sort(group.begin(), group.end());
    return {.groups = groups_, .slowest_seconds = load_[Slowest()]};
  }

 private:
  int Slowest() const {
    return static_cast<int>(std::max_element(load_.begin(), load_.end()) - load_.begin());
  }

  void Exchange(int from, int to, int mine, int theirs) {
    const uint32_t given = groups_[from][mine];
    if (theirs < 0) {
      groups_[from].erase(groups_[from].begin() + mine);
      groups_[to].push_back(given);
    } else {
      std::swap(groups_[from][mine], groups_[to][theirs]);
    }
    for (const int g : {from, to}) {
      load_[g] = 0;
      for (const uint32_t sequence : groups_[g]) load_[g] += seconds_[sequence];
    }
  }

  const std::vector<double>& seconds_;
  const bool moves_;   // from one group to another, for nothing in return
  const size_t most_;  // sequences a group
  std::vector<std::vector<uint32_t>> groups_;
  std::vector<double> load_;
  size_t compared_ = 0;
};

}  // namespace

Assignment AssignMicroBatches(const std::vector<double>& seconds, int groups, GroupSizes sizes) {
  Dealer dealer(seconds, groups, sizes);
  dealer.LongestFirst();
  // Each exchange lowers the slowest group or the number of groups that are as slow; the bound only
  // guards against rounding.
  for (size_t i = 0; i < 4 * seconds.size() + 16 && dealer.Improve(); ++i) {
  }
  return dealer.Finish();
}

absl::StatusOr<std::vector<std::vector<uint64_t>>> LengthsOfGroups(const v1::JobSpec& spec,
                                                                   const v1::StepPlan& plan) {
  const std::vector<uint64_t> all = jobspec::SequenceLengths(spec);
  std::vector<std::vector<uint64_t>> groups(spec.parallelism().data());
  if (plan.micro_batches().empty()) {
    for (size_t i = 0; i < all.size(); ++i) groups[i % groups.size()].push_back(all[i]);
    return groups;
  }
  for (const v1::MicroBatchAssignment& assignment : plan.micro_batches()) {
    if (assignment.group() >= groups.size()) {
      return absl::InvalidArgumentError(
          absl::StrFormat("plan %d names group %d of %d (parallelism.data)", plan.version(),
                          assignment.group(), groups.size()));
    }
    for (const uint32_t sequence : assignment.sequences()) {
      if (sequence >= all.size()) {
        return absl::InvalidArgumentError(absl::StrFormat(
            "plan %d gives group %d sequence %d of a step, which has %d (training.global_batch)",
            plan.version(), assignment.group(), sequence, all.size()));
      }
      groups[assignment.group()].push_back(all[sequence]);
    }
  }
  return groups;
}

}  // namespace ringleader::planner
