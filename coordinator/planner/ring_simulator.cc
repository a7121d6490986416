#include "coordinator/planner/ring_simulator.h"

#include <algorithm>

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

// The link on which `rank` receives from its predecessor in the flat ring.
const Link& FlatLink(const RingSetup& setup, int rank) {
  const bool first_of_node = rank % setup.group.inner == 0;
  return first_of_node && setup.group.outer > 1 ? setup.inter_node : setup.intra_node;
}

class Player {
 public:
  Player(const RingSetup& setup, const std::vector<double>& seconds,
         const std::vector<double>& outside)
      : setup_(setup), seconds_(seconds), done_(outside) {}

  double Play() {
    if (setup_.ranks == 1) return done_[0] + seconds_[0];
    if (setup_.kind == ParallelismSpec::ALL_GATHER) return AllGather();
    return Hierarchical(setup_) ? Nested() : Flat();
  }

 private:
  int ranks() const { return setup_.ranks; }
  double Seconds(int rank, int step) const {
    return seconds_[size_t(rank) * ranks() + OwnerAt(setup_, rank, step)];
  }
  double Last() const { return *std::max_element(done_.begin(), done_.end()); }

  double Flat() {
    const int w = ranks();
    std::vector<double> kv_arrival(w, 0.0), gradient_arrival(w, 0.0), begin(w), end(w);
    // The columns' pass fills the time of the first transfer.
    const std::vector<double> outside = done_;
    for (int t = 0; t < w; ++t) {
      for (int r = 0; r < w; ++r) begin[r] = t == 0 ? 0 : std::max(done_[r], kv_arrival[r]);
      for (int r = 0; r < w; ++r) {
        const double work = Seconds(r, t) + (t == 0 ? outside[r] : 0);
        end[r] = begin[r] + work;
        if (t > 0 && setup_.gradient_bytes > 0) end[r] = std::max(end[r], gradient_arrival[r]);
      }
      for (int r = 0; r < w; ++r) {
        const int from = (r + w - 1) % w;
        const Link& link = FlatLink(setup_, r);
        kv_arrival[r] = std::max(begin[r], begin[from]) + Transfer(link, setup_.kv_bytes);
        gradient_arrival[r] = std::max(end[r], end[from]) + Transfer(link, setup_.gradient_bytes);
      }
      done_ = end;
    }
    if (setup_.gradient_bytes > 0) {
      for (int r = 0; r < w; ++r) done_[r] = std::max(done_[r], gradient_arrival[r]);
    }
    return Last();
  }

  double Nested() {
    const int w = ranks(), inner = setup_.group.inner, outer = setup_.group.outer;
    const bool backward = setup_.gradient_bytes > 0;
    std::vector<double> kv(w, 0.0), gradient(w, 0.0), outer_kv(w, 0.0), outer_gradient(w, 0.0);
    std::vector<double> begin(w), end(w);
    const std::vector<double> outside = done_;
    std::fill(done_.begin(), done_.end(), 0.0);
    const auto inner_from = [&](int r) {
      return r / inner * inner + (r % inner + inner - 1) % inner;
    };
    const auto outer_from = [&](int r) { return (r + w - inner) % w; };
    // An inner loop's gradients are home one hop behind its last step; they are folded into what
    // came from the node before, and sent on, behind the first step of the next loop.
    const auto fold = [&](std::vector<double>* done, bool received) {
      for (int r = 0; r < w; ++r) {
        (*done)[r] = std::max({(*done)[r], gradient[r], received ? outer_gradient[r] : 0.0});
      }
      for (int r = 0; r < w; ++r) {
        outer_gradient[r] = std::max((*done)[r], (*done)[outer_from(r)]) +
                            Transfer(setup_.inter_node, setup_.gradient_bytes);
      }
    };
    for (int s = 0; s < outer; ++s) {
      for (int i = 0; i < inner; ++i) {
        const std::vector<double>& arrival = i == 0 ? outer_kv : kv;
        for (int r = 0; r < w; ++r) begin[r] = std::max(done_[r], arrival[r]);
        if (i == 0) {
          for (int r = 0; r < w; ++r) {
            outer_kv[r] = std::max(begin[r], begin[outer_from(r)]) +
                          Transfer(setup_.inter_node, setup_.kv_bytes);
          }
        }
        for (int r = 0; r < w; ++r) {
          const bool first = s == 0 && i == 0;
          end[r] = begin[r] + Seconds(r, s * inner + i) + (first ? outside[r] : 0);
          if (backward && i > 0) end[r] = std::max(end[r], gradient[r]);
        }
        if (backward && i == 0 && s > 0) fold(&end, s > 1);
        for (int r = 0; r < w; ++r) {
          const int from = inner_from(r);
          kv[r] = std::max(begin[r], begin[from]) + Transfer(setup_.intra_node, setup_.kv_bytes);
          gradient[r] = std::max(end[r], end[from]) +
                        (inner > 1 ? Transfer(setup_.intra_node, setup_.gradient_bytes) : 0.0);
        }
        done_ = end;
      }
    }
    if (backward) {
      fold(&done_, outer > 1);
      for (int r = 0; r < w; ++r) done_[r] = std::max(done_[r], outer_gradient[r]);
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
  const std::vector<double>& seconds_;
  std::vector<double> done_;
};

double TransferSeconds(const RingSetup& setup) {
  if (setup.ranks == 1) return 0;
  const double hops = setup.ranks - 1;
  double total = 0;
  for (const double bytes : {setup.kv_bytes, setup.gradient_bytes}) {
    if (bytes <= 0) continue;
    if (Hierarchical(setup)) {
      total += setup.group.outer * (setup.group.inner - 1) * Transfer(setup.intra_node, bytes) +
               (setup.group.outer - 1) * Transfer(setup.inter_node, bytes);
    } else {
      total += hops * Transfer(setup.group.outer > 1 ? setup.inter_node : setup.intra_node, bytes);
    }
  }
  return total;
}

}  // namespace

int OwnerAt(const RingSetup& setup, int rank, int step) {
  const int w = setup.ranks;
  if (!Hierarchical(setup)) return (rank - step % w + w) % w;
  const int inner = setup.group.inner, outer = setup.group.outer;
  const int node = (rank / inner - step / inner + outer) % outer;
  const int place = (rank % inner - step % inner + inner) % inner;
  return node * inner + place;
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
