// Ring schedules as data: which owner's keys and values a rank attends to at which step, and what
// it sends where, on which link. Trainers run them, and the planner's simulator plays the same
// objects. No LibTorch, no transfers here. Hierarchical: MTraining (arXiv 2510.18830), section 4.3.
//
// Ranks of a hierarchical ring are numbered node by node: rank = node * inner + place in the node.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"

namespace ringleader::ring {

enum class RingKind {
  kFlat,          // one ring over all ranks
  kHierarchical,  // inner rings inside nodes; a whole inner loop hides one outer hop
  kAllGather,     // keys and values of all ranks are gathered first
};

// ranks = inner * outer; outer = 1 unless hierarchical.
struct RingShape {
  RingKind kind = RingKind::kFlat;
  int inner = 1;
  int outer = 1;

  int ranks() const { return inner * outer; }
  bool operator==(const RingShape&) const = default;
};

enum class RingLink { kInner, kOuter };

// One exchange: send the content of `send_slot` to rank `to`, receive into `receive_slot` from rank
// `from`. Every rank makes the same hop at the same point, so that each send meets a receive.
struct RingHop {
  RingLink link = RingLink::kInner;
  int to = 0;
  int from = 0;
  int send_slot = 0;
  int receive_slot = 0;
};

// What happens to travelling gradients after a step's computation, in order.
struct GradAction {
  enum class Kind {
    kAdd,  // slot `to_slot` += slot `from_slot`
    kHop,
  };
  Kind kind = Kind::kAdd;
  int to_slot = 0;
  int from_slot = 0;
  RingHop hop = {};
};

// A step: start `kv_hops`, in order, then attend to the keys of `owner` in `kv_slot`, which may be
// what one of those hops brings; backward adds their gradients to a zeroed `grad_slot`, then does
// `grad_actions`.
//
// Whoever runs a schedule waits, before it reads a slot, for the hop that brings its content, and
// before it overwrites a slot, for all hops that touch it. Nothing else orders transfers and
// computation.
struct RingStep {
  int owner = 0;
  int kv_slot = 0;
  std::vector<RingHop> kv_hops = {};
  int grad_slot = 0;
  std::vector<GradAction> grad_actions = {};
};

// One rank's schedule for one layer. KV slot 0 holds the rank's own keys and values and is never
// received into. With kAllGather, slot j holds those of rank j, gathered before the first step, and
// gradient slot j is summed over ranks to rank j after the last.
struct RingSchedule {
  RingShape shape;
  int rank = 0;
  int ranks = 1;
  std::vector<RingHop> first_hops = {};  // start before anything else is computed
  std::vector<RingStep> steps = {};
  int kv_slots = 1;
  int grad_slots = 0;      // 0: a forward schedule
  int home_grad_slot = 0;  // where this rank's own gradients lie in the end
};

// `rank` of shape.inner * shape.outer. INVALID_ARGUMENT if the shape does not make sense. A rank
// attends to its own keys first, while the others' are on their way.
absl::StatusOr<RingSchedule> ForwardSchedule(const RingShape& shape, int rank);

// Every inner loop ends with the keys that it began with, and the loop over a rank's own node is
// the last. So gradients start at the first rank that meets keys which are not its own, make as
// many hops as those, and come home during the computation of what they are added to: that of their
// own rank on an inner ring, that of their own node on the outer.
absl::StatusOr<RingSchedule> BackwardSchedule(const RingShape& shape, int rank);

// The schedules of a shape differ by a rotation alone: the same steps, slots and links, and where
// rank 0's names rank `named`, that of `rank` names the rank that is as far from it, counted around
// the ring of nodes and around a node. One schedule so stands for all. (All-gather: its slots are
// numbered by ranks and turn likewise.)
int NamedByRank(const RingShape& shape, int rank, int named);
// The other way round: whom rank 0's schedule names where that of `rank` names `named`.
int NamedByRankZero(const RingShape& shape, int rank, int named);

}  // namespace ringleader::ring
