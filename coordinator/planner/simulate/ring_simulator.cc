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

// Rounding grows with a walk's steps. Walks of few ranks go in double precision; those of many,
// which are as good with a millionth of a step more or less, take half the time in single
// precision.
constexpr int kManyRanks = 256;

double Transfer(const Link& link, double bytes) {
  if (link.bytes_per_second <= 0) return 0;  // infinitely fast
  if (bytes <= 0) return 0;                  // both ends know that nothing travels
  return link.latency_seconds + bytes / link.bytes_per_second;
}

// Rank 0's; all ranks' are this one turned (ring::NamedByRank).
RingSchedule ScheduleOf(const RingSetup& setup) {
  return (setup.gradient_bytes > 0 ? ring::BackwardSchedule : ring::ForwardSchedule)(setup.shape, 0)
      .value();
}

bool Gathers(const RingSetup& setup) {
  return setup.shape.kind == RingKind::kAllGather;
}

// The loops over ranks that nearly all of a plan's time goes to, as plain as a compiler wants them.

// times = max(times, floor) + add
template <typename Time>
void RaiseAndAdd(Time* __restrict times, const Time* __restrict floor, Time add, int count) {
  for (int i = 0; i < count; ++i) times[i] = std::max(times[i], floor[i]) + add;
}
template <typename Time>
void RaiseAndAdd(Time* __restrict times, const Time* __restrict floor, Time add,
                 const Time* __restrict more, int count) {
  for (int i = 0; i < count; ++i) times[i] = std::max(times[i], floor[i]) + (add + more[i]);
}
template <typename Time>
void Raise(Time* __restrict times, const Time* __restrict floor, int count) {
  for (int i = 0; i < count; ++i) times[i] = std::max(times[i], floor[i]);
}
// latest = max(a, b)
template <typename Time>
void Later(Time* __restrict latest, const Time* __restrict a, const Time* __restrict b, int count) {
  for (int i = 0; i < count; ++i) latest[i] = std::max(a[i], b[i]);
}
// arrived = max(mine, theirs) + travel
template <typename Time>
void Arrive(Time* __restrict arrived, const Time* __restrict mine, const Time* __restrict theirs,
            const Time* __restrict travel, int count) {
  for (int i = 0; i < count; ++i) arrived[i] = std::max(mine[i], theirs[i]) + travel[i];
}

// The order in which a ring's ranks lie in memory: in rows of nodes or, where there are more nodes
// than ranks on each, in rows of ranks with the same place on theirs. What all ranks do together
// then goes along few long runs.
struct Order {
  explicit Order(const ring::RingShape& shape)
      : by_node(shape.inner >= shape.outer),
        rows(by_node ? shape.outer : shape.inner),
        columns(by_node ? shape.inner : shape.outer),
        row_stride(by_node ? shape.inner : 1),
        column_stride(by_node ? 1 : shape.inner) {}

  int Rank(int row, int column) const { return row * row_stride + column * column_stride; }
  int Index(int rank) const {
    return rank / row_stride % rows * columns + rank / column_stride % columns;
  }

  // visit({row, column}, {row, column}, count): so many ranks from the first on, each along its
  // row, name those from the second on, where rank 0 names `named`.
  struct Place {
    int row = 0, column = 0;
  };
  template <typename Visit>
  void VisitRuns(int named, const Visit& visit) const {
    const int turned = named / column_stride % columns;
    int named_row = named / row_stride % rows;
    for (int row = 0; row < rows; ++row) {
      visit(Place{row, 0}, Place{named_row, turned}, columns - turned);
      if (turned > 0) visit(Place{row, columns - turned}, Place{named_row, 0}, turned);
      named_row = named_row + 1 < rows ? named_row + 1 : 0;
    }
  }
  int Index(const Place& place) const { return place.row * columns + place.column; }

  const bool by_node;
  const int rows, columns;
  const int row_stride, column_stride;  // in ranks
};

// Walks a schedule on all ranks. What lies in a slot is there, on each rank, from a time on.
template <typename Time>
class Player {
 public:
  Player(const RingSetup& setup, const RingSchedule& schedule, const ring::TileLoads& loads,
         const ListedMeetings& listed, const StepSeconds& seconds)
      : setup_(setup),
        schedule_(schedule),
        loads_(loads),
        listed_(listed),
        seconds_(seconds),
        ranks_(loads.ranks()),
        order_(setup.shape),
        never_(ranks_),
        ready_(ranks_),
        travel_(ranks_),
        done_(ranks_),
        keys_there_(schedule.kv_slots, Times(ranks_)),
        gradients_there_(schedule.grad_slots, Times(ranks_)) {
    for (int rank = 0; rank < ranks_; ++rank) {
      done_[order_.Index(rank)] =
          static_cast<Time>(seconds.lead + loads.columns(rank) * seconds.per_tile);
    }
    if (loads.is_mirrored()) ListMirrored();
  }

  // When the last rank is done.
  double Play() {
    for (const RingHop& hop : schedule_.first_hops) MoveKeys(hop, never_);
    for (size_t t = 0; t < schedule_.steps.size(); ++t) {
      const RingStep& step = schedule_.steps[t];
      for (const RingHop& hop : step.kv_hops) MoveKeys(hop, done_);
      Compute(t);
      for (const GradAction& action : step.grad_actions) Follow(action);
      if (t % kStepsOfAnEpoch == kStepsOfAnEpoch - 1) BeginEpoch();
    }
    return epoch_ + *std::max_element(done_.begin(), done_.end());
  }

 private:
  using Times = std::vector<Time>;  // by rank, in some Order

  // How long keys and gradients travel to each receiving rank.
  struct Route {
    Times kv_seconds;
    Times gradient_seconds;
    std::vector<const Link*> links;
  };

  // Times count from an epoch that moves along, so that they stay short enough to be exact.
  void BeginEpoch() {
    const Time passed = *std::min_element(done_.begin(), done_.end());
    epoch_ += passed;
    const auto subtract = [passed](Times& times) {
      for (Time& time : times) time -= passed;
    };
    subtract(done_);
    for (Times& times : keys_there_) subtract(times);
    for (Times& times : gradients_there_) subtract(times);
  }

  // Along a run, the sum of a rank and the one that it names goes up by two columns at a time.
  void ListMirrored() {
    for (int rows = 0; rows < 2 * order_.rows - 1; ++rows) {
      for (const int odd : {0, 1}) {
        Times& seconds = mirrored_.emplace_back();
        for (int columns = odd; columns < 2 * order_.columns - 1; columns += 2) {
          seconds.push_back(
              static_cast<Time>(loads_.mirrored(order_.Rank(rows, columns)) * seconds_.per_tile));
        }
      }
    }
  }

  const Route& RouteOf(const RingHop& hop) {
    const auto [found, is_new] = routes_.try_emplace(hop.link);
    Route& route = found->second;
    if (!is_new) return route;
    route.kv_seconds.resize(ranks_);
    route.gradient_seconds.resize(ranks_);
    route.links.resize(ranks_);
    const int inner = setup_.group.inner;
    for (int rank = 0; rank < ranks_; ++rank) {
      const int from = ring::NamedByRank(setup_.shape, rank, hop.from);
      const bool same_node = setup_.group.outer == 1 || rank / inner == from / inner;
      const Link& link = same_node ? setup_.intra_node : setup_.inter_node;
      route.links[order_.Index(rank)] = &link;
      route.kv_seconds[order_.Index(rank)] = static_cast<Time>(Transfer(link, setup_.kv_bytes));
      route.gradient_seconds[order_.Index(rank)] =
          static_cast<Time>(Transfer(link, setup_.gradient_bytes));
    }
    return route;
  }

  // When what every rank sends, once it and its successor are ready, has arrived.
  void Move(const RingHop& hop, const Times& ready, const Times& travel, Times* arrived) const {
    order_.VisitRuns(hop.from, [&](const Order::Place& to, const Order::Place& from, int count) {
      const int first = order_.Index(to);
      Arrive(&(*arrived)[first], &ready[first], &ready[order_.Index(from)], &travel[first], count);
    });
  }

  // How long a hop takes to each receiving rank, which may get a share of `bytes` alone.
  const Times& SecondsOf(const Route& route, const Times& of_all, const std::vector<double>* shares,
                         double bytes) {
    if (shares == nullptr) return of_all;
    for (int rank = 0; rank < ranks_; ++rank) {
      const int index = order_.Index(rank);
      travel_[index] = static_cast<Time>(Transfer(*route.links[index], (*shares)[rank] * bytes));
    }
    return travel_;
  }

  void MoveKeys(const RingHop& hop, const Times& begun) {
    const Route& route = RouteOf(hop);
    const Times& travel = SecondsOf(
        route, route.kv_seconds,
        setup_.carried == nullptr ? nullptr : &setup_.carried->keys[key_hops_++], setup_.kv_bytes);
    // A rank's own keys wait for nobody.
    if (hop.send_slot == 0) {
      Move(hop, begun, travel, &keys_there_[hop.receive_slot]);
      return;
    }
    Later(ready_.data(), begun.data(), keys_there_[hop.send_slot].data(), ranks_);
    Move(hop, ready_, travel, &keys_there_[hop.receive_slot]);
  }

  void Compute(size_t t) {
    const RingStep& step = schedule_.steps[t];
    const Times& keys = keys_there_[step.kv_slot];
    order_.VisitRuns(step.owner, [&](const Order::Place& at, const Order::Place& owner, int count) {
      const int first = order_.Index(at);
      const int apart = order_.Rank(at.row, at.column) - order_.Rank(owner.row, owner.column);
      const auto add =
          static_cast<Time>(loads_.apart(apart) * seconds_.per_tile +
                            (apart == 0 ? seconds_.per_own_step : seconds_.per_other_step));
      if (!loads_.is_mirrored()) {
        RaiseAndAdd(&done_[first], &keys[first], add, count);
        return;
      }
      const int columns = at.column + owner.column;
      const Times& mirrored = mirrored_[2 * (at.row + owner.row) + columns % 2];
      RaiseAndAdd(&done_[first], &keys[first], add, &mirrored[columns / 2], count);
    });
    if (listed_.begin.empty()) return;
    const auto per_tile = static_cast<Time>(seconds_.per_tile);
    for (int64_t i = listed_.begin[step.owner]; i < listed_.begin[step.owner + 1]; ++i) {
      const ListedMeetings::Load& load = listed_.loads[i];
      done_[load.place] += static_cast<Time>(load.tiles) * per_tile;
    }
  }

  void Follow(const GradAction& action) {
    if (action.kind == GradAction::Kind::kAdd) {
      Raise(done_.data(), gradients_there_[action.from_slot].data(), ranks_);
      return;
    }
    const Route& route = RouteOf(action.hop);
    const Times& travel = SecondsOf(
        route, route.gradient_seconds,
        setup_.carried == nullptr ? nullptr : &setup_.carried->gradients[gradient_hops_++],
        setup_.gradient_bytes);
    Move(action.hop, done_, travel, &gradients_there_[action.hop.receive_slot]);
  }

  static constexpr size_t kStepsOfAnEpoch = 64;

  const RingSetup& setup_;
  const RingSchedule& schedule_;
  const ring::TileLoads& loads_;
  const ListedMeetings& listed_;
  const StepSeconds& seconds_;
  const int ranks_;
  const Order order_;
  const Times never_;  // zeros
  Times ready_;
  Times travel_;                             // of a hop that does not carry all
  size_t key_hops_ = 0, gradient_hops_ = 0;  // that have begun
  Times done_;                               // when each rank is done with the steps so far
  double epoch_ = 0;                         // from which times count
  std::map<RingLink, Route> routes_;
  std::vector<Times> keys_there_;       // by slot
  std::vector<Times> gradients_there_;  // by slot
  std::vector<Times> mirrored_;         // [sum of rows][sum of columns is odd][sum of columns / 2]
};

ListedMeetings ListMeetings(const ring::RingShape& shape, const ring::TileLoads& loads) {
  ListedMeetings listed;
  if (loads.listed().empty() || shape.kind == RingKind::kAllGather) return listed;
  const auto meeting = [&](const ring::ListedLoad& load) {
    return ring::NamedByRankZero(shape, load.rank, load.owner);
  };
  listed.begin.assign(loads.ranks() + 1, 0);
  for (const ring::ListedLoad& load : loads.listed()) ++listed.begin[meeting(load) + 1];
  std::partial_sum(listed.begin.begin(), listed.begin.end(), listed.begin.begin());
  std::vector<int64_t> next = listed.begin;
  listed.loads.resize(loads.listed().size());
  const Order order(shape);
  for (const ring::ListedLoad& load : loads.listed()) {
    listed.loads[next[meeting(load)]++] = {order.Index(load.rank), load.tiles};
  }
  return listed;
}

// Each rank fetches its share over the network, then nodes pass all of it around inside.
double GatherSeconds(const RingSetup& setup, double bytes) {
  const int inner = setup.group.inner, outer = setup.group.outer;
  return std::max((outer - 1) * Transfer(setup.inter_node, bytes),
                  (inner - 1) * Transfer(setup.intra_node, bytes * outer));
}

// Nobody waits for anybody after the gather: a rank attends to its own keys meanwhile, and to all
// others after it. Groups of heads are gathered one after the other, beside the computation; the
// gradients of each go home after its own.
double PlayGather(const RingSetup& setup, const ring::TileLoads& loads,
                  const std::vector<double>& totals, const StepSeconds& seconds) {
  const double groups = setup.head_groups;
  const double gather = GatherSeconds(setup, setup.kv_bytes / groups);
  const double home =
      setup.gradient_bytes > 0 ? GatherSeconds(setup, setup.gradient_bytes / groups) : 0;
  double last = 0;
  for (int rank = 0; rank < loads.ranks(); ++rank) {
    const double own = loads.of(rank, rank), columns = loads.columns(rank);
    const double others = totals[rank] - columns - own;
    double now = seconds.lead;
    for (int group = 1; group <= setup.head_groups; ++group) {
      now += ((columns + own) * seconds.per_tile + seconds.per_own_step) / groups;
      if (loads.ranks() == 1) continue;
      now = std::max(now, group * gather) +
            (others * seconds.per_tile + (loads.ranks() - 1) * seconds.per_other_step) / groups +
            home;
    }
    last = std::max(last, now);
  }
  return last;
}

// visit(hop, share of keys' bytes, share of gradients' bytes, ranks for which it is so) for each
// hop of a ring.
template <typename Visit>
void VisitHops(const RingSetup& setup, const RingSchedule& schedule, const Visit& visit) {
  size_t keys = 0, gradients = 0;
  const auto of_keys = [&](const RingHop& hop) {
    if (setup.carried == nullptr) return visit(hop, 1, 0, setup.shape.ranks());
    for (const double share : setup.carried->keys[keys++]) visit(hop, share, 0, 1);
  };
  const auto of_gradients = [&](const RingHop& hop) {
    if (setup.carried == nullptr) return visit(hop, 0, 1, setup.shape.ranks());
    for (const double share : setup.carried->gradients[gradients++]) visit(hop, 0, share, 1);
  };
  for (const RingHop& hop : schedule.first_hops) of_keys(hop);
  for (const RingStep& step : schedule.steps) {
    for (const RingHop& hop : step.kv_hops) of_keys(hop);
    for (const GradAction& action : step.grad_actions) {
      if (action.kind == GradAction::Kind::kHop) of_gradients(action.hop);
    }
  }
}

}  // namespace

double TransferSeconds(const RingSetup& setup) {
  const Link& slowest = setup.group.outer > 1 ? setup.inter_node : setup.intra_node;
  // An inner ring that is no part of a node goes at the speed of its slowest link.
  const Link& inner = setup.group.inner % setup.shape.inner == 0 ? setup.intra_node : slowest;
  if (Gathers(setup)) {  // each rank's share to every other
    const int transfers = (setup.shape.ranks() - 1) * setup.head_groups;
    return transfers * (Transfer(slowest, setup.kv_bytes / setup.head_groups) +
                        Transfer(slowest, setup.gradient_bytes / setup.head_groups));
  }
  double total = 0;
  VisitHops(setup, ScheduleOf(setup),
            [&](const RingHop& hop, double keys, double gradients, int ranks) {
              const double bytes = keys * setup.kv_bytes + gradients * setup.gradient_bytes;
              total += ranks * Transfer(hop.link == RingLink::kInner ? inner : slowest, bytes);
            });
  return total / setup.shape.ranks();
}

RingBytes BytesOf(const RingSetup& setup) {
  const int ranks = setup.shape.ranks();
  if (Gathers(setup)) {
    const double all = (ranks - 1) * (setup.kv_bytes + setup.gradient_bytes);
    return {.sent = all, .whole = all};
  }
  RingBytes bytes;
  VisitHops(
      setup, ScheduleOf(setup), [&](const RingHop&, double keys, double gradients, int of_ranks) {
        bytes.sent += of_ranks * (keys * setup.kv_bytes + gradients * setup.gradient_bytes) / ranks;
      });
  RingSetup all = setup;
  all.carried = nullptr;
  bytes.whole = setup.carried == nullptr ? bytes.sent : BytesOf(all).sent;
  return bytes;
}

RingSimulator::RingSimulator(const ring::RingShape& shape, const ring::TileLoads& loads)
    : shape_(shape),
      loads_(loads),
      totals_(loads.RankTotals()),
      listed_(ListMeetings(shape, loads)) {}

RingTimes RingSimulator::Play(const RingSetup& setup, const StepSeconds& seconds,
                              bool find_exposed) const {
  const RingSchedule schedule = ScheduleOf(setup);
  const double most = *std::max_element(totals_.begin(), totals_.end());
  RingTimes times;
  times.busy_seconds = seconds.lead + most * seconds.per_tile + seconds.per_own_step +
                       static_cast<double>(schedule.steps.size() - 1) * seconds.per_other_step;
  times.transfer_seconds = TransferSeconds(setup);
  const auto play = [&](const RingSetup& links) {
    if (Gathers(links)) return PlayGather(links, loads_, totals_, seconds);
    times.rank_steps += static_cast<int64_t>(schedule.steps.size()) * loads_.ranks();
    return loads_.ranks() > kManyRanks
               ? Player<float>(links, schedule, loads_, listed_, seconds).Play()
               : Player<double>(links, schedule, loads_, listed_, seconds).Play();
  };
  times.seconds = play(setup);
  if (!find_exposed) return times;
  RingSetup fast = setup;
  fast.intra_node = fast.inter_node = Link{};
  times.exposed_seconds = times.seconds - play(fast);
  return times;
}

}  // namespace ringleader::planner
