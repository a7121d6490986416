#include "coordinator/planner/micro_batches.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

namespace ringleader::planner {
namespace {

double Optimum(const std::vector<double>& seconds, int groups) {
  double best = std::numeric_limits<double>::infinity();
  const int64_t cases = std::llround(std::pow(groups, seconds.size()));
  for (int64_t code = 0; code < cases; ++code) {
    std::vector<double> load(groups, 0.0);
    int64_t rest = code;
    for (const double s : seconds) {
      load[rest % groups] += s;
      rest /= groups;
    }
    best = std::min(best, *std::max_element(load.begin(), load.end()));
  }
  return best;
}

TEST(MicroBatchesTest, EverySequenceIsDealtOnce) {
  std::mt19937 random(3);
  for (int trial = 0; trial < 100; ++trial) {
    std::vector<double> seconds(1 + random() % 40);
    for (double& s : seconds) s = 0.1 + random() % 100;
    const int groups = 1 + random() % 8;
    const Assignment assignment = AssignMicroBatches(seconds, groups);
    std::vector<uint32_t> all;
    double slowest = 0;
    for (const auto& group : assignment.groups) {
      double load = 0;
      for (const uint32_t i : group) load += seconds[i];
      slowest = std::max(slowest, load);
      all.insert(all.end(), group.begin(), group.end());
      EXPECT_TRUE(!group.empty() || seconds.size() < size_t(groups));
    }
    std::sort(all.begin(), all.end());
    for (size_t i = 0; i < seconds.size(); ++i) EXPECT_EQ(all[i], i);
    EXPECT_EQ(all.size(), seconds.size());
    EXPECT_NEAR(assignment.slowest_seconds, slowest, 1e-9);
  }
}

TEST(MicroBatchesTest, IsCloseToTheOptimumOnSmallCases) {
  std::mt19937 random(5);
  double worst = 0, sum = 0;
  constexpr int kTrials = 200;
  for (int trial = 0; trial < kTrials; ++trial) {
    std::vector<double> seconds(4 + random() % 5);
    // Quadratic in length, as attention is: a long tail.
    for (double& s : seconds) s = std::pow(1.0 + random() % 16, 2);
    const int groups = 2 + random() % 2;
    const double ratio =
        AssignMicroBatches(seconds, groups).slowest_seconds / Optimum(seconds, groups);
    worst = std::max(worst, ratio);
    sum += ratio;
  }
  EXPECT_LE(worst, 1.12);
  EXPECT_LE(sum / kTrials, 1.01);
}

TEST(MicroBatchesTest, SwapsImproveOnLongestFirst) {
  // Longest first gives {5, 3, 3} and {4, 4}: 11. A swap finds 4 + 3 + 3 and 5 + 4.
  EXPECT_DOUBLE_EQ(AssignMicroBatches({5, 4, 4, 3, 3}, 2).slowest_seconds, 10);
}

}  // namespace
}  // namespace ringleader::planner
