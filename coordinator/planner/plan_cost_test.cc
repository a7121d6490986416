// What a plan costs to make: foreseen before it is made, bounded, and refused by name beyond that.
#include "coordinator/planner/plan_cost.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "coordinator/planner/planner.h"
#include "coordinator/planner/simulate/pricer.h"
#include "coordinator/planner/testing/planner_problems.h"
#include "model_shape/model_config.h"

namespace ringleader::planner {
namespace {

using ::testing::HasSubstr;
using v1::ParallelismSpec;

// What is foreseen of a plan's work is what is done.
TEST(PlanCostTest, RankStepsAreThoseThatThePricerPlays) {
  for (const auto pattern : {v1::AttentionSpec::DENSE, v1::AttentionSpec::SLIDING_WINDOW,
                             v1::AttentionSpec::VERTICAL_SLASH, v1::AttentionSpec::BLOCK_TOPK,
                             v1::AttentionSpec::XATTENTION, v1::AttentionSpec::MOBA,
                             v1::AttentionSpec::KEY_GROUPS, v1::AttentionSpec::ADASPA}) {
    for (const uint32_t context : {1, 8, 264}) {
      v1::JobSpec spec = LongJob(context, uint64_t{context} * 1024);
      spec.mutable_attention()->set_pattern(pattern);
      spec.mutable_attention()->add_dense_layers(3);
      jobspec::ApplyDefaults(&spec);
      const ClusterShape cluster = Gpus(static_cast<int>(context), 1);
      const patterns::PatternHints hints;
      const model::ModelConfig model = ThreeBillion();
      Pricer pricer(spec, model, cluster, hints);
      v1::StepPlan plan;
      plan.set_layout(ParallelismSpec::CONTIGUOUS);
      plan.mutable_ring()->set_kind(ParallelismSpec::FLAT);
      plan.mutable_ring()->set_inner(context);
      plan.mutable_ring()->set_outer(1);
      ASSERT_TRUE(pricer.Price(plan, CostModel(spec, model, cluster)).ok());
      EXPECT_EQ(pricer.rank_steps(), CostOf(spec, model, 1, 0).rank_steps) << context;
      EXPECT_GT(pricer.rank_steps(), 0);
      // The loads are there already; all-gather is no ring that is walked.
      const int64_t before = pricer.rank_steps();
      plan.mutable_ring()->set_kind(ParallelismSpec::ALL_GATHER);
      ASSERT_TRUE(pricer.Price(plan, CostModel(spec, model, cluster)).ok());
      EXPECT_EQ(pricer.rank_steps(), before);
    }
  }
}

// Three layouts on two kinds of rings that are walked, forward and backward; the one that is chosen
// once more, and on infinitely fast links, too.
TEST(PlanCostTest, EightThousandRanksStayWithinTwoSecondsAndAQuarterOfAGibibyte) {
  v1::JobSpec spec = LongJob(8192, 4194304);
  EXPECT_EQ(CostOf(spec, ThreeBillion(), 3, 6).rank_steps, int64_t{2 * 6 + 4} * 8192 * 8192);
  for (const auto pattern : {v1::AttentionSpec::DENSE, v1::AttentionSpec::SLIDING_WINDOW,
                             v1::AttentionSpec::VERTICAL_SLASH, v1::AttentionSpec::BLOCK_TOPK,
                             v1::AttentionSpec::XATTENTION, v1::AttentionSpec::MOBA,
                             v1::AttentionSpec::KEY_GROUPS, v1::AttentionSpec::ADASPA}) {
    for (const uint64_t tokens : {4194304, 16777216}) {
      for (const auto batching : {v1::DataSpec::PACKED, v1::DataSpec::SAMPLES}) {
        SCOPED_TRACE(testing::Message() << pattern << ", " << tokens << ", " << batching);
        spec = LongJob(8192, tokens);
        spec.mutable_attention()->set_pattern(pattern);
        spec.mutable_attention()->add_dense_layers(3);
        spec.mutable_data()->set_batching(batching);
        jobspec::ApplyDefaults(&spec);
        spec.mutable_attention()->set_topk_blocks(65536);
        const PlanCost cost = CostOf(spec, ThreeBillion(), 3, 6);
        EXPECT_LT(cost.seconds(), 2);
        EXPECT_LT(cost.bytes, 256.0 * 1024 * 1024);
      }
    }
  }
}

// What a plan of samples weighs, sixteen lengths, is foreseen to take far less than the coordinator
// allows (10 s) wherever rings are of a few nodes, at the lengths that such jobs have.
TEST(PlanCostTest, SamplesOfAMillionTokensStayWithinFiveSeconds) {
  for (const auto pattern : {v1::AttentionSpec::VERTICAL_SLASH, v1::AttentionSpec::BLOCK_TOPK,
                             v1::AttentionSpec::XATTENTION, v1::AttentionSpec::MOBA,
                             v1::AttentionSpec::KEY_GROUPS, v1::AttentionSpec::ADASPA}) {
    for (const uint64_t tokens : {524288, 1048576}) {
      for (const uint32_t context : {1, 2, 8, 64}) {
        v1::JobSpec spec = LongJob(context, tokens);
        spec.mutable_attention()->Clear();
        spec.mutable_attention()->set_pattern(pattern);
        spec.mutable_data()->set_batching(v1::DataSpec::SAMPLES);
        jobspec::ApplyDefaults(&spec);
        const PlanCost cost = CostOf(spec, ThreeBillion(), 3, 6);
        EXPECT_LT(cost.seconds(), 5) << pattern << ", " << tokens << " on " << context;
        EXPECT_LT(cost.bytes, 200.0 * 1024 * 1024);
      }
    }
  }
}

TEST(PlanCostTest, PlansBeyondTheLimitsAreRefusedByName) {
  const auto refusal = [](const v1::JobSpec& spec, const PlanLimits& limits) {
    const ClusterShape cluster = Gpus(1, static_cast<int>(spec.resources().trainers()));
    const absl::Status status = MakePlan(spec, ThreeBillion(), cluster,
                                         CostModel(spec, ThreeBillion(), cluster), {}, limits)
                                    .status();
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    return std::string(status.message());
  };
  const std::string wide = refusal(LongJob(65536, 8388608), {.seconds = 10});
  EXPECT_THAT(wide, HasSubstr("for 65536 ranks in a ring (parallelism.context)"));
  EXPECT_THAT(wide, HasSubstr("and may take 10 s"));
  v1::JobSpec spec = LongJob(4, 131072);
  EXPECT_THAT(refusal(spec, {.bytes = 1024}), HasSubstr("MiB, and may take 0 MiB"));
  // A stop between two candidates ends it.
  int asked = 0;
  const ClusterShape cluster = Gpus(1, 4);
  spec = LongJob(4, 131072);
  EXPECT_EQ(MakePlan(spec, ThreeBillion(), cluster, CostModel(spec, ThreeBillion(), cluster), {},
                     {.stop = [&] { return ++asked == 2; }})
                .status()
                .code(),
            absl::StatusCode::kCancelled);
}

}  // namespace
}  // namespace ringleader::planner
