// Plans of jobs whose trainers share out heads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "coordinator/planner/candidates.h"
#include "coordinator/planner/cost/memory.h"
#include "coordinator/planner/testing/priced_ring.h"
#include "jobspec/values/attention_spec.h"

namespace ringleader::planner {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using v1::ParallelismSpec;

v1::JobSpec HeadsJob(uint32_t context, uint32_t heads, uint64_t tokens) {
  v1::JobSpec spec = LongJob(context, tokens);
  spec.mutable_parallelism()->set_heads(heads);
  return spec;
}

absl::StatusOr<v1::StepPlan> Plan(const v1::JobSpec& spec, const ClusterShape& cluster) {
  const model::ModelConfig model = ThreeBillion();
  return MakePlan(spec, model, cluster, CostModel(spec, model, cluster));
}

// The published volume of Ulysses (LongCA-bench, arXiv 2510.17896, appendix), in elements a device
// sends in forward: 2 (N - 1) / N² × t × (kv heads + heads) × head_dim; backward twice as much.
double PublishedElements(double n, double tokens, double kv_heads) {
  return 2 * (n - 1) / (n * n) * tokens * (kv_heads + 16) * 128;
}

TEST(HeadsPlanTest, BytesAreThePublishedVolumes) {
  constexpr double kTokens = 262144, kLayers = 36, kBytes = 2;
  const auto alone = Plan(HeadsJob(2, 2, 262144), Gpus(1, 2));
  ASSERT_TRUE(alone.ok()) << alone.status();
  EXPECT_DOUBLE_EQ(alone->prediction().head_bytes(),
                   3 * PublishedElements(2, kTokens, 2) * kBytes * kLayers);
  // Four trainers have two KV heads between them: each is sent its own copy.
  const auto few = Plan(HeadsJob(4, 4, 262144), Gpus(1, 4));
  ASSERT_TRUE(few.ok()) << few.status();
  EXPECT_DOUBLE_EQ(few->prediction().head_bytes(),
                   3 * PublishedElements(4, kTokens, 4) * kBytes * kLayers);
  // Inside a ring of two: as if of half the tokens.
  const auto usp = Plan(HeadsJob(4, 2, 262144), Gpus(1, 4));
  ASSERT_TRUE(usp.ok()) << usp.status();
  EXPECT_DOUBLE_EQ(usp->prediction().head_bytes(),
                   3 * PublishedElements(2, kTokens / 2, 2) * kBytes * kLayers);
  EXPECT_EQ(usp->ring().inner(), 2u);
  const auto ring = Plan(LongJob(4, 262144), Gpus(1, 4));
  ASSERT_TRUE(ring.ok()) << ring.status();
  EXPECT_EQ(ring->prediction().head_bytes(), 0);
}

// The same of a ring (Ring P2P), and of one around trainers that share heads (USP): 2 (N - 1) / N ×
// t / Na × kv heads × head_dim. Backward sends keys and values once more, and their gradients in
// float32.
TEST(HeadsPlanTest, RingsSendThePublishedVolumes) {
  constexpr double kTokens = 262144, kLayers = 36, kKvHeads = 2, kHeadDim = 128;
  for (const auto ring :
       {ParallelismSpec::FLAT, ParallelismSpec::HIERARCHICAL, ParallelismSpec::ALL_GATHER}) {
    for (const uint32_t heads : {1, 2, 4}) {
      v1::JobSpec spec = HeadsJob(8, heads, 262144);
      spec.mutable_parallelism()->set_ring(ring);
      const auto sent = PriceRing(spec, Gpus(1, 8));
      ASSERT_TRUE(sent.ok()) << sent.status();
      const double n = 8.0 / heads;
      // Of four trainers that share two KV heads each has one, as one of two has.
      const double kv_heads = std::max(1.0, kKvHeads / heads);
      const double elements = 2 * (n - 1) / n * kTokens * kv_heads * kHeadDim;
      const double batch = static_cast<double>(spec.training().global_batch());
      EXPECT_DOUBLE_EQ(sent->bytes.whole, batch * kLayers * elements * (2 + 2 + 4))
          << NameOf(sent->plan) << ", " << heads;
    }
  }
}

TEST(HeadsPlanTest, SecondsGoByTheLinksThatHeadsTravelOn) {
  const v1::JobSpec spec = HeadsJob(4, 4, 262144);
  const auto seconds = [&](const ClusterShape& cluster) {
    const auto plan = Plan(spec, cluster);
    EXPECT_TRUE(plan.ok()) << plan.status();
    const v1::Prediction& p = plan->prediction();
    EXPECT_NEAR(p.attention_seconds() + p.index_seconds() + p.linear_seconds() + p.wait_seconds() +
                    p.exposed_communication_seconds() + p.optimizer_seconds(),
                p.step_seconds(), 1e-9 * p.step_seconds());
    EXPECT_DOUBLE_EQ(p.exposed_communication_seconds(), p.head_seconds()) << "no ring travels";
    EXPECT_DOUBLE_EQ(p.communication_seconds(), p.head_seconds());
    return p.head_seconds();
  };
  const ClusterShape node = Gpus(1, 4), nodes = Gpus(2, 2);
  const double bytes = 3 * PublishedElements(4, 262144, 4) * 2 * 36;
  EXPECT_NEAR(seconds(node),
              bytes / node.intra_node.bytes_per_second + 36 * 4 * node.intra_node.latency_seconds,
              1e-9);
  EXPECT_NEAR(seconds(nodes),
              bytes / nodes.inter_node.bytes_per_second + 36 * 4 * nodes.inter_node.latency_seconds,
              1e-9);
}

// Each trainer attends to more tokens with fewer heads: as many tiles, all even, and a sequence
// that need not lie in stripes.
TEST(HeadsPlanTest, WorkIsTheSameAndEven) {
  const auto shared = Plan(HeadsJob(4, 4, 262144), Gpus(1, 4)),
             ring = Plan(LongJob(4, 262144), Gpus(1, 4));
  ASSERT_TRUE(shared.ok() && ring.ok()) << shared.status() << ring.status();
  const v1::Prediction &p = shared->prediction(), &of_ring = ring->prediction();
  EXPECT_EQ(shared->layout(), ParallelismSpec::CONTIGUOUS);
  EXPECT_EQ(shared->ring().inner() * shared->ring().outer(), 1u);
  EXPECT_DOUBLE_EQ(p.worker_imbalance(), 1);
  EXPECT_NEAR(p.density() / of_ring.density(), 1, 0.01);
  // A ring of four merges each query's output four times.
  EXPECT_LT(p.attention_seconds(), of_ring.attention_seconds());
  EXPECT_GT(p.attention_seconds(), 0.9 * of_ring.attention_seconds());
  EXPECT_NEAR(p.linear_seconds(), of_ring.linear_seconds(), 1e-9);
  EXPECT_NEAR(p.index_seconds(), of_ring.index_seconds(), 1e-9);
  EXPECT_NEAR(p.model_flops() / of_ring.model_flops(), 1, 0.01);
  EXPECT_THAT(shared->reasons(),
              Contains(HasSubstr("heads as parallelism.heads asks: 4 trainers")));
}

TEST(HeadsPlanTest, ARingGoesAroundTheTrainersThatShare) {
  ClusterShape cluster = Gpus(4, 8);
  cluster.inter_node.bytes_per_second = 2e9;
  const auto plan = Plan(HeadsJob(32, 2, 524288), cluster);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->ring().kind(), ParallelismSpec::HIERARCHICAL);
  EXPECT_EQ(plan->ring().inner(), 4u);
  EXPECT_EQ(plan->ring().outer(), 4u);
  // Half of the KV heads travel, of as many tokens a trainer of the ring: half of what a ring of
  // all would send to twice as many.
  v1::JobSpec flat = HeadsJob(8, 2, 524288), all = LongJob(8, 524288);
  for (v1::JobSpec* spec : {&flat, &all}) {
    spec->mutable_parallelism()->set_ring(ParallelismSpec::FLAT);
    spec->mutable_parallelism()->set_layout(ParallelismSpec::STRIPED);
  }
  const auto usp = Plan(flat, Gpus(1, 8)), whole = Plan(all, Gpus(1, 8));
  ASSERT_TRUE(usp.ok() && whole.ok()) << usp.status() << whole.status();
  const double hops = usp->prediction().communication_seconds() - usp->prediction().head_seconds();
  EXPECT_LT(hops, 0.6 * whole->prediction().communication_seconds());
}

// A model with as many KV heads as heads: a ring sends four times what heads that are shared out
// among eight do.
model::ModelConfig WithAllKvHeads() {
  model::ModelConfig model = ThreeBillion();
  model.kv_heads = model.heads;
  return model;
}

TEST(HeadsPlanTest, TheFastestNumberIsPicked) {
  const model::ModelConfig model = WithAllKvHeads();
  const auto planned = [&](const v1::JobSpec& spec, double bytes_per_second) {
    ClusterShape cluster = Gpus(1, 8);
    cluster.intra_node.bytes_per_second = bytes_per_second;
    auto plan = MakePlan(spec, model, cluster, CostModel(spec, model, cluster));
    EXPECT_TRUE(plan.ok()) << plan.status();
    return *std::move(plan);
  };
  const v1::JobSpec open = HeadsJob(8, 0, 524288);
  std::vector<uint32_t> picked;
  for (const double link : {3e9, 400e9}) {
    const v1::StepPlan plan = planned(open, link);
    picked.push_back(plan.heads());
    const v1::JobSpec job = jobspec::PlannedJob(open, plan);
    EXPECT_EQ(job.parallelism().heads(), plan.heads());
    EXPECT_EQ(plan.ring().inner() * plan.ring().outer(), 8 / plan.heads());
    // The same as where the job file gives that number, and faster than where it gives another.
    for (const uint32_t heads : {1u, 2u, 4u, 8u}) {
      const v1::StepPlan given = planned(HeadsJob(8, heads, 524288), link);
      EXPECT_EQ(given.heads(), 0u) << "the job file says";
      const double seconds = given.prediction().step_seconds();
      if (heads == plan.heads()) {
        EXPECT_EQ(plan.prediction().step_seconds(), seconds);
        EXPECT_EQ(plan.layout(), given.layout());
        EXPECT_EQ(plan.ring().kind(), given.ring().kind());
      } else {
        EXPECT_LT(plan.prediction().step_seconds(), seconds * 1.005);
        EXPECT_THAT(plan.reasons(),
                    Contains(HasSubstr(heads == 1 ? "heads whole on each trainer would take"
                                                  : absl::StrFormat("heads shared out among %d "
                                                                    "trainers would take",
                                                                    heads))));
      }
    }
  }
  EXPECT_THAT(picked, ::testing::ElementsAre(8, 1));
}

TEST(HeadsPlanTest, WhatDoesNotGoWithSharedHeadsIsNotPicked) {
  v1::JobSpec spec = HeadsJob(8, 0, 524288);
  spec.mutable_attention()->mutable_balance()->set_anchor(v1::AttentionSpec::Balance::MEAN);
  const auto plan = Plan(spec, Gpus(1, 8));
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->heads(), 1u);
  EXPECT_THAT(plan->reasons(), Contains(HasSubstr("heads are not shared out among 4: "
                                                  "parallelism.heads: 4 does not go with "
                                                  "attention.balance.anchor")));
  // 16 heads over 16 trainers: an odd number each.
  const auto many = Plan(HeadsJob(16, 0, 524288), Gpus(2, 8));
  ASSERT_TRUE(many.ok()) << many.status();
  EXPECT_THAT(many->reasons(), Contains(HasSubstr("heads are not shared out among 16: ")));
}

TEST(HeadsPlanTest, AResumedAttemptKeepsTheNumber) {
  const model::ModelConfig model = WithAllKvHeads();
  const v1::JobSpec spec = HeadsJob(8, 0, 524288);
  ClusterShape slow = Gpus(1, 8);
  slow.intra_node.bytes_per_second = 3e9;
  const auto before = MakePlan(spec, model, slow, CostModel(spec, model, slow));
  ASSERT_TRUE(before.ok()) << before.status();
  const ClusterShape fast = Gpus(1, 8);
  const auto after = MakePlan(spec, model, fast, CostModel(spec, model, fast), {}, {}, &*before);
  ASSERT_TRUE(after.ok()) << after.status();
  EXPECT_EQ(after->heads(), before->heads());
  EXPECT_EQ(after->version(), before->version());
  EXPECT_EQ(after->ring().inner(), before->ring().inner());
}

// All numbers are compared, so all of them count.
TEST(HeadsPlanTest, WhatThePlanMayCostCountsEveryNumber) {
  const model::ModelConfig model = ThreeBillion();
  const auto cost = [&](uint32_t heads) {
    const v1::JobSpec spec = HeadsJob(512, heads, 33554432);
    double least = 0, most = 1;  // seconds that are refused, and that are enough
    for (int i = 0; i < 20; ++i) {
      const double middle = (least + most) / 2;
      const absl::Status status =
          MakePlan(spec, model, Gpus(64, 8), CostModel(spec, model, Gpus(64, 8)), {},
                   {.seconds = middle, .stop = [] { return true; }})
              .status();
      (absl::IsResourceExhausted(status) ? least : most) = middle;
    }
    return most;
  };
  EXPECT_NEAR(cost(0) / (cost(1) + cost(2) + cost(4) + cost(8)), 1, 1e-3);
}

// Groups of heads send as many bytes, hide all but the first group's, and hold two groups at most.
TEST(HeadsPlanTest, GatheringInGroupsHidesTheGather) {
  const model::ModelConfig model = WithAllKvHeads();
  const auto job = [](uint32_t groups) {
    v1::JobSpec spec = LongJob(8, 524288);
    spec.mutable_attention()->set_pattern(v1::AttentionSpec::DENSE);
    spec.mutable_parallelism()->set_layout(ParallelismSpec::STRIPED);
    spec.mutable_parallelism()->set_ring(ParallelismSpec::ALL_GATHER);
    spec.mutable_parallelism()->set_head_groups(groups);
    return spec;
  };
  ClusterShape cluster = Gpus(1, 8);
  cluster.intra_node.bytes_per_second = 30e9;
  const auto predicted = [&](uint32_t groups) {
    const auto plan = MakePlan(job(groups), model, cluster, CostModel(job(groups), model, cluster));
    EXPECT_TRUE(plan.ok()) << plan.status();
    if (groups > 1) {
      EXPECT_THAT(plan->reasons(),
                  Contains(HasSubstr(absl::StrFormat(
                      "gathered in %d groups of heads, as parallelism.head_groups", groups))));
    }
    return plan->prediction();
  };
  const v1::Prediction at_once = predicted(1), in_groups = predicted(8);
  // As many pairs and rows, in seven times as many calls more: eight ring steps in each layer,
  // forward and backward.
  const CostModel costs(job(8), model, cluster);
  const double calls = costs.Seconds(Phase::kAttentionForward, {.calls = 1}) +
                       costs.Seconds(Phase::kAttentionBackward, {.calls = 1});
  EXPECT_NEAR(in_groups.attention_seconds() - at_once.attention_seconds(), 7 * 8 * 36 * calls,
              1e-9);
  // Keys in both directions and gradients, to seven others in each layer: seven groups more of
  // them pay a latency.
  EXPECT_NEAR(in_groups.communication_seconds() - at_once.communication_seconds(),
              3 * 7 * 7 * 36 * cluster.intra_node.latency_seconds, 1e-9);
  EXPECT_LT(in_groups.exposed_communication_seconds(),
            0.9 * at_once.exposed_communication_seconds());
  const auto keys = [&](uint32_t groups) {
    return EstimateMemory(job(groups), model, cluster, ParallelismSpec::ALL_GATHER).keys_and_values;
  };
  EXPECT_DOUBLE_EQ(keys(8), keys(1) / 4) << "two of eight groups";
  const auto refused = MakePlan(job(3), model, cluster, CostModel(job(3), model, cluster));
  EXPECT_THAT(std::string(refused.status().message()),
              HasSubstr("parallelism.head_groups: 3 does not divide the 16 KV heads"));
}

TEST(HeadsPlanTest, GroupsArePickedWhereTheyArePredictedToBeFaster) {
  const model::ModelConfig model = WithAllKvHeads();
  const auto planned = [&](const v1::JobSpec& spec, double bytes_per_second,
                           const v1::StepPlan* kept = nullptr) {
    ClusterShape cluster = Gpus(1, 8);
    cluster.intra_node.bytes_per_second = bytes_per_second;
    auto plan = MakePlan(spec, model, cluster, CostModel(spec, model, cluster), {}, {}, kept);
    EXPECT_TRUE(plan.ok()) << plan.status();
    return *std::move(plan);
  };
  v1::JobSpec open = LongJob(8, 524288);
  open.mutable_attention()->set_pattern(v1::AttentionSpec::DENSE);
  open.mutable_parallelism()->set_head_groups(0);
  EXPECT_EQ(planned(open, 400e9).head_groups(), 1u) << "a ring is faster";
  open.mutable_parallelism()->set_ring(ParallelismSpec::ALL_GATHER);
  const v1::StepPlan plan = planned(open, 30e9);
  EXPECT_GT(plan.head_groups(), 1u);
  EXPECT_THAT(plan.reasons(), Contains(HasSubstr("as is predicted to be fastest")));
  EXPECT_THAT(plan.reasons(), Contains(HasSubstr("striped(64), all_gather would take")));
  const double fastest = plan.prediction().step_seconds();
  for (const uint32_t groups : {1u, 2u, 4u, 8u}) {
    v1::JobSpec given = open;
    given.mutable_parallelism()->set_head_groups(groups);
    const v1::StepPlan with = planned(given, 30e9);
    EXPECT_EQ(with.head_groups(), 0u) << "the job file says";
    EXPECT_LT(fastest, with.prediction().step_seconds() * 1.005);
    if (groups == plan.head_groups()) {
      EXPECT_EQ(with.prediction().step_seconds(), fastest);
    }
  }
  // What goes on from a checkpoint keeps them, and an attempt of an earlier release has none.
  EXPECT_EQ(planned(open, 400e9, &plan).head_groups(), plan.head_groups());
  v1::StepPlan earlier = plan;
  earlier.clear_head_groups();
  EXPECT_EQ(planned(open, 30e9, &earlier).head_groups(), 1u);
  // What does not go with groups is planned without.
  open.mutable_attention()->mutable_balance()->set_anchor(v1::AttentionSpec::Balance::MEAN);
  EXPECT_EQ(planned(open, 30e9).head_groups(), 1u);
}

TEST(HeadsPlanTest, WhatCannotWorkIsRefusedByName) {
  const auto error = [](const v1::JobSpec& spec, const ClusterShape& cluster) {
    return std::string(Plan(spec, cluster).status().message());
  };
  EXPECT_THAT(error(HeadsJob(6, 3, 196608), Gpus(1, 6)),
              HasSubstr("parallelism.heads: 3 trainers cannot share out 16 heads over 2 KV heads"));
  EXPECT_THAT(error(HeadsJob(16, 16, 524288), Gpus(2, 8)),
              HasSubstr("1 of 16 heads; attention.pattern: vertical_slash"));
  v1::JobSpec nested = HeadsJob(16, 4, 524288);
  nested.mutable_parallelism()->set_ring(ParallelismSpec::HIERARCHICAL);
  EXPECT_THAT(error(nested, Gpus(8, 2)), HasSubstr("which parallelism.heads (4) divides"));
}

TEST(HeadsPlanTest, MemoryCountsKeysOfAllTokensThatAreShared) {
  const auto keys = [](uint32_t context, uint32_t heads) {
    return EstimateMemory(HeadsJob(context, heads, 262144), ThreeBillion(), Gpus(1, 8),
                          ParallelismSpec::FLAT)
        .keys_and_values;
  };
  EXPECT_EQ(keys(8, 2), keys(8, 1)) << "twice the tokens of half the heads";
  EXPECT_EQ(keys(8, 8), 4 * keys(8, 1)) << "eight times the tokens of one head of two";
}

}  // namespace
}  // namespace ringleader::planner
