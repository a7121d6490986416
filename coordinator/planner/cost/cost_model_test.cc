#include "coordinator/planner/cost/cost_model.h"

#include <gtest/gtest.h>

#include <random>

#include "coordinator/planner/testing/planner_problems.h"
#include "jobspec/jobspec.h"
#include "model_shape/model_config.h"

namespace ringleader::planner {
namespace {

using Vector = NonNegativeRegression::Vector;

// Features that vary over a range like those of a run whose density drifts.
Vector Features(std::mt19937* random) {
  std::uniform_real_distribution<double> u(0.2, 1.8);
  return {5e4 * u(*random), 2e6 * u(*random), 1e8 * u(*random), 100 * u(*random)};
}

TEST(RegressionTest, RecoversKnownCoefficientsFromNoisyReports) {
  std::mt19937 random(1);
  const Vector truth = {2e-6, 3e-8, 5e-10, 4e-4};
  // Off by up to an order of magnitude, in both directions.
  NonNegativeRegression fit({1.5e-5, 1e-8, 2e-9, 1e-4});
  std::normal_distribution<double> noise(1.0, 0.02);
  for (int i = 0; i < 400; ++i) {
    const Vector x = Features(&random);
    double seconds = 0;
    for (int k = 0; k < 4; ++k) seconds += truth[k] * x[k];
    fit.Observe(x, seconds * noise(random));
  }
  for (int k = 0; k < 4; ++k) {
    EXPECT_NEAR(fit.coefficients()[k] / truth[k], 1.0, 0.15) << k;
  }
}

TEST(RegressionTest, CoefficientsStayNonNegative) {
  std::mt19937 random(2);
  NonNegativeRegression fit({1e-6, 1e-8, 1e-9, 1e-4});
  std::normal_distribution<double> noise(1.0, 0.5);
  for (int i = 0; i < 200; ++i) {
    const Vector x = Features(&random);
    // Rows cost nothing, and the noise would have them earn time.
    fit.Observe(x, std::max(1e-3, 2e-6 * x[0] * noise(random)));
    for (const double c : fit.coefficients()) ASSERT_GE(c, 0);
  }
}

TEST(RegressionTest, FollowsAMachineThatSlowsDown) {
  std::mt19937 random(3);
  NonNegativeRegression fit({1e-6, 1e-8, 0, 1e-4});
  double speed = 1;
  for (int i = 0; i < 600; ++i) {
    if (i == 300) speed = 2;
    const Vector x = Features(&random);
    fit.Observe(x, speed * (2e-6 * x[0] + 1e-8 * x[1] + 1e-4 * x[3]));
  }
  EXPECT_NEAR(fit.coefficients()[0], 4e-6, 0.2e-6);
}

// Steps of one job look alike: tiles and rows never vary apart. Predictions must be right all the
// same, and the prior decides how the time is shared.
TEST(RegressionTest, ConstantFeaturesScaleThePrior) {
  NonNegativeRegression fit({1e-6, 1e-8, 0, 1e-4});
  const Vector x = {1e5, 1e6, 0, 100};
  for (int i = 0; i < 5000; ++i) {
    fit.Observe(x, 0.36);
    if (i < 50) continue;
    ASSERT_NEAR(fit.Predict(x), 0.36, 0.01) << i;
  }
  for (const int k : {0, 1, 3}) EXPECT_GT(fit.coefficients()[k], 0) << k;
  EXPECT_EQ(fit.coefficients()[2], 0);  // switched off
}

TEST(RegressionTest, NonsenseIsIgnored) {
  NonNegativeRegression fit({1e-6, 1e-8, 0, 1e-4});
  const Vector before = fit.coefficients();
  fit.Observe({1, 1, 1, 1}, 0);
  fit.Observe({1, 1, 1, 1}, -1);
  fit.Observe({1, 1, 1, 1}, std::nan(""));
  fit.Observe({-1, 1, 1, 1}, 1);
  fit.Observe({std::nan(""), 1, 1, 1}, 1);
  EXPECT_EQ(fit.coefficients(), before);
  EXPECT_EQ(fit.observations(), 0);
}

// A machine four times slower than the prior thinks, seen through step reports.
TEST(CostModelTest, LearnsFromStepReports) {
  const v1::JobSpec spec = LongJob(4, 131072);
  const model::ModelConfig model = ThreeBillion();
  const ClusterShape cluster = TypicalCluster(v1::ResourcesSpec::CUDA, 1, 4);
  CostModel truth(spec, model, cluster), fitted(spec, model, cluster);
  std::mt19937 random(4);
  std::normal_distribution<double> noise(1.0, 0.02);
  const double rows = 131072.0 / 4 * 16 * 36 * 4;
  for (uint64_t step = 1; step <= 60; ++step) {
    const double tiles = 1e6 + random() % 4000000;
    v1::StepReport report;
    report.set_step(step);
    report.set_most_tiles(static_cast<uint64_t>(tiles));
    const Work work = {.tiles = tiles, .rows = rows, .calls = 4 * 36};
    report.mutable_phases()->set_attention_forward(4 * noise(random) *
                                                   truth.Seconds(Phase::kAttentionForward, work));
    report.mutable_phases()->set_attention_backward(4 * noise(random) *
                                                    truth.Seconds(Phase::kAttentionBackward, work));
    report.mutable_phases()->set_linear(2.0);
    fitted.ObserveStep(spec, model, report);
  }
  EXPECT_EQ(fitted.observations(), 60);
  for (const Phase phase : {Phase::kAttentionForward, Phase::kAttentionBackward}) {
    const double ratio = fitted.coefficients(phase)[0] / truth.coefficients(phase)[0];
    EXPECT_NEAR(ratio, 4.0, 0.3);
  }
  EXPECT_NEAR(fitted.Seconds(Phase::kLinear, {.rows = 131072.0 / 4 * 36, .calls = 36}), 2.0, 0.05);
}

// The Qwen2.5-3B shape on four H200: seconds of bench/results/compare_peer.json and
// training_4gpus.csv.
TEST(CostModelTest, StartsNearWhatStepsTook) {
  struct Measured {
    double tokens, density, forward, backward, linear;
  };
  const Measured steps[] = {{262144, 0.0544, 0.3102, 0.8268, 2.1939},
                            {524288, 0.0503, 1.0432, 2.8711, 4.7465},
                            {1048576, 0.0491, 3.8745, 10.5066, 9.6995}};
  const model::ModelConfig shape = ThreeBillion();
  for (const Measured& step : steps) {
    v1::JobSpec spec = LongJob(4, static_cast<uint64_t>(step.tokens));
    spec.mutable_attention()->set_tile(128);
    const CostModel model(spec, shape, TypicalCluster(v1::ResourcesSpec::CUDA, 1, 4));
    const double blocks = step.tokens / 128;
    const Work attention = {.tiles = step.density * blocks * blocks / 2 / 4 * 16 * 36,
                            .rows = step.tokens / 4 * 16 * 36 * 4,
                            .calls = 4 * 36};
    const Work per_token = {.rows = step.tokens / 4 * 36, .calls = 36};
    EXPECT_NEAR(model.Seconds(Phase::kAttentionForward, attention) / step.forward, 1, 0.1);
    EXPECT_NEAR(model.Seconds(Phase::kAttentionBackward, attention) / step.backward, 1, 0.1);
    EXPECT_NEAR(model.Seconds(Phase::kLinear, per_token) / step.linear, 1, 0.12)
        << step.tokens << " tokens";
    // 0.01 to 0.03 s: nothing beside the others.
    EXPECT_LT(model.Seconds(Phase::kOptimizer, {.bytes = 8 * 3.09e9, .calls = 1}), 0.1);
  }
}

// A product that is computed again takes as long as it took in forward: 6 operations a weight
// become 8 for q, k, v, the output projection, gate and up of all layers, or all but q, k and v.
TEST(CostModelTest, WhatBackwardComputesAgainCounts) {
  const model::ModelConfig shape = ThreeBillion();
  const auto linear = [&](uint64_t tokens, v1::ResourcesSpec::Recompute recompute,
                          double memory_gib) {
    v1::JobSpec spec = LongJob(1, tokens);
    spec.mutable_resources()->set_recompute(recompute);
    ClusterShape cluster = TypicalCluster(v1::ResourcesSpec::CUDA, 1, 1);
    cluster.memory_bytes_per_trainer = static_cast<uint64_t>(memory_gib * 1024 * 1024 * 1024);
    return CostModel(spec, shape, cluster).Seconds(Phase::kLinear, {.rows = 1e6, .calls = 1});
  };
  const double none = linear(8192, v1::ResourcesSpec::NONE, 139);
  const double weights = 36 * (2048 * 128 * 36 + 3 * 2048 * 11008.0) + 2048 * 151936.0;
  const double full = 36 * (2048 * 128 * 36 + 2 * 2048 * 11008.0) / weights,
               attention_only = 36 * (2048 * 128 * 16 + 2 * 2048 * 11008.0) / weights;
  EXPECT_NEAR(linear(8192, v1::ResourcesSpec::FULL, 139) / none, 1 + full / 3, 1e-3);
  EXPECT_NEAR(linear(8192, v1::ResourcesSpec::ATTENTION_ONLY, 139) / none, 1 + attention_only / 3,
              1e-3);
  // What auto chooses goes by memory, an H200's where that is not known.
  const auto automatic = v1::ResourcesSpec::RECOMPUTE_UNSPECIFIED;
  EXPECT_EQ(linear(8192, automatic, 139), none);
  const double some = linear(131072, automatic, 139);
  EXPECT_GT(some, none);
  EXPECT_LE(some, linear(131072, v1::ResourcesSpec::FULL, 139));
  EXPECT_EQ(linear(131072, automatic, 0), some);
  EXPECT_GT(linear(65536, automatic, 80), linear(65536, automatic, 139));
}

// Key groups are chosen by all pairs of queries and keys: 22 ms a layer at 131,072 tokens where a
// sample stands for most of them once, and 30 where tiles keep too few groups for that
// (kernels/EXPERIMENTS.md). Columns and diagonals go by a few queries.
TEST(CostModelTest, ChoosingByAllPairsGrowsWithTheSquareOfTheLength) {
  const auto index = [](v1::AttentionSpec::Pattern pattern, double tokens, double density = 0) {
    v1::JobSpec spec = LongJob(1, static_cast<uint64_t>(tokens));
    spec.mutable_attention()->Clear();
    spec.mutable_attention()->set_pattern(pattern);
    if (density > 0) spec.mutable_attention()->set_density(density);
    jobspec::ApplyDefaults(&spec);
    const double blocks = tokens / spec.attention().tile();
    return CostModel(spec, ThreeBillion(), TypicalCluster(v1::ResourcesSpec::CUDA, 1, 1))
        .Seconds(Phase::kIndex,
                 {.tiles = 16 * blocks * (blocks + 1) / 2, .rows = tokens, .calls = 1});
  };
  EXPECT_NEAR(index(v1::AttentionSpec::KEY_GROUPS, 131072, 0.02), 0.030, 0.003);
  EXPECT_NEAR(index(v1::AttentionSpec::KEY_GROUPS, 131072, 0.05), 0.021, 0.003);
  EXPECT_NEAR(index(v1::AttentionSpec::KEY_GROUPS, 131072, 0.1), 0.020, 0.003);
  EXPECT_NEAR(index(v1::AttentionSpec::XATTENTION, 131072), 0.0044, 0.001);
  EXPECT_GT(index(v1::AttentionSpec::KEY_GROUPS, 131072, 0.01),
            3.8 * index(v1::AttentionSpec::KEY_GROUPS, 65536, 0.01));
  EXPECT_LT(index(v1::AttentionSpec::VERTICAL_SLASH, 131072),
            2.1 * index(v1::AttentionSpec::VERTICAL_SLASH, 65536));
}

// One H200, a layer of 16 heads of 128 at 131,072 tokens: 41 ms of backward at 5 %.
TEST(CostModelTest, GroupsOfATileAreAddedOneByOneInBackward) {
  v1::JobSpec spec = LongJob(1, 131072);
  spec.mutable_attention()->Clear();
  spec.mutable_attention()->set_pattern(v1::AttentionSpec::KEY_GROUPS);
  jobspec::ApplyDefaults(&spec);
  EXPECT_NEAR(CostModel(spec, ThreeBillion(), Gpus(1, 1))
                  .Seconds(Phase::kAttentionBackward, {.tiles = 0.05 * 16 * 2048 * 2049 / 2}),
              0.041, 0.004);
}

// Pairs of heads add up half as many gradients, where the model has pairs.
TEST(CostModelTest, PairsOfHeadsTakeLessInBackwardWhereThereAreSome) {
  const auto seconds = [](uint32_t group_heads, int64_t kv_heads) {
    v1::JobSpec spec = LongJob(1, 131072);
    spec.mutable_attention()->Clear();
    spec.mutable_attention()->set_pattern(v1::AttentionSpec::KEY_GROUPS);
    spec.mutable_attention()->set_group_heads(group_heads);
    jobspec::ApplyDefaults(&spec);
    model::ModelConfig model = ThreeBillion();
    model.kv_heads = kv_heads;
    return CostModel(spec, model, Gpus(1, 1)).Seconds(Phase::kAttentionBackward, {.tiles = 1e5});
  };
  const double alone = seconds(1, 2);
  EXPECT_NEAR(seconds(2, 2), alone * 1.5 / 2.2, 1e-6 * alone);
  EXPECT_EQ(seconds(0, 2), seconds(2, 2));
  EXPECT_EQ(seconds(0, 16), seconds(1, 16)) << "one query head for each KV head";
}

// 48 of 64 rows that GPUs multiply are empty where 16 queries choose; CPUs multiply none.
TEST(CostModelTest, SixteenQueriesTakeGpusAsLongAsSixtyFour) {
  const auto seconds = [](v1::ResourcesSpec::Engine engine, uint32_t queries, Phase phase) {
    v1::JobSpec spec = LongJob(1, 131072);
    spec.mutable_resources()->set_engine(engine);
    spec.mutable_attention()->Clear();
    spec.mutable_attention()->set_pattern(v1::AttentionSpec::KEY_GROUPS);
    spec.mutable_attention()->set_group_queries(queries);
    jobspec::ApplyDefaults(&spec);
    return CostModel(spec, ThreeBillion(), TypicalCluster(engine, 1, 1))
        .Seconds(phase, {.tiles = 1e5});
  };
  for (const Phase phase : {Phase::kAttentionForward, Phase::kAttentionBackward}) {
    for (const auto& [engine, factor] :
         {std::pair(v1::ResourcesSpec::CUDA, 4.0), std::pair(v1::ResourcesSpec::CPU, 1.0)}) {
      const double all = seconds(engine, 64, phase);
      EXPECT_NEAR(seconds(engine, 16, phase), factor * all, 1e-6 * all);
    }
  }
}

// A trainer by itself takes what was measured of one by itself; beside transfers it takes longer
// (bench/results/trainer_gpu.md, "Where weak scaling goes"). CPUs have no such blocks and limits.
TEST(CostModelTest, GpusBesideTransfersTakeLongerThanTheyWereMeasuredToTake) {
  balance::LatencyTable measured;
  for (const int64_t tokens : {8192, 32768, 131072}) {
    const auto blocks = static_cast<double>(tokens) / 64;
    const double ms = 4e-6 * 16 * blocks * (blocks + 1) / 2;
    measured.rows.push_back({.pattern = "dense",
                             .tile = 64,
                             .heads = 16,
                             .kv_heads = 2,
                             .head_dim = 128,
                             .tokens = tokens,
                             .density = 1,
                             .p50_ms = 4 * ms,
                             .p90_ms = 4 * ms,
                             .forward_p50_ms = ms});
  }
  const auto seconds = [&](uint32_t trainers, Phase phase, v1::ResourcesSpec::Engine engine) {
    v1::JobSpec spec = LongJob(trainers, 131072);
    spec.mutable_resources()->set_engine(engine);
    spec.mutable_resources()->set_recompute(v1::ResourcesSpec::NONE);
    return CostModel(spec, ThreeBillion(), TypicalCluster(engine, 1, static_cast<int>(trainers)),
                     measured)
        .Seconds(phase, {.tiles = 16 * 2048 * 2049 / 2.0, .rows = 131072 * 16, .calls = 1});
  };
  const auto cuda = v1::ResourcesSpec::CUDA, cpu = v1::ResourcesSpec::CPU;
  EXPECT_NEAR(seconds(1, Phase::kAttentionForward, cuda), 4e-9 * 16 * 2048 * 2049 / 2, 2e-3);
  for (const Phase phase : {Phase::kAttentionForward, Phase::kAttentionBackward}) {
    EXPECT_NEAR(seconds(2, phase, cuda) / seconds(1, phase, cuda), 1.03, 1e-9);
    EXPECT_EQ(seconds(2, phase, cpu), seconds(1, phase, cpu));
  }
  EXPECT_NEAR(seconds(2, Phase::kLinear, cuda) / seconds(1, Phase::kLinear, cuda), 1.02, 2e-3);
}

// What reports taught is left out, what was measured before is not.
TEST(CostModelTest, UnfittedIsAsItBegan) {
  const v1::JobSpec spec = LongJob(4, 131072);
  CostModel model(spec, ThreeBillion(), TypicalCluster(v1::ResourcesSpec::CUDA, 1, 4));
  const Vector before = model.coefficients(Phase::kAttentionForward);
  for (int i = 0; i < 10; ++i) model.Observe(Phase::kAttentionForward, {.tiles = 1e6}, 100);
  EXPECT_NE(model.coefficients(Phase::kAttentionForward), before);
  EXPECT_EQ(model.Unfitted().coefficients(Phase::kAttentionForward), before);
  EXPECT_EQ(model.Unfitted().observations(), 0);
}

TEST(CostModelTest, SkippedStepsTeachNothing) {
  const v1::JobSpec spec = LongJob(4, 131072);
  CostModel model(spec, ThreeBillion(), TypicalCluster(v1::ResourcesSpec::CUDA, 1, 4));
  v1::StepReport report;
  report.set_skipped(true);
  report.set_most_tiles(1000);
  report.mutable_phases()->set_attention_forward(100);
  model.ObserveStep(spec, ThreeBillion(), report);
  EXPECT_EQ(model.observations(), 0);
}

}  // namespace
}  // namespace ringleader::planner
