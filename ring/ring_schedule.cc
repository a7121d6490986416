#include "ring/ring_schedule.h"

#include "absl/strings/str_format.h"
#include "base/status_macros.h"

namespace ringleader::ring {

namespace {

absl::Status CheckShape(const RingShape& shape, int rank) {
  if (shape.inner < 1 || shape.outer < 1 || rank < 0 || rank >= shape.ranks()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("ring of %d x %d ranks has no rank %d", shape.outer, shape.inner, rank));
  }
  switch (shape.kind) {
    case RingKind::kHierarchical:
      return absl::OkStatus();
    case RingKind::kFlat:
    case RingKind::kAllGather:
      if (shape.outer == 1) return absl::OkStatus();
      return absl::InvalidArgumentError(absl::StrFormat(
          "ring has %d outer ranks; only a hierarchical ring has more than one", shape.outer));
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("ring of kind %d is unknown", static_cast<int>(shape.kind)));
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

// Slot numbers of keys: the rank's own, two that take turns on the inner ring, two on the outer.
constexpr int kInnerSlot = 1, kOuterSlot = 3;
// Slot numbers of gradients: steps take turns to compute into two, two receive on the inner ring,
// one leaves for another node and one comes from there.
constexpr int kReceiveSlot = 2, kLeavingSlot = 4, kArrivingSlot = 5;

RingSchedule EmptySchedule(const RingShape& shape, int rank) {
  return {.shape = shape,
          .rank = rank,
          .ranks = shape.ranks(),
          .kv_slots = shape.outer > 1   ? kOuterSlot + 2
                      : shape.inner > 1 ? kInnerSlot + 2
                                        : 1};
}

}  // namespace

absl::StatusOr<RingSchedule> ForwardSchedule(const RingShape& shape, int rank) {
  RETURN_IF_ERROR(CheckShape(shape, rank));
  if (shape.kind == RingKind::kAllGather) return GatherSchedule(shape, rank, false);
  const Place place(shape, rank);
  RingSchedule schedule = EmptySchedule(shape, rank);
  int base = 0, inner_turn = 0;
  for (int s = 0; s < place.outer; ++s) {
    const int next_base = kOuterSlot + s % 2;
    int current = base;
    for (int i = 0; i < place.inner; ++i) {
      RingStep step{.owner = place.Owner(s, i), .kv_slot = current};
      std::vector<RingHop>& hops = s + i == 0 ? schedule.first_hops : step.kv_hops;
      // The outer hop starts with the inner loop and has all of it to finish.
      if (i == 0 && s + 1 < place.outer) hops.push_back(place.OuterHop(base, next_base));
      if (i + 1 < place.inner) {
        const int next = kInnerSlot + inner_turn++ % 2;
        hops.push_back(place.InnerHop(current, next));
        current = next;
      }
      schedule.steps.push_back(std::move(step));
    }
    base = next_base;
  }
  return schedule;
}

absl::StatusOr<RingSchedule> BackwardSchedule(const RingShape& shape, int rank) {
  RETURN_IF_ERROR(CheckShape(shape, rank));
  if (shape.kind == RingKind::kAllGather) return GatherSchedule(shape, rank, true);
  const Place place(shape, rank);
  RingSchedule schedule = EmptySchedule(shape, rank);
  schedule.grad_slots = shape.outer > 1   ? kArrivingSlot + 1
                        : shape.inner > 1 ? kReceiveSlot + 2
                                          : 1;
  const auto add = [](RingStep& step, int from_slot) {
    step.grad_actions.push_back({.to_slot = step.grad_slot, .from_slot = from_slot});
  };
  const auto send = [](RingStep& step, const RingHop& hop) {
    step.grad_actions.push_back({.kind = GradAction::Kind::kHop, .hop = hop});
  };
  int base = 0, inner_turn = 0, turn = 0;
  const auto inner_hop = [&](int from_slot, int* to_slot) {
    *to_slot = kInnerSlot + inner_turn++ % 2;
    return place.InnerHop(from_slot, *to_slot);
  };
  int next = 0;  // the slot that the next inner hop brings keys into
  if (shape.outer > 1) {
    schedule.first_hops.push_back(place.OuterHop(0, kOuterSlot));
  } else if (shape.inner > 1) {
    schedule.first_hops.push_back(inner_hop(0, &next));
  }
  for (int loop = 1; loop <= place.outer; ++loop) {
    const bool home = loop == place.outer;
    base = home ? 0 : kOuterSlot + (loop - 1) % 2;
    int received = -1;  // the slot with gradients that came on the inner ring
    for (int n = 1; n <= place.inner; ++n, ++turn) {
      const int i = n % place.inner;
      RingStep step{.owner = place.Owner(loop % place.outer, i), .kv_slot = i == 0 ? base : next};
      if (n == 1 && loop + 1 < place.outer) {
        step.kv_hops.push_back(place.OuterHop(base, kOuterSlot + loop % 2));
      }
      if (n == 1 && i != 0 && !home) {  // what this step attends to
        step.kv_hops.push_back(inner_hop(base, &next));
        step.kv_slot = next;
      }
      if (i != 0 && i + 1 < place.inner) step.kv_hops.push_back(inner_hop(step.kv_slot, &next));
      // The own node's keys wait for nobody.
      if (i == 0 && loop + 1 == place.outer && place.inner > 1) {
        step.kv_hops.push_back(inner_hop(0, &next));
      }
      step.grad_slot = i == 0 && !home ? kLeavingSlot : turn % 2 % schedule.grad_slots;
      if (received >= 0) add(step, received);
      if (i != 0) {
        received = kReceiveSlot + turn % 2;
        send(step, place.InnerHop(step.grad_slot, received));
      } else if (!home) {
        if (loop > 1) add(step, kArrivingSlot);
        send(step, place.OuterHop(kLeavingSlot, kArrivingSlot));
      } else {
        if (place.outer > 1) add(step, kArrivingSlot);
        schedule.home_grad_slot = step.grad_slot;
      }
      schedule.steps.push_back(std::move(step));
    }
  }
  return schedule;
}

int NamedByRank(const RingShape& shape, int rank, int named) {
  return (rank / shape.inner + named / shape.inner) % shape.outer * shape.inner +
         (rank % shape.inner + named % shape.inner) % shape.inner;
}

int NamedByRankZero(const RingShape& shape, int rank, int named) {
  const int nodes = named / shape.inner - rank / shape.inner;
  const int local = named % shape.inner - rank % shape.inner;
  return (nodes < 0 ? nodes + shape.outer : nodes) * shape.inner +
         (local < 0 ? local + shape.inner : local);
}

}  // namespace ringleader::ring
