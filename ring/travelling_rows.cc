#include "ring/travelling_rows.h"

#include <algorithm>
#include <optional>
#include <tuple>

namespace ringleader::ring {

using kernels::ShardLayout;

namespace {

// Of one owner's keys, a bit each; empty: none.
using Tiles = std::vector<uint64_t>;

void Add(const Tiles& more, Tiles* tiles) {
  if (tiles->size() < more.size()) tiles->resize(more.size());
  for (size_t i = 0; i < more.size(); ++i) (*tiles)[i] |= more[i];
}

// What all ranks receive in a hop: whose rows, and which tiles of them.
struct HopTiles {
  int owner = 0;             // as rank 0 names ranks
  std::vector<Tiles> tiles;  // [receiving rank]
};

// Which tiles of an owner's keys each rank attends to, found when they are first asked for.
class SeenTiles {
 public:
  SeenTiles(const ShardLayout& layout, std::span<const int64_t> held, int tile)
      : held_(held),
        local_tokens_(layout.local_tokens()),
        tile_(tile),
        tiles_(layout.ranks, std::vector<std::optional<Tiles>>(layout.ranks)) {
    for (int rank = 0; rank < layout.ranks; ++rank) {
      const ShardLayout shard = ShardOf(layout, rank);
      std::vector<Tile>& of_rank = shards_.emplace_back();
      for (int64_t row = 0; row < Rows(rank); row += tile) {
        of_rank.push_back({.first = shard.Position(row),
                           .last = shard.Position(std::min(Rows(rank), row + tile) - 1)});
      }
    }
  }
  SeenTiles(const SeenTiles&) = delete;
  SeenTiles& operator=(const SeenTiles&) = delete;
  virtual ~SeenTiles() = default;

  int64_t Rows(int rank) const { return held_.empty() ? local_tokens_ : held_[rank]; }

  const Tiles& Of(int rank, int owner) {
    std::optional<Tiles>& known = tiles_[rank][owner];
    if (known.has_value()) return *known;
    Tiles& tiles = known.emplace((shards_[owner].size() + 63) / 64);
    Find(rank, shards_[owner],
         [&](size_t tile) { tiles[tile / 64] |= uint64_t{1} << (tile % 64); });
    return tiles;
  }

  RowRuns RunsOf(const Tiles& tiles, int owner) const {
    RowRuns runs;
    for (size_t i = 0; i < 64 * tiles.size(); ++i) {
      if ((tiles[i / 64] >> (i % 64) & 1) == 0) continue;
      const int64_t begin = static_cast<int64_t>(i) * tile_,
                    end = std::min(Rows(owner), begin + tile_);
      if (!runs.empty() && runs.back().end == begin) {
        runs.back().end = end;
      } else {
        runs.push_back({begin, end});
      }
    }
    return runs;
  }

 protected:
  struct Tile {
    int64_t first = 0, last = 0;  // positions
  };
  using AddTile = absl::FunctionRef<void(size_t tile)>;

  static ShardLayout ShardOf(ShardLayout layout, int rank) {
    layout.rank = rank;
    return layout;
  }
  const std::vector<Tile>& shard(int rank) const { return shards_[rank]; }

 private:
  // Adds each tile of `keys` of which `rank` attends to a key.
  virtual void Find(int rank, const std::vector<Tile>& keys, AddTile add) const = 0;

  const std::span<const int64_t> held_;
  const int64_t local_tokens_;
  const int tile_;
  std::vector<std::vector<Tile>> shards_;                 // [rank][tile]
  std::vector<std::vector<std::optional<Tiles>>> tiles_;  // [rank][owner]
};

// By what the positions of a tile of queries say.
class TilesByPosition : public SeenTiles {
 public:
  TilesByPosition(const ShardLayout& layout, std::span<const int64_t> held, int tile,
                  SeenPositions seen, const Landmarks* landmarks)
      : SeenTiles(layout, held, tile), landmarks_(landmarks) {
    for (int rank = 0; rank < layout.ranks; ++rank) {
      std::vector<Sights>& sights = sights_.emplace_back();
      for (const Tile& queries : shard(rank)) {
        Sights& of_tile = sights.emplace_back();
        std::tie(of_tile.seen.begin, of_tile.seen.end) = seen(queries.first, queries.last);
        if (landmarks == nullptr) continue;
        std::tie(of_tile.shown.begin, of_tile.shown.end) =
            landmarks->seen(queries.first, queries.last);
      }
    }
  }

 private:
  struct Positions {
    int64_t begin = 0, end = 0;
  };
  struct Sights {
    Positions seen = {}, shown = {};  // from there; `shown`: where landmarks may lie
  };

  void Find(int rank, const std::vector<Tile>& keys, AddTile add) const override {
    ForEachSeen(rank, keys, &Sights::seen, add);
    if (landmarks_ == nullptr) return;
    ForEachSeen(rank, keys, &Sights::shown, [&](size_t tile) {
      if (landmarks_->holds(keys[tile].first)) add(tile);
    });
  }

  // Calls visit with each tile of `keys` of which `rank` sees a key.
  void ForEachSeen(int rank, const std::vector<Tile>& keys, Positions Sights::*seen,
                   AddTile visit) const {
    // Positions grow with the row, and so do both ends of what is seen from there.
    size_t begin = 0, end = 0;
    for (const Sights& query : sights_[rank]) {
      while (begin < keys.size() && keys[begin].last < (query.*seen).begin) ++begin;
      end = std::max(begin, end);
      while (end < keys.size() && keys[end].first < (query.*seen).end) visit(end++);
    }
  }

  const Landmarks* const landmarks_;
  std::vector<std::vector<Sights>> sights_;  // [rank][tile]
};

// By lists of what each query sees, in any order.
class TilesByQuery : public SeenTiles {
 public:
  TilesByQuery(const ShardLayout& layout, int tile, std::span<const kernels::KeyIntervals> queries)
      : SeenTiles(layout, /*held=*/{}, tile) {
    for (int rank = 0; rank < layout.ranks; ++rank) {
      const ShardLayout shard = ShardOf(layout, rank);
      // How many more of the rank's queries see a position than the one before it.
      std::vector<int32_t> more(layout.tokens + 1);
      for (int64_t row = 0; row < Rows(rank); ++row) {
        const kernels::KeyIntervals& query = queries[shard.Position(row)];
        ++more[query.begin], --more[query.end];
        ++more[query.second_begin], --more[query.second_end];
      }
      RowRuns& seen = seen_.emplace_back();
      int64_t seeing = 0;
      for (int64_t position = 0; position <= layout.tokens; ++position) {
        const int64_t before = seeing;
        seeing += more[position];
        if (before == 0 && seeing > 0) seen.push_back({.begin = position});
        if (before > 0 && seeing == 0) seen.back().end = position;
      }
    }
  }

 private:
  void Find(int rank, const std::vector<Tile>& keys, AddTile add) const override {
    auto run = seen_[rank].begin();
    for (size_t tile = 0; tile < keys.size(); ++tile) {
      while (run != seen_[rank].end() && run->end <= keys[tile].first) ++run;
      if (run == seen_[rank].end()) return;
      if (run->begin <= keys[tile].last) add(tile);
    }
  }

  std::vector<RowRuns> seen_;  // positions, by rank
};

// A hop, or a step that reads a slot.
struct Event {
  const RingHop* hop = nullptr;
  int slot = 0;
  int owner = 0;  // of the step's keys
};

// `zero`: rank 0's schedule. What other ranks do is the same one, turned.
std::vector<HopTiles> KeyTiles(const RingSchedule& zero, SeenTiles& seen) {
  std::vector<Event> events;
  for (const RingHop& hop : zero.first_hops) events.push_back({.hop = &hop});
  for (const RingStep& step : zero.steps) {
    for (const RingHop& hop : step.kv_hops) events.push_back({.hop = &hop});
    events.push_back({.slot = step.kv_slot, .owner = step.owner});
  }
  const auto named = [&](int rank, int name) { return NamedByRank(zero.shape, rank, name); };
  std::vector<HopTiles> hops;
  std::vector<int> owners(zero.kv_slots, 0);  // whose keys each slot holds
  for (const Event& event : events) {
    if (event.hop == nullptr) continue;
    const int owner = named(event.hop->from, owners[event.hop->send_slot]);
    hops.push_back({.owner = owner, .tiles = std::vector<Tiles>(zero.ranks)});
    owners[event.hop->receive_slot] = owner;
  }
  // What will be attended to of what each slot holds, [slot][rank].
  std::vector<std::vector<Tiles>> later(zero.kv_slots, std::vector<Tiles>(zero.ranks));
  auto hop = hops.rbegin();
  for (auto event = events.rbegin(); event != events.rend(); ++event) {
    if (event->hop == nullptr) {
      for (int rank = 0; rank < zero.ranks; ++rank) {
        Add(seen.Of(rank, named(rank, event->owner)), &later[event->slot][rank]);
      }
      continue;
    }
    for (int rank = 0; rank < zero.ranks; ++rank) {
      hop->tiles[rank] = std::exchange(later[event->hop->receive_slot][rank], {});
    }
    for (int rank = 0; rank < zero.ranks; ++rank) {
      Add(hop->tiles[rank], &later[event->hop->send_slot][named(rank, event->hop->from)]);
    }
    ++hop;
  }
  return hops;
}

std::vector<HopTiles> GradientTiles(const RingSchedule& zero, SeenTiles& seen) {
  std::vector<HopTiles> hops;
  // Whose gradients each slot holds, and to which tiles somebody has added.
  std::vector<HopTiles> slots(zero.grad_slots, {.tiles = std::vector<Tiles>(zero.ranks)});
  for (const RingStep& step : zero.steps) {
    if (zero.grad_slots == 0) break;
    slots[step.grad_slot].owner = step.owner;
    for (int rank = 0; rank < zero.ranks; ++rank) {
      slots[step.grad_slot].tiles[rank] = seen.Of(rank, NamedByRank(zero.shape, rank, step.owner));
    }
    for (const GradAction& action : step.grad_actions) {
      switch (action.kind) {
        case GradAction::Kind::kAdd:
          for (int rank = 0; rank < zero.ranks; ++rank) {
            Add(slots[action.from_slot].tiles[rank], &slots[action.to_slot].tiles[rank]);
          }
          break;
        case GradAction::Kind::kHop: {
          const HopTiles& sent = slots[action.hop.send_slot];
          HopTiles& hop = hops.emplace_back();
          hop.owner = NamedByRank(zero.shape, action.hop.from, sent.owner);
          for (int rank = 0; rank < zero.ranks; ++rank) {
            hop.tiles.push_back(sent.tiles[NamedByRank(zero.shape, rank, action.hop.from)]);
          }
          slots[action.hop.receive_slot] = hop;
          break;
        }
      }
    }
  }
  return hops;
}

// To whom rank 0 sends in each hop, in the order of both.
struct Receivers {
  std::vector<int> keys, gradients;
};
Receivers ReceiversOf(const RingSchedule& zero) {
  Receivers to;
  for (const RingHop& hop : zero.first_hops) to.keys.push_back(hop.to);
  for (const RingStep& step : zero.steps) {
    for (const RingHop& hop : step.kv_hops) to.keys.push_back(hop.to);
    for (const GradAction& action : step.grad_actions) {
      if (action.kind == GradAction::Kind::kHop) to.gradients.push_back(action.hop.to);
    }
  }
  return to;
}

RingSchedule ZeroOf(const RingShape& shape, bool is_backward) {
  return (is_backward ? BackwardSchedule : ForwardSchedule)(shape, 0).value();
}

// What `schedule`'s rank sends and receives.
TravellingRows RowsOf(const RingSchedule& schedule, SeenTiles& tiles) {
  const RingShape& shape = schedule.shape;
  const RingSchedule zero = ZeroOf(shape, schedule.grad_slots > 0);
  const auto rows_of = [&](const std::vector<HopTiles>& hops, const std::vector<int>& receivers) {
    std::vector<HopRows> rows;
    for (size_t i = 0; i < hops.size(); ++i) {
      const int to = NamedByRank(shape, schedule.rank, receivers[i]);
      const int sent = NamedByRank(shape, to, hops[i].owner),
                received = NamedByRank(shape, schedule.rank, hops[i].owner);
      rows.push_back({.sent = tiles.RunsOf(hops[i].tiles[to], sent),
                      .received = tiles.RunsOf(hops[i].tiles[schedule.rank], received),
                      .sent_shard = tiles.Rows(sent),
                      .received_shard = tiles.Rows(received)});
    }
    return rows;
  };
  const Receivers to = ReceiversOf(zero);
  return {.keys = rows_of(KeyTiles(zero, tiles), to.keys),
          .gradients = rows_of(GradientTiles(zero, tiles), to.gradients)};
}

// All of a shard that is more than `share` carried.
void Widen(double share, int64_t shard, RowRuns* runs) {
  const int64_t carried = CountRows(*runs);
  if (static_cast<double>(carried) > share * static_cast<double>(shard)) *runs = {{0, shard}};
}

}  // namespace

int64_t CountRows(const RowRuns& runs) {
  int64_t rows = 0;
  for (const RowRun& run : runs) rows += run.end - run.begin;
  return rows;
}

TravellingRows FindTravellingRows(const RingSchedule& schedule, const ShardLayout& layout,
                                  std::span<const int64_t> held, int tile, SeenPositions seen,
                                  const Landmarks* landmarks) {
  TilesByPosition tiles(layout, held, tile, seen, landmarks);
  return RowsOf(schedule, tiles);
}

TravellingRows FindTravellingRows(const RingSchedule& schedule, const ShardLayout& layout, int tile,
                                  std::span<const kernels::KeyIntervals> queries) {
  TilesByQuery tiles(layout, tile, queries);
  return RowsOf(schedule, tiles);
}

HopCounts CountTravellingRows(const RingShape& shape, bool is_backward, const ShardLayout& layout,
                              std::span<const int64_t> held, int tile, double most_packed,
                              SeenPositions seen, const Landmarks* landmarks) {
  const RingSchedule zero = ZeroOf(shape, is_backward);
  TilesByPosition tiles(layout, held, tile, seen, landmarks);
  const auto counts_of = [&](const std::vector<HopTiles>& hops) {
    std::vector<std::vector<int64_t>> counts;
    for (const HopTiles& hop : hops) {
      std::vector<int64_t>& of_hop = counts.emplace_back();
      for (int rank = 0; rank < zero.ranks; ++rank) {
        const int owner = NamedByRank(shape, rank, hop.owner);
        RowRuns runs = tiles.RunsOf(hop.tiles[rank], owner);
        Widen(most_packed, tiles.Rows(owner), &runs);
        of_hop.push_back(CountRows(runs));
      }
    }
    return counts;
  };
  return {.keys = counts_of(KeyTiles(zero, tiles)),
          .gradients = counts_of(GradientTiles(zero, tiles))};
}

bool CarryAllAbove(double share, TravellingRows* rows) {
  bool leaves_out = false;
  for (std::vector<HopRows>* const hops : {&rows->keys, &rows->gradients}) {
    for (HopRows& hop : *hops) {
      Widen(share, hop.sent_shard, &hop.sent);
      Widen(share, hop.received_shard, &hop.received);
      leaves_out |= !hop.sends_all() || !hop.receives_all();
    }
  }
  return leaves_out;
}

}  // namespace ringleader::ring
