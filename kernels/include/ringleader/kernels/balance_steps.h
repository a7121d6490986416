// Budgets that are moved so that those who wait for each other take as long (SparseBalance, arXiv
// 2604.13847, section IV, dynamic sparsity tuning): steps and arithmetic that the CPU engine and
// GPUs share. Who takes longer than the anchor keeps less, but never so much less that the share of
// attention which its choice was estimated to cover falls by more than a tolerance; who takes less
// keeps more. docs/balance.md describes it.
#pragma once

#include <cmath>
#include <cstdint>

#include "ringleader/kernels/index.h"
#include "ringleader/kernels/seen_keys.h"
#include "ringleader/kernels/shard_layout.h"

namespace ringleader::kernels {

// What those that wait for each other are brought to, of what each takes by itself.
enum class Anchor : int32_t { kNone, kMin, kMean, kMax };

// Bounds of what a choice may become, as a factor of its work, and how near to 1 is nothing.
inline constexpr float kLeastMove = 0.5f, kMostMove = 1.5f, kNoMove = 0.01f;

RINGLEADER_HOST_DEVICE inline float BoundedMove(double factor) {
  if (!(fabs(factor - 1.0) >= static_cast<double>(kNoMove))) return 1.0f;
  return static_cast<float>(
      fmin(fmax(factor, static_cast<double>(kLeastMove)), static_cast<double>(kMostMove)));
}

// The anchor of `count` positive values.
RINGLEADER_HOST_DEVICE inline double AnchorOf(Anchor anchor, const int64_t* values, int32_t count) {
  double least = static_cast<double>(values[0]), most = least, sum = 0.0;
  for (int32_t i = 0; i < count; ++i) {
    const auto value = static_cast<double>(values[i]);
    least = fmin(least, value);
    most = fmax(most, value);
    sum += value;
  }
  switch (anchor) {
    case Anchor::kNone:
      break;
    case Anchor::kMin:
      return least;
    case Anchor::kMean:
      return sum / count;
    case Anchor::kMax:
      return most;
  }
  return 0.0;
}

// How many elements `factor` leaves of `kept`. Few elements are rounded up or down by `place`, so
// that those of many places come to the factor together, the same on any number of ranks.
RINGLEADER_HOST_DEVICE inline int32_t MovedCount(int64_t kept, float factor, uint32_t place) {
  // Multiples of the golden ratio, modulo 1, are spread evenly.
  const double up = static_cast<double>(place * 0x9e3779b9u) * 0x1p-32;
  return static_cast<int32_t>(floor(static_cast<double>(kept) * static_cast<double>(factor) + up));
}

// The place that stands for a tile of queries and a head.
RINGLEADER_HOST_DEVICE inline uint32_t MovePlace(int64_t tile_number, int32_t head) {
  return static_cast<uint32_t>(tile_number) + 7919u * static_cast<uint32_t>(head);
}

// The mass that may be lost of `total`.
RINGLEADER_HOST_DEVICE inline int64_t LostMass(int64_t total, float tolerance) {
  return static_cast<int64_t>(floor(static_cast<double>(tolerance) * static_cast<double>(total)));
}

// The mass that a choice of `kept` has to hold of `total`, so that it loses no more than
// `tolerance` of the total.
RINGLEADER_HOST_DEVICE inline int64_t HeldMass(int64_t kept, int64_t total, float tolerance) {
  return kept - LostMass(total, tolerance);
}

// Whether work that should have become `factor` of `before` is further from it than rounding to
// whole elements explains.
RINGLEADER_HOST_DEVICE inline bool MissesAnchor(int64_t before, int64_t after, float factor) {
  const double wanted = static_cast<double>(before) * static_cast<double>(factor);
  return fabs(static_cast<double>(after) - wanted) > 0.05 * wanted;
}

// In what a choice of blocks is moved; all of it lies in the engine's memory.
struct ChoiceMove {
  const float* factor = nullptr;  // of the work of the unmoved choice; null: it is not moved
  float tolerance = 0.0f;         // of the estimated mass of each tile of queries
  // Gets the work of the unmoved choice, as CountWorkStep counts it, from AntidiagonalGateStep
  // alone.
  int64_t* work_before = nullptr;
};

// What one head's vertical-slash choice holds: columns, and diagonals with the tiles that they have
// (DiagonalCost). The masses are parts of `total`.
struct HeadChoice {
  int64_t columns = 0, column_mass = 0;
  int64_t diagonal_tiles = 0, diagonal_mass = 0;
  int64_t total = 0;

  // In tiles: a column that may lie anywhere is visited by half of the query blocks, and a tile has
  // `tile` columns.
  RINGLEADER_HOST_DEVICE int64_t Work(int64_t blocks, int32_t tile) const {
    return diagonal_tiles + columns * blocks / (int64_t{2} * tile);
  }
};

// The tiles that this rank's tiles of queries visit in the blocks that they keep, up to the last
// key that they see: their number, into *work.
struct CountWorkStep {
  const uint32_t* chosen = nullptr;  // [heads, query tiles, BlockWords(blocks)]
  ShardLayout query_layout = {};
  SeenKeys seen = {};
  int32_t heads = 0;
  int32_t tile = 128;
  int32_t block_size = 128;
  int64_t* work = nullptr;
};

// *factor = wanted, times what brings this rank to the anchor of the ranks' works; BoundedMove.
struct FindMoveStep {
  const int64_t* works = nullptr;  // [ranks]; null: ranks need no move of their own
  int32_t ranks = 1, rank = 0;
  Anchor anchor = Anchor::kMean;
  float wanted = 1.0f;
  float* factor = nullptr;
};

// *work = the sum over heads of HeadChoice::Work.
struct SumChoicesStep {
  const HeadChoice* choices = nullptr;  // [heads]
  int32_t heads = 0;
  int64_t blocks = 0;
  int32_t tile = 128;
  int64_t* work = nullptr;
};

// Budgets of a head (HeadBudgets, [2, heads]: columns, then diagonals by tiles) that keep `factor`
// of its choice, by count alone.
struct MoveBudgetsStep {
  const HeadChoice* choices = nullptr;  // [heads]
  int32_t heads = 0;
  const float* factor = nullptr;
  float* masses = nullptr;    // [2, heads]
  int32_t* counts = nullptr;  // [2, heads]
};

// Where the parts of a head's choice that was moved lose more than the tolerance together: the
// budgets with which they lose that much and no more, half of it for each part, and what one part
// leaves of its half for the other.
struct HoldMassStep {
  const HeadChoice* before = nullptr;  // [heads]
  const HeadChoice* moved = nullptr;   // [heads]
  int32_t heads = 0;
  float tolerance = 0.0f;
  float* masses = nullptr;    // [2, heads]
  int32_t* counts = nullptr;  // [2, heads]
};

RINGLEADER_HOST_DEVICE inline void MoveBudgets(const MoveBudgetsStep& step, int32_t head) {
  const HeadChoice& choice = step.choices[head];
  const auto place = static_cast<uint32_t>(head);
  for (int part = 0; part < 2; ++part) {
    const int64_t kept = part == 0 ? choice.columns : choice.diagonal_tiles;
    step.masses[part * step.heads + head] = 1.0f;
    step.counts[part * step.heads + head] = MovedCount(kept, *step.factor, place);
  }
}

RINGLEADER_HOST_DEVICE inline void HoldMass(const HoldMassStep& step, int32_t head) {
  const HeadChoice &before = step.before[head], &moved = step.moved[head];
  const int64_t masses[] = {before.column_mass, before.diagonal_mass},
                lost[] = {before.column_mass - moved.column_mass,
                          before.diagonal_mass - moved.diagonal_mass},
                may_be_lost = LostMass(before.total, step.tolerance);
  for (int part = 0; part < 2; ++part) {
    const int64_t left_to_part = may_be_lost - lost[1 - part], half = may_be_lost / 2,
                  most = left_to_part > half ? left_to_part : half;
    if (lost[part] <= most) continue;
    const int64_t held = masses[part] - most;
    // The least share whose MassTarget is `held`, or the next float.
    const double exact = static_cast<double>(held) / static_cast<double>(before.total);
    auto share = static_cast<float>(exact);
    if (static_cast<double>(share) < exact) share = nextafterf(share, 2.0f);
    step.masses[part * step.heads + head] = share;
    step.counts[part * step.heads + head] =
        static_cast<int32_t>(part == 0 ? before.columns : before.diagonal_tiles);
  }
}

RINGLEADER_HOST_DEVICE inline void FindMove(const FindMoveStep& step) {
  double factor = static_cast<double>(step.wanted);
  if (step.works != nullptr && step.works[step.rank] > 0) {
    factor *=
        AnchorOf(step.anchor, step.works, step.ranks) / static_cast<double>(step.works[step.rank]);
  }
  *step.factor = BoundedMove(factor);
}

// How many tiles one tile of queries visits.
RINGLEADER_HOST_DEVICE inline int64_t TilesOfRow(const CountWorkStep& step, int64_t row,
                                                 int64_t query_tiles, int32_t words) {
  const int64_t per_block = step.block_size / step.tile;
  const int64_t last = LastKeyOf(step.seen, step.query_layout, row % query_tiles, step.tile);
  const int64_t last_block = last / step.block_size;
  int64_t blocks = 0;
  for (int32_t word = 0; word < words; ++word) {
    for (uint32_t bits = step.chosen[row * words + word]; bits != 0; bits &= bits - 1) ++blocks;
  }
  const bool keeps_last = (step.chosen[row * words + last_block / 32] >> last_block % 32 & 1) != 0;
  const int64_t hidden = per_block - (last % step.block_size) / step.tile - 1;
  return blocks * per_block - (keeps_last ? hidden : 0);
}

}  // namespace ringleader::kernels
