// Plays one attention layer's ring steps: when each rank computes, waits and transfers. O(ranks²).
#pragma once

#include <vector>

#include "coordinator/planner/shapes.h"
#include "ringleader/v1/job_spec.pb.h"

namespace ringleader::planner {

struct RingSetup {
  v1::ParallelismSpec::Ring kind = v1::ParallelismSpec::FLAT;
  int ranks = 1;
  GroupShape group;
  Link intra_node;
  Link inter_node;
  double kv_bytes = 0;        // keys and values of one rank
  double gradient_bytes = 0;  // of their gradients; 0: forward
};

struct RingTimes {
  double seconds = 0;           // until the last rank is done
  double busy_seconds = 0;      // computation of the busiest rank
  double transfer_seconds = 0;  // of one rank, hidden or not
  double exposed_seconds = 0;   // what links of infinite speed would save
};

// The owner whose keys `rank` attends to at ring step `step`, all-gather in the order of the flat
// ring.
int OwnerAt(const RingSetup& setup, int rank, int step);

// `seconds[rank * ranks + owner]`: computation of a step. `outside[rank]`: computation that needs
// no ring (selected columns), done while the first transfers run. A transfer begins when both ends
// have begun the step before it; gradients follow the computation that they come from, and come
// home.
RingTimes SimulateRing(const RingSetup& setup, const std::vector<double>& seconds,
                       const std::vector<double>& outside);

// Mean over ranks of max/mean over ring steps. `load` as `seconds`.
double StepImbalance(const RingSetup& setup, const std::vector<double>& load);

}  // namespace ringleader::planner
