#include "coordinator/planner/planner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "coordinator/planner/cost/memory.h"
#include "coordinator/planner/simulate/pricer.h"
#include "coordinator/planner/testing/planner_problems.h"
#include "model_shape/model_config.h"

namespace ringleader::planner {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;
using v1::ParallelismSpec;

absl::StatusOr<v1::StepPlan> Plan(const v1::JobSpec& spec, const ClusterShape& cluster,
                                  const model::ModelConfig& model = ThreeBillion()) {
  return MakePlan(spec, model, cluster, CostModel(spec, model, cluster));
}

TEST(MakePlanTest, StripesForVerticalSlash) {
  const auto plan = Plan(LongJob(4, 524288), Gpus(1, 4));
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->layout(), ParallelismSpec::STRIPED);
  EXPECT_EQ(plan->stripe(), 64);
  EXPECT_EQ(plan->ring().kind(), ParallelismSpec::FLAT);
  EXPECT_EQ(plan->ring().inner() * plan->ring().outer(), 4);
  EXPECT_LT(plan->prediction().worker_imbalance(), 1.02);
  EXPECT_GT(plan->prediction().step_seconds(), 0);
  EXPECT_FALSE(plan->reasons().empty());
}

TEST(MakePlanTest, HierarchicalAcrossNodesWithSlowLinks) {
  ClusterShape cluster = Gpus(4, 8);
  cluster.inter_node.bytes_per_second = 2e9;
  const auto plan = Plan(LongJob(32, 524288), cluster);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->ring().kind(), ParallelismSpec::HIERARCHICAL);
  EXPECT_EQ(plan->ring().inner(), 8);
  EXPECT_EQ(plan->ring().outer(), 4);
}

TEST(MakePlanTest, WhatTheUserAsksForIsKept) {
  v1::JobSpec spec = LongJob(4, 131072);
  spec.mutable_parallelism()->set_layout(ParallelismSpec::ZIGZAG);
  spec.mutable_parallelism()->set_ring(ParallelismSpec::ALL_GATHER);
  const auto plan = Plan(spec, Gpus(1, 4));
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->layout(), ParallelismSpec::ZIGZAG);
  EXPECT_EQ(plan->stripe(), 0);
  EXPECT_EQ(plan->ring().kind(), ParallelismSpec::ALL_GATHER);
}

TEST(MakePlanTest, OneTrainerNeedsNoLayout) {
  const auto plan = Plan(LongJob(1, 8192), Gpus(1, 1));
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->ring().inner(), 1);
  EXPECT_DOUBLE_EQ(plan->prediction().exposed_communication_seconds(), 0);
}

TEST(MakePlanTest, AThousandRanks) {
  v1::JobSpec spec = LongJob(1024, 4194304);
  const auto plan = Plan(spec, Gpus(128, 8));
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->layout(), ParallelismSpec::STRIPED);
  EXPECT_EQ(plan->ring().kind(), ParallelismSpec::HIERARCHICAL);
  EXPECT_LT(plan->prediction().worker_imbalance(), 1.05);
}

TEST(MakePlanTest, ImpossiblePlansShowTheArithmetic) {
  EXPECT_THAT(Plan(LongJob(16, 131072), Gpus(1, 8)).status().message(),
              HasSubstr("16 trainers do not fit on 1 nodes × 8 = 8"));
  v1::JobSpec spec = LongJob(6, 6144);
  spec.mutable_parallelism()->set_ring(ParallelismSpec::HIERARCHICAL);
  EXPECT_THAT(Plan(spec, Gpus(2, 4)).status().message(),
              HasSubstr("hierarchical needs a context (6) that is a multiple"));
  spec = LongJob(4, 131072);
  spec.mutable_attention()->add_dense_layers(36);
  EXPECT_THAT(Plan(spec, Gpus(1, 4)).status().message(),
              HasSubstr("layer 36 does not exist; the model has 36 layers"));
}

TEST(MakePlanTest, UnknownEnumeratorsAreRefusedByName) {
  v1::JobSpec spec = LongJob(4, 131072);
  const ClusterShape cluster = Gpus(1, 4);
  const CostModel cost(spec, ThreeBillion(), cluster);
  v1::StepPlan plan = *MakePlan(spec, ThreeBillion(), cluster, cost);
  plan.set_layout(static_cast<ParallelismSpec::Layout>(9));
  EXPECT_THAT(Predict(spec, ThreeBillion(), cluster, cost, plan).status().message(),
              HasSubstr("parallelism.layout: enumerator 9 is unknown"));
  spec.mutable_parallelism()->set_ring(static_cast<ParallelismSpec::Ring>(8));
  EXPECT_THAT(Plan(spec, cluster).status().message(),
              HasSubstr("parallelism.ring: enumerator 8 is unknown"));
  spec = LongJob(4, 131072);
  spec.mutable_attention()->set_pattern(static_cast<v1::AttentionSpec::Pattern>(7));
  EXPECT_THAT(Plan(spec, cluster).status().message(),
              HasSubstr("attention.pattern: enumerator 7 is unknown"));
}

TEST(MakePlanTest, AModelThatDoesNotFitIsRefused) {
  ClusterShape cluster = Gpus(1, 4);
  cluster.memory_bytes_per_trainer = uint64_t{8} << 30;
  const auto plan = Plan(LongJob(4, 131072), cluster);
  EXPECT_EQ(plan.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(plan.status().message(), HasSubstr("a trainer needs at least"));
  EXPECT_THAT(plan.status().message(), HasSubstr("has 8.00 GiB"));
  cluster.memory_bytes_per_trainer = uint64_t{140} << 30;
  EXPECT_TRUE(Plan(LongJob(4, 131072), cluster).ok());
}

TEST(MakePlanTest, WhatLayersKeepMayWaitInHostMemory) {
  ClusterShape cluster = Gpus(1, 4);
  cluster.memory_bytes_per_trainer = uint64_t{139} << 30;
  v1::JobSpec spec = LongJob(4, 2097152);
  // 36 layers keep 145 GiB of 524,288 tokens; one layer's 4 GiB have to stay.
  const auto plan = Plan(spec, cluster);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_THAT(plan->reasons(), Contains(HasSubstr("wait in host memory (resources.offload)")));

  spec.mutable_resources()->set_offload(v1::ResourcesSpec::OFFLOAD_NONE);
  EXPECT_THAT(Plan(spec, cluster).status().message(), HasSubstr("a trainer needs at least"));

  spec.mutable_resources()->clear_offload();
  cluster.host_memory_bytes_per_trainer = uint64_t{16} << 30;
  EXPECT_THAT(Plan(spec, cluster).status().message(),
              HasSubstr("in host memory, and its share of that is 16.00 GiB"));
  cluster.host_memory_bytes_per_trainer = uint64_t{64} << 30;
  EXPECT_TRUE(Plan(spec, cluster).ok());

  // What fits the GPU stays there, unless the job wants it otherwise.
  const v1::JobSpec small = LongJob(4, 131072);
  EXPECT_THAT(Plan(small, cluster)->reasons(), Not(Contains(HasSubstr("host memory"))));
  spec = small;
  spec.mutable_resources()->set_offload(v1::ResourcesSpec::OFFLOAD_HOST);
  EXPECT_THAT(Plan(spec, cluster)->reasons(), Contains(HasSubstr("at least 8.8 GiB")));
}

TEST(MakePlanTest, RicherPoliciesNeedMoreMemory) {
  ClusterShape cluster = Gpus(1, 4);
  cluster.memory_bytes_per_trainer = uint64_t{139} << 30;
  v1::JobSpec spec = LongJob(4, 1048576);
  spec.mutable_resources()->set_offload(v1::ResourcesSpec::OFFLOAD_NONE);
  EXPECT_TRUE(Plan(spec, cluster).ok()) << "full";
  spec.mutable_resources()->set_recompute(v1::ResourcesSpec::NONE);
  EXPECT_FALSE(Plan(spec, cluster).ok());
}

TEST(MakePlanTest, AnUnknownModelStillGetsAPlan) {
  const auto plan = Plan(LongJob(4, 131072), Gpus(1, 4), model::ModelConfig{});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->layout(), ParallelismSpec::STRIPED);
  EXPECT_FALSE(plan->has_prediction());
}

TEST(MakePlanTest, SameInputSamePlan) {
  const v1::JobSpec spec = LongJob(8, 131072);
  EXPECT_EQ(Plan(spec, Gpus(1, 8))->SerializeAsString(),
            Plan(spec, Gpus(1, 8))->SerializeAsString());
}

// What was measured prices the plan but does not choose it: a resumed attempt adds in the same
// order.
TEST(MakePlanTest, MeasuredSpeedChangesThePredictionNotTheChoice) {
  const v1::JobSpec spec = LongJob(8, 131072);
  const ClusterShape cluster = Gpus(2, 4);
  CostModel slow(spec, ThreeBillion(), cluster);
  for (int i = 0; i < 100; ++i) {
    const Work work = {.tiles = 1e6, .rows = 1e6, .calls = 100};
    slow.Observe(Phase::kAttentionForward, work, 50);
    slow.Observe(Phase::kAttentionBackward, work, 100);
  }
  const auto before = Plan(spec, cluster);
  const auto after = MakePlan(spec, ThreeBillion(), cluster, slow);
  ASSERT_TRUE(before.ok() && after.ok());
  EXPECT_EQ(after->layout(), before->layout());
  EXPECT_EQ(after->stripe(), before->stripe());
  EXPECT_EQ(after->ring().SerializeAsString(), before->ring().SerializeAsString());
  EXPECT_GT(after->prediction().step_seconds(), 2 * before->prediction().step_seconds());
}

// Whatever takes the time of a step has a row.
TEST(PredictTest, TheRowsOfAStepAddUpToIt) {
  for (const double bytes_per_second : {1e7, 1e9, 1e11}) {
    for (const uint32_t context : {1u, 4u, 8u}) {
      for (const uint64_t tokens : {16384u, 262144u}) {
        v1::JobSpec spec = LongJob(context, tokens);
        spec.mutable_training()->set_global_batch(2);
        ClusterShape cluster = Gpus(context == 8 ? 2 : 1, context == 8 ? 4 : context);
        cluster.intra_node.bytes_per_second = cluster.inter_node.bytes_per_second =
            bytes_per_second;
        const auto plan = Plan(spec, cluster);
        ASSERT_TRUE(plan.ok()) << plan.status();
        const v1::Prediction& p = plan->prediction();
        const double rows = p.attention_seconds() + p.index_seconds() + p.linear_seconds() +
                            p.wait_seconds() + p.exposed_communication_seconds() +
                            p.optimizer_seconds();
        EXPECT_NEAR(rows / p.step_seconds(), 1, 1e-9) << bytes_per_second << " " << context;
        EXPECT_LE(p.exchange_seconds(), p.optimizer_seconds());
        EXPECT_EQ(p.exchange_seconds() > 0, context > 1);
        EXPECT_GT(p.memory_bytes(), uint64_t{1} << 30);
        EXPECT_GT(p.model_flops(), 6.0 * 3e9 * 2 * static_cast<double>(tokens));
      }
    }
  }
}

// What was measured since would choose otherwise; the attempt that goes on from a checkpoint adds
// in the order of the one before.
TEST(MakePlanTest, AResumedAttemptKeepsWhatDecidesTheOrderOfSums) {
  v1::JobSpec spec = LongJob(4, 131072);
  spec.mutable_parallelism()->set_data(2);
  spec.mutable_resources()->set_trainers(8);
  spec.mutable_training()->set_global_batch(4);
  spec.mutable_data()->set_batching(v1::DataSpec::SAMPLES);
  const ClusterShape cluster = Gpus(1, 8);
  const CostModel cost(spec, ThreeBillion(), cluster);
  const auto fresh = MakePlan(spec, ThreeBillion(), cluster, cost);
  ASSERT_TRUE(fresh.ok()) << fresh.status();
  ASSERT_FALSE(fresh->sample_weights().empty());
  v1::StepPlan before = *fresh;
  before.set_version(7);
  before.set_layout(ParallelismSpec::ZIGZAG);
  before.set_stripe(0);
  before.mutable_sample_weights(0)->set_milliseconds(before.sample_weights(0).milliseconds() / 2);
  ASSERT_NE(fresh->layout(), before.layout());
  const auto resumed = MakePlan(spec, ThreeBillion(), cluster, cost, {}, {}, &before);
  ASSERT_TRUE(resumed.ok()) << resumed.status();
  EXPECT_EQ(resumed->version(), 7u) << "the same plan: versions grow over attempts";
  EXPECT_EQ(resumed->layout(), before.layout());
  EXPECT_EQ(resumed->ring().SerializeAsString(), before.ring().SerializeAsString());
  ASSERT_EQ(resumed->sample_weights_size(), before.sample_weights_size());
  EXPECT_EQ(resumed->sample_weights(0).milliseconds(), before.sample_weights(0).milliseconds());
  EXPECT_THAT(resumed->reasons(), Contains(HasSubstr("sums are in the same order")));

  // The file's own word is newer than the attempt.
  spec.mutable_parallelism()->set_layout(ParallelismSpec::STRIPED);
  const auto changed = MakePlan(spec, ThreeBillion(), cluster, cost, {}, {}, &before);
  ASSERT_TRUE(changed.ok()) << changed.status();
  EXPECT_EQ(changed->version(), 8u);
  EXPECT_EQ(changed->layout(), ParallelismSpec::STRIPED);
  EXPECT_THAT(changed->reasons(), Contains(HasSubstr("losses may differ")));
}

TEST(MakePlanTest, EveryPatternIsPredicted) {
  v1::JobSpec spec = LongJob(4, 131072);
  double dense_seconds = 0;
  for (const auto pattern : {v1::AttentionSpec::DENSE, v1::AttentionSpec::SLIDING_WINDOW,
                             v1::AttentionSpec::VERTICAL_SLASH, v1::AttentionSpec::BLOCK_TOPK,
                             v1::AttentionSpec::XATTENTION, v1::AttentionSpec::MOBA,
                             v1::AttentionSpec::KEY_GROUPS, v1::AttentionSpec::ADASPA}) {
    spec.mutable_attention()->set_pattern(pattern);
    jobspec::ApplyDefaults(&spec);
    const auto plan = Plan(spec, Gpus(1, 4));
    ASSERT_TRUE(plan.ok()) << plan.status();
    const v1::Prediction& p = plan->prediction();
    EXPECT_GT(p.density(), 0);
    EXPECT_LE(p.density(), 1.0 + 1e-9);
    if (pattern == v1::AttentionSpec::DENSE) {
      EXPECT_NEAR(p.density(), 1.0, 1e-9);
      dense_seconds = p.attention_seconds();
    } else {
      EXPECT_LT(p.attention_seconds(), dense_seconds);
    }
  }
}

// Queries that GPUs gather by blocks of keys: each block has one owner where the sequence divides.
TEST(MakePlanTest, StripesOfMobaOnGpusAreItsBlocks) {
  v1::JobSpec spec = LongJob(4, 131072);
  spec.mutable_attention()->set_pattern(v1::AttentionSpec::MOBA);
  spec.mutable_attention()->set_block_size(1024);
  jobspec::ApplyDefaults(&spec);
  ASSERT_EQ(spec.resources().engine(), v1::ResourcesSpec::CUDA);
  const auto stripe = [&] {
    const auto plan = Plan(spec, Gpus(1, 4));
    return plan.ok() ? plan->stripe() : 0;
  };
  EXPECT_EQ(stripe(), 1024u);
  spec.mutable_parallelism()->set_stripe(256);
  EXPECT_EQ(stripe(), 256u) << "as the job file says";
  spec.mutable_parallelism()->set_stripe(0);
  spec.mutable_data()->set_sequence_length(131072 - 2048);  // no multiple of 4 times 1,024
  EXPECT_EQ(stripe(), spec.attention().tile());
  spec.mutable_data()->set_sequence_length(131072);
  EXPECT_EQ(stripe(), 1024u);
  v1::JobSpec samples = spec;
  samples.mutable_data()->set_batching(v1::DataSpec::SAMPLES);
  samples.mutable_data()->clear_document_mask();
  jobspec::ApplyDefaults(&samples);
  const auto plan = Plan(samples, Gpus(1, 4));
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->stripe(), spec.attention().tile()) << "samples are filled up to whole stripes";
  spec.mutable_resources()->set_engine(v1::ResourcesSpec::CPU);
  EXPECT_EQ(stripe(), spec.attention().tile());
}

// What trainers deal samples by: longer ones take more, much longer ones more than in proportion,
// and neither reports nor a machine's speed change who trains which.
TEST(MakePlanTest, SamplesHaveWeights) {
  v1::JobSpec spec = LongJob(4, 131072);
  spec.mutable_parallelism()->set_data(2);
  spec.mutable_resources()->set_trainers(8);
  spec.mutable_training()->set_global_batch(6);
  const ClusterShape cluster = Gpus(1, 8);
  CostModel cost(spec, ThreeBillion(), cluster);
  EXPECT_TRUE(MakePlan(spec, ThreeBillion(), cluster, cost)->sample_weights().empty());
  spec.mutable_data()->set_batching(v1::DataSpec::SAMPLES);
  spec.mutable_data()->clear_document_mask();
  for (const auto pattern : {v1::AttentionSpec::DENSE, v1::AttentionSpec::VERTICAL_SLASH}) {
    spec.clear_attention();
    spec.mutable_attention()->set_pattern(pattern);
    jobspec::ApplyDefaults(&spec);
    const auto plan = MakePlan(spec, ThreeBillion(), cluster, cost);
    ASSERT_TRUE(plan.ok()) << plan.status();
    const auto& weights = plan->sample_weights();
    ASSERT_GT(weights.size(), 10);
    EXPECT_EQ(weights.rbegin()->tokens(), 131072u);
    for (int i = 1; i < weights.size(); ++i) {
      EXPECT_GT(weights[i].tokens(), weights[i - 1].tokens());
      EXPECT_GE(weights[i].milliseconds(), weights[i - 1].milliseconds());
    }
    EXPECT_GT(weights.rbegin()->milliseconds(), (pattern == v1::AttentionSpec::DENSE ? 16 : 8) *
                                                    weights[weights.size() - 7].milliseconds());
    EXPECT_THAT(plan->reasons(), Contains(HasSubstr("samples are dealt to 2 groups")));
    CostModel other = cost;
    other.Observe(Phase::kAttentionForward, {.tiles = 1e6}, 1);
    const patterns::PatternHints hints = {.slashes = 20, .verticals = 900, .density = 0.01};
    const auto again = MakePlan(spec, ThreeBillion(), cluster, other, hints);
    ASSERT_TRUE(again.ok()) << again.status();
    for (int i = 0; i < weights.size(); ++i) {
      EXPECT_EQ(again->sample_weights(i).milliseconds(), weights[i].milliseconds());
    }
  }
}

TEST(PredictTest, TheFirstHopOfBackwardTravelsBehindTheMlp) {
  const auto exposed = [](int64_t intermediate) {
    model::ModelConfig model = ThreeBillion();
    model.intermediate_size = intermediate;
    ClusterShape cluster = Gpus(2, 1);
    cluster.inter_node.bytes_per_second = 2e9;
    const auto plan = Plan(LongJob(2, 131072), cluster, model);
    EXPECT_TRUE(plan.ok()) << plan.status();
    return plan->prediction().exposed_communication_seconds();
  };
  EXPECT_GT(exposed(11008), 0);  // forward's hop has the index alone, and gradients have attention
  EXPECT_LT(exposed(11008), 0.8 * exposed(16));
}

TEST(MakePlanTest, AMeasuredPatternChangesThePredictionNotTheChoice) {
  const v1::JobSpec spec = LongJob(8, 524288);
  const ClusterShape cluster = Gpus(1, 8);
  const CostModel cost(spec, ThreeBillion(), cluster);
  const auto usual = MakePlan(spec, ThreeBillion(), cluster, cost);
  std::vector<v1::StepReport> reports(2);
  for (v1::StepReport& report : reports) {
    for (uint32_t layer = 0; layer < 4; ++layer) {
      report.add_layers()->set_slashes(1000);
      report.mutable_layers(static_cast<int>(layer))->set_verticals(4000);
      report.mutable_layers(static_cast<int>(layer))->set_density(0.31);
    }
  }
  const auto measured = MakePlan(spec, ThreeBillion(), cluster, cost, HintsFrom(spec, reports));
  ASSERT_TRUE(usual.ok() && measured.ok());
  EXPECT_GT(measured->prediction().density(), usual->prediction().density());
  EXPECT_NEAR(measured->prediction().density(), 0.31, 1e-6);
  EXPECT_GT(measured->prediction().step_seconds(), usual->prediction().step_seconds());
  EXPECT_EQ(measured->layout(), usual->layout());
  EXPECT_EQ(measured->ring().kind(), usual->ring().kind());
}

TEST(MakePlanTest, Fp8TakesLessTimeAndMemory) {
  v1::JobSpec spec = LongJob(2, 262144);
  const auto bf16 = Plan(spec, Gpus(1, 2));
  spec.mutable_training()->set_precision(v1::TrainingSpec::FP8);
  const auto fp8 = Plan(spec, Gpus(1, 2));
  ASSERT_TRUE(bf16.ok() && fp8.ok());
  const double inner = 34.0 / 36;  // the first layer and the last are left out
  EXPECT_NEAR(fp8->prediction().linear_seconds() / bf16->prediction().linear_seconds(),
              1 - inner + inner / 1.43, 0.01);
  EXPECT_NEAR(fp8->prediction().attention_seconds(), bf16->prediction().attention_seconds(), 1e-9);

  constexpr uint64_t kSteps = 10;
  const auto weights = [&](v1::TrainingSpec::Precision precision, uint64_t first = 0,
                           uint64_t last = 0) {
    v1::JobSpec asked = spec;
    asked.mutable_training()->set_precision(precision);
    asked.mutable_training()->set_steps(kSteps);
    asked.mutable_training()->set_fp8_first_step(first);
    asked.mutable_training()->set_fp8_last_step(last);
    return EstimateMemory(asked, ThreeBillion(), Gpus(1, 2), ParallelismSpec::FLAT).weights;
  };
  const double without = weights(v1::TrainingSpec::BFLOAT16);
  const double layer = 2048 * (2 * 16 + 2 * 2) * 128 + 3.0 * 2048 * 11008;
  // A byte less for each weight, and 4 more for each row's scale.
  const double saved = without - weights(v1::TrainingSpec::FP8);
  EXPECT_LT(saved, 34 * layer);
  EXPECT_GT(saved, 34 * 0.998 * layer);
  EXPECT_EQ(without - weights(v1::TrainingSpec::FP8, 1, kSteps), saved);
  EXPECT_EQ(weights(v1::TrainingSpec::FP8, 2), without) << "the first step reads no casts";
  EXPECT_EQ(weights(v1::TrainingSpec::FP8, 1, kSteps - 1), without) << "the last step reads none";

  spec.mutable_training()->set_precision(v1::TrainingSpec::FP8_ALL_LAYERS);
  const auto all = Plan(spec, Gpus(1, 2));
  ASSERT_TRUE(all.ok()) << all.status();
  EXPECT_NEAR(all->prediction().linear_seconds() / bf16->prediction().linear_seconds(), 1 / 1.43,
              0.01);

  model::ModelConfig odd = ThreeBillion();
  odd.intermediate_size = 11000;
  const auto refused = Plan(spec, Gpus(1, 2), odd);
  EXPECT_TRUE(absl::IsInvalidArgument(refused.status())) << refused.status();
  EXPECT_THAT(std::string(refused.status().message()),
              HasSubstr("training.precision: fp8 needs widths that are multiples of 16"));
}

TEST(MemoryTest, AddsUp) {
  const v1::JobSpec spec = LongJob(4, 131072);
  const MemoryEstimate ring =
      EstimateMemory(spec, ThreeBillion(), Gpus(1, 4), ParallelismSpec::FLAT);
  EXPECT_NEAR(ring.weights, 2 * 3.086e9, 1e7);
  EXPECT_NEAR(ring.optimizer, 3 * 3.086e9, 1e7);
  // 32,768 tokens × 2 × 2 heads × 128 × 2 bytes, two buffers.
  EXPECT_DOUBLE_EQ(ring.keys_and_values, 32768.0 * 512 * 2 * 2);
  const MemoryEstimate gathered =
      EstimateMemory(spec, ThreeBillion(), Gpus(1, 4), ParallelismSpec::ALL_GATHER);
  EXPECT_DOUBLE_EQ(gathered.keys_and_values, 2 * ring.keys_and_values);
}

}  // namespace
}  // namespace ringleader::planner
