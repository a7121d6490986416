#include "coordinator/planner/simulate/ring_simulator.h"

#include <algorithm>
#include <map>

namespace ringleader::planner {
namespace {

using ring::GradAction;
using ring::RingHop;
using ring::RingKind;
using ring::RingLink;
using ring::RingSchedule;
using ring::RingStep;

using Times = std::vector<double>;  // by rank

double Transfer(const Link& link, double bytes) {
  if (link.bytes_per_second <= 0) return 0;  // infinitely fast
  return link.latency_seconds + bytes / link.bytes_per_second;
}

// Rank 0's; all ranks' are this one turned (ring::NamedByAllRanks).
RingSchedule ScheduleOf(const RingSetup& setup) {
  return (setup.gradient_bytes > 0 ? ring::BackwardSchedule : ring::ForwardSchedule)(setup.shape, 0)
      .value();
}

void Raise(Times* times, const Times& floor) {
  for (size_t r = 0; r < times->size(); ++r) (*times)[r] = std::max((*times)[r], floor[r]);
}

// Walks a schedule on all ranks. What lies in a slot is there, on each rank, from a time on.
class Player {
 public:
  Player(const RingSetup& setup, const RingSchedule& schedule, const ring::TileLoads& loads,
         const StepSeconds& seconds)
      : setup_(setup),
        schedule_(schedule),
        loads_(loads),
        seconds_(seconds),
        keys_there_(schedule.kv_slots, Times(gathers() ? 0 : loads.ranks())),
        gradients_there_(gathers() ? 0 : schedule.grad_slots, Times(loads.ranks())) {
    for (int r = 0; r < loads.ranks(); ++r) {
      done_.push_back(seconds.lead + loads.columns(r) * seconds.per_tile);
    }
  }

  // When the last rank is done.
  double Play() {
    const double gather = gathers() ? GatherSeconds(setup_.kv_bytes) : 0;
    const Times start(loads_.ranks());
    for (const RingHop& hop : schedule_.first_hops) MoveKeys(hop, start);
    for (const RingStep& step : schedule_.steps) {
      for (const RingHop& hop : step.kv_hops) MoveKeys(hop, done_);
      if (!gathers()) {
        Raise(&done_, keys_there_[step.kv_slot]);
      } else if (step.owner != 0) {  // a rank's own keys need no transfer
        for (double& done : done_) done = std::max(done, gather);
      }
      Compute(ring::NamedByAllRanks(setup_.shape, step.owner));
      for (const GradAction& action : step.grad_actions) Follow(action);
    }
    const double last = *std::max_element(done_.begin(), done_.end());
    const bool scatters = gathers() && schedule_.grad_slots > 0;
    return scatters ? last + GatherSeconds(setup_.gradient_bytes) : last;
  }

 private:
  // By receiving rank: whom it receives from, and how long keys and gradients travel.
  struct Route {
    std::vector<int> from;
    Times kv_seconds;
    Times gradient_seconds;
  };

  bool gathers() const { return setup_.shape.kind == RingKind::kAllGather; }

  const Route& RouteOf(const RingHop& hop) {
    const auto [found, is_new] = routes_.try_emplace(hop.link);
    Route& route = found->second;
    if (!is_new) return route;
    route.from = ring::NamedByAllRanks(setup_.shape, hop.from);
    for (int r = 0; r < loads_.ranks(); ++r) {
      const int inner = setup_.group.inner;
      const bool same_node = setup_.group.outer == 1 || r / inner == route.from[r] / inner;
      const Link& link = same_node ? setup_.intra_node : setup_.inter_node;
      route.kv_seconds.push_back(Transfer(link, setup_.kv_bytes));
      route.gradient_seconds.push_back(Transfer(link, setup_.gradient_bytes));
    }
    return route;
  }

  // When what every rank sends, once it and its successor are ready, has arrived.
  static void Move(const Route& route, const Times& transfer, const Times& ready, Times* arrived) {
    for (size_t r = 0; r < ready.size(); ++r) {
      (*arrived)[r] = std::max(ready[r], ready[route.from[r]]) + transfer[r];
    }
  }

  void MoveKeys(const RingHop& hop, const Times& begun) {
    Times ready = begun;
    Raise(&ready, keys_there_[hop.send_slot]);
    const Route& route = RouteOf(hop);
    Move(route, route.kv_seconds, ready, &keys_there_[hop.receive_slot]);
  }

  void Compute(const std::vector<int>& owners) {
    for (int r = 0; r < loads_.ranks(); ++r) {
      done_[r] += loads_.of(r, owners[r]) * seconds_.per_tile + seconds_.per_step;
    }
  }

  void Follow(const GradAction& action) {
    if (action.kind == GradAction::Kind::kAdd) {
      Raise(&done_, gradients_there_[action.from_slot]);
      return;
    }
    const Route& route = RouteOf(action.hop);
    Move(route, route.gradient_seconds, done_, &gradients_there_[action.hop.receive_slot]);
  }

  // Each rank fetches its share over the network, then nodes pass all of it around inside.
  double GatherSeconds(double bytes) const {
    const int inner = setup_.group.inner, outer = setup_.group.outer;
    return std::max((outer - 1) * Transfer(setup_.inter_node, bytes),
                    (inner - 1) * Transfer(setup_.intra_node, bytes * outer));
  }

  const RingSetup& setup_;
  const RingSchedule& schedule_;
  const ring::TileLoads& loads_;
  const StepSeconds& seconds_;
  std::map<RingLink, Route> routes_;
  std::vector<Times> keys_there_;       // by slot
  std::vector<Times> gradients_there_;  // by slot
  Times done_;                          // when each rank is done with the steps so far
};

// Of the hops that a rank makes; a ring without nodes goes at the speed of its slowest link.
double TransferSeconds(const RingSetup& setup, const RingSchedule& schedule) {
  const bool flat = setup.shape.outer == 1;
  const Link& slowest = setup.group.outer > 1 ? setup.inter_node : setup.intra_node;
  double total = 0;
  const auto add = [&](const RingHop& hop, double bytes) {
    const Link& inner = flat ? slowest : setup.intra_node;
    total += Transfer(hop.link == RingLink::kInner ? inner : setup.inter_node, bytes);
  };
  for (const RingHop& hop : schedule.first_hops) add(hop, setup.kv_bytes);
  for (const RingStep& step : schedule.steps) {
    for (const RingHop& hop : step.kv_hops) add(hop, setup.kv_bytes);
    for (const GradAction& action : step.grad_actions) {
      if (action.kind == GradAction::Kind::kHop) add(action.hop, setup.gradient_bytes);
    }
  }
  if (setup.shape.kind == RingKind::kAllGather) {  // each rank's share to every other
    total = (setup.shape.ranks() - 1) * Transfer(slowest, setup.kv_bytes);
    if (setup.gradient_bytes > 0) {
      total += (setup.shape.ranks() - 1) * Transfer(slowest, setup.gradient_bytes);
    }
  }
  return total;
}

}  // namespace

RingTimes SimulateRing(const RingSetup& setup, const ring::TileLoads& loads,
                       const StepSeconds& seconds) {
  const RingSchedule schedule = ScheduleOf(setup);
  RingTimes times;
  for (const double tiles : loads.RankTotals()) {
    times.busy_seconds = std::max(
        times.busy_seconds, seconds.lead + tiles * seconds.per_tile +
                                static_cast<double>(schedule.steps.size()) * seconds.per_step);
  }
  times.seconds = Player(setup, schedule, loads, seconds).Play();
  times.transfer_seconds = TransferSeconds(setup, schedule);
  RingSetup fast = setup;
  fast.intra_node = fast.inter_node = Link{};
  times.exposed_seconds = times.seconds - Player(fast, schedule, loads, seconds).Play();
  return times;
}

double StepImbalance(const ring::TileLoads& loads) {
  double sum = 0;
  int counted = 0;
  for (int r = 0; r < loads.ranks(); ++r) {
    double largest = 0, total = 0;
    for (int owner = 0; owner < loads.ranks(); ++owner) {
      const double mine = loads.of(r, owner);
      largest = std::max(largest, mine);
      total += mine;
    }
    if (total <= 0) continue;
    sum += largest * loads.ranks() / total;
    ++counted;
  }
  return counted > 0 ? sum / counted : 1.0;
}

}  // namespace ringleader::planner
