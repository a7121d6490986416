#include "coordinator/planner/live/slow_ranks.h"

#include <gtest/gtest.h>

namespace ringleader::planner {
namespace {

// `steps` steps in which rank i took paces[i] microseconds a token.
void Observe(SlowRanks* ranks, const std::vector<float>& paces, int steps, uint64_t* step) {
  for (int i = 0; i < steps; ++i) {
    v1::StepReport report;
    report.set_step(++*step);
    report.mutable_rank_paces()->Add(paces.begin(), paces.end());
    ranks->Observe(report);
  }
}

TEST(SlowRanksTest, ARankIsSlowAfterFiftyStepsAndUntilItIsNot) {
  SlowRanks ranks(4);
  uint64_t step = 0;
  Observe(&ranks, {10, 10.5, 10.2, 10}, 200, &step);
  EXPECT_TRUE(ranks.List().empty());
  Observe(&ranks, {10, 10.5, 13, 10}, 40, &step);
  EXPECT_TRUE(ranks.List().empty());
  Observe(&ranks, {10, 10.5, 13, 10}, 10, &step);
  ASSERT_EQ(ranks.List().size(), 1u);
  EXPECT_EQ(ranks.List()[0].rank(), 2u);
  EXPECT_GT(ranks.List()[0].step(), 240u);
  EXPECT_NEAR(ranks.List()[0].ratio(), 1.3, 0.02);
  // Two groups of two: the second has the slow rank.
  EXPECT_EQ(ranks.GroupPermille(2).at(0), 1000u);
  EXPECT_NEAR(ranks.GroupPermille(2).at(1), 1000 / 1.3, 15);
  // One halt says nothing; to be as quick as others for long does.
  Observe(&ranks, {10, 10.5, 10, 10}, 1, &step);
  EXPECT_EQ(ranks.List().size(), 1u);
  Observe(&ranks, {10, 10.5, 10, 10}, 50, &step);
  EXPECT_TRUE(ranks.List().empty());
  EXPECT_TRUE(ranks.GroupPermille(2).empty());
}

TEST(SlowRanksTest, ALateRankNowAndThenIsNotSlow) {
  SlowRanks ranks(2);
  uint64_t step = 0;
  for (int i = 0; i < 200; ++i) Observe(&ranks, {10, i % 2 == 0 ? 20.0f : 10.0f}, 1, &step);
  EXPECT_TRUE(ranks.List().empty());
}

TEST(SlowRanksTest, RanksThatSayNothingAreNotCompared) {
  SlowRanks ranks(2);
  uint64_t step = 0;
  Observe(&ranks, {10, 0}, 100, &step);
  Observe(&ranks, {}, 100, &step);
  Observe(&ranks, {10}, 100, &step);
  EXPECT_TRUE(ranks.List().empty());
  EXPECT_TRUE(ranks.GroupPermille(2).empty());
}

TEST(SlowRanksTest, PacesOfMoreOrFewerRanksThanThereAreAreNoRanks) {
  SlowRanks ranks(4);
  uint64_t step = 0;
  Observe(&ranks, {10, 10, 10, 13, 10}, 100, &step);
  Observe(&ranks, {10, 10, 13}, 100, &step);
  EXPECT_TRUE(ranks.List().empty());
  EXPECT_FALSE(ranks.know());
}

}  // namespace
}  // namespace ringleader::planner
