// All ranks play their schedules with rows that are marked as they travel: what a step reads has
// come, what gradients add up to is what was added, and nothing travels for nobody.
#include "ring/travelling_rows.h"

#include <algorithm>
#include <map>
#include <string>
#include <tuple>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ringleader::ring {
namespace {

using kernels::LayoutKind;
using kernels::ShardLayout;

constexpr int kTile = 16;

struct Seen {
  std::string name = {};
  int64_t window = 0;  // 0: everything before
  std::vector<int64_t> documents = {0};
  bool is_uneven = false;
  int64_t landmarks = 0;  // of every so many tiles all see the last; 0: of none
  int64_t question =
      0;  // all see so many first keys, too, and each query's keys are listed; 0: not

  std::pair<int64_t, int64_t> Of(int64_t first, int64_t last) const {
    const int64_t start = *(std::upper_bound(documents.begin(), documents.end(), first) - 1);
    return {std::max(start, window == 0 ? 0 : first - window + 1), last + 1};
  }
  std::pair<int64_t, int64_t> Shown(int64_t first, int64_t last) const {
    return Seen{.name = name, .documents = documents}.Of(first, last);
  }
  bool IsLandmark(int64_t position) const {
    return landmarks > 0 && position / kTile % landmarks == landmarks - 1;
  }
  std::vector<kernels::KeyIntervals> Listed(int64_t tokens) const {
    std::vector<kernels::KeyIntervals> queries;
    for (int64_t i = 0; i < tokens; ++i) {
      const auto begin = static_cast<int32_t>(Of(i, i).first), end = static_cast<int32_t>(i + 1),
                 first = static_cast<int32_t>(std::min(question, int64_t{begin}));
      queries.push_back({0, first, begin, end});
    }
    return queries;
  }
  // Calls find with what is seen, and with the landmarks or null.
  template <typename Find>
  auto Ask(const Find& find) const {
    const auto shown = [&](int64_t first, int64_t last) { return Shown(first, last); };
    const auto holds = [&](int64_t position) { return IsLandmark(position); };
    const Landmarks wherever = {.seen = shown, .holds = holds};
    return find([&](int64_t first, int64_t last) { return Of(first, last); },
                landmarks > 0 ? &wherever : nullptr);
  }
};

class TravellingRowsTest
    : public ::testing::TestWithParam<std::tuple<RingShape, LayoutKind, Seen>> {
 protected:
  ShardLayout Layout(int rank) const {
    const auto& [shape, kind, seen] = GetParam();
    return {.kind = kind, .ranks = shape.ranks(), .rank = rank, .stripe = kTile, .tokens = 1536};
  }
  int ranks() const { return std::get<RingShape>(GetParam()).ranks(); }
  // Where seen.is_uneven, ranks hold fewer rows, each another number.
  std::vector<int64_t> Held() const {
    std::vector<int64_t> held;
    for (int rank = 0; rank < ranks() && std::get<Seen>(GetParam()).is_uneven; ++rank) {
      held.push_back(Layout(0).local_tokens() - int64_t{20} * rank);
    }
    return held;
  }
  int64_t rows(int rank) const {
    const std::vector<int64_t> held = Held();
    return held.empty() ? Layout(0).local_tokens() : held[rank];
  }
  int64_t rows() const { return Layout(0).local_tokens(); }  // room for all

  TravellingRows Rows(const RingSchedule& schedule) const {
    const Seen& seen = std::get<Seen>(GetParam());
    if (seen.question > 0) {
      const ShardLayout layout = Layout(schedule.rank);
      return FindTravellingRows(schedule, layout, kTile, seen.Listed(layout.tokens));
    }
    return seen.Ask([&](SeenPositions near, const Landmarks* landmarks) {
      return FindTravellingRows(schedule, Layout(schedule.rank), Held(), kTile, near, landmarks);
    });
  }
  // Whether `rank` attends to this row of `owner`, in whole tiles.
  bool Attends(int rank, int owner, int64_t row) {
    const auto [found, is_new] = attends_.try_emplace({rank, owner, row / kTile});
    if (is_new) found->second = Counted(rank, owner, row / kTile * kTile);
    return found->second;
  }

 private:
  // Query by query.
  bool Counted(int rank, int owner, int64_t tile) const {
    const Seen& seen = std::get<Seen>(GetParam());
    const ShardLayout query = Layout(rank), key = Layout(owner);
    const int64_t queries = rows(rank), keys = std::min(rows(owner), tile + kTile);
    for (int64_t i = 0; i < queries; ++i) {
      const int64_t at = query.Position(i);
      const auto [first, end] = seen.Of(at, at);
      const auto [shown_first, shown_end] = seen.Shown(at, at);
      for (int64_t k = tile; k < keys; ++k) {
        const int64_t position = key.Position(k);
        if (position >= first && position < end) return true;
        if (position < std::min(seen.question, first)) return true;
        if (!seen.IsLandmark(position)) continue;
        if (position >= shown_first && position < shown_end) return true;
      }
    }
    return false;
  }

  std::map<std::tuple<int, int, int64_t>, bool> attends_;  // by rank, owner and tile
};

// A slot's content: which row of whom each row holds; none: nobody knows.
using Content = std::vector<int>;

TEST_P(TravellingRowsTest, WhatAStepReadsHasCome) {
  const RingShape shape = std::get<RingShape>(GetParam());
  for (const auto make : {&ForwardSchedule, &BackwardSchedule}) {
    std::vector<RingSchedule> schedules;
    std::vector<TravellingRows> travelling;
    std::vector<std::vector<Content>> slots(ranks());
    for (int rank = 0; rank < ranks(); ++rank) {
      schedules.push_back(make(shape, rank).value());
      travelling.push_back(Rows(schedules[rank]));
      slots[rank].assign(schedules[rank].kv_slots, Content(rows(), -1));
      slots[rank][0].assign(rows(), rank);
    }
    size_t number = 0;
    const auto hop = [&](auto hop_of) {
      auto next = slots;
      for (int rank = 0; rank < ranks(); ++rank) {
        const RingHop &mine = hop_of(rank), &theirs = hop_of(mine.from);
        const RowRuns& runs = travelling[rank].keys.at(number).received;
        ASSERT_EQ(runs, travelling[mine.from].keys.at(number).sent) << "both ends agree";
        next[rank][mine.receive_slot].assign(rows(), -1);
        for (const RowRun& run : runs) {
          for (int64_t i = run.begin; i < run.end; ++i) {
            next[rank][mine.receive_slot][i] = slots[mine.from][theirs.send_slot][i];
          }
        }
      }
      slots = std::move(next);
      ++number;
    };
    for (size_t h = 0; h < schedules[0].first_hops.size(); ++h) {
      hop([&](int rank) -> const RingHop& { return schedules[rank].first_hops[h]; });
    }
    for (size_t t = 0; t < schedules[0].steps.size(); ++t) {
      for (size_t h = 0; h < schedules[0].steps[t].kv_hops.size(); ++h) {
        hop([&](int rank) -> const RingHop& { return schedules[rank].steps[t].kv_hops[h]; });
      }
      for (int rank = 0; rank < ranks(); ++rank) {
        const RingStep& step = schedules[rank].steps[t];
        for (int64_t i = 0; i < rows(); i += kTile) {
          if (Attends(rank, step.owner, i)) {
            EXPECT_EQ(slots[rank][step.kv_slot][i], step.owner) << rank << " " << t << " " << i;
          }
        }
      }
    }
    EXPECT_EQ(number, travelling[0].keys.size());
  }
}

TEST_P(TravellingRowsTest, GradientsComeHomeFromAllWhoAdded) {
  const RingShape shape = std::get<RingShape>(GetParam());
  std::vector<RingSchedule> schedules;
  std::vector<TravellingRows> travelling;
  std::vector<std::vector<Content>> slots(ranks());  // how many have added; -1: nobody knows
  for (int rank = 0; rank < ranks(); ++rank) {
    schedules.push_back(BackwardSchedule(shape, rank).value());
    travelling.push_back(Rows(schedules[rank]));
    slots[rank].assign(schedules[rank].grad_slots, Content(rows(), -1));
  }
  std::vector<std::vector<RowRuns>> arrived(ranks(), std::vector<RowRuns>(8));  // by slot
  size_t number = 0;
  for (size_t t = 0; t < schedules[0].steps.size(); ++t) {
    for (int rank = 0; rank < ranks(); ++rank) {
      const RingStep& step = schedules[rank].steps[t];
      for (int64_t i = 0; i < rows(); ++i) {
        slots[rank][step.grad_slot][i] = Attends(rank, step.owner, i) ? 1 : 0;
      }
    }
    for (size_t a = 0; a < schedules[0].steps[t].grad_actions.size(); ++a) {
      auto next = slots;
      for (int rank = 0; rank < ranks(); ++rank) {
        const GradAction& action = schedules[rank].steps[t].grad_actions[a];
        if (action.kind == GradAction::Kind::kAdd) {
          for (const RowRun& run : arrived[rank][action.from_slot]) {
            for (int64_t i = run.begin; i < run.end; ++i) {
              next[rank][action.to_slot][i] += slots[rank][action.from_slot][i];
            }
          }
          continue;
        }
        const HopRows& mine = travelling[rank].gradients.at(number);
        ASSERT_EQ(mine.received, travelling[action.hop.from].gradients.at(number).sent);
        const RingHop& theirs = schedules[action.hop.from].steps[t].grad_actions[a].hop;
        next[rank][action.hop.receive_slot].assign(rows(), -1);
        for (const RowRun& run : mine.received) {
          for (int64_t i = run.begin; i < run.end; ++i) {
            next[rank][action.hop.receive_slot][i] = slots[action.hop.from][theirs.send_slot][i];
          }
        }
        arrived[rank][action.hop.receive_slot] = mine.received;
      }
      if (schedules[0].steps[t].grad_actions[a].kind == GradAction::Kind::kHop) ++number;
      slots = std::move(next);
    }
  }
  EXPECT_EQ(number, travelling[0].gradients.size());
  for (int owner = 0; owner < ranks(); ++owner) {
    for (int64_t i = 0; i < rows(); i += kTile) {
      int added = 0;
      for (int rank = 0; rank < ranks(); ++rank) added += Attends(rank, owner, i) ? 1 : 0;
      EXPECT_EQ(slots[owner][schedules[owner].home_grad_slot][i], added) << owner << " " << i;
    }
  }
}

TEST_P(TravellingRowsTest, CountsAreThoseOfAllRanks) {
  const RingShape shape = std::get<RingShape>(GetParam());
  const Seen& seen = std::get<Seen>(GetParam());
  for (const bool is_backward : {false, true}) {
    for (const double most_packed : {0.5, 1.0}) {
      HopCounts sent, received;
      const auto count = [](const std::vector<HopRows>& hops, auto* to, auto* by) {
        to->resize(hops.size());
        by->resize(hops.size());
        for (size_t i = 0; i < hops.size(); ++i) {
          (*to)[i].push_back(CountRows(hops[i].received));
          (*by)[i].push_back(CountRows(hops[i].sent));
        }
      };
      for (int rank = 0; rank < ranks(); ++rank) {
        TravellingRows rows =
            Rows((is_backward ? BackwardSchedule : ForwardSchedule)(shape, rank).value());
        CarryAllAbove(most_packed, &rows);
        count(rows.keys, &received.keys, &sent.keys);
        count(rows.gradients, &received.gradients, &sent.gradients);
      }
      // Each has one sender, which counts as many.
      for (size_t i = 0; i < sent.keys.size(); ++i) {
        EXPECT_THAT(sent.keys[i], ::testing::UnorderedElementsAreArray(received.keys[i])) << i;
      }
      for (size_t i = 0; i < sent.gradients.size(); ++i) {
        EXPECT_THAT(sent.gradients[i], ::testing::UnorderedElementsAreArray(received.gradients[i]))
            << i;
      }
      if (seen.question > 0) continue;  // plans have no lists
      const HopCounts counts = seen.Ask([&](SeenPositions near, const Landmarks* landmarks) {
        return CountTravellingRows(shape, is_backward, Layout(0), Held(), kTile, most_packed, near,
                                   landmarks);
      });
      EXPECT_EQ(counts.keys, received.keys);
      EXPECT_EQ(counts.gradients, received.gradients);
    }
  }
}

std::string NameOf(const ::testing::TestParamInfo<std::tuple<RingShape, LayoutKind, Seen>>& info) {
  const auto& [shape, kind, seen] = info.param;
  const char* const layouts[] = {"Contiguous", "Zigzag", "Striped"};
  return layouts[static_cast<int>(kind)] + seen.name + std::to_string(shape.outer) + "x" +
         std::to_string(shape.inner);
}

INSTANTIATE_TEST_SUITE_P(
    Settings, TravellingRowsTest,
    ::testing::Combine(
        ::testing::Values(RingShape{RingKind::kFlat, 1, 1}, RingShape{RingKind::kFlat, 2, 1},
                          RingShape{RingKind::kFlat, 4, 1},
                          RingShape{RingKind::kHierarchical, 2, 2},
                          RingShape{RingKind::kHierarchical, 3, 2},
                          RingShape{RingKind::kHierarchical, 2, 3},
                          RingShape{RingKind::kHierarchical, 1, 4}),
        ::testing::Values(LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped),
        ::testing::Values(Seen{"Causal"}, Seen{"Window", 40},
                          Seen{"Documents", 0, {0, 1, 100, 101, 480, 900, 1500}},
                          Seen{"Uneven", 0, {0, 100, 480, 900}, true},
                          Seen{"Landmarks", 20, {0}, false, 5},
                          Seen{"LandmarksOfDocuments", 20, {0, 100, 480, 900}, false, 3},
                          Seen{"Listed", 0, {0, 100, 480, 900}, false, 0, 100},
                          Seen{"ListedWindow", 40, {0}, false, 0, 7})),
    NameOf);

// What travels between four contiguous shards of 24 tiles each.
TEST(TravellingRowsCountTest, NothingTravelsForNobody) {
  const ShardLayout layout{.ranks = 4, .tokens = 1536};
  const auto sent = [&](int rank, int64_t window, int64_t every = 0) {
    const Seen seen{.window = window, .landmarks = every};
    const TravellingRows rows = seen.Ask([&](SeenPositions near, const Landmarks* landmarks) {
      return FindTravellingRows(ForwardSchedule({RingKind::kFlat, 4, 1}, rank).value(), layout,
                                /*held=*/{}, kTile, near, landmarks);
    });
    std::vector<int64_t> counts;
    for (const HopRows& hop : rows.keys) counts.push_back(CountRows(hop.sent));
    return counts;
  };
  using Counts = std::vector<int64_t>;
  // Under a window the last three tiles travel, and to the next rank alone.
  EXPECT_EQ(sent(0, 40), (Counts{48, 0, 0}));
  EXPECT_EQ(sent(2, 40), (Counts{48, 0, 0}));
  EXPECT_EQ(sent(3, 40), (Counts{0, 0, 0})) << "nobody comes after it";
  // With every sixth tile beside it the last two travel, and four to all that come later.
  EXPECT_EQ(sent(0, 20, 6), (Counts{80, 0, 0}));
  EXPECT_EQ(sent(2, 20, 6), (Counts{80, 64, 64}));
  EXPECT_EQ(sent(3, 20, 6), (Counts{0, 0, 0})) << "nobody comes after it";
  // Causal attention needs the keys of those before.
  EXPECT_EQ(sent(0, 0), (Counts{384, 0, 0}));
  EXPECT_EQ(sent(2, 0), (Counts{384, 384, 384}));
  EXPECT_EQ(sent(3, 0), (Counts{0, 0, 0}));
}

TEST(TravellingRowsTest, HopsThatLeaveLittleOutCarryAll) {
  const auto rows = [] {
    return TravellingRows{
        .keys = {{.sent = {{0, 64}}, .received = {}, .sent_shard = 256, .received_shard = 128}},
        .gradients = {{.sent = {{0, 64}, {128, 256}},
                       .received = {{64, 128}},
                       .sent_shard = 256,
                       .received_shard = 128}}};
  };
  TravellingRows half = rows();
  EXPECT_TRUE(CarryAllAbove(0.5, &half));
  EXPECT_EQ(half.keys[0].sent, rows().keys[0].sent);
  EXPECT_TRUE(half.keys[0].received.empty());
  EXPECT_EQ(half.gradients[0].sent, (RowRuns{{0, 256}})) << "three quarters";
  EXPECT_EQ(half.gradients[0].received, rows().gradients[0].received) << "half, and no more";
  TravellingRows exact = rows();
  EXPECT_TRUE(CarryAllAbove(1.0, &exact));
  EXPECT_EQ(exact.gradients[0].sent, rows().gradients[0].sent);
  TravellingRows whole = {
      .keys = {{.sent = {{0, 64}}, .received = {{0, 9}}, .sent_shard = 64, .received_shard = 9}},
      .gradients = {}};
  EXPECT_FALSE(CarryAllAbove(0.5, &whole));
  // One end of one hop is enough.
  TravellingRows one_end = {
      .keys = {{.sent = {{0, 64}}, .received = {{0, 9}}, .sent_shard = 64, .received_shard = 90}},
      .gradients = whole.keys};
  EXPECT_TRUE(CarryAllAbove(0.5, &one_end));
}

}  // namespace
}  // namespace ringleader::ring
