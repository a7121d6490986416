#include "ring/travelling_rows.h"

#include <algorithm>
#include <map>
#include <ranges>
#include <set>

namespace ringleader::ring {

using kernels::ShardLayout;

namespace {

// One owner's rows, and the ranks that attend to them, or that have added to them.
struct Use {
  int owner = 0;
  std::set<int> ranks = {};
};
struct HopUse {
  Use sent, received;
};

// Names of rank `at`, as this rank names the same ranks.
Use Shift(const RingShape& shape, int at, const Use& use) {
  Use shifted{.owner = NamedByRank(shape, at, use.owner)};
  for (const int rank : use.ranks) shifted.ranks.insert(NamedByRank(shape, at, rank));
  return shifted;
}

// A hop, or a step that reads a slot.
struct Event {
  const RingHop* hop = nullptr;
  int slot = 0;
};

// As rank 0 names ranks. What other ranks do is rank 0's schedule turned.
std::vector<HopUse> KeyUses(const RingSchedule& zero) {
  std::vector<Event> events;
  for (const RingHop& hop : zero.first_hops) events.push_back({.hop = &hop});
  for (const RingStep& step : zero.steps) {
    for (const RingHop& hop : step.kv_hops) events.push_back({.hop = &hop});
    events.push_back({.slot = step.kv_slot});
  }
  std::vector<HopUse> uses;
  std::vector<int> owners(zero.kv_slots, 0);  // whose keys each slot holds
  for (const Event& event : events) {
    if (event.hop == nullptr) continue;
    HopUse& use = uses.emplace_back();
    use.sent.owner = owners[event.hop->send_slot];
    use.received.owner = NamedByRank(zero.shape, event.hop->from, use.sent.owner);
    owners[event.hop->receive_slot] = use.received.owner;
  }
  std::vector<std::set<int>> later(zero.kv_slots);  // who will attend to what each slot holds
  auto use = uses.rbegin();
  for (auto event = events.rbegin(); event != events.rend(); ++event) {
    if (event->hop == nullptr) {
      later[event->slot].insert(0);
      continue;
    }
    use->received.ranks = std::exchange(later[event->hop->receive_slot], {});
    use->sent.ranks = Shift(zero.shape, event->hop->to, {.ranks = use->received.ranks}).ranks;
    later[event->hop->send_slot].insert(use->sent.ranks.begin(), use->sent.ranks.end());
    ++use;
  }
  return uses;
}

std::vector<HopUse> GradientUses(const RingSchedule& zero) {
  std::vector<HopUse> uses;
  if (zero.grad_slots == 0) return uses;
  std::vector<Use> slots(zero.grad_slots);  // whose gradients each holds, and who has added to them
  for (const RingStep& step : zero.steps) {
    slots[step.grad_slot] = {.owner = step.owner, .ranks = {0}};
    for (const GradAction& action : step.grad_actions) {
      switch (action.kind) {
        case GradAction::Kind::kAdd: {
          const std::set<int>& added = slots[action.from_slot].ranks;
          slots[action.to_slot].ranks.insert(added.begin(), added.end());
          break;
        }
        case GradAction::Kind::kHop: {
          HopUse& use = uses.emplace_back();
          use.sent = slots[action.hop.send_slot];
          use.received = Shift(zero.shape, action.hop.from, use.sent);
          slots[action.hop.receive_slot] = use.received;
          break;
        }
      }
    }
  }
  return uses;
}

// Which tiles of an owner's keys each rank attends to, found when they are first asked for.
class SeenTiles {
 public:
  SeenTiles(const ShardLayout& layout, std::span<const int64_t> held, int tile, SeenPositions seen)
      : layout_(layout), held_(held), tile_(tile), seen_(seen) {}

  int64_t Rows(int rank) const { return held_.empty() ? layout_.local_tokens() : held_[rank]; }

  RowRuns RowsOf(const Use& use) {
    std::vector<bool> tiles(Tiles(use.owner));
    for (const int rank : use.ranks) {
      const std::vector<bool>& of_rank = Of(rank, use.owner);
      for (size_t i = 0; i < tiles.size(); ++i) tiles[i] = tiles[i] || of_rank[i];
    }
    RowRuns runs;
    for (int64_t i = 0; i < std::ssize(tiles); ++i) {
      if (!tiles[i]) continue;
      const int64_t begin = i * tile_, end = std::min(Rows(use.owner), begin + tile_);
      if (!runs.empty() && runs.back().end == begin) {
        runs.back().end = end;
      } else {
        runs.push_back({begin, end});
      }
    }
    return runs;
  }

 private:
  int64_t Tiles(int rank) const { return (Rows(rank) + tile_ - 1) / tile_; }

  const std::vector<bool>& Of(int rank, int owner) {
    const auto [found, is_new] = tiles_.try_emplace({rank, owner});
    std::vector<bool>& tiles = found->second;
    if (!is_new) return tiles;
    tiles.resize(Tiles(owner));
    ShardLayout query = layout_, key = layout_;
    query.rank = rank;
    key.rank = owner;
    const auto last_of = [&](const ShardLayout& shard, int64_t i) {
      return shard.Position(std::min(Rows(shard.rank), (i + 1) * tile_) - 1);
    };
    for (int64_t i = 0; i < Tiles(rank); ++i) {
      const auto [first, end] = seen_(query.Position(i * tile_), last_of(query, i));
      // Positions grow with the row.
      const auto numbers = std::views::iota(int64_t{0}, Tiles(owner));
      auto k =
          std::ranges::partition_point(numbers, [&](int64_t t) { return last_of(key, t) < first; });
      for (; k != numbers.end() && key.Position(*k * tile_) < end; ++k) tiles[*k] = true;
    }
    return tiles;
  }

  const ShardLayout layout_;
  const std::span<const int64_t> held_;
  const int tile_;
  const SeenPositions seen_;
  std::map<std::pair<int, int>, std::vector<bool>> tiles_;  // by rank and owner
};

}  // namespace

int64_t CountRows(const RowRuns& runs) {
  int64_t rows = 0;
  for (const RowRun& run : runs) rows += run.end - run.begin;
  return rows;
}

TravellingRows FindTravellingRows(const RingSchedule& schedule, const ShardLayout& layout,
                                  std::span<const int64_t> held, int tile, SeenPositions seen) {
  SeenTiles tiles(layout, held, tile, seen);
  const auto rows_of = [&](const std::vector<HopUse>& uses) {
    std::vector<HopRows> rows;
    for (const HopUse& use : uses) {
      const Use sent = Shift(schedule.shape, schedule.rank, use.sent),
                received = Shift(schedule.shape, schedule.rank, use.received);
      rows.push_back({.sent = tiles.RowsOf(sent),
                      .received = tiles.RowsOf(received),
                      .sent_shard = tiles.Rows(sent.owner),
                      .received_shard = tiles.Rows(received.owner)});
    }
    return rows;
  };
  const RingSchedule zero =
      (schedule.grad_slots > 0 ? BackwardSchedule : ForwardSchedule)(schedule.shape, 0).value();
  return {.keys = rows_of(KeyUses(zero)), .gradients = rows_of(GradientUses(zero))};
}

bool CarryAllAbove(double share, TravellingRows* rows) {
  bool leaves_out = false;
  const auto widen = [&](RowRuns* runs, int64_t shard) {
    const int64_t carried = CountRows(*runs);
    if (static_cast<double>(carried) > share * static_cast<double>(shard)) *runs = {{0, shard}};
    leaves_out |= CountRows(*runs) < shard;
  };
  for (std::vector<HopRows>* const hops : {&rows->keys, &rows->gradients}) {
    for (HopRows& hop : *hops) {
      widen(&hop.sent, hop.sent_shard);
      widen(&hop.received, hop.received_shard);
    }
  }
  return leaves_out;
}

}  // namespace ringleader::ring
