// Plans of double rings: windows that the job gives, and those that the planner picks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "coordinator/planner/testing/planner_problems.h"

namespace ringleader::planner {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using v1::ParallelismSpec;

absl::StatusOr<v1::StepPlan> Plan(uint32_t window, const ClusterShape& cluster, uint32_t heads = 1,
                                  const v1::StepPlan* kept = nullptr) {
  v1::JobSpec spec = LongJob(16, 1048576);
  spec.mutable_parallelism()->set_ring(ParallelismSpec::HIERARCHICAL);
  spec.mutable_parallelism()->set_ring_window(window);
  spec.mutable_parallelism()->set_heads(heads);
  const model::ModelConfig model = ThreeBillion();
  return MakePlan(spec, model, cluster, CostModel(spec, model, cluster), {}, {}, kept);
}

TEST(RingWindowTest, TheInnerRingIsTheWindow) {
  const ClusterShape cluster = Gpus(2, 8);
  const auto of_nodes = Plan(0, cluster);
  ASSERT_TRUE(of_nodes.ok()) << of_nodes.status();
  EXPECT_EQ(of_nodes->ring().inner(), 8u);
  for (const uint32_t window : {1u, 4u, 8u, 16u}) {
    const auto plan = Plan(window, cluster);
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_EQ(plan->ring().kind(), ParallelismSpec::HIERARCHICAL);
    EXPECT_EQ(plan->ring().inner(), window);
    EXPECT_EQ(plan->ring().outer(), 16 / window);
    EXPECT_THAT(plan->reasons(), Contains(HasSubstr("as parallelism.ring_window asks")));
    // What travels, and how long, are the same hops where the window is the node.
    if (window == 8) {
      EXPECT_EQ(plan->prediction().SerializeAsString(), of_nodes->prediction().SerializeAsString());
    }
  }
  // The ring has half as many places: each is two trainers that share heads.
  const auto shared = Plan(4, cluster, /*heads=*/2);
  ASSERT_TRUE(shared.ok()) << shared.status();
  EXPECT_EQ(shared->ring().inner(), 4u);
  EXPECT_EQ(shared->ring().outer(), 2u);
}

// A window inside a node sends between nodes as often as one of the node does, and one that spans
// nodes at every step of its inner ring.
TEST(RingWindowTest, HopsGoByTheLinksThatTheyTravelOn) {
  ClusterShape cluster = Gpus(2, 8);
  cluster.inter_node = {.bytes_per_second = 1e9};
  const auto seconds = [&](uint32_t window) {
    return Plan(window, cluster)->prediction().communication_seconds();
  };
  EXPECT_GT(seconds(16), 3 * seconds(8));
}

// Nodes of unequal size have no ring of nodes; a window makes one.
TEST(RingWindowTest, FitsNodesOfAnySize) {
  const ClusterShape unequal = Gpus(3, 0);
  EXPECT_THAT(std::string(Plan(0, unequal).status().message()),
              HasSubstr("or give parallelism.ring_window"));
  const auto plan = Plan(4, unequal);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->ring().outer(), 4u);
}

// Keys of eight heads take their links as long as attention takes: more hops between smaller
// windows are begun sooner.
TEST(RingWindowTest, APartOfANodeIsPickedWhereItIsPredictedToBeFaster) {
  model::ModelConfig model = ThreeBillion();
  model.kv_heads = 8;
  const auto plan_of = [&](int nodes, const auto& change) {
    v1::JobSpec spec = LongJob(8 * nodes, 8192ull * 8 * nodes);
    change(*spec.mutable_parallelism());
    const ClusterShape cluster = Gpus(nodes, 8);
    const auto plan = MakePlan(spec, model, cluster, CostModel(spec, model, cluster));
    EXPECT_TRUE(plan.ok()) << plan.status();
    return *plan;
  };
  const v1::StepPlan picked = plan_of(8, [](auto&) {});
  EXPECT_EQ(picked.ring().kind(), ParallelismSpec::HIERARCHICAL);
  EXPECT_EQ(picked.ring().inner(), 4u);
  EXPECT_EQ(picked.ring().outer(), 16u);
  EXPECT_THAT(picked.reasons(), Contains(HasSubstr("a hop between windows of 4 trainers")));
  EXPECT_THAT(picked.reasons(), Contains(HasSubstr("hierarchical(8) would take")));
  const v1::StepPlan node = plan_of(8, [](auto& asked) {
    asked.set_ring(ParallelismSpec::HIERARCHICAL);
    asked.set_ring_window(8);
  });
  EXPECT_LT(picked.prediction().step_seconds(), node.prediction().step_seconds());
  // Of thousands of ranks windows are not compared, which would take too long.
  const v1::StepPlan many = plan_of(256, [](auto& asked) {
    asked.set_layout(ParallelismSpec::STRIPED);
    asked.set_ring(ParallelismSpec::HIERARCHICAL);
  });
  EXPECT_EQ(many.ring().inner(), 8u);
}

TEST(RingWindowTest, AResumedAttemptKeepsItsWindow) {
  const ClusterShape cluster = Gpus(2, 8);
  const auto before = Plan(4, cluster);
  ASSERT_TRUE(before.ok()) << before.status();
  EXPECT_THAT(Plan(4, cluster, 1, &*before)->reasons(),
              Contains(HasSubstr("sums are in the same order")));
  EXPECT_THAT(Plan(8, cluster, 1, &*before)->reasons(),
              Contains(HasSubstr("losses may differ in their last bits")));
  // Where the planner may pick, too.
  for (const uint32_t window : {4, 8}) {
    const auto had = Plan(window, cluster);
    const auto goes_on = Plan(0, cluster, 1, &*had);
    ASSERT_TRUE(goes_on.ok()) << goes_on.status();
    EXPECT_EQ(goes_on->ring().inner(), window);
  }
}

}  // namespace
}  // namespace ringleader::planner
