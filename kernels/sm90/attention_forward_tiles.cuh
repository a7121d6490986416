// What kernels visit whose CTAs hold 128 queries of one head (forward, and dQ of the deterministic
// backward): work items, the tiles of keys that their queries attend to, and what is visible in a
// tile of scores.
#pragma once

#include <cstdint>

#include "kernels/sm90/ptx/sync.cuh"
#include "kernels/sm90/ptx/wgmma.cuh"
#include "kernels/sm90/tile_walk.cuh"

namespace ringleader::kernels::sm90 {

constexpr int kForwardQueries = 128;

// 128 queries of one head. Blocks of a KV group are adjacent, so that its keys stay in L2; within
// the group late blocks, which have the most keys in every causal pattern, come first.
struct ForwardItem {
  int32_t head;  // -1: no more work
  int32_t block;
};

__device__ __forceinline__ ForwardItem ForwardItemAt(int32_t heads, int32_t kv_heads,
                                                     int32_t query_tokens, int32_t index) {
  const int32_t group = heads / kv_heads;
  const int32_t blocks = (query_tokens + kForwardQueries - 1) / kForwardQueries;
  const int32_t kv_head = index / (group * blocks);
  if (kv_head >= kv_heads) return {-1, 0};
  const int32_t in_group = index - kv_head * group * blocks;
  return {kv_head * group + in_group % group, blocks - 1 - in_group / group};
}

template <int kHeadDim, WalkKind kKind>
struct ForwardTile {
  static constexpr int kKeys = kKind == WalkKind::kTiles64 ? 64 : 128;
  // As many as shared memory holds beside two query blocks, up to four of 128 keys.
  static constexpr int kStages = (kHeadDim == 128 ? 2 : 4) * 128 / kKeys;
  static constexpr int kConsumers = 2;
  static constexpr int kThreads = (kConsumers + 1) * ptx::kWarpgroupThreads;
  static constexpr int kQueryBytes = kForwardQueries * kHeadDim * 2;
  static constexpr int kKeyBytes = kKeys * kHeadDim * 2;
  // Bytes between the 64-column halves of a tile.
  static constexpr int kQueryBlock = kForwardQueries * ptx::kSwizzleRowBytes;
  static constexpr int kKeyBlock = kKeys * ptx::kSwizzleRowBytes;
};

// What the consumers learn of a stage.
struct ForwardStep {
  // Of all queries; WalkKind::kTiles64: of each consumer's 64. One address for both consumers keeps
  // the compiler's view of the main loop uniform, which is worth 5 to 7 % of the time.
  TileStep part[2];
  uint32_t visible[2][kColumnWords];  // WalkKind::kColumns: a bit a key
  // Where there are documents: how many of each consumer's 64 queries see them (kColumns); else the
  // first of the item's local queries, and the position of the tile's first key.
  int32_t rows[2];
  int32_t first_query;
  int32_t first_key;
};

// The tiles of an item, in ascending order. Next and Describe are called by a whole warp.
template <WalkKind kKind, bool kDocuments>
class ForwardTiles;

template <bool kDocuments>
class ForwardTiles<WalkKind::kTiles128, kDocuments> {
 public:
  __device__ ForwardTiles(const TileWalk& walk, const ColumnWalk&, const ForwardItem& item)
      : walk_(walk), row_(item.block), walker_(walk, item.head, item.block) {}
  __device__ TileRef Next() { return {walker_.Next(), 0}; }
  __device__ void Describe(ForwardStep& step, const TileRef& tile, bool last) const {
    if (threadIdx.x % 32 != 0) return;
    step.part[0] =
        MakeTileStep<kDocuments>(walk_, row_, tile.index, 0, 0, kForwardQueries, 128, last);
    if constexpr (!kDocuments) return;
    step.first_query = row_ * kForwardQueries;
    step.first_key = walk_.FirstKey(tile.index);
  }

 private:
  const TileWalk& walk_;
  int32_t row_;
  TileWalker<WalkDirection::kAlongRow, kDocuments> walker_;
};

template <bool kDocuments>
class ForwardTiles<WalkKind::kTiles64, kDocuments> {
 public:
  __device__ ForwardTiles(const TileWalk& walk, const ColumnWalk&, const ForwardItem& item)
      : walk_(walk), pair_(item.block), walker_(walk, item.head, item.block) {}
  __device__ TileRef Next() { return walker_.Next(); }
  __device__ void Describe(ForwardStep& step, const TileRef& tile, bool last) const {
    if (threadIdx.x % 32 != 0) return;
    for (int i = 0; i < 2; ++i) {
      if (tile.bits >> i & 1) {
        step.part[i] =
            MakeTileStep<kDocuments>(walk_, 2 * pair_ + i, tile.index, 0, 0, 64, 64, last);
      } else {
        step.part[i] = HiddenTileStep(last);
      }
    }
    if constexpr (!kDocuments) return;
    step.first_query = pair_ * kForwardQueries;
    step.first_key = walk_.FirstKey(tile.index);
  }

 private:
  const TileWalk& walk_;
  int32_t pair_;
  PairWalker<WalkDirection::kAlongRow, kDocuments> walker_;
};

template <bool kDocuments>
class ForwardTiles<WalkKind::kColumns, kDocuments> {
 public:
  __device__ ForwardTiles(const TileWalk& walk, const ColumnWalk& columns, const ForwardItem& item)
      : walk_(walk), columns_(columns), item_(item) {
    tiles_ = (columns.counts[item.head] + kColumnTile - 1) / kColumnTile;
    rows_ = kForwardQueries >> walk.tile_log2;
    last_query_ = walk.LastQuery(min(item.block * rows_ + rows_, walk.query_tiles) - 1);
  }
  __device__ TileRef Next() {
    while (next_ < tiles_) {
      const int32_t tile = next_++;
      const int64_t* const positions =
          columns_.positions + static_cast<int64_t>(item_.head) * columns_.max_columns;
      if (positions[tile * kColumnTile] > last_query_) break;  // so are all that follow
      const uint32_t word =
          VisibleColumns<kDocuments>(walk_, columns_, item_.head, tile, item_.block * rows_, rows_);
      if (__any_sync(0xFFFFFFFFu, word != 0)) return {tile, word};
    }
    return {-1, 0};
  }
  __device__ void Describe(ForwardStep& step, const TileRef& tile, bool last) const {
    const int lane = threadIdx.x % 32;
    bool masked = false;
    for (int i = 0; i < 2 * kColumnWords; ++i) {
      // With tiles of 128 both consumers are in the same one.
      const uint32_t word = __shfl_sync(0xFFFFFFFFu, tile.bits, i % (rows_ * kColumnWords));
      if (lane == 0) step.visible[i / kColumnWords][i % kColumnWords] = word;
      masked |= word != 0xFFFFFFFFu;
    }
    for (int i = 0; kDocuments && i < 2; ++i) {
      const int32_t rows = QueriesOfFirstDocument(walk_, item_.block * kForwardQueries + i * 64);
      if (lane == 0) step.rows[i] = rows;
      masked |= rows < 64;
    }
    if (lane == 0) {
      TileStep part = {};
      part.keys = kColumnTile;
      part.masked = masked;
      part.last = last;
      step.part[0] = part;
    }
  }

 private:
  const TileWalk& walk_;
  const ColumnWalk& columns_;
  ForwardItem item_;
  int32_t tiles_;
  int32_t rows_;
  int32_t last_query_;
  int32_t next_ = 0;
};

// scores[64 queries, kKeys] of the queries from `first_row` of what `step` describes: -infinity
// where nothing is visible.
template <int kKeys>
__device__ __forceinline__ void MaskRows(float (&scores)[kKeys / 2], const TileStep& step,
                                         int first_row) {
  const int lane = threadIdx.x % 32;
  const int row = first_row + (threadIdx.x % 128) / 32 * 16 + lane / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int end = min(static_cast<int>(step.keys), row + half * 8 + step.diagonal + 1);
    const int begin = row + half * 8 + step.diagonal - step.window + 1;
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
      for (int low = 0; low < 2; ++low) {
        const int column = 8 * j + 2 * (lane % 4) + low;
        if (column >= end || column < begin) scores[4 * j + 2 * half + low] = -INFINITY;
      }
    }
  }
}

// The same where keys are of another document than a query; of the consumer's 64 queries.
template <int kKeys>
__device__ __forceinline__ void MaskRowDocuments(float (&scores)[kKeys / 2], const TileWalk& walk,
                                                 const ForwardStep& step, int consumer) {
  const int lane = threadIdx.x % 32;
  const int row = consumer * 64 + (threadIdx.x % 128) / 32 * 16 + lane / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int begin = walk.DocumentStart(step.first_query + row + half * 8) - step.first_key;
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
      for (int low = 0; low < 2; ++low) {
        if (8 * j + 2 * (lane % 4) + low < begin) scores[4 * j + 2 * half + low] = -INFINITY;
      }
    }
  }
}

// The same by a bit a key, for 64 queries of which those of their tile's first document all see the
// same columns, and the others none.
template <int kKeys, bool kDocuments>
__device__ __forceinline__ void MaskRowColumns(float (&scores)[kKeys / 2], const TileWalk& walk,
                                               const ForwardStep& step, int consumer) {
  const int quad = threadIdx.x % 4;
#pragma unroll
  for (int w = 0; w < kKeys / 32; ++w) {
    const uint32_t word = step.visible[consumer][w] >> (2 * quad);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int column = i / 4 * 8 + i % 2;
      if (!(word >> column & 1)) scores[16 * w + i] = -INFINITY;
    }
  }
  if constexpr (!kDocuments) return;
  const int row = (threadIdx.x % 128) / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
  for (int i = 0; i < kKeys / 2; ++i) {
    if (row + i / 2 % 2 * 8 >= step.rows[consumer]) scores[i] = -INFINITY;
  }
}

}  // namespace ringleader::kernels::sm90
