// What the producer of a kernel tells its consumers about a tile.
#pragma once

#include <cstdint>

#include "kernels/sm90/walk/column_walk.cuh"
#include "kernels/sm90/walk/tile_walk.cuh"

namespace ringleader::kernels::sm90 {

// Describes a part of a tile to a consumer. Pair (query i, key j) of it is visible when
//   j < keys, j - i <= diagonal (causal), and j - i > diagonal - window,
// and where there are documents, position of j >= DocumentStart(i), and where queries chose blocks,
// query i's bit beside the step is set.
struct TileStep {
  int32_t diagonal;  // position of query 0 - position of key 0
  int32_t window;
  int16_t keys;  // that exist; 0: nothing is visible
  bool masked;   // false: every pair is visible
  bool last;     // of the item
};

__device__ __forceinline__ TileStep HiddenTileStep(bool last) {
  return {.diagonal = 0, .window = 0, .keys = 0, .masked = true, .last = last};
}

// The step for a tile of columns. Which pairs are visible stands in bits beside it, one a column.
__device__ __forceinline__ TileStep ColumnTileStep(bool masked, bool last) {
  return {.diagonal = 0, .window = 0, .keys = kColumnTile, .masked = masked, .last = last};
}

constexpr int32_t kUnbounded = kMaxSequenceTokens;

// Describes the part of tile (row, column) that starts at (query_offset, key_offset) and has
// `queries` x `keys`.
template <bool kDocuments>
__device__ __forceinline__ TileStep MakeTileStep(const TileWalk& walk, int32_t row, int32_t column,
                                                 int32_t query_offset, int32_t key_offset,
                                                 int32_t queries, int32_t keys, bool last) {
  TileStep step;
  const int32_t keys_left = walk.key_tokens - (column << walk.tile_log2) - key_offset;
  step.keys = static_cast<int16_t>(max(0, min(keys, keys_left)));
  step.last = last;
  if (walk.pattern == TilePattern::kFull) {
    step.diagonal = kUnbounded;
    step.window = 0x7FFFFFFF;
    step.masked = step.keys < keys;
    return step;
  }
  step.diagonal = walk.FirstQuery(row) + query_offset - walk.FirstKey(column) - key_offset;
  step.window = walk.pattern == TilePattern::kWindow ? walk.window : kUnbounded;
  const int32_t last_query = (row << walk.tile_log2) + query_offset + queries - 1;
  step.masked = step.keys < keys || step.diagonal < keys - 1 ||
                step.diagonal + queries - 1 >= step.window ||
                (kDocuments && walk.FirstKey(column) + key_offset < walk.DocumentStart(last_query));
  return step;
}

}  // namespace ringleader::kernels::sm90
