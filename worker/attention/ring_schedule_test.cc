#include "worker/attention/ring_schedule.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>
#include <vector>

namespace ringleader::attention {
namespace {

// Runs a shape's schedules of all ranks together on symbols instead of tensors: keys are their
// owner's number, gradients the list of (owner, rank) contributions.
class Simulation {
 public:
  using Gradient = std::multiset<std::pair<int, int>>;

  explicit Simulation(const RingShape& shape) : ranks_(shape.inner * shape.outer) {
    for (int rank = 0; rank < ranks_; ++rank) {
      schedules_.push_back(*BackwardSchedule(shape, rank));
      kv_.emplace_back(schedules_.back().kv_slots, -1);
      grads_.emplace_back(schedules_.back().grad_slots);
      kv_.back()[0] = rank;
      if (shape.kind == RingKind::kAllGather) {
        for (int owner = 0; owner < ranks_; ++owner) kv_.back()[owner] = owner;
      }
    }
  }

  void Run() {
    for (size_t step = 0; step < schedules_[0].steps.size(); ++step) {
      const auto before = kv_;
      for (int rank = 0; rank < ranks_; ++rank) {
        const RingStep& mine = schedules_[rank].steps[step];
        ASSERT_EQ(before[rank][mine.kv_slot], mine.owner) << "rank " << rank << " step " << step;
        grads_[rank][mine.grad_slot] = {{mine.owner, rank}};
        for (const RingHop& hop : mine.kv_hops) {
          ASSERT_NE(hop.receive_slot, mine.kv_slot);
          ASSERT_NE(hop.receive_slot, 0) << "a rank's own keys are overwritten";
          kv_[rank][hop.receive_slot] = before[hop.from][SenderHop(hop, rank, step).send_slot];
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
  const RingHop& SenderHop(const RingHop& hop, int rank, size_t step) {
    for (const RingHop& other : schedules_[hop.from].steps[step].kv_hops) {
      if (other.link == hop.link && other.to == rank) return other;
    }
    ADD_FAILURE() << "rank " << hop.from << " sends nothing to rank " << rank;
    return hop;
  }

  int ranks_;
  std::vector<RingSchedule> schedules_;
  std::vector<std::vector<int>> kv_;
  std::vector<std::vector<Gradient>> grads_;
};

class RingScheduleTest : public ::testing::TestWithParam<RingShape> {};

TEST_P(RingScheduleTest, EveryRankSeesEveryOwnerOnceAndGradientsComeHome) {
  Simulation simulation(GetParam());
  ASSERT_NO_FATAL_FAILURE(simulation.Run());
  for (int rank = 0; rank < simulation.ranks(); ++rank) {
    std::set<int> owners;
    for (const RingStep& step : simulation.schedule(rank).steps) owners.insert(step.owner);
    EXPECT_EQ(owners.size(), simulation.ranks());
    EXPECT_EQ(simulation.schedule(rank).steps.size(), simulation.ranks());
    EXPECT_EQ(simulation.schedule(rank).steps[0].owner, rank);
    if (GetParam().kind == RingKind::kAllGather) continue;
    Simulation::Gradient expected;
    for (int other = 0; other < simulation.ranks(); ++other) expected.insert({rank, other});
    EXPECT_EQ(simulation.HomeGradient(rank), expected) << "rank " << rank;
  }
}

TEST_P(RingScheduleTest, OuterHopsAreOneALoop) {
  const RingShape shape = GetParam();
  const RingSchedule schedule = *ForwardSchedule(shape, 0);
  std::map<RingLink, int> hops;
  for (const RingStep& step : schedule.steps) {
    EXPECT_TRUE(step.grad_actions.empty());
    for (const RingHop& hop : step.kv_hops) ++hops[hop.link];
  }
  if (shape.kind == RingKind::kAllGather) {
    EXPECT_TRUE(hops.empty());
    return;
  }
  EXPECT_EQ(hops[RingLink::kOuter], shape.outer - 1);
  EXPECT_EQ(hops[RingLink::kInner], shape.outer * (shape.inner - 1));
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
  EXPECT_FALSE(BackwardSchedule({RingKind::kHierarchical, 0, 4}, 0).ok());
}

}  // namespace
}  // namespace ringleader::attention
