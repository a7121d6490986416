#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "worker/optim/decay_ranges.h"
#include "worker/optim/schedule.h"

namespace ringleader::optim {
namespace {

using ::testing::ElementsAre;

TEST(DecayRangesTest, CoverEveryShardWithAlignedCuts) {
  model::ModelConfig config;
  config.vocab_size = 61;
  config.hidden_size = 33;  // rows that end off the alignment
  config.intermediate_size = 40;
  config.layers = 2;
  config.heads = 4;
  config.kv_heads = 2;
  config.head_dim = 8;
  config.qkv_bias = true;
  const model::ParameterLayout layout = model::MakeParameterLayout(config);
  for (const int ranks : {1, 3, 7}) {
    const int64_t shard = layout.ShardElements(ranks);
    std::vector<bool> decayed(layout.PaddedElements(ranks));
    for (int rank = 0; rank < ranks; ++rank) {
      int64_t at = rank * shard;
      for (const DecayRange& range : CutByDecay(layout, at, at + shard)) {
        EXPECT_EQ(range.begin, at);
        EXPECT_EQ(range.begin % model::ParameterLayout::kAlignment, 0);
        std::fill(decayed.begin() + range.begin, decayed.begin() + range.end, range.decayed);
        at = range.end;
      }
      EXPECT_EQ(at, (rank + 1) * shard);
    }
    for (const model::ParameterSlot& slot : layout.slots) {
      for (int64_t i = slot.offset; i < slot.offset + slot.elements; ++i) {
        ASSERT_EQ(decayed[i], slot.is_matrix()) << slot.name << ", " << ranks << " ranks";
      }
    }
  }
}

TEST(ScheduleTest, WarmsUpThenDecays) {
  using Decay = LearningRateSchedule::Decay;
  LearningRateSchedule schedule{
      .decay = Decay::kCosine, .peak = 1.0, .minimum = 0.1, .warmup_steps = 4, .total_steps = 15};
  EXPECT_DOUBLE_EQ(schedule.At(0), 0.25);
  EXPECT_DOUBLE_EQ(schedule.At(3), 1.0);
  EXPECT_DOUBLE_EQ(schedule.At(4), 1.0);
  EXPECT_DOUBLE_EQ(schedule.At(9), 0.55);
  EXPECT_DOUBLE_EQ(schedule.At(14), 0.1);
  EXPECT_DOUBLE_EQ(schedule.At(100), 0.1);

  schedule.decay = Decay::kLinear;
  EXPECT_DOUBLE_EQ(schedule.At(9), 0.55);
  EXPECT_DOUBLE_EQ(schedule.At(14), 0.1);
  EXPECT_GT(schedule.At(5), schedule.At(6));

  schedule.decay = Decay::kConstant;
  EXPECT_DOUBLE_EQ(schedule.At(0), 0.25);
  EXPECT_DOUBLE_EQ(schedule.At(14), 1.0);
}

TEST(ScheduleTest, EndsWithoutASlope) {
  LearningRateSchedule schedule{.decay = LearningRateSchedule::Decay::kLinear,
                                .peak = 1.0,
                                .warmup_steps = 3,
                                .total_steps = 4};
  EXPECT_DOUBLE_EQ(schedule.At(3), 1.0);
  schedule = {.decay = LearningRateSchedule::Decay::kCosine, .peak = 1.0, .total_steps = 1};
  EXPECT_DOUBLE_EQ(schedule.At(0), 1.0);
}

std::vector<double> Rates(const LearningRateSchedule& schedule, int64_t steps) {
  std::vector<double> rates;
  for (int64_t step = 0; step < steps; ++step) rates.push_back(schedule.At(step));
  return rates;
}

TEST(ScheduleTest, EachStepHasItsOwnRate) {
  using Decay = LearningRateSchedule::Decay;
  LearningRateSchedule schedule{.decay = Decay::kLinear, .peak = 1.0, .total_steps = 5};
  EXPECT_THAT(Rates(schedule, 7), ElementsAre(1, 0.75, 0.5, 0.25, 0, 0, 0));
  schedule = {.decay = Decay::kLinear, .peak = 1.0, .warmup_steps = 2, .total_steps = 7};
  EXPECT_THAT(Rates(schedule, 7), ElementsAre(0.5, 1, 1, 0.75, 0.5, 0.25, 0));
  schedule.decay = Decay::kCosine;
  EXPECT_NEAR(schedule.At(3), 0.5 + 0.5 * std::sqrt(0.5), 1e-12);
  EXPECT_NEAR(schedule.At(5), 0.5 - 0.5 * std::sqrt(0.5), 1e-12);
  schedule.minimum = 0.5;
  EXPECT_NEAR(schedule.At(4), 0.75, 1e-12);
}

TEST(ScheduleTest, AWarmUpMayBeAsLongAsTrainingOrLonger) {
  for (const auto decay :
       {LearningRateSchedule::Decay::kConstant, LearningRateSchedule::Decay::kCosine,
        LearningRateSchedule::Decay::kLinear}) {
    LearningRateSchedule schedule{
        .decay = decay, .peak = 1.0, .minimum = 0.1, .warmup_steps = 4, .total_steps = 4};
    EXPECT_THAT(Rates(schedule, 4), ElementsAre(0.25, 0.5, 0.75, 1));
    EXPECT_EQ(schedule.At(4), 1) << "past the end the last value stays";
    schedule.warmup_steps = 8;
    EXPECT_THAT(Rates(schedule, 4), ElementsAre(0.125, 0.25, 0.375, 0.5));
  }
}

}  // namespace
}  // namespace ringleader::optim
