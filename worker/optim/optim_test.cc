#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "worker/comm/testing/local_communicator.h"
#include "worker/optim/adamw.h"
#include "worker/optim/decay_ranges.h"
#include "worker/optim/schedule.h"

namespace ringleader::optim {
namespace {

using comm::Communicator;
using comm::testing::RunRanks;
using testing::Each;
using testing::ElementsAreArray;
using testing::HasSubstr;

// A matrix of 5 x 7 and a norm of 9, with the gaps that alignment leaves.
model::ParameterLayout Layout() {
  return {.slots = {{.name = "matrix", .shape = {5, 7}, .offset = 0, .elements = 35},
                    {.name = "norm", .shape = {9}, .offset = 48, .elements = 9}},
          .elements = 64};
}

std::vector<float> Random(int64_t padded, uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(padded, 0.0f);
  for (const model::ParameterSlot& slot : Layout().slots) {
    for (int64_t i = 0; i < slot.elements; ++i) values[slot.offset + i] = normal(generator);
  }
  return values;
}

struct Outcome {
  std::vector<float> parameters;  // [layout.elements], rank 0's
  std::vector<OptimizerStep> steps;
};

// `steps` updates on `ranks` ranks; the gradient of each step is split into as many contributions.
Outcome Train(int ranks, int steps, const AdamWOptions& options) {
  Outcome run;
  RunRanks(ranks, [&](Communicator& comm) {
    const model::ParameterLayout layout = Layout();
    std::vector<float> parameters = Random(layout.PaddedElements(ranks), 1);
    AdamW adamw(options, layout, comm, parameters.data());
    for (int step = 0; step < steps; ++step) {
      std::vector<float> gradients = Random(layout.PaddedElements(ranks), 100 + step);
      for (float& g : gradients) g /= static_cast<float>(ranks);
      const auto result = adamw.Step(0.01, gradients.data(), parameters.data());
      if (!result.ok()) throw std::runtime_error(std::string(result.status().message()));
      if (comm.rank() == 0) run.steps.push_back(*result);
    }
    parameters.resize(layout.elements);
    if (comm.rank() == 0) run.parameters = parameters;
  });
  return run;
}

// The paper's algorithm 2, in fp64 and on one rank.
std::vector<double> Reference(int steps, const AdamWOptions& o) {
  const model::ParameterLayout layout = Layout();
  const std::vector<float> start = Random(layout.elements, 1);
  std::vector<double> p(start.begin(), start.end()), m(p.size()), v(p.size());
  for (int step = 0; step < steps; ++step) {
    const std::vector<float> g = Random(layout.elements, 100 + step);
    double norm = 0.0;
    for (const float x : g) norm += static_cast<double>(x) * x;
    norm = std::sqrt(norm);
    const double scale = o.clip_norm > 0 && norm > o.clip_norm ? o.clip_norm / norm : 1.0;
    for (const model::ParameterSlot& slot : layout.slots) {
      for (int64_t i = slot.offset; i < slot.offset + slot.elements; ++i) {
        const double gradient = g[i] * scale;
        m[i] = o.beta1 * m[i] + (1 - o.beta1) * gradient;
        v[i] = o.beta2 * v[i] + (1 - o.beta2) * gradient * gradient;
        const double m_hat = m[i] / (1 - std::pow(o.beta1, step + 1));
        const double v_hat = v[i] / (1 - std::pow(o.beta2, step + 1));
        const double decay = slot.is_matrix() ? o.weight_decay * p[i] : 0.0;
        p[i] -= 0.01 * (m_hat / (std::sqrt(v_hat) + o.epsilon) + decay);
      }
    }
  }
  return p;
}

TEST(AdamWTest, FollowsThePaperOnAnyNumberOfRanks) {
  for (const double clip_norm : {0.0, 1.0}) {
    const AdamWOptions options{.weight_decay = 0.3, .clip_norm = clip_norm};
    const std::vector<double> expected = Reference(5, options);
    for (const int ranks : {1, 2, 3, 4}) {
      const Outcome run = Train(ranks, 5, options);
      for (size_t i = 0; i < expected.size(); ++i) {
        ASSERT_NEAR(run.parameters[i], expected[i], 1e-5) << ranks << " ranks, element " << i;
      }
    }
  }
}

TEST(AdamWTest, SameBitsInEveryRun) {
  EXPECT_THAT(Train(4, 3, {}).parameters, ElementsAreArray(Train(4, 3, {}).parameters));
}

TEST(AdamWTest, ReportsTheNormBeforeClipping) {
  double squares = 0.0;
  for (const float g : Random(64, 100)) squares += static_cast<double>(g) * g;
  EXPECT_NEAR(Train(2, 1, {.clip_norm = 0.5}).steps[0].gradient_norm, std::sqrt(squares), 1e-4);
}

TEST(AdamWTest, OneBadValueOnOneRankSkipsTheStepOnAll) {
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    RunRanks(3, [&](Communicator& comm) {
      const model::ParameterLayout layout = Layout();
      std::vector<float> parameters = Random(layout.PaddedElements(3), 1);
      const std::vector<float> before = parameters;
      AdamW adamw({}, layout, comm, parameters.data());
      std::vector<float> gradients = Random(layout.PaddedElements(3), 2);
      if (comm.rank() == 1) gradients[50] = bad;
      const auto step = adamw.Step(0.1, gradients.data(), parameters.data());
      ASSERT_TRUE(step.ok()) << step.status();
      EXPECT_TRUE(step->skipped);
      EXPECT_EQ(adamw.updates(), 0);
      EXPECT_THAT(parameters, ElementsAreArray(before));
      EXPECT_THAT(adamw.shard().first_moment, Each(0.0f));
    });
  }
}

TEST(AdamWTest, RestoredStateGoesOnAsIfNothingHappened) {
  const Outcome undisturbed = Train(2, 4, {});
  RunRanks(2, [&](Communicator& comm) {
    const model::ParameterLayout layout = Layout();
    std::vector<float> parameters = Random(layout.PaddedElements(2), 1);
    const auto train = [&](AdamW& adamw, int begin, int end) {
      for (int step = begin; step < end; ++step) {
        std::vector<float> gradients = Random(layout.PaddedElements(2), 100 + step);
        for (float& g : gradients) g /= 2.0f;
        ASSERT_TRUE(adamw.Step(0.01, gradients.data(), parameters.data()).ok());
      }
    };
    AdamW first({}, layout, comm, parameters.data());
    train(first, 0, 2);
    std::vector<float> other = Random(layout.PaddedElements(2), 7);
    AdamW second({}, layout, comm, other.data());
    ASSERT_TRUE(second.Restore(first.shard(), first.updates(), parameters.data()).ok());
    train(second, 2, 4);
    parameters.resize(layout.elements);
    EXPECT_THAT(parameters, ElementsAreArray(undisturbed.parameters));

    const absl::Status status =
        second.Restore({.begin = 1, .master = {0.0f}, .first_moment = {}, .second_moment = {}}, 1,
                       parameters.data());
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("does not fit rank"));
  });
}

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

}  // namespace
}  // namespace ringleader::optim
