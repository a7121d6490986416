#include "worker/attention/ring_schedule.h"

#include "absl/strings/str_format.h"
#include "base/status_macros.h"

namespace ringleader::attention {

namespace {

absl::Status CheckShape(const RingShape& shape, int rank) {
  if (shape.inner < 1 || shape.outer < 1 || rank < 0 || rank >= shape.inner * shape.outer) {
    return absl::InvalidArgumentError(
        absl::StrFormat("ring of %d x %d ranks has no rank %d", shape.outer, shape.inner, rank));
  }
  if (shape.kind != RingKind::kHierarchical && shape.outer != 1) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "ring has %d outer ranks; only a hierarchical ring has more than one", shape.outer));
  }
  return absl::OkStatus();
}

// Neighbours on both rings.
struct Place {
  int inner, outer;  // sizes
  int node, local;

  Place(const RingShape& shape, int rank)
      : inner(shape.inner),
        outer(shape.outer),
        node(rank / shape.inner),
        local(rank % shape.inner) {}

  int Rank(int at_node, int at_local) const {
    return (at_node + outer) % outer * inner + (at_local + inner) % inner;
  }
  // Whose keys a rank holds at inner step i of outer step s.
  int Owner(int s, int i) const { return Rank(node - s, local - i); }
  RingHop InnerHop(int send_slot, int receive_slot) const {
    return {.link = RingLink::kInner,
            .to = Rank(node, local + 1),
            .from = Rank(node, local - 1),
            .send_slot = send_slot,
            .receive_slot = receive_slot};
  }
  RingHop OuterHop(int send_slot, int receive_slot) const {
    return {.link = RingLink::kOuter,
            .to = Rank(node + 1, local),
            .from = Rank(node - 1, local),
            .send_slot = send_slot,
            .receive_slot = receive_slot};
  }
};

RingSchedule GatherSchedule(const RingShape& shape, int rank, bool backward) {
  RingSchedule schedule{.shape = shape, .rank = rank, .ranks = shape.inner};
  schedule.kv_slots = shape.inner;
  if (backward) {
    schedule.grad_slots = shape.inner;
    schedule.home_grad_slot = rank;
  }
  for (int step = 0; step < shape.inner; ++step) {
    const int owner = (rank - step + shape.inner) % shape.inner;
    schedule.steps.push_back({.owner = owner, .kv_slot = owner, .grad_slot = owner});
  }
  return schedule;
}

// Slot numbers: the rank's own, two that take turns on the inner ring, two on the outer.
constexpr int kInnerSlot = 1, kOuterSlot = 3;

RingSchedule KvSchedule(const RingShape& shape, int rank) {
  const Place place(shape, rank);
  RingSchedule schedule{.shape = shape, .rank = rank, .ranks = shape.inner * shape.outer};
  schedule.kv_slots = shape.outer > 1 ? kOuterSlot + 2 : shape.inner > 1 ? kInnerSlot + 2 : 1;
  int base = 0, inner_turn = 0;
  for (int s = 0; s < place.outer; ++s) {
    const int next_base = kOuterSlot + s % 2;
    int current = base;
    for (int i = 0; i < place.inner; ++i) {
      RingStep step{.owner = place.Owner(s, i), .kv_slot = current};
      // The outer hop starts with the inner loop and has all of it to finish.
      if (i == 0 && s + 1 < place.outer) step.kv_hops.push_back(place.OuterHop(base, next_base));
      if (i + 1 < place.inner) {
        const int next = kInnerSlot + inner_turn++ % 2;
        step.kv_hops.push_back(place.InnerHop(current, next));
        current = next;
      }
      schedule.steps.push_back(std::move(step));
    }
    base = next_base;
  }
  return schedule;
}

}  // namespace

absl::StatusOr<RingSchedule> ForwardSchedule(const RingShape& shape, int rank) {
  RETURN_IF_ERROR(CheckShape(shape, rank));
  if (shape.kind == RingKind::kAllGather) return GatherSchedule(shape, rank, false);
  return KvSchedule(shape, rank);
}

absl::StatusOr<RingSchedule> BackwardSchedule(const RingShape& shape, int rank) {
  RETURN_IF_ERROR(CheckShape(shape, rank));
  if (shape.kind == RingKind::kAllGather) return GatherSchedule(shape, rank, true);
  RingSchedule schedule = KvSchedule(shape, rank);
  const Place place(shape, rank);
  // Gradient slots: two that steps compute into by turns, two that receive on the inner ring, two
  // on the outer.
  constexpr int kReceive = 2, kFold = 4;
  schedule.grad_slots = shape.outer > 1 ? kFold + 2 : shape.inner > 1 ? kReceive + 2 : 1;
  int turn = 0, fold = kFold;
  int result = -1;  // the slot with an inner loop's sum that is not yet folded
  const auto fold_result = [&](std::vector<GradAction>& actions) {
    const int received = fold == kFold ? kFold + 1 : kFold;
    actions.push_back({.kind = GradAction::Kind::kAdd, .to_slot = fold, .from_slot = result});
    actions.push_back({.kind = GradAction::Kind::kHop, .hop = place.OuterHop(fold, received)});
    fold = received;
    result = -1;
  };
  if (shape.outer > 1) schedule.zeroed_slot = fold;
  for (int s = 0; s < place.outer; ++s) {
    int received = -1;
    for (int i = 0; i < place.inner; ++i, ++turn) {
      RingStep& step = schedule.steps[turn];
      const int sum = turn % 2 % schedule.grad_slots;
      step.grad_slot = sum;
      if (i > 0) {
        step.grad_actions.push_back(
            {.kind = GradAction::Kind::kAdd, .to_slot = sum, .from_slot = received});
      }
      // The sum of the inner loop before is home by now: it hides behind this step.
      if (result >= 0 && shape.outer > 1) fold_result(step.grad_actions);
      received = sum;
      if (place.inner > 1) {
        received = kReceive + turn % 2;
        step.grad_actions.push_back(
            {.kind = GradAction::Kind::kHop, .hop = place.InnerHop(sum, received)});
      }
    }
    result = received;
  }
  schedule.home_grad_slot = result;
  if (shape.outer > 1) {
    fold_result(schedule.steps.back().grad_actions);
    schedule.home_grad_slot = fold;
  }
  return schedule;
}

}  // namespace ringleader::attention
