// What the ranks of a cell hand back, and cells made of it.
#pragma once

#include <chrono>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "bench/longca/cell.h"
#include "bench/longca/pattern_choice.h"
#include "bench/longca/problem.h"
#include "bench/longca/scheme.h"
#include "kernels/masks/masks.h"
#include "worker/attention/stats/attention_stats.h"

namespace ringleader::bench {

// What one rank did.
struct RankRun {
  absl::Status status;
  std::vector<double> forward_ms, backward_ms;  // of repetitions
  double plan_ms = 0;
  double tiles = 0;  // in a forward
  // Sent in a repetition; what rows nobody visits spare is the difference to `whole`.
  attention::RingBytes forward_bytes, backward_bytes;
};

// Of the whole sequence. Ranks write different rows.
struct Results {
  kernels::reference::testing::Tensor out, dq, dk, dv;

  explicit Results(int64_t tokens)
      : out(tokens, kHeads, kHeadDim), dq(out), dk(tokens, kKvHeads, kHeadDim), dv(dk) {}
};

// A cell for each direction, not measured yet.
std::vector<Cell> EmptyCells(kernels::MaskKind mask, const PatternChoice& choice,
                             const Scheme& scheme, int64_t tokens);
// Sets times, plan, bytes and imbalance of the cell's direction.
void FillFrom(std::span<const RankRun> runs, Cell* cell);

inline double MillisecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
      .count();
}

}  // namespace ringleader::bench
