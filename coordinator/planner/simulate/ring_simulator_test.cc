#include "coordinator/planner/simulate/ring_simulator.h"

#include <gtest/gtest.h>

#include <set>

#include "ring/ring_schedule.h"

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

// Bytes a second inside a node and between nodes.
RingSetup WithLinks(RingSetup setup, double inside, double between) {
  setup.intra_node = {.bytes_per_second = inside, .latency_seconds = 0};
  setup.inter_node = {.bytes_per_second = between, .latency_seconds = 0};
  return setup;
}

// One setup, even steps of 1 s.
RingTimes Play(const RingSetup& setup, double outside = 0) {
  return SimulateRing(setup, Even(setup, 1.0), std::vector<double>(setup.ranks, outside));
}

RingSetup Backward(RingSetup setup) {
  setup.gradient_bytes = 1;
  return setup;
}

TEST(RingScheduleTest, EveryRankMeetsEveryOwnerOnceAndNoTwoAtOnce) {
  for (const auto kind :
       {ParallelismSpec::FLAT, ParallelismSpec::HIERARCHICAL, ParallelismSpec::ALL_GATHER}) {
    const RingSetup forward = Ring(kind, 4, 3), backward = Backward(forward);
    for (const RingSetup& setup : {forward, backward}) {
      for (int r = 0; r < setup.ranks; ++r) {
        std::set<int> owners;
        for (int t = 0; t < setup.ranks; ++t) owners.insert(OwnerAt(setup, r, t));
        EXPECT_EQ(owners.size(), setup.ranks);
      }
      for (int t = 0; t < setup.ranks; ++t) {
        std::set<int> held;
        for (int r = 0; r < setup.ranks; ++r) held.insert(OwnerAt(setup, r, t));
        EXPECT_EQ(held.size(), setup.ranks);
      }
    }
    for (int r = 0; r < forward.ranks; ++r) {
      EXPECT_EQ(OwnerAt(forward, r, 0), r);
      const bool gathers = kind == ParallelismSpec::ALL_GATHER;
      EXPECT_EQ(OwnerAt(backward, r, gathers ? 0 : backward.ranks - 1), r);
    }
  }
}

RingLevel LevelOf(ring::RingLink link) {
  return link == ring::RingLink::kInner ? RingLevel::kInner : RingLevel::kOuter;
}

// What lies in a trainer's slots, as the simulator numbers keys.
class TrainersKeys {
 public:
  TrainersKeys(int slots, int inner) : keys_(slots, -1), inner_(inner) { keys_[0] = 0; }

  int in(int slot) const { return keys_[slot]; }
  std::vector<KeyHop> Move(const std::vector<ring::RingHop>& hops) {
    std::vector<KeyHop> moved;
    for (const ring::RingHop& hop : hops) {
      const int sent = keys_[hop.send_slot];
      moved.push_back({LevelOf(hop.link), sent});
      keys_[hop.receive_slot] = sent + (hop.link == ring::RingLink::kInner ? 1 : inner_);
    }
    return moved;
  }

 private:
  std::vector<int> keys_;
  const int inner_;
};

void ExpectTheTrainersOwn(const RingSetup& setup, int rank, const ring::RingSchedule& schedule) {
  const RingOrder order = OrderOf(setup);
  TrainersKeys keys(schedule.kv_slots, schedule.shape.inner);
  EXPECT_EQ(keys.Move(schedule.first_hops), order.first_hops);
  ASSERT_EQ(order.steps.size(), setup.ranks);
  ASSERT_EQ(schedule.steps.size(), setup.ranks);
  for (int t = 0; t < setup.ranks; ++t) {
    SCOPED_TRACE(testing::Message() << "step " << t);
    const ring::RingStep& theirs = schedule.steps[t];
    EXPECT_EQ(keys.Move(theirs.kv_hops), order.steps[t].key_hops);
    EXPECT_EQ(keys.in(theirs.kv_slot), order.steps[t].keys);
    EXPECT_EQ(theirs.owner, OwnerAt(setup, rank, t));
    std::vector<RingLevel> returns;
    size_t adds = 0;
    for (const ring::GradAction& action : theirs.grad_actions) {
      if (action.kind == ring::GradAction::Kind::kHop) {
        returns.push_back(LevelOf(action.hop.link));
      } else {
        EXPECT_TRUE(returns.empty()) << "a sum is sent before it is complete";
        ++adds;
      }
    }
    EXPECT_EQ(adds, order.steps[t].adds.size());
    std::vector<RingLevel> mine;
    if (order.steps[t].returns.has_value()) mine.push_back(*order.steps[t].returns);
    EXPECT_EQ(returns, mine);
  }
}

// The simulator plays the schedules that trainers run: same owners, same hops at the same steps.
TEST(RingScheduleTest, IsTheTrainersOwn) {
  for (const auto& [inner, outer] :
       {std::pair{1, 1}, {2, 1}, {4, 1}, {7, 1}, {2, 2}, {4, 3}, {2, 5}, {1, 2}, {1, 4}}) {
    const bool nested = outer > 1;
    const RingSetup forward =
        Ring(nested ? ParallelismSpec::HIERARCHICAL : ParallelismSpec::FLAT, inner, outer);
    const ring::RingShape shape = {
        .kind = nested ? ring::RingKind::kHierarchical : ring::RingKind::kFlat,
        .inner = inner,
        .outer = outer};
    for (int r = 0; r < forward.ranks; ++r) {
      SCOPED_TRACE(testing::Message() << outer << " x " << inner << " rank " << r);
      ExpectTheTrainersOwn(forward, r, *ring::ForwardSchedule(shape, r));
      ExpectTheTrainersOwn(Backward(forward), r, *ring::BackwardSchedule(shape, r));
    }
  }
}

// Seconds of transfer are those of the hops that a rank makes.
TEST(RingScheduleTest, TransfersAreTheHops) {
  for (const auto& [inner, outer] : {std::pair{4, 1}, {2, 2}, {4, 3}, {1, 4}}) {
    RingSetup setup = Backward(
        Ring(outer > 1 ? ParallelismSpec::HIERARCHICAL : ParallelismSpec::FLAT, inner, outer));
    setup.intra_node = {.bytes_per_second = 1, .latency_seconds = 0};
    setup.inter_node = {.bytes_per_second = 0.01, .latency_seconds = 0};
    setup.kv_bytes = 3;  // 3 s inside a node, 300 s between nodes; gradients 1 s, 100 s
    const RingOrder order = OrderOf(setup);
    double expected = 0;
    const auto count = [&](RingLevel level, double seconds) {
      expected += level == RingLevel::kInner ? seconds : 100 * seconds;
    };
    for (const KeyHop& hop : order.first_hops) count(hop.level, 3);
    for (const RingStep& step : order.steps) {
      for (const KeyHop& hop : step.key_hops) count(hop.level, 3);
      if (step.returns.has_value()) count(*step.returns, 1);
    }
    const std::vector<double> none(setup.ranks, 0.0);
    EXPECT_NEAR(SimulateRing(setup, Even(setup, 1.0), none).transfer_seconds, expected, 1e-9);
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
  EXPECT_NEAR(Play(setup).seconds, 4.0, 1e-9);
  setup.kv_bytes = 130;  // 1.3 s: three hops stick out by 0.3 s each
  const RingTimes times = Play(setup);
  EXPECT_NEAR(times.seconds, 4.9, 1e-9);
  EXPECT_NEAR(times.exposed_seconds, 0.9, 1e-9);
  EXPECT_NEAR(times.transfer_seconds, 3.9, 1e-9);
}

// Steps of 1 s. The first keys are there at 0.1 s, all others before they are needed; the gradients
// of a step travel behind the next, the last behind the own one: 0.1 + 4.
TEST(RingSimulatorTest, GradientsComeHomeBehindTheOwnStep) {
  RingSetup setup = Ring(ParallelismSpec::FLAT, 4, 1);
  setup.intra_node = {.bytes_per_second = 100, .latency_seconds = 0};
  setup.kv_bytes = 10;
  setup.gradient_bytes = 50;
  const RingTimes times = Play(setup);
  EXPECT_NEAR(times.seconds, 4.1, 1e-9);
  EXPECT_NEAR(times.exposed_seconds, 0.1, 1e-9);
  EXPECT_NEAR(times.transfer_seconds, 3 * (0.1 + 0.5), 1e-9);
  // Columns hide the first hop.
  const RingTimes columns = Play(setup, 0.25);
  EXPECT_NEAR(columns.seconds, 4.25, 1e-9);
  EXPECT_NEAR(columns.exposed_seconds, 0.0, 1e-9);
  // Each of three hops sticks out of the step behind which it travels by 0.3 s: computed at 1.1,
  // 2.1, 3.4, 4.7; what those add is there at 2.4, 3.7, 5.0.
  setup.gradient_bytes = 130;
  EXPECT_NEAR(Play(setup).seconds, 5.0, 1e-9);
}

// Two nodes of two, steps of 1 s. Keys take 0.1 s inside a node and 0.5 s between nodes, gradients
// 0.2 s and 1 s. The other node's keys arrive at 0.5, its neighbour's at 0.6, when the first step
// begins: 1.6, where gradients leave (1.8) and the second step begins. It ends at 2.6, with them,
// and their sum leaves for the other node (3.6), while the own node's steps end at 3.6 and 4.6; the
// last needs the neighbour's gradients of 3.6 (3.8) and the other node's (3.6).
TEST(RingSimulatorTest, GradientsComeHomeBehindTheOwnNode) {
  RingSetup setup = WithLinks(Ring(ParallelismSpec::HIERARCHICAL, 2, 2), 100, 20);
  setup.kv_bytes = 10;
  setup.gradient_bytes = 20;
  const RingTimes times = Play(setup);
  EXPECT_NEAR(times.seconds, 4.6, 1e-9);
  EXPECT_NEAR(times.exposed_seconds, 0.6, 1e-9);
  EXPECT_NEAR(times.transfer_seconds, 2 * (0.1 + 0.2) + (0.5 + 1.0), 1e-9);
  // Columns of 0.25 s hide as much of the hop between nodes; of 0.75 s all of it, but not the hop
  // inside, which starts with the first step: 0.85 + 4.
  EXPECT_NEAR(Play(setup, 0.25).seconds, 4.6, 1e-9);
  EXPECT_NEAR(Play(setup, 0.25).exposed_seconds, 0.35, 1e-9);
  EXPECT_NEAR(Play(setup, 0.75).seconds, 4.85, 1e-9);
  // 0.6 s and 3 s: gradients of the first step are there at 2.2; those that leave the node at 2.6
  // come home at 5.6, a second behind the last step.
  setup.gradient_bytes = 60;
  EXPECT_NEAR(Play(setup).seconds, 5.6, 1e-9);
}

// Three nodes of three, steps of 1 s, gradients take next to nothing. Keys take 0.5 s between nodes
// and 1.2 s inside, where the second hop of a loop follows the first:
//   loop 1: keys at 0.5, 1.7 and 2.9; steps begin at 1.7, 2.9 and 3.9 with what came first;
//   loop 2: keys have been there since 1.0, at 6.1 and 7.3; steps begin at 6.1, 7.3 and 8.3;
//   own:    keys leave with the step before, at 8.3 and 9.5; steps begin at 9.5, 10.7 and 11.7.
TEST(RingSimulatorTest, BackwardWaitsForTheFirstHopOfALoop) {
  RingSetup setup = WithLinks(Ring(ParallelismSpec::HIERARCHICAL, 3, 3), 100, 240);
  setup.kv_bytes = 120;
  setup.gradient_bytes = 1;
  const RingTimes times = Play(setup);
  EXPECT_NEAR(times.seconds, 12.7, 1e-9);
  EXPECT_NEAR(times.exposed_seconds, 3.7, 1e-9);
}

// One rank a node, steps of 1 s, keys 0.5 s, gradients 0.75 s between nodes: like a flat ring.
TEST(RingSimulatorTest, NodesOfOneRankAreAFlatRing) {
  RingSetup setup = Ring(ParallelismSpec::HIERARCHICAL, 1, 4);
  setup.inter_node = {.bytes_per_second = 100, .latency_seconds = 0};
  setup.kv_bytes = 50;
  setup.gradient_bytes = 75;
  EXPECT_NEAR(Play(setup).seconds, 4.5, 1e-9);
  setup.kind = ParallelismSpec::FLAT;
  EXPECT_NEAR(Play(setup).seconds, 4.5, 1e-9);
}

// A hop between nodes takes three steps: the flat ring waits for it at every step, the hierarchical
// one hides it behind a whole inner loop.
TEST(RingSimulatorTest, HierarchicalHidesSlowLinks) {
  const auto run = [](ParallelismSpec::Ring kind) {
    RingSetup setup = WithLinks(Ring(kind, 4, 4), 1000, 100);
    setup.kv_bytes = 300;
    return Play(setup);
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
