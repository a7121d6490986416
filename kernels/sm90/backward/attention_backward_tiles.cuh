// What backward attention visits, and in which order: parameters, work items, and the queries that
// attend to a block of keys.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/sm90/walk/column_walk.cuh"
#include "kernels/sm90/walk/interval_walk.cuh"
#include "kernels/sm90/walk/tile_step.cuh"
#include "kernels/sm90/walk/tile_walk.cuh"

namespace ringleader::kernels::sm90 {

constexpr int kBackwardQueries = 64;
constexpr int kBackwardKeys = 128;

// lse (times log2(e)) and delta (times scale) of a block of 64 queries lie together, padded, so
// that one bulk copy brings them. Queries beyond the end and those without keys have lse =
// +infinity: their P is 0.
struct RowStats {
  float lse_log2[kBackwardQueries];
  float scaled_delta[kBackwardQueries];
};

struct BackwardParams {
  TileWalk walk;
  ColumnWalk columns;                   // WalkKind::kColumns
  const RowStats* row_stats = nullptr;  // [heads, query_blocks]
  int32_t heads = 0;
  int32_t kv_heads = 0;
  int32_t heads_per_item = 0;  // of a KV head's group
  int32_t query_blocks = 0;    // of 64
  int32_t list_parts = 1;
  // Lists in parts: the items that are not empty, in order, and beyond them kNoItem.
  const int32_t* items = nullptr;
  float scale = 0;
  float scale_log2 = 0;
  int32_t* next_item = nullptr;
};

// One block of keys and the queries of heads [first_head, end_head) of its group.
struct BackwardItem {
  int32_t kv_head = -1;  // -1: no more work
  int32_t key_block = 0;
  int32_t first_head = 0;
  int32_t end_head = 0;
  bool descending = false;  // WalkKind::kColumns: the walk's direction
  int32_t part = 0;         // of lists in parts, of which an item has one head
};

// Lists (kCsr) may be walked in parts of the queries, all keys for one part before the next: CTAs
// at blocks of keys whose lists differ are soon at different queries, and what lies between them
// has to stay in L2.
template <WalkKind kKind>
inline constexpr bool kMayBeLists = kKind != WalkKind::kTiles64&& kKind != WalkKind::kColumns;

// Early keys, which have the most queries in every causal pattern, first. Tiles go by a few heads
// at a time: items that are short enough keep CTAs near each other in the sequence, so that the
// queries of these heads stay in L2.
//
// Columns have few blocks a head, and the long ones of all heads have to come before the short
// ones. A CTA's first item goes down from the last query, the next one up, and so on: CTAs that
// turn around at their block's first query meet the others there.
template <WalkKind kKind>
__device__ __forceinline__ BackwardItem BackwardItemAt(const BackwardParams& params,
                                                       int32_t index) {
  const int32_t blocks = (params.walk.key_tokens + kBackwardKeys - 1) / kBackwardKeys;
  if (kKind == WalkKind::kColumns) {
    if (index >= blocks * params.heads) return {};
    const int32_t head = index % params.heads;
    const bool descending = index / static_cast<int32_t>(gridDim.x) % 2 == 0;
    return {head, index / params.heads, head, head + 1, descending};
  }
  const int32_t group = params.heads / params.kv_heads;
  const int32_t sets = (group + params.heads_per_item - 1) / params.heads_per_item;
  const int32_t parts = kMayBeLists<kKind> ? params.list_parts : 1;
  const int32_t set = index / blocks / parts;
  const int32_t kv_head = set / sets;
  if (kv_head >= params.kv_heads) return {};
  const int32_t first_head = kv_head * group + set % sets * params.heads_per_item;
  return {kv_head,    index % blocks,
          first_head, min(first_head + params.heads_per_item, (kv_head + 1) * group),
          false,      index / blocks % parts};
}

// What the producer tells the consumers about a stage of queries.
struct alignas(8) BackwardStep {
  TileStep part[2];  // of all keys; tiles of 64: of each consumer's 64
  // WalkKind::kColumns: a bit a key. Where queries chose blocks: a bit a query; kChosen64: of each
  // part.
  uint32_t visible[kColumnWords];
  int32_t head;
  int32_t first_query;
  int32_t queries;  // kColumns, where there are documents: how many of the 64 see `visible`
};

// Where queries attend to intervals of keys: what KeyBounds says of each query and all keys, where
// one of them is hidden.
struct IntervalKeyStep : BackwardStep {
  uint32_t bounds[kBackwardQueries];
};
template <WalkKind kKind>
using KeyStepOf = std::conditional_t<kHasIntervals<kKind>, IntervalKeyStep, BackwardStep>;

// The tiles of one head's queries that attend to one block of keys, in ascending order but for
// columns. Called by a whole warp, of which the first kDescribers lanes write the step; each of
// them announces what it wrote by itself.
template <WalkKind kKind, bool kDocuments>
class BackwardTiles;

template <bool kDocuments>
class BackwardTiles<WalkKind::kTiles128, kDocuments> {
 public:
  static constexpr int kDescribers = 1;
  __device__ BackwardTiles(const BackwardParams& params, int32_t head, const BackwardItem& item)
      : key_block_(item.key_block), walker_(params.walk, head, item.key_block, item.part) {}
  __device__ TileRef Next() { return {walker_.Next(), 0}; }
  // Describes the 64 queries of `head` that start `offset` into the tile, which may be a tile that
  // Next() found before it went on to another head.
  __device__ void Describe(BackwardStep& step, const TileWalk& walk, int32_t /*head*/,
                           const TileRef& tile, int32_t offset, bool last) const {
    if (threadIdx.x % 32 != 0) return;
    step.part[0] = MakeTileStep<kDocuments>(walk, tile.index, key_block_, offset, 0,
                                            kBackwardQueries, 128, last);
  }

 private:
  int32_t key_block_;
  TileWalker<WalkDirection::kAlongColumn, kDocuments> walker_;
};

// Tiles of 64 tokens of two lines, as `Walker` finds them.
template <typename Walker, bool kDocuments>
class BackwardTilePairs {
 public:
  static constexpr int kDescribers = 2;
  __device__ BackwardTilePairs(const BackwardParams& params, int32_t head, const BackwardItem& item)
      : key_block_(item.key_block), walker_(params.walk, head, item.key_block, item.part) {}
  __device__ TileRef Next() { return walker_.Next(); }
  __device__ void Describe(BackwardStep& step, const TileWalk& walk, int32_t /*head*/,
                           const TileRef& tile, int32_t offset, bool last) const {
    const int32_t i = threadIdx.x % 32;
    if (i < kDescribers) {
      step.part[i] = tile.bits >> i & 1
                         ? MakeTileStep<kDocuments>(walk, tile.index, 2 * key_block_ + i, offset, 0,
                                                    64, 64, last)
                         : HiddenTileStep(last);
    }
  }

 private:
  int32_t key_block_;
  Walker walker_;
};

template <bool kDocuments>
class BackwardTiles<WalkKind::kTiles64, kDocuments>
    : public BackwardTilePairs<PairWalker<WalkDirection::kAlongColumn, kDocuments>, kDocuments> {
  using BackwardTiles::BackwardTilePairs::BackwardTilePairs;
};
template <bool kDocuments>
class BackwardTiles<WalkKind::kLists64, kDocuments>
    : public BackwardTilePairs<ListPairWalker<kDocuments>, kDocuments> {
  using BackwardTiles::BackwardTilePairs::BackwardTilePairs;
};

// Where queries chose blocks: what `kListed` visits and, in `kParts` parts, the queries' bits.
template <WalkKind kListed, int kParts, bool kDocuments>
class BackwardChosenTiles : public BackwardTiles<kListed, kDocuments> {
  using Base = BackwardTiles<kListed, kDocuments>;

 public:
  __device__ BackwardChosenTiles(const BackwardParams& params, int32_t head,
                                 const BackwardItem& item)
      : Base(params, head, item), first_column_(item.key_block * kParts) {}
  // The lane that describes a part writes its bits, too.
  __device__ void Describe(BackwardStep& step, const TileWalk& walk, int32_t head,
                           const TileRef& tile, int32_t offset, bool last) const {
    Base::Describe(step, walk, head, tile, offset, last);
    const int32_t part = threadIdx.x % 32;
    if (part >= kParts || (kParts > 1 && !(tile.bits >> part & 1))) return;
    const int32_t first_word = (tile.index * walk.tile() + offset) / 32;
#pragma unroll
    for (int i = 0; i < kBackwardQueries / 32; ++i) {
      const uint32_t word = walk.ChosenBy(head, first_column_ + part, first_word + i);
      step.visible[2 * part + i] = word;
      if (word != 0xFFFFFFFFu) step.part[part].masked = true;
    }
  }

 private:
  int32_t first_column_;
};

template <bool kDocuments>
class BackwardTiles<WalkKind::kChosen128, kDocuments>
    : public BackwardChosenTiles<WalkKind::kTiles128, 1, kDocuments> {
  using BackwardTiles::BackwardChosenTiles::BackwardChosenTiles;
};
template <bool kDocuments>
class BackwardTiles<WalkKind::kChosen64, kDocuments>
    : public BackwardChosenTiles<WalkKind::kLists64, 2, kDocuments> {
  using BackwardTiles::BackwardChosenTiles::BackwardChosenTiles;
};

// Where queries attend to intervals of keys. A TileRef's bits: bit i says whether part i of the
// keys is visited, bit kParts + i whether all its pairs are visible.
template <typename Walker, int kParts>
class BackwardIntervalTiles {
 public:
  static constexpr int kDescribers = 32;
  __device__ BackwardIntervalTiles(const BackwardParams& params, int32_t head,
                                   const BackwardItem& item)
      : first_key_(item.key_block * kBackwardKeys),
        walker_(params.walk, head, item.key_block, item.part) {}
  __device__ TileRef Next() { return walker_.Next(); }
  __device__ void Describe(IntervalKeyStep& step, const TileWalk& walk, int32_t /*head*/,
                           const TileRef& tile, int32_t offset, bool last) const {
    constexpr uint32_t kAllParts = (1u << kParts) - 1;
    const bool partial = (tile.bits & ~(tile.bits >> kParts) & kAllParts) != 0;
    const bool masked =
        partial && WriteBounds<kBackwardQueries>(step.bounds, walk,
                                                 tile.index * walk.tile() + offset, first_key_);
    const int32_t i = threadIdx.x % 32;
    if (i >= kParts) return;
    step.part[i] = tile.bits >> i & 1
                       ? TileStep{.diagonal = 0,
                                  .window = 0,
                                  .keys = kBackwardKeys / kParts,
                                  .masked = masked && !(tile.bits >> kParts >> i & 1),
                                  .last = last}
                       : HiddenTileStep(last);
  }

 private:
  int32_t first_key_;
  Walker walker_;
};

// Queries that attend to a tile of 128 keys.
class IntervalColumnWalker {
 public:
  __device__ IntervalColumnWalker(const TileWalk& walk, int32_t head, int32_t column, int32_t part)
      : walker_(walk, head, column, part) {}
  __device__ TileRef Next() {
    const TileRef tile = walker_.Next();
    return {tile.index, 1 | tile.bits << 1};
  }

 private:
  IntervalWalker walker_;
};

template <>
class BackwardTiles<WalkKind::kIntervals128, false>
    : public BackwardIntervalTiles<IntervalColumnWalker, 1> {
  using BackwardIntervalTiles::BackwardIntervalTiles;
};
template <>
class BackwardTiles<WalkKind::kIntervals64, false>
    : public BackwardIntervalTiles<IntervalPairWalker, 2> {
  using BackwardIntervalTiles::BackwardIntervalTiles;
};

template <bool kDocuments>
class BackwardTiles<WalkKind::kColumns, kDocuments> {
 public:
  static constexpr int kDescribers = 1;
  __device__ BackwardTiles(const BackwardParams& params, int32_t head, const BackwardItem& item)
      : params_(&params), head_(head), key_block_(item.key_block) {
    const int lane = threadIdx.x % 32;
    if (key_block_ * kColumnTile >= params.columns.counts[head]) return;
    const int64_t first_position =
        params.columns.positions[static_cast<int64_t>(head) * params.columns.max_columns +
                                 key_block_ * kColumnTile];
    for (int32_t row = 0; row < params.walk.query_tiles; row += 32) {
      const uint32_t later =
          __ballot_sync(0xFFFFFFFFu, row + lane < params.walk.query_tiles &&
                                         params.walk.FirstQuery(row + lane) > first_position);
      if (later != 0) {
        const int32_t first = row + __ffs(later) - 1;
        left_ = params.walk.query_tiles - first;
        next_ = item.descending ? params.walk.query_tiles - 1 : first;
        step_ = item.descending ? -1 : 1;
        break;
      }
    }
  }
  __device__ TileRef Next() {
    while (left_ > 0) {
      const int32_t row = next_;
      next_ += step_;
      --left_;
      const uint32_t word =
          VisibleColumns<kDocuments>(params_->walk, params_->columns, head_, key_block_, row, 1);
      if (__any_sync(0xFFFFFFFFu, word != 0)) return {row, word};
    }
    return {-1, 0};
  }
  __device__ void Describe(BackwardStep& step, const TileWalk& walk, int32_t /*head*/,
                           const TileRef& tile, int32_t offset, bool last) const {
    const int lane = threadIdx.x % 32;
    bool masked = false;
    for (int i = 0; i < kColumnWords; ++i) {
      const uint32_t word = __shfl_sync(0xFFFFFFFFu, tile.bits, i);
      if (lane == 0) step.visible[i] = word;
      masked |= word != 0xFFFFFFFFu;
    }
    if constexpr (kDocuments) {
      const int32_t queries = QueriesOfFirstDocument(walk, tile.index * walk.tile() + offset);
      if (lane == 0) step.queries = queries;
      masked |= queries < kBackwardQueries;
    }
    if (lane == 0) step.part[0] = ColumnTileStep(masked, last);
  }

 private:
  const BackwardParams* params_;
  int32_t head_;
  int32_t key_block_;
  int32_t next_ = 0;
  int32_t step_ = 1;
  int32_t left_ = 0;
};

}  // namespace ringleader::kernels::sm90
