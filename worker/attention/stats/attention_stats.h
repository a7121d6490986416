// What one step of attention did: counted by the device, read by the trainer after the step.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <span>
#include <vector>

#include "ringleader/kernels/index.h"

namespace ringleader::attention {

// Whose attention a probe compares with what was visited (patterns/probe.h).
enum class ProbedRows {
  kApart,  // that had no part in the choice, or a choice of their own
  kHeard,  // that chose with others
};

// Tiles are sums over the step's calls (micro-batches), shares and counts are means over them.
struct LayerStats {
  int calls = 0;           // of Forward
  double density = 0.0;    // share of this rank's causal tiles that was visited
  double verticals = 0.0;  // selected columns, mean over heads
  double slashes = 0.0;    // block diagonals, mean over heads
  // Shares of the heads whose columns, and whose diagonals, were ended by the budget before they
  // covered the mass asked for.
  double verticals_at_budget = 0.0, slashes_at_budget = 0.0;
  // Attention mass kept on queries that chose; -1: not estimated, as under patterns whose index
  // does not count it (PatternDefinition) but in calls that probed.
  double recall = -1.0;
  // Calls whose choice was moved (attention.balance), and those of them that did not come to the
  // anchor.
  uint64_t balanced = 0, anchor_missed = 0;
  int probes = 0;  // calls that probed
  // By head, where there were probes (patterns/probe.h): the share of their queries' attention that
  // was visited. The first is head `first_head`.
  std::vector<double> probed_recall;
  // The same as whole numbers: what was visited, in units of 2^-kMassBits, by head, and of how many
  // queries, over all probes.
  std::vector<int64_t> probed_visited = {};
  int64_t probed_queries = 0;
  int first_head = 0;
  // Over the probes of queries that chose: sums, over heads, of shares, and of how many heads.
  double heard_recall = 0.0;
  int64_t heard_heads = 0;
  std::vector<uint64_t> tiles_per_ring_step;  // forward, this rank, all heads
  uint64_t column_tiles = 0;                  // of the pass over selected columns
  uint64_t causal_tiles = 0;                  // what dense attention would have visited

  // Tiles that this rank visited in forward: the work that stripes balance.
  uint64_t TotalTiles() const {
    uint64_t tiles = column_tiles;
    for (const uint64_t step : tiles_per_ring_step) tiles += step;
    return tiles;
  }
  // One call's probe. visited: of each head from `first` on, summed over `queries`, in units of
  // 2^-kMassBits. Heads that are attended with in groups are probed in the order of the groups.
  void AddProbe(std::span<const int32_t> visited, int32_t queries, size_t first, ProbedRows rows) {
    if (rows == ProbedRows::kHeard) {
      for (const int32_t of_head : visited) {
        heard_recall += std::ldexp(of_head, -kernels::kMassBits) / queries;
      }
      heard_heads += std::ssize(visited);
      return;
    }
    if (first == 0) {
      ++probes;
      probed_queries += queries;
    }
    probed_recall.resize(std::max(probed_recall.size(), first + visited.size()));
    probed_visited.resize(probed_recall.size());
    for (size_t head = 0; head < visited.size(); ++head) {
      probed_visited[first + head] += visited[head];
      probed_recall[first + head] += std::ldexp(visited[head], -kernels::kMassBits) / queries;
    }
  }
  // Sums over calls become means over them.
  void TakeMeans() {
    if (calls == 0) return;
    verticals /= calls;
    slashes /= calls;
    verticals_at_budget /= calls;
    slashes_at_budget /= calls;
    if (recall >= 0.0) recall /= calls;
    if (heard_heads > 0) recall = heard_recall / static_cast<double>(heard_heads);
    for (double& of_head : probed_recall) of_head /= probes;
    density = static_cast<double>(TotalTiles()) / static_cast<double>(causal_tiles);
  }
};

// This rank's seconds; exposed communication is the time spent waiting for transfers and
// collectives.
struct AttentionSeconds {
  double index = 0.0;
  double forward = 0.0;
  double backward = 0.0;
  double exposed_communication = 0.0;
};

// The tiles that this rank visited in forward, over all layers and heads.
struct VisitedTiles {
  uint64_t visited = 0;
  uint64_t causal = 0;  // what dense attention would have visited
};

// Keys, values and their gradients that this rank sent to others of its ring.
struct RingBytes {
  uint64_t sent = 0;
  uint64_t whole = 0;  // if every hop carried all of an owner's
};

struct AttentionStats {
  AttentionSeconds seconds;
  std::vector<LayerStats> layers;           // by layer index
  std::vector<VisitedTiles> micro_batches;  // in their order, where they were marked
  uint64_t head_bytes = 0;  // that this rank sent to those with which it shares out heads
  RingBytes ring_bytes;

  uint64_t TotalTiles() const {
    uint64_t tiles = 0;
    for (const LayerStats& layer : layers) tiles += layer.TotalTiles();
    return tiles;
  }
};

}  // namespace ringleader::attention
