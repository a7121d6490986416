// The vertical-slash index: which key columns and which block diagonals each head attends to,
// chosen online from a few estimate queries. The same contract for the CPU engine (reference/) and
// the GPU (index/). After MTraining (arXiv 2510.18830), section 4.1, Algorithm 1.
//
// The work is cut at the points where ranks have to agree. Per layer, on every rank:
//   1. row maximum      -> row_max            caller reduces: MAX over ranks
//   2. row sum          -> row_sum            SUM
//   3. mass             -> column_mass (stays local), diagonal_mass   SUM of diagonal_mass
//   4. candidate columns of this rank         ALL-GATHER, in rank order
//   5. selection        -> diagonals, columns; identical on all ranks
// Sums are over integers (fixed point), and ties of columns go to the lower position in even heads,
// to the higher one in odd heads (TiesGoLate), so the selection depends neither on the order of
// threads nor on how many ranks hold the sequence, and no end of it is favoured.
#pragma once

#include <cmath>
#include <cstdint>

#include "ringleader/kernels/attention.h"
#include "ringleader/kernels/shard_layout.h"

namespace ringleader::kernels {

// Every sum that ranks add up is made of fp32 sums over a fixed run of 64 (keys of a query, or
// queries of a key), each rounded once to these units; the integers then add up in any order.
//
// row_sum: the sum over a run of exp(logit - row_max), times 2^kRowSumBits. logit = scale * (q .
// k).
// A flat row of 2^24 keys, the longest sequence, then adds up to 2^62.
inline constexpr int kRowSumBits = 38;
// Masses: one query's softmax has the mass 2^kMassBits. A pair's share of it is
// exp(logit - row_max) / (row_sum / 2^kRowSumBits) * 2^kMassBits.
inline constexpr int kMassBits = 22;
// Queries or keys in a run: row e of the estimate queries belongs to run e / 64, a key to run
// position / 64.
inline constexpr int kMassRun = 64;
// More estimate queries could overflow a mass of 31 bits.
inline constexpr int kMaxEstimateQueries = 256;

// Estimate queries that are spread over a sequence: one in each of `count` parts of equal length,
// at a place in it that differs from part to part, so that none is favoured. number: [0, count).
RINGLEADER_HOST_DEVICE inline int64_t SpreadPosition(int64_t tokens, int64_t count,
                                                     int64_t number) {
  const int64_t begin = number * tokens / count, end = (number + 1) * tokens / count;
  // Multiples of the golden ratio, modulo 1, are spread evenly, too.
  const uint64_t place = static_cast<uint64_t>(number + 1) * 0x9e3779b97f4a7c15u >> 40;
  return begin + static_cast<int64_t>(place * static_cast<uint64_t>(end - begin) >> 24);
}

// Step 1 to 3. Only keys at or before a query's position count, and of packed documents only those
// of its own.
template <typename T>
struct IndexEstimateArgs {
  TokenMajor<const T> q;  // [E, heads, d], the estimate queries: the same on every rank
  const int64_t* query_positions = nullptr;  // [E]
  // [E]: where the queries' documents start in the sequence. Null: it is one document.
  const int64_t* query_starts = nullptr;
  TokenMajor<const T> k;  // [n, kv_heads, d], this rank's keys
  ShardLayout key_layout;
  int32_t tile = 128;
  float scale = 0.0f;
  float* row_max = nullptr;    // [heads, E], of scaled logits, natural; -infinity without a key
  int64_t* row_sum = nullptr;  // [heads, E]
  // On GPUs, from step 2 for step 3: each run's part of row_sum, before it is rounded. [heads, E,
  // RunsOf(n)]. The CPU engine keeps logits instead.
  float* run_sums = nullptr;
  int32_t* column_mass = nullptr;  // [heads, n], summed over queries
  // [heads, blocks of the sequence]: the mass of pairs whose query block lies delta blocks after
  // the key block.
  int32_t* diagonal_mass = nullptr;
};

// Runs of this rank's n keys.
RINGLEADER_HOST_DEVICE inline int64_t RunsOf(int64_t n) {
  return (n + kMassRun - 1) / kMassRun;
}

// What block diagonal `delta` counts for in a budget: 1, or `by_tiles`, where the budget is a share
// of the causal tiles, the tiles that it has in a sequence of `blocks` blocks, in units that keep
// the sum over all diagonals below 2^30.
RINGLEADER_HOST_DEVICE inline int32_t DiagonalCost(bool by_tiles, int64_t blocks, int64_t delta) {
  if (!by_tiles) return 1;
  int shift = 0;
  while ((blocks * (blocks + 1) / 2 >> shift) + (shift > 0 ? blocks : 0) >= int64_t{1} << 30)
    ++shift;
  const int64_t cost = (blocks - delta) >> shift;
  return cost > 0 ? static_cast<int32_t>(cost) : 1;
}

RINGLEADER_HOST_DEVICE inline bool TiesGoLate(int32_t head) {
  return head % 2 != 0;
}

// Budgets, one element a head, in the memory of the engine: a plan replaces them between steps
// without a new launch configuration. Elements are taken by falling mass (ties: TiesGoLate,
// shorter distance first) until their mass reaches mass[h] of the total or their number, for
// diagonals their DiagonalCost, max_count[h]; the element that crosses is included, one without
// mass is not taken. mass = 1 is top-k. What is forced is always in, comes first and counts towards
// both.
struct HeadBudgets {
  const float* mass = nullptr;         // [heads], in (0, 1]
  const int32_t* max_count = nullptr;  // [heads]
};

// The mass of what attention visited for a query: `lse` is the natural logarithm of its sum over
// what it visited, row_max and row_sum are of all keys. What is not a number has none.
RINGLEADER_HOST_DEVICE inline int32_t VisitedShare(float lse, float row_max, int64_t row_sum) {
  const double all =
      static_cast<double>(row_max) + log(ldexp(static_cast<double>(row_sum), -kRowSumBits));
  const double share = exp(static_cast<double>(lse) - all);
  const double rounded = rint(ldexp(share < 1.0 ? share : 1.0, kMassBits));
  return share >= 0.0 ? static_cast<int32_t>(rounded) : 0;
}

// The mass at which a selection may stop.
RINGLEADER_HOST_DEVICE inline int64_t MassTarget(int64_t total, float mass) {
  return static_cast<int64_t>(ceil(static_cast<double>(total) * static_cast<double>(mass)));
}

// `halves`, 1 to 3, of a budget of `count`; one head's half less and another's half more add up to
// twice the budget.
RINGLEADER_HOST_DEVICE inline int32_t OfHalves(int32_t count, int32_t halves) {
  return halves == 1 ? count - count / 2 : halves == 2 ? count : count + count / 2;
}

// Budgets of heads by how well they did with the same one: of the heads by falling recall, let c be
// the number whose recall exceeds kGoodRecall, but at most half of all. The first c get half of the
// budget, the last c half more, so that the mean stays (AdaSpa, arXiv 2502.21079, section 4.3).
// `better`: heads before this one, ties by number.
inline constexpr double kGoodRecall = 0.8;
RINGLEADER_HOST_DEVICE inline int32_t AdaptedCount(int32_t count, int better, int good, int heads) {
  const int moved = good < heads / 2 ? good : heads / 2;
  if (better < moved) return OfHalves(count, 1);
  return better >= heads - moved ? OfHalves(count, 3) : count;
}

}  // namespace ringleader::kernels
