// Plays one attention layer's ring: the schedule that trainers run (ring/ring_schedule.h), on all
// ranks at once, and when each of them computes, waits and transfers. O(ranks²) but for all-gather,
// in O(ranks) memory.
#pragma once

#include <cstdint>
#include <vector>

#include "coordinator/planner/cost/shapes.h"
#include "ring/ring_schedule.h"
#include "ring/tile_loads.h"

namespace ringleader::planner {

// What the hops of a ring carry, of a rank's keys and values and of their gradients:
// [hop][receiving rank], hops in the order of the schedule.
struct CarriedShares {
  std::vector<std::vector<double>> keys, gradients;
};

struct RingSetup {
  ring::RingShape shape;
  GroupShape group;  // which ranks share a node
  Link intra_node;
  Link inter_node;
  double kv_bytes = 0;                     // keys and values of one rank
  double gradient_bytes = 0;               // of their gradients; 0: forward
  int head_groups = 1;                     // that are gathered one after the other
  const CarriedShares* carried = nullptr;  // all of it
};

// What the loads' tiles take. A rank spends `per_tile` on a tile, `per_own_step` on the ring step
// of its own keys, `per_other_step` on every other, and `lead` before its first one, while the
// first hops run.
struct StepSeconds {
  double per_tile = 0;
  double per_own_step = 0;
  double per_other_step = 0;
  double lead = 0;
};

// What loads list by pairs of ranks, by the owner whom rank 0 meets when the pair does.
struct ListedMeetings {
  struct Load {
    int place = 0;  // of the rank, in the order of the walk
    double tiles = 0;
  };
  std::vector<int64_t> begin;  // [ranks + 1], or empty
  std::vector<Load> loads;
};

struct RingTimes {
  double seconds = 0;           // until the last rank is done
  double busy_seconds = 0;      // computation of the busiest rank
  double transfer_seconds = 0;  // of one rank, hidden or not
  double exposed_seconds = 0;  // what links of infinite speed would save; 0 unless it was asked for
  int64_t rank_steps = 0;      // ring steps of single ranks that were played to find out
};

// Bytes that a rank sends, in the mean: what is carried, and what all keys would be.
struct RingBytes {
  double sent = 0, whole = 0;
};
RingBytes BytesOf(const RingSetup& setup);

// Seconds of the hops that a rank makes, one after the other, hidden or not; in the mean.
double TransferSeconds(const RingSetup& setup);

// The loads, arranged once for all plays of one shape of ring.
class RingSimulator {
 public:
  // `shape` is one that ring::ForwardSchedule takes, of loads.ranks() ranks. `loads` must outlive
  // the simulator.
  RingSimulator(const ring::RingShape& shape, const ring::TileLoads& loads);

  // `setup` has the simulator's shape. Selected columns need no ring: they are computed first,
  // while the first transfers run. A transfer begins when both ends have begun the step it belongs
  // to and hold what it sends; gradients follow the computation that they come from, and are added
  // after the next. `find_exposed` takes as long again.
  RingTimes Play(const RingSetup& setup, const StepSeconds& seconds, bool find_exposed) const;

 private:
  const ring::RingShape shape_;
  const ring::TileLoads& loads_;
  const std::vector<double> totals_;  // of each rank
  ListedMeetings listed_;
};

}  // namespace ringleader::planner
