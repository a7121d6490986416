#include "coordinator/planner/simulate/ring_simulator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "ring/ring_schedule.h"

namespace ringleader::planner {
namespace {

using ring::GradAction;
using ring::RingHop;
using ring::RingKind;
using ring::RingLink;
using ring::RingSchedule;

RingSetup Ring(RingKind kind, int inner, int outer) {
  RingSetup setup;
  const bool nested = kind == RingKind::kHierarchical;
  setup.shape = {
      .kind = kind, .inner = nested ? inner : inner * outer, .outer = nested ? outer : 1};
  setup.group = {.inner = inner, .outer = outer, .regular = true};
  return setup;
}

ring::TileLoads Even(const RingSetup& setup, double tiles) {
  ring::TileLoads loads(setup.shape.ranks());
  for (int rank = 0; rank < loads.ranks(); ++rank) {
    for (int owner = 0; owner < loads.ranks(); ++owner) loads.AddRing(rank, owner, tiles);
  }
  return loads;
}

// Bytes a second inside a node and between nodes.
RingSetup WithLinks(RingSetup setup, double inside, double between) {
  setup.intra_node = {.bytes_per_second = inside, .latency_seconds = 0};
  setup.inter_node = {.bytes_per_second = between, .latency_seconds = 0};
  return setup;
}

// A tile takes a second.
RingTimes Simulate(const RingSetup& setup, const ring::TileLoads& loads) {
  return RingSimulator(setup.shape, loads).Play(setup, {.per_tile = 1}, true);
}

// One setup, even steps of 1 s.
RingTimes Play(const RingSetup& setup, double outside = 0) {
  ring::TileLoads loads = Even(setup, 1.0);
  for (int rank = 0; rank < loads.ranks(); ++rank) loads.AddColumns(rank, outside);
  return Simulate(setup, loads);
}

RingSetup Backward(RingSetup setup) {
  setup.gradient_bytes = 1;
  return setup;
}

// Every rank runs a schedule of its own, as trainers do, in lock step: hop by hop and action by
// action, each with the ranks that the schedule names. A tile takes a second.
class Trainers {
 public:
  Trainers(const RingSetup& setup, const ring::TileLoads& loads)
      : setup_(setup), loads_(loads), backward_(setup.gradient_bytes > 0) {
    for (int rank = 0; rank < loads.ranks(); ++rank) {
      schedules_.push_back(
          *(backward_ ? ring::BackwardSchedule : ring::ForwardSchedule)(setup.shape, rank));
      keys_.emplace_back(schedules_.back().kv_slots, 0.0);
      gradients_.emplace_back(schedules_.back().grad_slots, 0.0);
      done_.push_back(loads.columns(rank));
    }
  }

  double Run() {
    const std::vector<double> start(done_.size(), 0.0);
    for (size_t i = 0; i < schedules_[0].first_hops.size(); ++i) {
      Exchange([i](const RingSchedule& s) { return s.first_hops[i]; }, start, setup_.kv_bytes,
               &keys_);
    }
    for (size_t t = 0; t < schedules_[0].steps.size(); ++t) {
      for (size_t i = 0; i < schedules_[0].steps[t].kv_hops.size(); ++i) {
        Exchange([t, i](const RingSchedule& s) { return s.steps[t].kv_hops[i]; }, done_,
                 setup_.kv_bytes, &keys_);
      }
      for (int rank = 0; rank < loads_.ranks(); ++rank) {
        const ring::RingStep& step = schedules_[rank].steps[t];
        done_[rank] = std::max(done_[rank], keys_[rank][step.kv_slot]);
        done_[rank] += loads_.of(rank, step.owner);
      }
      for (size_t i = 0; i < schedules_[0].steps[t].grad_actions.size(); ++i) Follow(t, i);
    }
    return *std::max_element(done_.begin(), done_.end());
  }

 private:
  using Slots = std::vector<std::vector<double>>;  // [rank][slot]: when its content is there

  template <typename HopOf>
  void Exchange(const HopOf& hop_of, const std::vector<double>& begun, double bytes,
                Slots* slots) const {
    const Slots before = *slots;
    for (int rank = 0; rank < loads_.ranks(); ++rank) {
      const RingHop mine = hop_of(schedules_[rank]), sent = hop_of(schedules_[mine.from]);
      ASSERT_EQ(sent.to, rank);
      const bool same_node = rank / setup_.group.inner == mine.from / setup_.group.inner;
      const Link& link = same_node ? setup_.intra_node : setup_.inter_node;
      // The slot to send must be full at both ends: the receiver passes on what it has itself.
      (*slots)[rank][mine.receive_slot] =
          std::max({begun[rank], begun[mine.from], before[mine.from][sent.send_slot],
                    before[rank][mine.send_slot]}) +
          bytes / link.bytes_per_second;
    }
  }

  void Follow(size_t t, size_t i) {
    if (schedules_[0].steps[t].grad_actions[i].kind == GradAction::Kind::kAdd) {
      for (int rank = 0; rank < loads_.ranks(); ++rank) {
        const int from = schedules_[rank].steps[t].grad_actions[i].from_slot;
        done_[rank] = std::max(done_[rank], gradients_[rank][from]);
      }
      return;
    }
    for (int rank = 0; rank < loads_.ranks(); ++rank) {
      gradients_[rank][schedules_[rank].steps[t].grad_actions[i].hop.send_slot] = done_[rank];
    }
    Exchange([t, i](const RingSchedule& s) { return s.steps[t].grad_actions[i].hop; }, done_,
             setup_.gradient_bytes, &gradients_);
  }

  const RingSetup& setup_;
  const ring::TileLoads& loads_;
  const bool backward_;
  std::vector<RingSchedule> schedules_;
  Slots keys_, gradients_;
  std::vector<double> done_;
};

// The simulator walks the schedules that trainers run: with uneven work on links of uneven speed,
// it takes to the microsecond what all ranks take with schedules of their own.
TEST(RingWalkTest, IsTheTrainersOwn) {
  std::mt19937 random(11);
  const auto unit = [&] { return static_cast<double>(random() >> 8) * 0x1.0p-24; };
  for (const auto& [inner, outer] :
       {std::pair{1, 1}, {2, 1}, {4, 1}, {7, 1}, {2, 2}, {4, 3}, {2, 5}, {1, 2}, {1, 4}}) {
    for (const RingKind kind : {RingKind::kFlat, RingKind::kHierarchical}) {
      for (int trial = 0; trial < 20; ++trial) {
        SCOPED_TRACE(testing::Message() << outer << " x " << inner << " trial " << trial);
        RingSetup setup = WithLinks(Ring(kind, inner, outer), 20 + 100 * unit(), 5 + 50 * unit());
        setup.kv_bytes = 100 * unit();
        if (trial % 2 == 1) setup.gradient_bytes = 100 * unit() + 1;
        ring::TileLoads loads(inner * outer);
        for (int rank = 0; rank < loads.ranks(); ++rank) {
          loads.AddColumns(rank, unit());
          for (int owner = 0; owner < loads.ranks(); ++owner)
            loads.AddRing(rank, owner, 2 * unit());
        }
        EXPECT_NEAR(Simulate(setup, loads).seconds, Trainers(setup, loads).Run(), 1e-6);
      }
    }
  }
}

// Many ranks are walked in single precision, which costs less than a millionth.
TEST(RingWalkTest, OfManyRanksToo) {
  std::mt19937 random(12);
  const auto unit = [&] { return static_cast<double>(random() >> 8) * 0x1.0p-24; };
  for (const RingKind kind : {RingKind::kFlat, RingKind::kHierarchical}) {
    for (const double gradient_bytes : {0.0, 60.0}) {
      RingSetup setup = WithLinks(Ring(kind, 4, 65), 100, 30);
      setup.kv_bytes = 50;
      setup.gradient_bytes = gradient_bytes;
      ring::TileLoads loads(260);
      for (int rank = 0; rank < loads.ranks(); ++rank) {
        loads.AddColumns(rank, unit());
        for (int owner = 0; owner < loads.ranks(); ++owner) loads.AddRing(rank, owner, 2 * unit());
      }
      const double expected = Trainers(setup, loads).Run();
      EXPECT_NEAR(Simulate(setup, loads).seconds, expected, 1e-6 * expected);
    }
  }
}

TEST(RingWalkTest, WhatIsExposedIsFoundWhenItIsAskedFor) {
  RingSetup setup = Ring(RingKind::kFlat, 4, 1);
  setup.intra_node = {.bytes_per_second = 100, .latency_seconds = 0};
  setup.kv_bytes = 130;
  const ring::TileLoads loads = Even(setup, 1.0);
  const RingSimulator simulator(setup.shape, loads);
  const RingTimes whole = simulator.Play(setup, {.per_tile = 1}, true);
  const RingTimes part = simulator.Play(setup, {.per_tile = 1}, false);
  EXPECT_DOUBLE_EQ(part.seconds, whole.seconds);
  EXPECT_DOUBLE_EQ(part.exposed_seconds, 0);
  EXPECT_EQ(2 * part.rank_steps, whole.rank_steps);
}

// Seconds of transfer are those of the hops that a rank makes.
TEST(RingWalkTest, TransfersAreTheHops) {
  for (const auto& [inner, outer] : {std::pair{4, 1}, {2, 2}, {4, 3}, {1, 4}}) {
    RingSetup setup =
        Backward(Ring(outer > 1 ? RingKind::kHierarchical : RingKind::kFlat, inner, outer));
    setup.intra_node = {.bytes_per_second = 1, .latency_seconds = 0};
    setup.inter_node = {.bytes_per_second = 0.01, .latency_seconds = 0};
    setup.kv_bytes = 3;  // 3 s inside a node, 300 s between nodes; gradients 1 s, 100 s
    const RingSchedule schedule = *ring::BackwardSchedule(setup.shape, 0);
    double expected = 0;
    const auto count = [&](RingLink link, double seconds) {
      expected += link == RingLink::kInner ? seconds : 100 * seconds;
    };
    for (const RingHop& hop : schedule.first_hops) count(hop.link, 3);
    for (const ring::RingStep& step : schedule.steps) {
      for (const RingHop& hop : step.kv_hops) count(hop.link, 3);
      for (const GradAction& action : step.grad_actions) {
        if (action.kind == GradAction::Kind::kHop) count(action.hop.link, 1);
      }
    }
    EXPECT_NEAR(Play(setup).transfer_seconds, expected, 1e-9);
  }
}

TEST(RingSimulatorTest, WithoutTransfersEvenWorkTakesItsOwnTime) {
  for (const auto kind : {RingKind::kFlat, RingKind::kHierarchical, RingKind::kAllGather}) {
    const RingSetup setup = Ring(kind, 4, 2);
    ring::TileLoads loads = Even(setup, 0.5);
    for (int rank = 0; rank < 8; ++rank) loads.AddColumns(rank, 0.25);
    const RingTimes times = Simulate(setup, loads);
    EXPECT_DOUBLE_EQ(times.seconds, 8 * 0.5 + 0.25);
    EXPECT_DOUBLE_EQ(times.busy_seconds, times.seconds);
    EXPECT_DOUBLE_EQ(times.exposed_seconds, 0);
  }
}

// Flat, one node: hop h, step c: a step hides each of W - 1 hops. Hand-computed.
TEST(RingSimulatorTest, FlatRingHidesHopsBehindSteps) {
  RingSetup setup = Ring(RingKind::kFlat, 4, 1);
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
// of a step travel during the next, the last during the own one: 0.1 + 4.
TEST(RingSimulatorTest, GradientsComeHomeBehindTheOwnStep) {
  RingSetup setup = Ring(RingKind::kFlat, 4, 1);
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
  // Each of three hops sticks out of the step during which it travels by 0.3 s: computed at 1.1,
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
  RingSetup setup = WithLinks(Ring(RingKind::kHierarchical, 2, 2), 100, 20);
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
  // come home at 5.6, a second after the last step.
  setup.gradient_bytes = 60;
  EXPECT_NEAR(Play(setup).seconds, 5.6, 1e-9);
}

// Three nodes of three, steps of 1 s, gradients take next to nothing. Keys take 0.5 s between nodes
// and 1.2 s inside, where the second hop of a loop follows the first:
//   loop 1: keys at 0.5, 1.7 and 2.9; steps begin at 1.7, 2.9 and 3.9 with what came first;
//   loop 2: keys have been there since 1.0, at 6.1 and 7.3; steps begin at 6.1, 7.3 and 8.3;
//   own:    keys leave with the step before, at 8.3 and 9.5; steps begin at 9.5, 10.7 and 11.7.
TEST(RingSimulatorTest, BackwardWaitsForTheFirstHopOfALoop) {
  RingSetup setup = WithLinks(Ring(RingKind::kHierarchical, 3, 3), 100, 240);
  setup.kv_bytes = 120;
  setup.gradient_bytes = 1;
  const RingTimes times = Play(setup);
  EXPECT_NEAR(times.seconds, 12.7, 1e-9);
  EXPECT_NEAR(times.exposed_seconds, 3.7, 1e-9);
}

// One rank a node, steps of 1 s, keys 0.5 s, gradients 0.75 s between nodes: like a flat ring.
TEST(RingSimulatorTest, NodesOfOneRankAreAFlatRing) {
  RingSetup setup = Ring(RingKind::kHierarchical, 1, 4);
  setup.inter_node = {.bytes_per_second = 100, .latency_seconds = 0};
  setup.kv_bytes = 50;
  setup.gradient_bytes = 75;
  EXPECT_NEAR(Play(setup).seconds, 4.5, 1e-9);
  setup.shape = {.kind = RingKind::kFlat, .inner = 4, .outer = 1};
  EXPECT_NEAR(Play(setup).seconds, 4.5, 1e-9);
}

// A hop between nodes takes three steps: the flat ring waits for it at every step, the hierarchical
// one hides it behind a whole inner loop.
TEST(RingSimulatorTest, HierarchicalHidesSlowLinks) {
  const auto run = [](RingKind kind) {
    RingSetup setup = WithLinks(Ring(kind, 4, 4), 1000, 100);
    setup.kv_bytes = 300;
    return Play(setup);
  };
  EXPECT_NEAR(run(RingKind::kHierarchical).seconds, 16.0, 1e-9);
  EXPECT_GT(run(RingKind::kFlat).seconds, 16.0 + 15.0);
  EXPECT_NEAR(run(RingKind::kFlat).seconds, 1.0 + 15 * 3.0, 1e-9);
}

// One slow rank at one step holds up its successors: a ring is only as fast as its steps' maxima.
TEST(RingSimulatorTest, UnevenStepsCostMoreThanTheirMean) {
  RingSetup setup = Ring(RingKind::kFlat, 8, 1);
  setup.intra_node = {.bytes_per_second = 1e3, .latency_seconds = 0};
  setup.kv_bytes = 1;
  ring::TileLoads hot(8);
  for (int r = 0; r < 8; ++r) hot.AddRing(r, 3, 8.0);  // one hot owner
  EXPECT_GT(Simulate(setup, hot).seconds, 8.0);
  EXPECT_DOUBLE_EQ(hot.StepImbalance(), 8.0);
  EXPECT_DOUBLE_EQ(Even(setup, 2.0).StepImbalance(), 1.0);
}

TEST(RingSimulatorTest, OneRankNeedsNoRing) {
  const RingSetup setup = Ring(RingKind::kFlat, 1, 1);
  ring::TileLoads loads = Even(setup, 2.0);
  loads.AddColumns(0, 0.5);
  EXPECT_DOUBLE_EQ(Simulate(setup, loads).seconds, 2.5);
}

}  // namespace
}  // namespace ringleader::planner
