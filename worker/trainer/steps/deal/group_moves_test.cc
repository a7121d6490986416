#include "worker/trainer/steps/deal/group_moves.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ringleader::trainer {
namespace {

using kernels::Anchor;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::FloatNear;

class GroupMovesTest : public ::testing::Test {
 protected:
  // Samples of 100 tokens take 1 ms, of 400 tokens 8 ms; of these half and three quarters are
  // attention's. One group has both of the long ones.
  GroupMovesTest() : weights_(*balance::SampleWeights::Create({{100, 1, 0.5}, {400, 8, 6}})) {
    Add(0, {0});
    Add(0, {1});
    Add(1, {2});
    Add(1, {3});
    Add(1, {4});
  }
  void Add(size_t group, std::vector<uint32_t> samples) {
    dealing_.groups.resize(2);
    balance::MicroBatch& batch = dealing_.groups[group].emplace_back();
    batch.samples = std::move(samples);
    for (const uint32_t sample : batch.samples) {
      batch.microseconds += weights_.Microseconds(tokens_[sample]);
    }
  }
  std::vector<float> Moves(size_t group, Anchor anchor, bool once, int64_t permille = 1000) const {
    return GroupMoves(dealing_, tokens_, weights_, group, permille, anchor, worth_moving_, once);
  }

  const std::vector<uint64_t> tokens_ = {400, 400, 400, 100, 100};
  balance::SampleWeights weights_;
  balance::Dealing dealing_;
  double worth_moving_ = 1.2;
};

TEST_F(GroupMovesTest, GroupsThatMeetOnceAStepHaveOneAnchor) {
  // 16 ms, 12 of them attention's, against 10 ms, 7 of them.
  EXPECT_THAT(Moves(0, Anchor::kMean, true), ElementsAre(0.75f, 0.75f));
  EXPECT_THAT(Moves(1, Anchor::kMean, true), Each(FloatNear(1 + 3.0f / 7, 1e-6f)));
  EXPECT_THAT(Moves(0, Anchor::kMin, true), Each(0.5f));
  EXPECT_THAT(Moves(1, Anchor::kMin, true), Each(1.0f));
  EXPECT_THAT(Moves(0, Anchor::kMax, true), Each(1.0f));
  EXPECT_THAT(Moves(1, Anchor::kMax, true), Each(kernels::kMostMove)) << "1.86, bounded";
}

TEST_F(GroupMovesTest, AttentionOfASlowGroupTakesLonger) {
  for (balance::MicroBatch& batch : dealing_.groups[0]) batch.microseconds *= 2;
  // 32 ms at half the speed, 24 of them attention's, against 10 ms.
  EXPECT_THAT(Moves(0, Anchor::kMean, true, 500), Each(FloatNear(1 - 11.0f / 24, 1e-6f)));
}

TEST_F(GroupMovesTest, GroupsThatMeetInEachMicroBatchHaveOneForEach) {
  EXPECT_THAT(Moves(0, Anchor::kMean, false), ElementsAre(1.0f, kernels::kLeastMove))
      << "8 and 8 ms; 8 and 1, which asks for 0.42";
  EXPECT_THAT(Moves(1, Anchor::kMean, false), ElementsAre(1.0f, kernels::kMostMove, 1.0f))
      << "nobody waits for the last";
}

// To choose again would cost more than there is to gain.
TEST_F(GroupMovesTest, GroupsThatAreNearlyAlikeAreLeftAlone) {
  dealing_.groups[0][0].microseconds = dealing_.groups[0][1].microseconds = 5900;
  EXPECT_THAT(Moves(0, Anchor::kMean, true), Each(1.0f)) << "11.8 and 10 ms";
  EXPECT_THAT(Moves(1, Anchor::kMax, true), Each(1.0f));
  dealing_.groups[0][0].microseconds = 9200;
  EXPECT_THAT(Moves(0, Anchor::kMean, true), Each(FloatNear(1 - 2.55f / 12, 1e-6f)))
      << "15.1 and 10 ms";
  worth_moving_ = 1.3;
  EXPECT_THAT(Moves(0, Anchor::kMean, true), Each(1.0f));
}

// A choice that is moved as it is made costs nothing.
TEST(WorthMovingTest, CheapMovesNeedLess) {
  EXPECT_EQ(WorthMoving(patterns::Pattern::kXAttention), 1.05);
  EXPECT_EQ(WorthMoving(patterns::Pattern::kKeyGroups), 1.05);
  EXPECT_EQ(WorthMoving(patterns::Pattern::kVerticalSlash), 1.2);
  EXPECT_EQ(WorthMoving(patterns::Pattern::kMoba), 1.2);
}

TEST_F(GroupMovesTest, WithoutWordOfAttentionNothingMoves) {
  weights_ = *balance::SampleWeights::Create({{100, 1}, {400, 8}});
  EXPECT_THAT(Moves(0, Anchor::kMean, true), Each(1.0f));
  EXPECT_THAT(Moves(1, Anchor::kMean, false), Each(1.0f));
}

}  // namespace
}  // namespace ringleader::trainer
