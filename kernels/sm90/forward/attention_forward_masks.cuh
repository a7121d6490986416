// Which scores of a stage are visible to a consumer of forward or of the deterministic dQ.
#pragma once

#include <cstdint>

#include "kernels/sm90/forward/attention_forward_tiles.cuh"
#include "kernels/sm90/walk/interval_walk.cuh"
#include "kernels/sm90/walk/tile_step.cuh"
#include "kernels/sm90/walk/tile_walk.cuh"
#include "kernels/sm90/warpgroup/fragment.cuh"

namespace ringleader::kernels::sm90 {

// scores[64 queries, 64 keys] of the queries from `first_row` and the keys from `first_key` of what
// `step` describes: -infinity where nothing is visible.
__device__ __forceinline__ void MaskRows(float* scores, const TileStep& step, int first_row,
                                         int first_key) {
  const int row = first_row + FragmentRow();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int end = row + half * 8 + step.diagonal + 1;
    const uint32_t visible = ColumnsBelow(min(static_cast<int>(step.keys), end) - first_key) &
                             ~ColumnsBelow(end - step.window - first_key);
    HideColumns(scores, half, visible);
  }
}

// The same where keys, the first of which is at position `first_key`, are of another document than
// a query; of the 64 local queries from `first_query`.
__device__ __forceinline__ void MaskRowDocuments(float* scores, const TileWalk& walk,
                                                 int32_t first_query, int32_t first_key) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t start = walk.DocumentStart(first_query + FragmentRow() + half * 8);
    HideColumns(scores, half, ~ColumnsBelow(start - first_key));
  }
}

// The same by a bit a key, for 64 queries of which those of their tile's first document all see the
// same columns, and the others none.
template <bool kDocuments, int kScores>
__device__ __forceinline__ void MaskRowColumns(float (&scores)[kScores], const ForwardStep& step,
                                               int consumer) {
  const int quad = threadIdx.x % 4;
#pragma unroll
  for (int w = 0; w < kScores / 16; ++w) {
    const uint32_t word = step.visible[consumer][w] >> (2 * quad);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int column = i / 4 * 8 + i % 2;
      if (!(word >> column & 1)) scores[16 * w + i] = -INFINITY;
    }
  }
  if constexpr (kDocuments) {
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      if (FragmentRow() + i / 2 % 2 * 8 >= step.rows[consumer]) scores[i] = -INFINITY;
    }
  }
}

// The same where queries, of which `chosen` has a bit each, did not choose the keys' block.
template <int kScores>
__device__ __forceinline__ void MaskChosenRows(float (&scores)[kScores], const uint32_t* chosen) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = FragmentRow() + half * 8;
    if (chosen[row / 32] >> (row % 32) & 1) continue;
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) scores[i / 2 * 4 + half * 2 + i % 2] = -INFINITY;
  }
}

// The same by intervals of keys, of which each of the 64 queries has bounds.
template <int kScores>
__device__ __forceinline__ void MaskRowIntervals(float (&scores)[kScores], const uint32_t* bounds) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t row = bounds[FragmentRow() + half * 8];
#pragma unroll
    for (int i = 0; i < kScores / 32; ++i) {
      // Bounds ascend: what lies below an odd number of them, counted from above, is visible.
      uint32_t visible = 0;
#pragma unroll
      for (int bound = 0; bound < 4; ++bound) visible ^= ColumnsBelow(Bound(row, bound) - 64 * i);
      HideColumns(scores + 32 * i, half, visible);
    }
  }
}

// All scores of a consumer in a stage: those that are not visible become -infinity.
template <WalkKind kKind, bool kDocuments, int kScores>
__device__ __forceinline__ void MaskStage(float (&scores)[kScores], const TileWalk& walk,
                                          const StepOf<kKind>& step, int consumer) {
  if constexpr (kHasIntervals<kKind>) {
    MaskRowIntervals(scores, step.bounds + consumer * 64);
  } else if constexpr (kHasGroups<kKind>) {
    MaskRowColumns<kDocuments>(scores, step, 0);  // both consumers', where there are two
  } else if constexpr (kKind == WalkKind::kColumns) {
    MaskRowColumns<kDocuments>(scores, step, consumer);
  } else {
    constexpr bool kPairs = kKind == WalkKind::kTiles64;
#pragma unroll
    for (int i = 0; i < kScores / 32; ++i) {
      if constexpr (kPairs) {
        MaskRows(scores + 32 * i, step.quarter[consumer][i], 0, 0);
      } else {
        MaskRows(scores + 32 * i, step.all, consumer * 64, 64 * i);
      }
      if constexpr (kDocuments) {
        MaskRowDocuments(scores + 32 * i, walk, step.first_query + consumer * 64,
                         kPairs ? step.first_key[i] : step.first_key[0] + 64 * i);
      }
    }
    if constexpr (kHasChoice<kKind>) MaskChosenRows(scores, step.visible[consumer]);
  }
}

}  // namespace ringleader::kernels::sm90
