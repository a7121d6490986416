// Which rows of keys, of values and of their gradients the hops of a ring have to carry, where it
// is known before anything travels what each rank attends to: positions alone decide it, as in a
// window, in fixed blocks, between documents and, of shards that do not reach as far, in causal
// attention itself; or every query's keys are listed.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "ring/ring_schedule.h"
#include "ringleader/kernels/attention.h"
#include "ringleader/kernels/shard_layout.h"

namespace ringleader::ring {

// Rows [begin, end) of an owner's shard.
struct RowRun {
  int64_t begin = 0, end = 0;
  bool operator==(const RowRun&) const = default;
};
// Ascending, apart from each other.
using RowRuns = std::vector<RowRun>;
int64_t CountRows(const RowRuns& runs);

// What a rank sends in one of its hops, and what it receives; and how many rows there are of both.
struct HopRows {
  RowRuns sent = {}, received = {};
  int64_t sent_shard = 0, received_shard = 0;

  bool sends_all() const { return CountRows(sent) == sent_shard; }
  bool receives_all() const { return CountRows(received) == received_shard; }
};

// By hop, in the order in which a schedule starts them.
struct TravellingRows {
  std::vector<HopRows> keys;       // first_hops, then each step's kv_hops
  std::vector<HopRows> gradients;  // hops among each step's grad_actions
};

// The positions [first, second) of which those of [first, last] attend to some; what a tile of
// queries attends to lies between those of its first and of its last query. Neither end goes back
// where the positions go on.
using SeenPositions = absl::FunctionRef<std::pair<int64_t, int64_t>(int64_t first, int64_t last)>;

// Tiles of keys that whoever sees any of their keys attends to, wherever they lie: `holds` the one
// at that position. Both functions outlive it.
struct Landmarks {
  SeenPositions seen;
  absl::FunctionRef<bool(int64_t position)> holds;
};

// How many rows the hops of all ranks carry: [hop][receiving rank], hops as in TravellingRows.
struct HopCounts {
  std::vector<std::vector<int64_t>> keys, gradients;
};

// A hop carries the tiles of keys that its receiver attends to, and those that it passes on; one of
// gradients the tiles to which its sender, and those from whom it has its sum, have added.
// `layout`: of the whole sequence, alike for all ranks; its rank is ignored. `held`: how many of
// their rows ranks hold, their first ones; empty: all. `landmarks`: attended to besides what is
// `seen`; null: none. Takes time by ranks × (ranks + tiles of the sequence). `schedule` gathers
// nothing.
TravellingRows FindTravellingRows(const RingSchedule& schedule, const kernels::ShardLayout& layout,
                                  std::span<const int64_t> held, int tile, SeenPositions seen,
                                  const Landmarks* landmarks = nullptr);

// The same where `queries`, [layout.tokens] by position, list the keys that each sees; takes time
// by ranks × tokens.
TravellingRows FindTravellingRows(const RingSchedule& schedule, const kernels::ShardLayout& layout,
                                  int tile, std::span<const kernels::KeyIntervals> queries);

// What all ranks' FindTravellingRows() come to after CarryAllAbove(most_packed, …), in one such
// time: backward's with `is_backward`. `shape` is one that ForwardSchedule takes.
HopCounts CountTravellingRows(const RingShape& shape, bool is_backward,
                              const kernels::ShardLayout& layout, std::span<const int64_t> held,
                              int tile, double most_packed, SeenPositions seen,
                              const Landmarks* landmarks = nullptr);

// Makes a hop carry all rows of a shard of which it carries more than `share`: where rows are
// packed at one end and spread out at the other, that takes longer than the few that stay away.
// Returns whether some hop still carries less than all.
bool CarryAllAbove(double share, TravellingRows* rows);

}  // namespace ringleader::ring
