#include "bench/attention_bench_balance.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <random>
#include <vector>

#include "ring/ring_load.h"

namespace ringleader::bench {
namespace {

using kernels::LayoutKind;
using ring::RingKind;
using ring::RingLoad;
using ring::RingShape;

// A head as they are seen: a local band, a few clusters of far diagonals.
std::vector<uint64_t> RandomDiagonals(int64_t blocks, std::mt19937& random) {
  std::vector<uint64_t> words((blocks + 63) / 64, 0);
  const auto set = [&](int64_t delta) {
    if (delta < blocks) words[delta / 64] |= uint64_t{1} << (delta % 64);
  };
  const int64_t band = 2 + random() % std::max<int64_t>(1, blocks / 64);
  for (int64_t delta = 0; delta <= band; ++delta) set(delta);
  for (int cluster = 10 + random() % 50; cluster > 0; --cluster) {
    const int64_t center = random() % blocks, width = 1 + random() % 3;
    for (int64_t delta = center; delta < center + width; ++delta) set(delta);
  }
  return words;
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
    std::vector<uint64_t> diagonals;
    for (int head = 0; head < kHeads; ++head) {
      const std::vector<uint64_t> of_head = RandomDiagonals(blocks, random);
      diagonals.insert(diagonals.end(), of_head.begin(), of_head.end());
    }
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
      const RingLoad load = ring::DiagonalLoad(
          diagonals.data(), static_cast<int32_t>((blocks + 63) / 64), kHeads,
          {.kind = c.layout, .ranks = size.ranks, .stripe = size.tile, .tokens = size.tokens},
          size.tile, c.ring);
      std::printf("| %lld | %d | %d | %s | %s | %.3f | %.3f | %.3f | %.2f |\n",
                  static_cast<long long>(size.tokens), size.tile, size.ranks, c.name, c.ring_name,
                  load.TotalTiles() / (kHeads * 0.5 * blocks * (blocks + 1)),
                  load.WorkerImbalance(), load.StepImbalance(), load.LockStepEfficiency());
    }
  }
}

}  // namespace ringleader::bench
