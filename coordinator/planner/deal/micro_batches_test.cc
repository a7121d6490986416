#include "coordinator/planner/deal/micro_batches.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

namespace ringleader::planner {
namespace {

double Optimum(const std::vector<double>& seconds, int groups, GroupSizes sizes) {
  double best = std::numeric_limits<double>::infinity();
  const int64_t cases = std::llround(std::pow(groups, seconds.size()));
  for (int64_t code = 0; code < cases; ++code) {
    std::vector<double> load(groups, 0.0);
    std::vector<size_t> count(groups, 0);
    int64_t rest = code;
    for (const double s : seconds) {
      load[rest % groups] += s;
      ++count[rest % groups];
      rest /= groups;
    }
    if (sizes == GroupSizes::kSame && *std::ranges::max_element(count) * groups > seconds.size()) {
      continue;
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
    const bool same = trial % 2 == 0;
    if (same) seconds.resize(groups * (1 + seconds.size() / groups), 0.5);
    const Assignment assignment =
        AssignMicroBatches(seconds, groups, same ? GroupSizes::kSame : GroupSizes::kAny);
    std::vector<uint32_t> all;
    double slowest = 0;
    for (const auto& group : assignment.groups) {
      double load = 0;
      for (const uint32_t i : group) load += seconds[i];
      slowest = std::max(slowest, load);
      all.insert(all.end(), group.begin(), group.end());
      EXPECT_TRUE(!group.empty() || seconds.size() < size_t(groups));
      EXPECT_TRUE(!same || group.size() * groups == seconds.size());
    }
    std::sort(all.begin(), all.end());
    for (size_t i = 0; i < seconds.size(); ++i) EXPECT_EQ(all[i], i);
    EXPECT_EQ(all.size(), seconds.size());
    EXPECT_NEAR(assignment.slowest_seconds, slowest, 1e-9);
  }
}

class MicroBatchesOptimumTest : public ::testing::TestWithParam<GroupSizes> {};

TEST_P(MicroBatchesOptimumTest, IsCloseOnSmallCases) {
  const bool same = GetParam() == GroupSizes::kSame;
  std::mt19937 random(5);
  double worst = 0, sum = 0;
  constexpr int kTrials = 200;
  for (int trial = 0; trial < kTrials; ++trial) {
    std::vector<double> seconds(4 + random() % 5);
    // Quadratic in length, as attention is: a long tail.
    for (double& s : seconds) s = std::pow(1.0 + random() % 16, 2);
    const int groups = 2 + random() % 2;
    if (same) seconds.resize(seconds.size() / groups * groups);
    const double ratio = AssignMicroBatches(seconds, groups, GetParam()).slowest_seconds /
                         Optimum(seconds, groups, GetParam());
    worst = std::max(worst, ratio);
    sum += ratio;
  }
  EXPECT_LE(worst, 1.12);
  EXPECT_LE(sum / kTrials, 1.01);
}

INSTANTIATE_TEST_SUITE_P(Sizes, MicroBatchesOptimumTest,
                         ::testing::Values(GroupSizes::kAny, GroupSizes::kSame),
                         [](const ::testing::TestParamInfo<GroupSizes>& info) {
                           return info.param == GroupSizes::kSame ? "Same" : "Any";
                         });

TEST(MicroBatchesTest, SwapsImproveOnLongestFirst) {
  // Longest first gives {5, 3, 3} and {4, 4}: 11. A swap finds 4 + 3 + 3 and 5 + 4.
  EXPECT_DOUBLE_EQ(AssignMicroBatches({5, 4, 4, 3, 3}, 2, GroupSizes::kAny).slowest_seconds, 10);
}

// A job file has room for so many sequences: what is compared is bounded, and little is left.
TEST(MicroBatchesTest, AreDealtHoweverManyThereAre) {
  std::mt19937 random(5);
  std::vector<double> seconds(300'000);
  double sum = 0;
  for (double& one : seconds) sum += one = 1 + random() % 1000;
  for (const int groups : {2, 1000}) {
    const Assignment dealt = AssignMicroBatches(seconds, groups, GroupSizes::kAny);
    EXPECT_LT(dealt.slowest_seconds, 1.001 * sum / groups);
  }
}

TEST(MicroBatchesTest, SequencesBeyondTheGlobalBatchAreRefused) {
  v1::JobSpec spec;
  spec.mutable_training()->set_global_batch(2);
  spec.mutable_parallelism()->set_data(2);
  spec.mutable_data()->add_sequence_lengths(4096);
  spec.mutable_data()->add_sequence_lengths(1024);
  v1::StepPlan plan;
  plan.set_version(3);
  v1::MicroBatchAssignment* const group = plan.add_micro_batches();
  group->set_group(1);
  group->add_sequences(1);
  EXPECT_EQ(LengthsOfGroups(spec, plan)->at(1), std::vector<uint64_t>{1024});
  group->add_sequences(2);
  EXPECT_EQ(LengthsOfGroups(spec, plan).status().message(),
            "plan 3 gives group 1 sequence 2 of a step, which has 2 (training.global_batch)");
}

}  // namespace
}  // namespace ringleader::planner
