#include "coordinator/planner/ring_simulator.h"

#include <gtest/gtest.h>

#include <set>

#include "worker/attention/ring_schedule.h"

namespace ringleader::planner {
namespace {

using v1::ParallelismSpec;

RingSetup Ring(ParallelismSpec::Ring kind, int inner, int outer) {
  RingSetup setup;
  setup.kind = kind;
  setup.ranks = inner * outer;
  setup.group = {.inner = inner, .outer = outer, .regular = true};
  return setup;
}

std::vector<double> Even(const RingSetup& setup, double seconds) {
  return std::vector<double>(size_t(setup.ranks) * setup.ranks, seconds);
}

TEST(RingScheduleTest, EveryRankMeetsEveryOwnerOnceAndNoTwoAtOnce) {
  for (const auto kind : {ParallelismSpec::FLAT, ParallelismSpec::HIERARCHICAL}) {
    const RingSetup setup = Ring(kind, 4, 3);
    for (int r = 0; r < setup.ranks; ++r) {
      std::set<int> owners;
      for (int t = 0; t < setup.ranks; ++t) owners.insert(OwnerAt(setup, r, t));
      EXPECT_EQ(owners.size(), setup.ranks);
      EXPECT_EQ(OwnerAt(setup, r, 0), r);
    }
    for (int t = 0; t < setup.ranks; ++t) {
      std::set<int> held;
      for (int r = 0; r < setup.ranks; ++r) held.insert(OwnerAt(setup, r, t));
      EXPECT_EQ(held.size(), setup.ranks);
    }
  }
}

// The simulator plays the schedules that trainers run: same owners, same hops at the same steps.
TEST(RingScheduleTest, IsTheTrainersOwn) {
  using attention::RingKind, attention::RingLink;
  for (const auto& [inner, outer] : {std::pair{1, 1}, {4, 1}, {7, 1}, {4, 3}, {2, 5}, {1, 4}}) {
    const bool nested = outer > 1;
    const RingSetup setup =
        Ring(nested ? ParallelismSpec::HIERARCHICAL : ParallelismSpec::FLAT, inner, outer);
    for (int r = 0; r < setup.ranks; ++r) {
      const auto schedule =
          attention::BackwardSchedule({.kind = nested ? RingKind::kHierarchical : RingKind::kFlat,
                                       .inner = inner,
                                       .outer = outer},
                                      r);
      ASSERT_TRUE(schedule.ok()) << schedule.status();
      ASSERT_EQ(schedule->steps.size(), setup.ranks);
      for (int t = 0; t < setup.ranks; ++t) {
        const attention::RingStep& step = schedule->steps[t];
        EXPECT_EQ(step.owner, OwnerAt(setup, r, t));
        int inner_hops = 0, outer_hops = 0, inner_gradients = 0, outer_gradients = 0;
        for (const auto& hop : step.kv_hops)
          ++(hop.link == RingLink::kInner ? inner_hops : outer_hops);
        for (const auto& action : step.grad_actions) {
          if (action.kind != attention::GradAction::Kind::kHop) continue;
          ++(action.hop.link == RingLink::kInner ? inner_gradients : outer_gradients);
        }
        const bool first = t % inner == 0, last = t % inner == inner - 1;
        EXPECT_EQ(inner_hops, last ? 0 : 1);
        EXPECT_EQ(outer_hops, first && t + inner < setup.ranks ? 1 : 0);
        EXPECT_EQ(inner_gradients, inner > 1 ? 1 : 0);
        const int folds = (first && t > 0) + (t == setup.ranks - 1);
        EXPECT_EQ(outer_gradients, nested ? folds : 0);
      }
    }
  }
}

TEST(RingSimulatorTest, WithoutTransfersEvenWorkTakesItsOwnTime) {
  for (const auto kind :
       {ParallelismSpec::FLAT, ParallelismSpec::HIERARCHICAL, ParallelismSpec::ALL_GATHER}) {
    const RingSetup setup = Ring(kind, 4, 2);
    const RingTimes times = SimulateRing(setup, Even(setup, 0.5), std::vector<double>(8, 0.25));
    EXPECT_DOUBLE_EQ(times.seconds, 8 * 0.5 + 0.25);
    EXPECT_DOUBLE_EQ(times.busy_seconds, times.seconds);
    EXPECT_DOUBLE_EQ(times.exposed_seconds, 0);
  }
}

// Flat, one node: hop h, step c: each of W - 1 hops hides behind a step. Hand-computed.
TEST(RingSimulatorTest, FlatRingHidesHopsBehindSteps) {
  RingSetup setup = Ring(ParallelismSpec::FLAT, 4, 1);
  setup.intra_node = {.bytes_per_second = 100, .latency_seconds = 0};
  setup.kv_bytes = 80;  // 0.8 s
  const std::vector<double> none(4, 0.0);
  EXPECT_NEAR(SimulateRing(setup, Even(setup, 1.0), none).seconds, 4.0, 1e-9);
  setup.kv_bytes = 130;  // 1.3 s: three hops stick out by 0.3 s each
  const RingTimes times = SimulateRing(setup, Even(setup, 1.0), none);
  EXPECT_NEAR(times.seconds, 4.9, 1e-9);
  EXPECT_NEAR(times.exposed_seconds, 0.9, 1e-9);
  EXPECT_NEAR(times.transfer_seconds, 3.9, 1e-9);
}

TEST(RingSimulatorTest, GradientsComeHomeOneHopLater) {
  RingSetup setup = Ring(ParallelismSpec::FLAT, 4, 1);
  setup.intra_node = {.bytes_per_second = 100, .latency_seconds = 0};
  setup.kv_bytes = 10;
  setup.gradient_bytes = 50;  // 0.5 s behind every step, the last one exposed
  const RingTimes times = SimulateRing(setup, Even(setup, 1.0), std::vector<double>(4, 0.0));
  EXPECT_NEAR(times.seconds, 4.5, 1e-9);
}

// A hop between nodes takes three steps: the flat ring waits for it at every step, the hierarchical
// one hides it behind a whole inner loop.
TEST(RingSimulatorTest, HierarchicalHidesSlowLinks) {
  const std::vector<double> none(16, 0.0);
  const auto run = [&](ParallelismSpec::Ring kind) {
    RingSetup setup = Ring(kind, 4, 4);
    setup.intra_node = {.bytes_per_second = 1000, .latency_seconds = 0};
    setup.inter_node = {.bytes_per_second = 100, .latency_seconds = 0};
    setup.kv_bytes = 300;
    return SimulateRing(setup, Even(setup, 1.0), none);
  };
  EXPECT_NEAR(run(ParallelismSpec::HIERARCHICAL).seconds, 16.0, 1e-9);
  EXPECT_GT(run(ParallelismSpec::FLAT).seconds, 16.0 + 15.0);
  EXPECT_NEAR(run(ParallelismSpec::FLAT).seconds, 1.0 + 15 * 3.0, 1e-9);
}

// One slow rank at one step holds up its successors: a ring is only as fast as its steps' maxima.
TEST(RingSimulatorTest, UnevenStepsCostMoreThanTheirMean) {
  RingSetup setup = Ring(ParallelismSpec::FLAT, 8, 1);
  setup.intra_node = {.bytes_per_second = 1e3, .latency_seconds = 0};
  setup.kv_bytes = 1;
  std::vector<double> seconds = Even(setup, 1.0);
  double most = 0;
  for (int r = 0; r < 8; ++r) {
    for (int j = 0; j < 8; ++j) seconds[r * 8 + j] = j == 3 ? 8.0 : 0.0;  // one hot owner
    most = 8.0;
  }
  EXPECT_GT(SimulateRing(setup, seconds, std::vector<double>(8, 0.0)).seconds, most);
  EXPECT_DOUBLE_EQ(StepImbalance(setup, seconds), 8.0);
  EXPECT_DOUBLE_EQ(StepImbalance(setup, Even(setup, 2.0)), 1.0);
}

TEST(RingSimulatorTest, OneRankNeedsNoRing) {
  const RingSetup setup = Ring(ParallelismSpec::FLAT, 1, 1);
  EXPECT_DOUBLE_EQ(SimulateRing(setup, {2.0}, {0.5}).seconds, 2.5);
}

}  // namespace
}  // namespace ringleader::planner
