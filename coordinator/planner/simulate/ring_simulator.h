// Plays one attention layer's ring steps: when each rank computes, waits and transfers. O(ranks²).
#pragma once

#include <optional>
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

// Which of two rings a hop is on. A flat ring, also over several nodes, is all inner.
enum class RingLevel { kInner, kOuter };

// Keys are numbered by the hops that brought them: outer hops * inner ranks + inner hops; 0 are a
// rank's own. All ranks make the same hop, each with those that have this number there.
struct KeyHop {
  RingLevel level = RingLevel::kInner;
  int keys = 0;

  bool operator==(const KeyHop&) const = default;
};

struct RingStep {
  int keys = 0;                           // attended to
  std::vector<KeyHop> key_hops = {};      // start with the step, in order
  std::vector<RingLevel> adds = {};       // gradients that came there: added behind the computation
  std::optional<RingLevel> returns = {};  // where the sum goes then
};

struct RingOrder {
  std::vector<KeyHop> first_hops;  // start before anything is computed
  std::vector<RingStep> steps;
};

// What all ranks do; empty for all-gather. Forward begins with a rank's own keys. Backward ends
// with them, as every inner loop does with the keys that it began with: gradients make no more hops
// than keys.
RingOrder OrderOf(const RingSetup& setup);

// The owner whose keys `rank` attends to at ring step `step`; all-gather in the order of the flat
// ring's forward.
int OwnerAt(const RingSetup& setup, int rank, int step);

// `seconds[rank * ranks + owner]`: computation of a step. `outside[rank]`: computation that needs
// no ring (selected columns), done while the first transfers run. A transfer begins when both ends
// have begun the step it belongs to and hold what it sends; gradients follow the computation that
// they come from, and are added behind the next.
RingTimes SimulateRing(const RingSetup& setup, const std::vector<double>& seconds,
                       const std::vector<double>& outside);

// Mean over ranks of max/mean over ring steps. `load` as `seconds`.
double StepImbalance(const RingSetup& setup, const std::vector<double>& load);

}  // namespace ringleader::planner
