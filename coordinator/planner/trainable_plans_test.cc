// Whatever a valid job file asks for is planned, and its trainers take the plan.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "base/status_macros.h"
#include "coordinator/planner/live/reshape.h"
#include "coordinator/planner/planner.h"
#include "coordinator/planner/simulate/pricer.h"
#include "coordinator/planner/testing/planner_problems.h"
#include "jobspec/values/attention_spec.h"
#include "patterns/check_options.h"

namespace ringleader::planner {
namespace {

using v1::AttentionSpec;
using v1::ParallelismSpec;

// What trainers say of a plan (worker/trainer/link/assignment.cc, worker/attention/runner).
absl::Status AtTrainers(const v1::JobSpec& asked, const v1::StepPlan& plan) {
  const v1::JobSpec spec = jobspec::PlannedJob(asked, plan);
  const ParallelismSpec& parallelism = spec.parallelism();
  ASSIGN_OR_RETURN(patterns::AttentionOptions options,
                   jobspec::AttentionOptionsOf(spec.attention()));
  options.head_ranks = static_cast<int>(jobspec::HeadRanks(parallelism));
  options.head_groups = static_cast<int>(jobspec::HeadGroups(parallelism));
  ASSIGN_OR_RETURN(options.layout, jobspec::LayoutOf(plan.layout()));
  options.by_documents = jobspec::IsByDocuments(plan.layout());
  options.stripe = plan.stripe() == 0 ? options.tile : static_cast<int>(plan.stripe());
  ASSIGN_OR_RETURN(options.ring.kind, jobspec::RingOf(plan.ring().kind()));
  options.ring.inner = static_cast<int>(plan.ring().inner());
  options.ring.outer = static_cast<int>(std::max(1u, plan.ring().outer()));
  RETURN_IF_ERROR(patterns::CheckOptions(
      options, static_cast<int>(parallelism.context() / jobspec::HeadRanks(parallelism))));
  return WeightsOf(plan).status();
}

model::ModelConfig EightKvHeads() {
  model::ModelConfig model = ThreeBillion();
  model.kv_heads = 8;
  return model;
}

v1::JobSpec DenseJob(uint32_t context) {
  v1::JobSpec spec = LongJob(context, 262144);
  spec.mutable_attention()->Clear();
  spec.mutable_attention()->set_pattern(AttentionSpec::DENSE);
  spec.mutable_data()->set_document_mask(true);
  return spec;
}

class TrainablePlansTest : public ::testing::Test {
 protected:
  v1::StepPlan Plan(v1::JobSpec spec, const ClusterShape& cluster,
                    const v1::StepPlan* kept = nullptr) {
    jobspec::ApplyDefaults(&spec);
    const auto plan =
        MakePlan(spec, model_, cluster, CostModel(spec, model_, cluster), {}, {}, kept);
    EXPECT_TRUE(plan.ok()) << plan.status() << spec.DebugString();
    if (!plan.ok()) return {};
    EXPECT_EQ(AtTrainers(spec, *plan), absl::OkStatus()) << spec.DebugString();
    return *plan;
  }

  const model::ModelConfig model_ = EightKvHeads();
};

// Of every pattern, whole and as samples: lengths that are halved come to nothing.
TEST_F(TrainablePlansTest, SequencesOfAFewTokens) {
  for (int pattern = 1; AttentionSpec::Pattern_IsValid(pattern); ++pattern) {
    for (const uint64_t tokens : {1, 2, 63, 64, 128, 181, 182}) {
      v1::JobSpec spec = LongJob(1, tokens);
      spec.mutable_attention()->Clear();
      spec.mutable_attention()->set_pattern(static_cast<AttentionSpec::Pattern>(pattern));
      spec.mutable_attention()->set_window(64);
      spec.mutable_data()->set_batching(v1::DataSpec::SAMPLES);
      const v1::StepPlan plan = Plan(spec, Gpus(1, 1));
      ASSERT_GE(plan.sample_weights_size(), 1) << tokens;
      EXPECT_GE(plan.sample_weights(0).tokens(), 1u) << tokens;
    }
  }
}

// A ring of one, asked for or left by groups of heads that take all ranks, gathers from nobody.
TEST_F(TrainablePlansTest, GroupsOfHeadsWithoutARing) {
  v1::JobSpec spec = DenseJob(1);
  spec.mutable_parallelism()->set_head_groups(2);
  EXPECT_EQ(Plan(spec, Gpus(1, 1)).ring().kind(), ParallelismSpec::ALL_GATHER);
  spec = DenseJob(4);
  spec.mutable_parallelism()->set_head_groups(2);
  spec.mutable_parallelism()->set_heads(4);
  Plan(spec, Gpus(1, 4));
  spec.mutable_parallelism()->set_heads(0);
  for (const double link : {1e9, 1e10, 4e11}) {
    ClusterShape cluster = Gpus(1, 4);
    cluster.intra_node.bytes_per_second = link;
    Plan(spec, cluster);
  }
}

// What a pattern chooses for a document alone it chooses on one rank, too.
TEST_F(TrainablePlansTest, DocumentsOnOneRankAreApart) {
  v1::JobSpec spec = LongJob(1, 4096);
  spec.mutable_data()->set_document_mask(true);
  EXPECT_EQ(Plan(spec, Gpus(1, 1)).layout(), ParallelismSpec::CONTIGUOUS);
  spec.mutable_parallelism()->set_layout(ParallelismSpec::DOCUMENTS);
  const v1::StepPlan plan = Plan(spec, Gpus(1, 1));
  EXPECT_EQ(plan.layout(), ParallelismSpec::DOCUMENTS);
  EXPECT_EQ(plan.ring().inner() * plan.ring().outer(), 1u);
}

// Groups of heads do not go with documents: a running job is offered no such shape, nor is one
// that a plan had kept.
TEST_F(TrainablePlansTest, GroupsOfHeadsKeepTheirLayout) {
  for (const uint32_t groups : {0u, 2u}) {
    v1::JobSpec spec = DenseJob(4);
    spec.mutable_parallelism()->set_head_groups(groups);
    spec.mutable_parallelism()->set_ring(ParallelismSpec::ALL_GATHER);
    ClusterShape cluster = Gpus(2, 2);
    cluster.inter_node.bytes_per_second = 1e9;
    v1::StepPlan plan = Plan(spec, cluster);
    jobspec::ApplyDefaults(&spec);
    const v1::JobSpec planned = jobspec::PlannedJob(spec, plan);
    ASSERT_GT(jobspec::HeadGroups(planned.parallelism()), 1u);
    const patterns::PatternHints hints = {.document_tokens = {8000, 3000, 12000, 1000}};
    const CostModel costs(planned, model_, cluster);
    const auto now = Predict(planned, model_, cluster, costs, plan, hints);
    ASSERT_TRUE(now.ok()) << now.status();
    const auto found =
        Reshape({.spec = planned,
                 .model = model_,
                 .cluster = cluster,
                 .costs = costs,
                 .hints = hints,
                 .plan = plan,
                 .taken = {.seconds = now->step_seconds(),
                           .exposed_communication = now->exposed_communication_seconds()},
                 .steps_left = 1000,
                 .change_costs = {.layout = 0.1, .ring = 2}},
                {});
    ASSERT_TRUE(found.ok()) << found.status();
    if (found->better.has_value()) {
      EXPECT_EQ(AtTrainers(planned, *found->better), absl::OkStatus());
    }
    plan.set_layout(ParallelismSpec::DOCUMENTS);
    plan.set_stripe(64);
    EXPECT_NE(Plan(spec, cluster, &plan).layout(), ParallelismSpec::DOCUMENTS);
  }
}

}  // namespace
}  // namespace ringleader::planner
