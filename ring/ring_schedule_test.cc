#include "ring/ring_schedule.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace ringleader::ring {
namespace {

// Runs a shape's schedules of all ranks together on symbols instead of tensors: keys are their
// owner's number, gradients the list of (owner, rank) contributions.
class Simulation {
 public:
  using Gradient = std::multiset<std::pair<int, int>>;

  Simulation(const RingShape& shape, bool backward) : ranks_(shape.inner * shape.outer) {
    for (int rank = 0; rank < ranks_; ++rank) {
      schedules_.push_back(*(backward ? BackwardSchedule : ForwardSchedule)(shape, rank));
      kv_.emplace_back(schedules_.back().kv_slots, -1);
      grads_.emplace_back(schedules_.back().grad_slots);
      kv_.back()[0] = rank;
      if (shape.kind == RingKind::kAllGather) {
        for (int owner = 0; owner < ranks_; ++owner) kv_.back()[owner] = owner;
      }
    }
  }

  void Run() {
    MoveKeys([](const RingSchedule& schedule) { return &schedule.first_hops; });
    for (size_t step = 0; step < schedules_[0].steps.size(); ++step) {
      MoveKeys([&](const RingSchedule& schedule) { return &schedule.steps[step].kv_hops; });
      for (int rank = 0; rank < ranks_; ++rank) {
        const RingStep& mine = schedules_[rank].steps[step];
        ASSERT_EQ(kv_[rank][mine.kv_slot], mine.owner) << "rank " << rank << " step " << step;
        if (mine.grad_slot < schedules_[rank].grad_slots) {
          grads_[rank][mine.grad_slot] = {{mine.owner, rank}};
        }
      }
      const size_t actions = schedules_[0].steps[step].grad_actions.size();
      for (size_t i = 0; i < actions; ++i) {
        const auto sent = grads_;
        for (int rank = 0; rank < ranks_; ++rank) {
          const GradAction& action = schedules_[rank].steps[step].grad_actions.at(i);
          if (action.kind == GradAction::Kind::kAdd) {
            const Gradient& from = grads_[rank][action.from_slot];
            grads_[rank][action.to_slot].insert(from.begin(), from.end());
            continue;
          }
          const GradAction& sender = schedules_[action.hop.from].steps[step].grad_actions.at(i);
          ASSERT_EQ(sender.hop.to, rank);
          grads_[rank][action.hop.receive_slot] = sent[action.hop.from][sender.hop.send_slot];
        }
      }
    }
  }

  const RingSchedule& schedule(int rank) const { return schedules_[rank]; }
  int ranks() const { return ranks_; }
  const Gradient& HomeGradient(int rank) const {
    return grads_[rank][schedules_[rank].home_grad_slot];
  }

 private:
  // hops_of(schedule): what all ranks do one after the other, each hop together.
  template <typename HopsOf>
  void MoveKeys(const HopsOf& hops_of) {
    const size_t hops = hops_of(schedules_[0])->size();
    for (size_t i = 0; i < hops; ++i) {
      const auto before = kv_;
      for (int rank = 0; rank < ranks_; ++rank) {
        const RingHop& hop = hops_of(schedules_[rank])->at(i);
        const RingHop& sender = hops_of(schedules_[hop.from])->at(i);
        ASSERT_EQ(sender.to, rank);
        ASSERT_EQ(sender.link, hop.link);
        ASSERT_NE(hop.receive_slot, 0) << "a rank's own keys are overwritten";
        ASSERT_NE(before[hop.from][sender.send_slot], -1) << "nothing was there to send";
        kv_[rank][hop.receive_slot] = before[hop.from][sender.send_slot];
      }
    }
  }

  int ranks_;
  std::vector<RingSchedule> schedules_;
  std::vector<std::vector<int>> kv_;
  std::vector<std::vector<Gradient>> grads_;
};

class RingScheduleTest : public ::testing::TestWithParam<RingShape> {};

TEST_P(RingScheduleTest, EveryRankSeesEveryOwnerOnceAndNoTwoAtOnce) {
  for (const bool backward : {false, true}) {
    Simulation simulation(GetParam(), backward);
    ASSERT_NO_FATAL_FAILURE(simulation.Run());
    std::vector<std::set<int>> held(simulation.ranks());  // by step: no two ranks hold the same
    for (int rank = 0; rank < simulation.ranks(); ++rank) {
      const std::vector<RingStep>& steps = simulation.schedule(rank).steps;
      std::set<int> owners;
      for (const RingStep& step : steps) owners.insert(step.owner);
      EXPECT_EQ(owners.size(), simulation.ranks());
      EXPECT_EQ(steps.size(), simulation.ranks());
      for (size_t t = 0; t < steps.size(); ++t) held[t].insert(steps[t].owner);
      const bool own_last = backward && GetParam().kind != RingKind::kAllGather;
      EXPECT_EQ((own_last ? steps.back() : steps.front()).owner, rank);
    }
    for (const std::set<int>& owners : held) EXPECT_EQ(owners.size(), simulation.ranks());
  }
}

TEST_P(RingScheduleTest, GradientsComeHome) {
  if (GetParam().kind == RingKind::kAllGather) return;  // summed after the schedule
  Simulation simulation(GetParam(), /*backward=*/true);
  ASSERT_NO_FATAL_FAILURE(simulation.Run());
  for (int rank = 0; rank < simulation.ranks(); ++rank) {
    Simulation::Gradient expected;
    for (int other = 0; other < simulation.ranks(); ++other) expected.insert({rank, other});
    EXPECT_EQ(simulation.HomeGradient(rank), expected) << "rank " << rank;
  }
}

std::map<RingLink, int> KeyHops(const RingSchedule& schedule) {
  std::map<RingLink, int> hops;
  for (const RingHop& hop : schedule.first_hops) ++hops[hop.link];
  for (const RingStep& step : schedule.steps) {
    for (const RingHop& hop : step.kv_hops) ++hops[hop.link];
  }
  return hops;
}

TEST_P(RingScheduleTest, KeysAndGradientsMakeTheSameHops) {
  const RingShape shape = GetParam();
  const RingSchedule forward = *ForwardSchedule(shape, 0), backward = *BackwardSchedule(shape, 0);
  std::map<RingLink, int> expected, gradients;
  if (shape.kind != RingKind::kAllGather) {
    if (shape.outer > 1) expected[RingLink::kOuter] = shape.outer - 1;
    if (shape.inner > 1) expected[RingLink::kInner] = shape.outer * (shape.inner - 1);
  }
  EXPECT_EQ(KeyHops(forward), expected);
  EXPECT_EQ(KeyHops(backward), expected);
  for (const RingStep& step : backward.steps) {
    for (const GradAction& action : step.grad_actions) {
      if (action.kind == GradAction::Kind::kHop) ++gradients[action.hop.link];
    }
  }
  EXPECT_EQ(gradients, expected);
  for (const RingStep& step : forward.steps) EXPECT_TRUE(step.grad_actions.empty());
}

// What lets the planner play one schedule for all ranks.
TEST_P(RingScheduleTest, OfAllRanksAreRankZerosTurned) {
  const RingShape shape = GetParam();
  const bool gathers = shape.kind == RingKind::kAllGather;
  for (const bool backward : {false, true}) {
    const auto schedule_of = backward ? BackwardSchedule : ForwardSchedule;
    const RingSchedule first = *schedule_of(shape, 0);
    for (int rank = 0; rank < shape.ranks(); ++rank) {
      const auto turned = [&](int named) {
        const int result = NamedByRank(shape, rank, named);
        EXPECT_EQ(NamedByRankZero(shape, rank, result), named);
        return result;
      };
      const auto slot = [&](int slot) { return gathers ? turned(slot) : slot; };
      const auto hop = [&](const RingHop& mine, const RingHop& zeros) {
        EXPECT_EQ(mine.link, zeros.link);
        EXPECT_EQ(mine.to, turned(zeros.to));
        EXPECT_EQ(mine.from, turned(zeros.from));
        EXPECT_EQ(mine.send_slot, zeros.send_slot);
        EXPECT_EQ(mine.receive_slot, zeros.receive_slot);
      };
      const auto hops = [&](const std::vector<RingHop>& mine, const std::vector<RingHop>& zeros) {
        ASSERT_EQ(mine.size(), zeros.size());
        for (size_t i = 0; i < mine.size(); ++i) hop(mine[i], zeros[i]);
      };
      const RingSchedule mine = *schedule_of(shape, rank);
      hops(mine.first_hops, first.first_hops);
      ASSERT_EQ(mine.steps.size(), first.steps.size());
      for (size_t t = 0; t < mine.steps.size(); ++t) {
        const RingStep &step = mine.steps[t], &zeros = first.steps[t];
        EXPECT_EQ(step.owner, turned(zeros.owner));
        EXPECT_EQ(step.kv_slot, slot(zeros.kv_slot));
        EXPECT_EQ(step.grad_slot, slot(zeros.grad_slot));
        hops(step.kv_hops, zeros.kv_hops);
        ASSERT_EQ(step.grad_actions.size(), zeros.grad_actions.size());
        for (size_t i = 0; i < step.grad_actions.size(); ++i) {
          EXPECT_EQ(step.grad_actions[i].kind, zeros.grad_actions[i].kind);
          EXPECT_EQ(step.grad_actions[i].to_slot, zeros.grad_actions[i].to_slot);
          EXPECT_EQ(step.grad_actions[i].from_slot, zeros.grad_actions[i].from_slot);
          if (step.grad_actions[i].kind == GradAction::Kind::kHop) {
            hop(step.grad_actions[i].hop, zeros.grad_actions[i].hop);
          }
        }
      }
    }
  }
}

// By link, for each hop of keys: how many steps' computations there are between its start and the
// first that reads what it brings, or the start of the hop that passes it on.
std::map<RingLink, std::multiset<int>> StepsToArrive(const RingSchedule& schedule) {
  struct Underway {
    RingLink link;
    int step;
  };
  std::map<RingLink, std::multiset<int>> steps;
  std::map<int, Underway> underway;  // by slot that receives
  int step = 0;
  const auto read = [&](int slot) {
    const auto hop = underway.find(slot);
    if (hop == underway.end()) return;
    steps[hop->second.link].insert(step - hop->second.step);
    underway.erase(hop);
  };
  const auto start = [&](const std::vector<RingHop>& hops) {
    for (const RingHop& hop : hops) {
      EXPECT_NE(hop.send_slot, hop.receive_slot) << "it would overwrite what it sends";
      read(hop.send_slot);
      EXPECT_FALSE(underway.contains(hop.receive_slot)) << "another hop's, which nobody has read";
      underway[hop.receive_slot] = {hop.link, step};
    }
  };
  start(schedule.first_hops);
  for (; step < std::ssize(schedule.steps); ++step) {
    start(schedule.steps[step].kv_hops);
    read(schedule.steps[step].kv_slot);
  }
  EXPECT_TRUE(underway.empty());
  return steps;
}

// An outer hop has a whole inner loop, an inner one the step that it starts with. In backward what
// the first step attends to, and on each other node's loop what its first step does, is waited for.
TEST_P(RingScheduleTest, HopsOfKeysHideBehindComputation) {
  const RingShape shape = GetParam();
  std::map<RingLink, std::multiset<int>> forward, backward;
  if (shape.kind != RingKind::kAllGather) {
    for (int node = 1; node < shape.outer; ++node) {
      forward[RingLink::kOuter].insert(shape.inner);
      backward[RingLink::kOuter].insert(node == 1 ? 0 : shape.inner);
    }
    for (int node = 0; node < shape.outer; ++node) {
      for (int local = 1; local < shape.inner; ++local) {
        const bool is_waited_for = local == 1 && (shape.outer == 1 || node > 0);
        forward[RingLink::kInner].insert(1);
        backward[RingLink::kInner].insert(is_waited_for ? 0 : 1);
      }
    }
  }
  EXPECT_EQ(StepsToArrive(*ForwardSchedule(shape, 0)), forward);
  EXPECT_EQ(StepsToArrive(*BackwardSchedule(shape, 0)), backward);
}

// Nor does a computation, or a sum, wait until the gradients of the step before have left.
TEST_P(RingScheduleTest, GradientsTravelFromSlotsThatTheNextStepLeavesAlone) {
  const RingSchedule schedule = *BackwardSchedule(GetParam(), 0);
  const RingHop* last = nullptr;  // on the inner ring, of the step before
  for (const RingStep& step : schedule.steps) {
    if (last != nullptr) {
      EXPECT_NE(step.grad_slot, last->send_slot);
      EXPECT_NE(step.grad_slot, last->receive_slot);
    }
    const RingHop* const before = std::exchange(last, nullptr);
    for (const GradAction& action : step.grad_actions) {
      if (action.kind != GradAction::Kind::kHop) continue;
      EXPECT_NE(action.hop.send_slot, action.hop.receive_slot);
      if (action.hop.link != RingLink::kInner) continue;
      if (before != nullptr) {
        EXPECT_NE(action.hop.receive_slot, before->receive_slot);
      }
      last = &action.hop;
    }
  }
}

// Memory is planned by these numbers.
TEST_P(RingScheduleTest, SaysWhoseItIsAndHowManySlotsItTakes) {
  const RingShape shape = GetParam();
  const bool gathers = shape.kind == RingKind::kAllGather;
  const int keys = gathers ? shape.inner : shape.outer > 1 ? 5 : shape.inner > 1 ? 3 : 1;
  const int gradients = gathers ? shape.inner : shape.outer > 1 ? 6 : shape.inner > 1 ? 4 : 1;
  for (const bool backward : {false, true}) {
    for (int rank = 0; rank < shape.ranks(); ++rank) {
      const RingSchedule schedule = *(backward ? BackwardSchedule : ForwardSchedule)(shape, rank);
      EXPECT_EQ(schedule.shape, shape);
      EXPECT_EQ(schedule.rank, rank);
      EXPECT_EQ(schedule.ranks, shape.ranks());
      EXPECT_EQ(schedule.kv_slots, keys);
      EXPECT_EQ(schedule.grad_slots, backward ? gradients : 0);
      if (gathers && backward) {
        EXPECT_EQ(schedule.home_grad_slot, rank);
      }
    }
  }
}

// What comes home does so during a computation that does not need it.
TEST_P(RingScheduleTest, NoGradientTravelsAfterTheLastStep) {
  const RingSchedule schedule = *BackwardSchedule(GetParam(), 0);
  for (const GradAction& action : schedule.steps.back().grad_actions) {
    EXPECT_EQ(action.kind, GradAction::Kind::kAdd);
  }
}

std::string NameOf(const RingShape& shape) {
  const char* const kinds[] = {"Flat", "Hierarchical", "AllGather"};
  return kinds[static_cast<int>(shape.kind)] + std::to_string(shape.outer) + "x" +
         std::to_string(shape.inner);
}

INSTANTIATE_TEST_SUITE_P(Shapes, RingScheduleTest,
                         ::testing::Values(RingShape{RingKind::kFlat, 1, 1},
                                           RingShape{RingKind::kFlat, 2, 1},
                                           RingShape{RingKind::kFlat, 5, 1},
                                           RingShape{RingKind::kHierarchical, 2, 2},
                                           RingShape{RingKind::kHierarchical, 4, 3},
                                           RingShape{RingKind::kHierarchical, 1, 4},
                                           RingShape{RingKind::kHierarchical, 3, 1},
                                           RingShape{RingKind::kAllGather, 4, 1}),
                         [](const auto& info) { return NameOf(info.param); });

TEST(RingScheduleErrorTest, NamesTheShape) {
  EXPECT_FALSE(ForwardSchedule({RingKind::kFlat, 2, 2}, 0).ok());
  EXPECT_FALSE(ForwardSchedule({RingKind::kFlat, 4, 1}, 4).ok());
  EXPECT_FALSE(ForwardSchedule({RingKind::kFlat, 4, 1}, -1).ok());
  EXPECT_FALSE(BackwardSchedule({RingKind::kHierarchical, 0, 4}, 0).ok());
  EXPECT_FALSE(BackwardSchedule({RingKind::kAllGather, 2, 2}, 0).ok());
  EXPECT_EQ(ForwardSchedule({static_cast<RingKind>(9), 4, 1}, 0).status().message(),
            "ring of kind 9 is unknown");
}

}  // namespace
}  // namespace ringleader::ring
