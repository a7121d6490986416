#include "coordinator/planner/live/slow_ranks.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace ringleader::planner {
namespace {

constexpr double kLonger = 1.1;      // than the median
constexpr double kMostRatio = 10.0;  // one that hangs now and then has some share, too
// Of 50 steps: one that came to a halt for something else does not acquit a slow rank.
constexpr int kNearlyAll = 45, kHardlyAny = 5;
constexpr double kNewest = 0.08;  // of a moving average: about the last 25 steps

// Where two ranks stand in the middle, the faster one counts.
double Median(std::vector<double> paces) {
  const auto middle = paces.begin() + static_cast<std::ptrdiff_t>((paces.size() - 1) / 2);
  std::nth_element(paces.begin(), middle, paces.end());
  return *middle;
}

}  // namespace

void SlowRanks::Observe(const v1::StepReport& report) {
  const std::vector<double> paces(report.rank_paces().begin(), report.rank_paces().end());
  // A rank that says nothing of its pace has an earlier release, or had no sample; a pace too many
  // would be taken for another rank's.
  if (paces.size() < 2 || paces.size() != world_size_ ||
      std::ranges::any_of(paces, [](double pace) { return !(pace > 0); })) {
    return;
  }
  constexpr uint64_t kWindow = (uint64_t{1} << kSteps) - 1;
  steps_ = std::min(steps_ + 1, kSteps);
  ranks_.resize(paces.size());
  const double median = Median(paces);
  for (size_t i = 0; i < paces.size(); ++i) {
    Rank& rank = ranks_[i];
    const double ratio = std::min(paces[i] / median, kMostRatio);
    if (ratio > kLonger) rank.ratio += kNewest * (ratio - rank.ratio);
    rank.window = (rank.window << 1 | (ratio > kLonger ? 1 : 0)) & kWindow;
    const int slow_steps = std::popcount(rank.window);
    if (rank.slow_at == 0 && slow_steps >= kNearlyAll) rank.slow_at = report.step();
    if (slow_steps <= kHardlyAny) rank.slow_at = 0;
  }
}

std::vector<v1::SlowRank> SlowRanks::List() const {
  std::vector<v1::SlowRank> list;
  for (size_t i = 0; i < ranks_.size(); ++i) {
    if (ranks_[i].slow_at == 0) continue;
    v1::SlowRank& slow = list.emplace_back();
    slow.set_rank(static_cast<uint32_t>(i));
    slow.set_ratio(ranks_[i].ratio);
    slow.set_step(ranks_[i].slow_at);
  }
  return list;
}

std::vector<uint32_t> SlowRanks::GroupPermille(size_t groups) const {
  const size_t context = groups > 0 ? ranks_.size() / groups : 0;
  if (context == 0 || context * groups != ranks_.size()) return {};
  std::vector<uint32_t> permille(groups, 1000);
  for (const v1::SlowRank& slow : List()) {
    uint32_t& group = permille.at(slow.rank() / context);
    group = std::min(group, static_cast<uint32_t>(std::lround(1000 / std::max(1.0, slow.ratio()))));
  }
  const bool alike = std::ranges::all_of(permille, [](uint32_t speed) { return speed == 1000; });
  return alike ? std::vector<uint32_t>() : permille;
}

}  // namespace ringleader::planner
