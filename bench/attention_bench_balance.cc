#include "bench/attention_bench_balance.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <random>
#include <vector>

#include "ring/ring_schedule.h"
#include "ring/tile_loads.h"

namespace ringleader::bench {
namespace {

using kernels::LayoutKind;
using ring::RingKind;
using ring::RingShape;

// A head as they are seen: a local band, a few clusters of far diagonals.
ring::HeadPattern RandomDiagonals(int64_t blocks, std::mt19937& random) {
  ring::HeadPattern head;
  head.diagonals.assign(blocks, 0);
  const auto set = [&](int64_t delta) {
    if (delta < blocks) head.diagonals[delta] = 1;
  };
  const int64_t band = 2 + random() % std::max<int64_t>(1, blocks / 64);
  for (int64_t delta = 0; delta <= band; ++delta) set(delta);
  for (int cluster = 10 + random() % 50; cluster > 0; --cluster) {
    const int64_t center = random() % blocks, width = 1 + random() % 3;
    for (int64_t delta = center; delta < center + width; ++delta) set(delta);
  }
  return head;
}

// Tiles of the busiest rank at each ring step.
std::vector<double> BusiestBySteps(const ring::TileLoads& loads, const RingShape& shape) {
  std::vector<double> busiest(loads.ranks(), 0.0);
  for (int rank = 0; rank < loads.ranks(); ++rank) {
    const ring::RingSchedule schedule = *ring::ForwardSchedule(shape, rank);
    for (int t = 0; t < loads.ranks(); ++t) {
      busiest[t] = std::max(busiest[t], loads.of(rank, schedule.steps[t].owner));
    }
  }
  return busiest;
}

}  // namespace

void BenchBalance() {
  constexpr int kHeads = 16;
  std::printf(
      "\n## Balance: tiles of block diagonals, %d heads, exact; max/mean\n\n"
      "Workers: total per rank. Steps: per rank and ring step. Lock-step: mean work / sum over "
      "steps of the slowest rank.\n\n"
      "| tokens | tile | ranks | layout | ring | density | workers | steps | lock-step |\n"
      "|---|---|---|---|---|---|---|---|---|\n",
      kHeads);
  struct Size {
    int64_t tokens;
    int tile, ranks, inner;
  };
  for (const Size& size :
       {Size{16384, 64, 4, 2}, Size{131072, 128, 8, 4}, Size{524288, 128, 32, 8}}) {
    const int64_t blocks = size.tokens / size.tile;
    std::mt19937 random(7);
    std::vector<ring::HeadPattern> heads;
    for (int head = 0; head < kHeads; ++head) heads.push_back(RandomDiagonals(blocks, random));
    struct Case {
      LayoutKind layout;
      const char* name;
      RingShape ring;
      const char* ring_name;
    };
    const RingShape flat{RingKind::kFlat, size.ranks, 1};
    const RingShape hierarchical{RingKind::kHierarchical, size.inner, size.ranks / size.inner};
    for (const Case& c : {Case{LayoutKind::kContiguous, "contiguous", flat, "flat"},
                          Case{LayoutKind::kZigzag, "zigzag", flat, "flat"},
                          Case{LayoutKind::kStriped, "striped", flat, "flat"},
                          Case{LayoutKind::kStriped, "striped", hierarchical, "hierarchical"}}) {
      ring::TileLoads loads(size.ranks);
      for (const ring::HeadPattern& head : heads) {
        loads.AddHead(
            head,
            {.kind = c.layout, .ranks = size.ranks, .stripe = size.tile, .tokens = size.tokens},
            size.tile, 1.0);
      }
      const std::vector<double> totals = loads.RankTotals();
      const double total = std::accumulate(totals.begin(), totals.end(), 0.0);
      const std::vector<double> busiest = BusiestBySteps(loads, c.ring);
      const double steps = static_cast<double>(size.ranks) * size.ranks;
      std::printf("| %lld | %d | %d | %s | %s | %.3f | %.3f | %.3f | %.2f |\n",
                  static_cast<long long>(size.tokens), size.tile, size.ranks, c.name, c.ring_name,
                  total / (kHeads * 0.5 * blocks * (blocks + 1)),
                  std::ranges::max(totals) * size.ranks / total,
                  *std::max_element(busiest.begin(), busiest.end()) * steps / total,
                  total / (std::accumulate(busiest.begin(), busiest.end(), 0.0) * size.ranks));
    }
  }
}

}  // namespace ringleader::bench
