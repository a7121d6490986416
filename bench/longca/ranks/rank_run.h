// What the ranks of a cell are to do and hand back, and cells made of it.
#pragma once

#include <chrono>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "bench/longca/cell.h"
#include "bench/longca/pattern_choice.h"
#include "bench/longca/problem.h"
#include "bench/longca/ranks/scheme.h"
#include "kernels/masks/masks.h"
#include "worker/attention/stats/attention_stats.h"

namespace ringleader::bench {

struct Setting {
  kernels::MaskKind mask;
  PatternChoice choice;
  Scheme scheme;
};

// Whether `sequence` can be had so: the choice goes with the mask, and with the heads of
// Problem that a rank has; helpers, without a choice, with the mask.
bool IsPossible(const Setting& setting, const MaskedSequence& sequence, int tile);

// What one rank did.
struct RankRun {
  absl::Status status;
  std::vector<double> forward_ms, backward_ms;  // of repetitions
  std::vector<double> plan_ms;                  // likewise, or one that serves all
  double tiles = 0;                             // in a forward
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
std::vector<Cell> EmptyCells(const Setting& setting, int64_t tokens);
// Sets times, plan, bytes and imbalance of the cell's direction.
void FillFrom(std::span<const RankRun> runs, Cell* cell);
// The share of all pairs of a sequence that its ranks visit: of a choice as large a part of what
// the mask shows as their tiles are of those of `heads` heads in which it shows something. `rows`:
// what each query sees.
double ShareOf(std::span<const RankRun> runs, const Setting& setting,
               std::span<const kernels::KeyIntervals> rows, int heads, int tile);

inline double MillisecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
      .count();
}

}  // namespace ringleader::bench
