#include "coordinator/planner/simulate/ring_simulator.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>
#include <vector>

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

// Rank 0's; all ranks' are this one turned (ring::VisitNamed).
RingSchedule ScheduleOf(const RingSetup& setup) {
  return (setup.gradient_bytes > 0 ? ring::BackwardSchedule : ring::ForwardSchedule)(setup.shape, 0)
      .value();
}

bool Gathers(const RingSetup& setup) {
  return setup.shape.kind == RingKind::kAllGather;
}

// The loops over ranks that nearly all of a plan's time goes to, as plain as a compiler wants them.

// times = max(times, floor) + add
void RaiseAndAdd(double* __restrict times, const double* __restrict floor, double add, int count) {
  for (int i = 0; i < count; ++i) times[i] = std::max(times[i], floor[i]) + add;
}
void RaiseAndAdd(double* __restrict times, const double* __restrict floor, double add,
                 const double* __restrict more, int count) {
  for (int i = 0; i < count; ++i) times[i] = std::max(times[i], floor[i]) + (add + more[i]);
}
void Raise(double* __restrict times, const double* __restrict floor, int count) {
  for (int i = 0; i < count; ++i) times[i] = std::max(times[i], floor[i]);
}
// latest = max(a, b)
void Later(double* __restrict latest, const double* __restrict a, const double* __restrict b,
           int count) {
  for (int i = 0; i < count; ++i) latest[i] = std::max(a[i], b[i]);
}
// arrived = max(mine, theirs) + travel
void Arrive(double* __restrict arrived, const double* __restrict mine,
            const double* __restrict theirs, const double* __restrict travel, int count) {
  for (int i = 0; i < count; ++i) arrived[i] = std::max(mine[i], theirs[i]) + travel[i];
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
        ranks_(loads.ranks()),
        never_(ranks_),
        ready_(ranks_),
        keys_there_(schedule.kv_slots, Times(ranks_)),
        gradients_there_(schedule.grad_slots, Times(ranks_)) {
    for (int r = 0; r < ranks_; ++r) {
      done_.push_back(seconds.lead + loads.columns(r) * seconds.per_tile);
    }
    ListBySteps();
    if (!loads.is_mirrored()) return;
    for (const int odd : {0, 1}) {
      for (int sum = odd; sum < 2 * ranks_ - 1; sum += 2) {
        mirrored_[odd].push_back(loads.mirrored(sum) * seconds.per_tile);
      }
    }
  }

  // When the last rank is done.
  double Play() {
    for (const RingHop& hop : schedule_.first_hops) MoveKeys(hop, never_);
    for (size_t t = 0; t < schedule_.steps.size(); ++t) {
      const RingStep& step = schedule_.steps[t];
      for (const RingHop& hop : step.kv_hops) MoveKeys(hop, done_);
      Compute(t);
      for (const GradAction& action : step.grad_actions) Follow(action);
    }
    return *std::max_element(done_.begin(), done_.end());
  }

 private:
  // By receiving rank: how long keys and gradients travel to it.
  struct Route {
    Times kv_seconds;
    Times gradient_seconds;
  };

  // What is listed by pairs, by the step in which they meet.
  void ListBySteps() {
    if (loads_.listed().empty()) return;
    std::vector<int> step_of(ranks_);  // by what rank 0's schedule names
    for (size_t t = 0; t < schedule_.steps.size(); ++t) {
      step_of[schedule_.steps[t].owner] = static_cast<int>(t);
    }
    const auto step = [&](const ring::ListedLoad& load) {
      return step_of[ring::NamedByRankZero(setup_.shape, load.rank, load.owner)];
    };
    listed_begin_.assign(schedule_.steps.size() + 1, 0);
    for (const ring::ListedLoad& load : loads_.listed()) ++listed_begin_[step(load) + 1];
    std::partial_sum(listed_begin_.begin(), listed_begin_.end(), listed_begin_.begin());
    std::vector<int64_t> next = listed_begin_;
    listed_.resize(loads_.listed().size());
    for (const ring::ListedLoad& load : loads_.listed()) {
      listed_[next[step(load)]++] = {load.rank, load.tiles * seconds_.per_tile};
    }
  }

  const Route& RouteOf(const RingHop& hop) {
    const auto [found, is_new] = routes_.try_emplace(hop.link);
    Route& route = found->second;
    if (!is_new) return route;
    route.kv_seconds.resize(ranks_);
    route.gradient_seconds.resize(ranks_);
    const int inner = setup_.group.inner;
    ring::VisitNamed(setup_.shape, hop.from, [&](int first, int count, int from) {
      for (int i = 0; i < count; ++i) {
        const bool same_node = setup_.group.outer == 1 || (first + i) / inner == (from + i) / inner;
        const Link& link = same_node ? setup_.intra_node : setup_.inter_node;
        route.kv_seconds[first + i] = Transfer(link, setup_.kv_bytes);
        route.gradient_seconds[first + i] = Transfer(link, setup_.gradient_bytes);
      }
    });
    return route;
  }

  // When what every rank sends, once it and its successor are ready, has arrived.
  void Move(const RingHop& hop, const Times& ready, const Times& travel, Times* arrived) const {
    ring::VisitNamed(setup_.shape, hop.from, [&](int first, int count, int from) {
      Arrive(&(*arrived)[first], &ready[first], &ready[from], &travel[first], count);
    });
  }

  void MoveKeys(const RingHop& hop, const Times& begun) {
    const Route& route = RouteOf(hop);
    // A rank's own keys wait for nobody.
    if (hop.send_slot == 0) {
      Move(hop, begun, route.kv_seconds, &keys_there_[hop.receive_slot]);
      return;
    }
    Later(ready_.data(), begun.data(), keys_there_[hop.send_slot].data(), ranks_);
    Move(hop, ready_, route.kv_seconds, &keys_there_[hop.receive_slot]);
  }

  void Compute(size_t t) {
    const RingStep& step = schedule_.steps[t];
    const Times& keys = keys_there_[step.kv_slot];
    ring::VisitNamed(setup_.shape, step.owner, [&](int first, int count, int owner) {
      const double add = loads_.apart(first - owner) * seconds_.per_tile + seconds_.per_step;
      if (!loads_.is_mirrored()) {
        RaiseAndAdd(&done_[first], &keys[first], add, count);
      } else {
        const int sum = first + owner;
        RaiseAndAdd(&done_[first], &keys[first], add, &mirrored_[sum % 2][sum / 2], count);
      }
    });
    if (listed_.empty()) return;
    for (int64_t i = listed_begin_[t]; i < listed_begin_[t + 1]; ++i) {
      done_[listed_[i].rank] += listed_[i].seconds;
    }
  }

  void Follow(const GradAction& action) {
    if (action.kind == GradAction::Kind::kAdd) {
      Raise(done_.data(), gradients_there_[action.from_slot].data(), ranks_);
      return;
    }
    Move(action.hop, done_, RouteOf(action.hop).gradient_seconds,
         &gradients_there_[action.hop.receive_slot]);
  }

  struct ListedSeconds {
    int rank = 0;
    double seconds = 0;
  };

  const RingSetup& setup_;
  const RingSchedule& schedule_;
  const ring::TileLoads& loads_;
  const StepSeconds& seconds_;
  const int ranks_;
  const Times never_;  // zeros
  Times ready_;
  std::map<RingLink, Route> routes_;
  std::vector<Times> keys_there_;       // by slot
  std::vector<Times> gradients_there_;  // by slot
  std::vector<int64_t> listed_begin_;   // by step
  std::vector<ListedSeconds> listed_;
  // loads_.mirrored() of even and of odd sums: along a run of ranks, a step's sums go up by two.
  Times mirrored_[2];
  Times done_;  // when each rank is done with the steps so far
};

// Each rank fetches its share over the network, then nodes pass all of it around inside.
double GatherSeconds(const RingSetup& setup, double bytes) {
  const int inner = setup.group.inner, outer = setup.group.outer;
  return std::max((outer - 1) * Transfer(setup.inter_node, bytes),
                  (inner - 1) * Transfer(setup.intra_node, bytes * outer));
}

// Nobody waits for anybody after the gather: a rank attends to its own keys meanwhile, and to all
// others after it.
double PlayGather(const RingSetup& setup, const ring::TileLoads& loads,
                  const std::vector<double>& totals, const StepSeconds& seconds) {
  const double gather = GatherSeconds(setup, setup.kv_bytes);
  double last = 0;
  for (int rank = 0; rank < loads.ranks(); ++rank) {
    const double own = loads.of(rank, rank), columns = loads.columns(rank);
    const double begun = seconds.lead + (columns + own) * seconds.per_tile + seconds.per_step;
    const double others = (totals[rank] - columns - own) * seconds.per_tile;
    last = std::max(last, loads.ranks() == 1 ? begun
                                             : std::max(begun, gather) + others +
                                                   (loads.ranks() - 1) * seconds.per_step);
  }
  return setup.gradient_bytes > 0 ? last + GatherSeconds(setup, setup.gradient_bytes) : last;
}

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
  if (Gathers(setup)) {  // each rank's share to every other
    total = (setup.shape.ranks() - 1) * Transfer(slowest, setup.kv_bytes);
    if (setup.gradient_bytes > 0) {
      total += (setup.shape.ranks() - 1) * Transfer(slowest, setup.gradient_bytes);
    }
  }
  return total;
}

}  // namespace

int64_t RankStepsOf(const ring::RingShape& shape) {
  const int64_t ranks = shape.ranks();
  return shape.kind == RingKind::kAllGather ? 0 : 2 * ranks * ranks;
}

RingTimes SimulateRing(const RingSetup& setup, const ring::TileLoads& loads,
                       const StepSeconds& seconds) {
  const RingSchedule schedule = ScheduleOf(setup);
  const std::vector<double> totals = loads.RankTotals();
  const double most = *std::max_element(totals.begin(), totals.end());
  RingTimes times;
  times.busy_seconds = seconds.lead + most * seconds.per_tile +
                       static_cast<double>(schedule.steps.size()) * seconds.per_step;
  times.transfer_seconds = TransferSeconds(setup, schedule);
  const auto play = [&](const RingSetup& links) {
    if (Gathers(links)) return PlayGather(links, loads, totals, seconds);
    times.rank_steps += static_cast<int64_t>(schedule.steps.size()) * loads.ranks();
    return Player(links, schedule, loads, seconds).Play();
  };
  RingSetup fast = setup;
  fast.intra_node = fast.inter_node = Link{};
  times.seconds = play(setup);
  times.exposed_seconds = times.seconds - play(fast);
  return times;
}

}  // namespace ringleader::planner
