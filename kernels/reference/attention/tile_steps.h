// The steps that the passes over tiles and over selected columns share: a tile of queries meets a
// tile of packed keys, forward or backward.
#pragma once

#include <cstdint>

#include "kernels/reference/math/tile_math.h"
#include "kernels/reference/tiles/tile_lists.h"
#include "ringleader/kernels/attention.h"

namespace ringleader::kernels::reference {

inline constexpr int kMaxTile = 128;
inline constexpr int kMaxHeadDim = 256;
// Rows of scores that are in flight at once: 128 of them stay in the second-level cache.
inline constexpr int kScoreRows = 64;
inline constexpr float kLog2E = 1.44269504088896340736f;
inline constexpr float kLn2 = 0.69314718055994530942f;

// Packed keys and values of up to kMaxTile consecutive keys, all padded to whole panels.
struct KeyTile {
  int tokens = 0;
  int d = 0;
  const float* keys_t = nullptr;    // PackTransposed
  const float* values = nullptr;    // PackPanels; forward
  const float* values_t = nullptr;  // PackTransposed; backward
  const float* keys = nullptr;      // PackPanels; backward
};

inline constexpr uint32_t kAllGroups = ~0u;

// Which pairs of a query tile and a key tile attend.
struct PairMask {
  enum class Kind { kNone, kBand, kKeys, kIntervals } kind = Kind::kNone;
  PositionBand band = {};   // kBand
  int64_t first_query = 0;  // position; kBand
  int64_t first_key = 0;    // position; kBand, kIntervals
  // kBand, where documents are packed: the position of each row's first visible key, ascending;
  // null: no bound.
  const int32_t* starts = nullptr;
  // kBand, where queries chose blocks: bit i % 32 of word i / 32 says whether row i sees the tile.
  const uint32_t* seen_by = nullptr;
  // kBand: bit j / kGroupKeys says whether the rows see key j.
  uint32_t groups = kAllGroups;
  const float* bias = nullptr;              // kKeys: [padded keys], 0 or -infinity
  int rows = kMaxTile;                      // kKeys: rows from here on see no key
  const KeyIntervals* intervals = nullptr;  // kIntervals: of each row
};

// A tile of queries on its way through its keys. Rows are tokens.
struct ForwardState {
  int rows = 0;
  int d_padded = 0;
  const float* q = nullptr;  // [rows, d], times scale * log2(e)
  float* scores = nullptr;   // [kScoreRows, kMaxTile]
  float* out = nullptr;      // [rows, d_padded], not normalised
  float* maximum = nullptr;  // [rows], base 2; -infinity before the first key
  float* sum = nullptr;      // [rows]
};
void ForwardStep(const TileMath& math, const ForwardState& state, const KeyTile& key,
                 const PairMask& mask);

// Merges a finished tile into out and lse (kernels/attention.h) and leaves rows without keys alone.
void MergeRows(const ForwardState& state, int d, float* out, int64_t out_stride, float* lse);

// A tile of queries as backward reads it.
struct BackwardQueries {
  int rows = 0;
  const float* q = nullptr;         // [rows, d], times scale * log2(e)
  const float* q_panels = nullptr;  // PackPanels of it
  const float* d_out = nullptr;     // [rows, d]
  const float* d_out_panels = nullptr;
  const float* lse2 = nullptr;   // [rows], base 2; +infinity for rows without keys
  const float* delta = nullptr;  // [rows]
};
struct BackwardScratch {
  float* p = nullptr;   // [kScoreRows, kMaxTile]
  float* dp = nullptr;  // [kScoreRows, kMaxTile]
};
// dk and dv: [padded keys, d_padded], added to; dk in units of 1 / log2(e).
// dq: [rows, d_padded], overwritten, without the scale.
void BackwardStep(const TileMath& math, const BackwardQueries& queries, const KeyTile& key,
                  const PairMask& mask, const BackwardScratch& scratch, float* dq, float* dk,
                  float* dv);

}  // namespace ringleader::kernels::reference
