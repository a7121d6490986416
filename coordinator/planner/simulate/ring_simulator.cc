#include "coordinator/planner/simulate/ring_simulator.h"

#include <algorithm>
#include <map>
#include <utility>

namespace ringleader::planner {
namespace {

using v1::ParallelismSpec;

double Transfer(const Link& link, double bytes) {
  if (link.bytes_per_second <= 0) return 0;  // infinitely fast
  return link.latency_seconds + bytes / link.bytes_per_second;
}

bool Hierarchical(const RingSetup& setup) {
  return setup.kind == ParallelismSpec::HIERARCHICAL && setup.group.outer > 1;
}

// Sizes of the rings, and what a rank receives on.
struct Rings {
  const RingSetup& setup;
  int inner, outer;

  explicit Rings(const RingSetup& setup_)
      : setup(setup_),
        inner(Hierarchical(setup) ? setup.group.inner : setup.ranks),
        outer(Hierarchical(setup) ? setup.group.outer : 1) {}

  // Attended to at `step`: forward, and all-gather, in the order in which they come. Backward
  // counts loops, and steps of a loop, from one, so that what forward has first comes last.
  int KeysAt(int step) const {
    if (setup.gradient_bytes <= 0 || setup.kind == ParallelismSpec::ALL_GATHER) return step;
    const int loop = step / inner + 1, n = step % inner + 1;
    return loop % outer * inner + n % inner;
  }
  // Whose they are at `rank`.
  int Owner(int rank, int keys) const {
    const int node = (rank / inner - keys / inner + outer) % outer;
    return node * inner + (rank % inner - keys % inner + inner) % inner;
  }
  int From(RingLevel level, int rank) const {
    if (level == RingLevel::kInner) return rank % inner > 0 ? rank - 1 : rank + inner - 1;
    return rank < inner ? rank + setup.ranks - inner : rank - inner;
  }
  const Link& LinkInto(RingLevel level, int rank) const {
    if (Hierarchical(setup)) {
      return level == RingLevel::kInner ? setup.intra_node : setup.inter_node;
    }
    const bool first_of_node = rank % setup.group.inner == 0;
    return first_of_node && setup.group.outer > 1 ? setup.inter_node : setup.intra_node;
  }
};

RingOrder ForwardOrder(const Rings& rings) {
  RingOrder order;
  for (int keys = 0; keys < rings.inner * rings.outer; ++keys) {
    RingStep step{.keys = keys};
    std::vector<KeyHop>& hops = keys == 0 ? order.first_hops : step.key_hops;
    const bool loop_begins = keys % rings.inner == 0;
    if (loop_begins && keys / rings.inner + 1 < rings.outer) {
      hops.push_back({RingLevel::kOuter, keys});
    }
    if (keys % rings.inner + 1 < rings.inner) hops.push_back({RingLevel::kInner, keys});
    order.steps.push_back(std::move(step));
  }
  return order;
}

RingOrder BackwardOrder(const Rings& rings) {
  RingOrder order;
  if (rings.outer > 1) {
    order.first_hops.push_back({RingLevel::kOuter, 0});
  } else if (rings.inner > 1) {
    order.first_hops.push_back({RingLevel::kInner, 0});
  }
  for (int t = 0; t < rings.inner * rings.outer; ++t) {
    const int loop = t / rings.inner + 1, n = t % rings.inner + 1;  // of outer, of inner
    const bool home = loop == rings.outer;
    RingStep step{.keys = rings.KeysAt(t)};
    const int i = step.keys % rings.inner, base = step.keys - i;
    if (n == 1 && loop + 1 < rings.outer) step.key_hops.push_back({RingLevel::kOuter, base});
    // What the step attends to itself. The own node's keys set out a step before.
    if (n == 1 && i != 0 && !home) step.key_hops.push_back({RingLevel::kInner, base});
    if (i != 0 && i + 1 < rings.inner) step.key_hops.push_back({RingLevel::kInner, step.keys});
    if (i == 0 && loop + 1 == rings.outer && rings.inner > 1) {
      step.key_hops.push_back({RingLevel::kInner, 0});
    }
    if (n > 1) step.adds.push_back(RingLevel::kInner);
    if (i == 0 && loop > 1) step.adds.push_back(RingLevel::kOuter);
    if (i != 0) {
      step.returns = RingLevel::kInner;
    } else if (!home) {
      step.returns = RingLevel::kOuter;
    }
    order.steps.push_back(std::move(step));
  }
  return order;
}

class Player {
 public:
  Player(const RingSetup& setup, const std::vector<double>& seconds,
         const std::vector<double>& outside)
      : setup_(setup), rings_(setup), seconds_(seconds), done_(outside) {}

  double Play() { return setup_.kind == ParallelismSpec::ALL_GATHER ? AllGather() : Ring(); }

 private:
  using Times = std::vector<double>;  // by rank

  int ranks() const { return setup_.ranks; }
  double Seconds(int rank, int keys) const {
    return seconds_[size_t(rank) * ranks() + rings_.Owner(rank, keys)];
  }
  double Last() const { return *std::max_element(done_.begin(), done_.end()); }

  // When `bytes` are there that every rank sends once it and its successor are ready.
  Times Hop(RingLevel level, double bytes, const Times& ready) const {
    Times there(ranks());
    for (int r = 0; r < ranks(); ++r) {
      there[r] = std::max(ready[r], ready[rings_.From(level, r)]) +
                 Transfer(rings_.LinkInto(level, r), bytes);
    }
    return there;
  }

  static Times Later(Times a, const Times& b) {
    for (size_t r = 0; r < a.size(); ++r) a[r] = std::max(a[r], b[r]);
    return a;
  }

  double Ring() {
    const RingOrder order = OrderOf(setup_);
    std::vector<Times> keys(ranks());  // when they are there, until attended to
    keys[0] = Times(ranks(), 0.0);
    const auto start = [&](const KeyHop& hop, const Times& begun) {
      const int there = hop.keys + (hop.level == RingLevel::kInner ? 1 : rings_.inner);
      keys[there] = Hop(hop.level, setup_.kv_bytes, Later(begun, keys[hop.keys]));
    };
    for (const KeyHop& hop : order.first_hops) start(hop, keys[0]);
    std::map<RingLevel, Times> gradients;  // when those that were last sent there are
    for (const RingStep& step : order.steps) {
      for (const KeyHop& hop : step.key_hops) start(hop, done_);
      done_ = Later(std::move(done_), std::exchange(keys[step.keys], Times()));
      for (int r = 0; r < ranks(); ++r) done_[r] += Seconds(r, step.keys);
      for (const RingLevel level : step.adds) done_ = Later(std::move(done_), gradients[level]);
      if (step.returns.has_value()) {
        gradients[*step.returns] = Hop(*step.returns, setup_.gradient_bytes, done_);
      }
    }
    return Last();
  }

  double AllGather() {
    const double gather = GatherSeconds(setup_.kv_bytes);
    for (int r = 0; r < ranks(); ++r) {
      // Own keys and columns need no transfer.
      double rest = 0;
      for (int t = 1; t < ranks(); ++t) rest += Seconds(r, t);
      done_[r] = std::max(done_[r] + Seconds(r, 0), gather) + rest;
    }
    const double scatter = setup_.gradient_bytes > 0 ? GatherSeconds(setup_.gradient_bytes) : 0.0;
    return Last() + scatter;
  }

  // Each rank fetches its share over the network, then nodes pass all of it around inside.
  double GatherSeconds(double bytes) const {
    const int inner = setup_.group.inner, outer = setup_.group.outer;
    double network = 0, node = 0;
    for (int i = 1; i < outer; ++i) network += Transfer(setup_.inter_node, bytes);
    for (int i = 1; i < inner; ++i) node += Transfer(setup_.intra_node, bytes * outer);
    return std::max(network, node);
  }

  const RingSetup& setup_;
  const Rings rings_;
  const std::vector<double>& seconds_;
  Times done_;  // when each rank is done with the steps so far
};

// Keys and gradients make the same hops.
double TransferSeconds(const RingSetup& setup) {
  const Rings rings(setup);
  double total = 0;
  for (const double bytes : {setup.kv_bytes, setup.gradient_bytes}) {
    if (bytes <= 0) continue;
    if (Hierarchical(setup)) {
      total += rings.outer * (rings.inner - 1) * Transfer(setup.intra_node, bytes) +
               (rings.outer - 1) * Transfer(setup.inter_node, bytes);
    } else {
      total += (setup.ranks - 1) *
               Transfer(setup.group.outer > 1 ? setup.inter_node : setup.intra_node, bytes);
    }
  }
  return total;
}

}  // namespace

RingOrder OrderOf(const RingSetup& setup) {
  if (setup.kind == ParallelismSpec::ALL_GATHER) return {};
  const Rings rings(setup);
  return setup.gradient_bytes > 0 ? BackwardOrder(rings) : ForwardOrder(rings);
}

int OwnerAt(const RingSetup& setup, int rank, int step) {
  const Rings rings(setup);
  return rings.Owner(rank, rings.KeysAt(step));
}

RingTimes SimulateRing(const RingSetup& setup, const std::vector<double>& seconds,
                       const std::vector<double>& outside) {
  RingTimes times;
  for (int r = 0; r < setup.ranks; ++r) {
    double busy = outside[r];
    for (int j = 0; j < setup.ranks; ++j) busy += seconds[size_t(r) * setup.ranks + j];
    times.busy_seconds = std::max(times.busy_seconds, busy);
  }
  times.seconds = Player(setup, seconds, outside).Play();
  times.transfer_seconds = TransferSeconds(setup);
  RingSetup fast = setup;
  fast.intra_node = fast.inter_node = Link{};
  times.exposed_seconds = times.seconds - Player(fast, seconds, outside).Play();
  return times;
}

double StepImbalance(const RingSetup& setup, const std::vector<double>& load) {
  double sum = 0;
  int counted = 0;
  for (int r = 0; r < setup.ranks; ++r) {
    double largest = 0, total = 0;
    for (int j = 0; j < setup.ranks; ++j) {
      const double mine = load[size_t(r) * setup.ranks + j];
      largest = std::max(largest, mine);
      total += mine;
    }
    if (total <= 0) continue;
    sum += largest * setup.ranks / total;
    ++counted;
  }
  return counted > 0 ? sum / counted : 1.0;
}

}  // namespace ringleader::planner
