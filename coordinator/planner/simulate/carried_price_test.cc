// What hops of a ring carry where positions alone say what is attended to, as plans price it. What
// trainers send is compared with the same counts (attention_test, RingsCarryWhatIsAttendedTo).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "coordinator/planner/candidates.h"
#include "coordinator/planner/testing/priced_ring.h"
#include "jobspec/values/attention_spec.h"
#include "patterns/carried/carried_rows.h"

namespace ringleader::planner {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;
using v1::ParallelismSpec;

v1::JobSpec WindowJob(ParallelismSpec::Layout layout, ParallelismSpec::Ring ring,
                      v1::ResourcesSpec::Engine engine = v1::ResourcesSpec::CPU) {
  v1::JobSpec spec;
  spec.set_name("window");
  spec.mutable_data()->set_sequence_length(32768);
  spec.mutable_attention()->set_pattern(v1::AttentionSpec::SLIDING_WINDOW);
  spec.mutable_attention()->set_window(1000);
  spec.mutable_attention()->add_dense_layers(3);
  spec.mutable_parallelism()->set_context(8);
  spec.mutable_parallelism()->set_layout(layout);
  spec.mutable_parallelism()->set_ring(ring);
  spec.mutable_resources()->set_trainers(8);
  spec.mutable_resources()->set_engine(engine);
  jobspec::ApplyDefaults(&spec);
  return spec;
}

double Rows(const v1::JobSpec& spec, const v1::StepPlan& plan, bool is_dense, bool gradients) {
  patterns::AttentionOptions options = *jobspec::AttentionOptionsOf(spec.attention());
  options.layout = *jobspec::LayoutOf(plan.layout());
  options.stripe = static_cast<int>(plan.stripe());
  const ring::RingShape shape = {.kind = *jobspec::RingOf(plan.ring().kind()),
                                 .inner = static_cast<int>(plan.ring().inner()),
                                 .outer = static_cast<int>(plan.ring().outer())};
  double rows = 0;
  for (const bool is_backward : {false, true}) {
    const ring::HopCounts counts =
        patterns::CountCarriedRows(options, shape, is_backward, {.tokens = 32768},
                                   *patterns::KnownKeysOf(options, is_dense), /*most_packed=*/1.0);
    for (const auto& hop : gradients ? counts.gradients : counts.keys) {
      for (const int64_t count : hop) rows += static_cast<double>(count);
    }
  }
  return rows;
}

TEST(CarriedPriceTest, PlansCountTheBytesOfWhatHopsCarry) {
  for (const auto layout :
       {ParallelismSpec::CONTIGUOUS, ParallelismSpec::ZIGZAG, ParallelismSpec::STRIPED}) {
    for (const auto ring : {ParallelismSpec::FLAT, ParallelismSpec::HIERARCHICAL}) {
      const v1::JobSpec spec = WindowJob(layout, ring);
      const auto priced = PriceRing(spec, TypicalCluster(v1::ResourcesSpec::CPU, 2, 4));
      ASSERT_TRUE(priced.ok()) << priced.status();
      const v1::StepPlan& plan = priced->plan;
      double bytes = 0;  // of all ranks; one layer is dense
      for (const bool is_dense : {false, true}) {
        const double layers = is_dense ? 1 : 35, row = 2.0 * 2 * 128 * sizeof(float);
        bytes += layers * row * Rows(spec, plan, is_dense, false);
        bytes += layers * row * Rows(spec, plan, is_dense, true);
      }
      bytes *= static_cast<double>(spec.training().global_batch());
      EXPECT_NEAR(priced->bytes.sent * 8 / bytes, 1, 1e-12) << NameOf(plan);
      EXPECT_LE(priced->bytes.sent, priced->bytes.whole);
    }
  }
}

// A window in contiguous shards asks for little of the neighbour's keys, and of nobody else's.
TEST(CarriedPriceTest, WhatStaysAwayTakesNoTime) {
  const model::ModelConfig model = ThreeBillion();
  ClusterShape cluster = TypicalCluster(v1::ResourcesSpec::CPU, 1, 8);
  cluster.intra_node = {.bytes_per_second = 1e9, .latency_seconds = 0};
  const auto plan = [&](ParallelismSpec::Layout layout) {
    v1::JobSpec spec = WindowJob(layout, ParallelismSpec::FLAT);
    spec.mutable_attention()->clear_dense_layers();
    return *MakePlan(spec, model, cluster, CostModel(spec, model, cluster));
  };
  const v1::StepPlan contiguous = plan(ParallelismSpec::CONTIGUOUS),
                     striped = plan(ParallelismSpec::STRIPED);
  EXPECT_LT(contiguous.prediction().communication_seconds(),
            0.2 * striped.prediction().communication_seconds());
  EXPECT_LT(contiguous.prediction().exposed_communication_seconds(),
            0.3 * striped.prediction().exposed_communication_seconds());
  EXPECT_THAT(contiguous.reasons(),
              Contains(HasSubstr("hops of the ring carry what their receivers attend to")));
  // All of it travels where data choose.
  const v1::JobSpec chosen = LongJob(8, 32768);
  const v1::StepPlan online = *MakePlan(chosen, model, cluster, CostModel(chosen, model, cluster));
  EXPECT_THAT(online.reasons(), Not(Contains(HasSubstr("hops of the ring carry"))));
  // Nor do GPUs' plans count on it.
  const v1::JobSpec on_gpus =
      WindowJob(ParallelismSpec::CONTIGUOUS, ParallelismSpec::FLAT, v1::ResourcesSpec::CUDA);
  const ClusterShape gpus = Gpus(1, 8);
  EXPECT_THAT(MakePlan(on_gpus, model, gpus, CostModel(on_gpus, model, gpus))->reasons(),
              Not(Contains(HasSubstr("hops of the ring carry"))));
}

}  // namespace
}  // namespace ringleader::planner
