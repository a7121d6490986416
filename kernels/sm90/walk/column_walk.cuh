// Selected columns on the device, and which of them queries see.
#pragma once

#include <cstdint>

#include "kernels/sm90/walk/tile_walk.cuh"

namespace ringleader::kernels::sm90 {

// ColumnSelection on the device; columns lie in dense rows of their head, 128 a tile.
struct ColumnWalk {
  const int64_t* positions = nullptr;
  const int32_t* counts = nullptr;
  int32_t max_columns = 0;
};

constexpr int32_t kColumnTile = 128;
constexpr int32_t kColumnWords = kColumnTile / 32;

#if defined(__CUDACC__)

// Which columns of a tile the queries of one tile see: those before it, in the document of its
// first query, that no active diagonal covers. That is the same for all queries of the tile that
// are in this document, since the diagonal block is always covered: one bit a column; the others
// see none (see QueriesOfFirstDocument). Lane i holds word i % 4 of the answer for query tile i / 4
// of the two given.
template <bool kDocuments>
__device__ __forceinline__ uint32_t VisibleColumns(const TileWalk& walk, const ColumnWalk& columns,
                                                   int32_t head, int32_t column_tile,
                                                   int32_t first_row, int32_t rows) {
  const int lane = threadIdx.x % 32;
  const int32_t count = columns.counts[head];
  const int64_t* const positions =
      columns.positions + static_cast<int64_t>(head) * columns.max_columns;
  int32_t position[kColumnWords], key_block[kColumnWords];  // no column: beyond all rows
#pragma unroll
  for (int i = 0; i < kColumnWords; ++i) {
    const int32_t column = column_tile * kColumnTile + i * 32 + lane;
    position[i] = column < count ? static_cast<int32_t>(positions[column]) : kMaxSequenceTokens;
    key_block[i] = position[i] >> walk.tile_log2;
  }
  uint32_t word = 0;
  for (int r = 0; r < rows; ++r) {
    const int32_t row = first_row + r;
    const int32_t query_block = row < walk.query_tiles ? walk.FirstQuery(row) >> walk.tile_log2 : 0;
    const int32_t start = kDocuments ? walk.TileDocumentStart(row) : 0;
    bool visible[kColumnWords];
#pragma unroll
    for (int i = 0; i < kColumnWords; ++i) {
      const int32_t delta = query_block - key_block[i];
      visible[i] =
          delta > 0 && !walk.DiagonalIsSet(head, delta) && (!kDocuments || position[i] >= start);
    }
#pragma unroll
    for (int i = 0; i < kColumnWords; ++i) {
      const uint32_t ballot = __ballot_sync(0xFFFFFFFFu, visible[i]);
      if (lane == r * kColumnWords + i) word = ballot;
    }
  }
  return word;
}

// How many of the 64 local queries from `first` on are in the document of the first query of their
// tile: those come first. A document that starts later in the tile starts after all keys of other
// blocks, so its queries see none of them. Called by a whole warp.
__device__ __forceinline__ int32_t QueriesOfFirstDocument(const TileWalk& walk, int32_t first) {
  const int32_t start = walk.TileDocumentStart(first >> walk.tile_log2);
  const int32_t query = first + static_cast<int32_t>(threadIdx.x % 32);
  return __popc(__ballot_sync(0xFFFFFFFFu, walk.DocumentStart(query) == start)) +
         __popc(__ballot_sync(0xFFFFFFFFu, walk.DocumentStart(query + 32) == start));
}

#endif  // __CUDACC__

}  // namespace ringleader::kernels::sm90
