// What forward and the deterministic dQ visit, which hold queries and walk the keys that these
// attend to: work items and tiles.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/sm90/ptx/sync.cuh"
#include "kernels/sm90/ptx/wgmma.cuh"
#include "kernels/sm90/walk/column_walk.cuh"
#include "kernels/sm90/walk/diagonal_walk.cuh"
#include "kernels/sm90/walk/interval_walk.cuh"
#include "kernels/sm90/walk/tile_step.cuh"
#include "kernels/sm90/walk/tile_walk.cuh"
#include "kernels/sm90/warpgroup/fragment.cuh"

namespace ringleader::kernels::sm90 {

// A block of queries of one head, or of two neighbours.
struct ForwardItem {
  int32_t head;  // the first; -1: no more work
  int32_t block;
};

// Blocks of a KV group are adjacent, so that its keys stay in L2; within the group late blocks,
// which have the most keys in every causal pattern, come first.
__device__ __forceinline__ ForwardItem ForwardItemAt(int32_t heads, int32_t kv_heads,
                                                     int32_t blocks, int32_t index) {
  const int32_t group = heads / kv_heads;
  const int32_t kv_head = index / (group * blocks);
  if (kv_head >= kv_heads) return {-1, 0};
  const int32_t in_group = index - kv_head * group * blocks;
  return {kv_head * group + in_group % group, blocks - 1 - in_group / group};
}

// The same with a part of the keys.
struct GroupItem : ForwardItem {
  int32_t part;
};

// All blocks of a KV group have one part of its keys, then all have the next one. kHeads of an
// item.
template <int kHeads>
__device__ __forceinline__ GroupItem GroupItemAt(int32_t heads, int32_t kv_heads, int32_t blocks,
                                                 int32_t parts, int32_t index) {
  const int32_t items = heads / kHeads / kv_heads * blocks;
  const int32_t kv_head = index / (items * parts), part = index / items - kv_head * parts;
  ForwardItem item = ForwardItemAt(heads / kHeads, kv_heads, blocks,
                                   index - (kv_head * (parts - 1) + part) * items);
  if (item.head > 0) item.head *= kHeads;
  return {item, part};
}

template <WalkKind kKind>
using ItemOf = std::conditional_t<kHasGroups<kKind>, GroupItem, ForwardItem>;

template <int kHeadDim, WalkKind kKind>
struct ForwardTile {
  // Where the tiles of two consumers are not the same, each has a producer, a ring of stages and
  // items of its own.
  static constexpr int kPipelines =
      kHasLists64<kKind> || kKind == WalkKind::kDiagonals64 || kKind == WalkKind::kGroups64 ? 2 : 1;
  static constexpr int kConsumers = 2 / kPipelines;  // of a pipeline
  static constexpr int kThreads = 3 * ptx::kWarpgroupThreads;
  // Of an item: where there are two heads, a consumer has all queries of one.
  static constexpr int kHeads = kOfPairs<kKind> ? 2 : 1;
  static constexpr int kQueries = 64 * kConsumers / kHeads;
  static constexpr int kKeys =
      kKind == WalkKind::kPairGroups64 ? 64 : 64 * kConsumers;  // of a stage
  static constexpr int kQueryBytes = kQueries * kHeadDim * 2;   // of a head
  static constexpr int kKeyBytes = kKeys * kHeadDim * 2;
  // Bytes between the 64-column halves of a tile, and between eight keys and the next: a group of
  // keys lies as one copy brings it.
  static constexpr int kQueryBlock = kQueries * ptx::kSwizzleRowBytes;
  static constexpr int kKeyBlock =
      kHasGroups<kKind> ? ptx::kSwizzleAtomBytes : kKeys * ptx::kSwizzleRowBytes;
  static constexpr int kKeyAtom = ptx::kSwizzleAtomBytes * (kHasGroups<kKind> ? kHeadDim / 64 : 1);
};

// What the producer tells the consumers about a stage.
struct ForwardStep {
  // Describes all queries and keys. One address for both consumers keeps the compiler's view of the
  // main loop uniform, which is worth 5 to 7 % of the time.
  TileStep all;
  TileStep quarter[2][2];  // WalkKind::kTiles64: by consumer and tile
  // kColumns, kHasGroups: a bit a key. Where queries chose blocks: by consumer, a bit a query.
  uint32_t visible[2][kColumnWords];
  // Where there are documents: how many of each consumer's 64 queries see what `visible` says; else
  // the first of the item's local queries, and the positions of the tiles' first keys.
  int32_t rows[2];
  int32_t first_query;
  int32_t first_key[2];
};

// Groups of keys that make a stage.
template <WalkKind kKind>
inline constexpr int kStageGroups = (kKind == WalkKind::kPairGroups128 ? 128 : 64) / kGroupKeys;

template <int kSlots>
struct GroupStep : ForwardStep {
  int32_t groups[kSlots];  // the owner's local groups; -1: none
};
// Of kTokens queries and keys; of each query what KeyBounds says, where not all is visible.
template <int kTokens>
struct IntervalStep {
  TileStep all;
  uint32_t bounds[kTokens];
};

template <WalkKind kKind>
using StepOf = std::conditional_t<
    kHasIntervals<kKind>, IntervalStep<kKind == WalkKind::kIntervals128 ? 128 : 64>,
    std::conditional_t<kHasGroups<kKind>, GroupStep<kStageGroups<kKind>>, ForwardStep>>;

// The tiles of an item, in ascending order. Next and Describe are called by a whole warp, of which
// the first kDescribers lanes write the step; each of them announces what it wrote by itself.
template <WalkKind kKind, bool kDocuments>
class ForwardTiles;

// One tile of kTokens queries and keys a stage.
template <int kTokens, bool kDocuments,
          typename Walker = TileWalker<WalkDirection::kAlongRow, kDocuments>>
class SingleTiles {
 public:
  static constexpr int kDescribers = 1;
  __device__ SingleTiles(const TileWalk& walk, const ColumnWalk&, const ForwardItem& item)
      : walk_(walk), row_(item.block), walker_(walk, item.head, item.block) {}
  __device__ TileRef Next() { return {walker_.Next(), 0}; }
  __device__ void Describe(ForwardStep& step, const TileRef& tile, bool last) const {
    if (threadIdx.x % 32 != 0) return;
    step.all = MakeTileStep<kDocuments>(walk_, row_, tile.index, 0, 0, kTokens, kTokens, last);
    if constexpr (kDocuments) {
      step.first_query = row_ * kTokens;
      step.first_key[0] = walk_.FirstKey(tile.index);
    }
  }

 private:
  const TileWalk& walk_;
  int32_t row_;
  Walker walker_;
};

template <bool kDocuments>
class ForwardTiles<WalkKind::kTiles128, kDocuments> : public SingleTiles<128, kDocuments> {
  using ForwardTiles::SingleTiles::SingleTiles;
};
template <bool kDocuments>
class ForwardTiles<WalkKind::kLists64, kDocuments> : public SingleTiles<64, kDocuments> {
  using ForwardTiles::SingleTiles::SingleTiles;
};
template <bool kDocuments>
class ForwardTiles<WalkKind::kDiagonals64, kDocuments>
    : public SingleTiles<64, kDocuments, DiagonalWalker<kDocuments>> {
  using ForwardTiles::SingleTiles::SingleTiles;
};

// The same where queries chose blocks.
template <int kTokens, bool kDocuments>
class ChosenTiles : public SingleTiles<kTokens, kDocuments> {
  using Base = SingleTiles<kTokens, kDocuments>;

 public:
  __device__ ChosenTiles(const TileWalk& walk, const ColumnWalk& columns, const ForwardItem& item)
      : Base(walk, columns, item), walk_(walk), item_(item) {}
  __device__ void Describe(ForwardStep& step, const TileRef& tile, bool last) const {
    Base::Describe(step, tile, last);
    if (threadIdx.x % 32 != 0) return;
    constexpr int kWords = kTokens / 32;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const uint32_t word = walk_.ChosenBy(item_.head, tile.index, item_.block * kWords + i);
      step.visible[i / 2][i % 2] = word;
      if (word != 0xFFFFFFFFu) step.all.masked = true;
    }
  }

 private:
  const TileWalk& walk_;
  ForwardItem item_;
};

template <bool kDocuments>
class ForwardTiles<WalkKind::kChosen128, kDocuments> : public ChosenTiles<128, kDocuments> {
  using ForwardTiles::ChosenTiles::ChosenTiles;
};
template <bool kDocuments>
class ForwardTiles<WalkKind::kChosen64, kDocuments> : public ChosenTiles<64, kDocuments> {
  using ForwardTiles::ChosenTiles::ChosenTiles;
};

// The same where a query attends to intervals of keys.
template <int kTokens>
class IntervalTiles {
 public:
  static constexpr int kDescribers = 32;
  __device__ IntervalTiles(const TileWalk& walk, const ColumnWalk&, const ForwardItem& item)
      : walk_(walk), row_(item.block), walker_(walk, item.head, item.block) {}
  __device__ TileRef Next() { return walker_.Next(); }
  __device__ void Describe(IntervalStep<kTokens>& step, const TileRef& tile, bool last) const {
    const bool masked = tile.bits == 0 && WriteBounds<kTokens>(step.bounds, walk_, row_ * kTokens,
                                                               tile.index * kTokens);
    if (threadIdx.x % 32 == 0) {
      step.all = {.diagonal = 0, .window = 0, .keys = kTokens, .masked = masked, .last = last};
    }
  }

 private:
  const TileWalk& walk_;
  int32_t row_;
  IntervalWalker walker_;
};

template <>
class ForwardTiles<WalkKind::kIntervals128, false> : public IntervalTiles<128> {
  using IntervalTiles::IntervalTiles;
};
template <>
class ForwardTiles<WalkKind::kIntervals64, false> : public IntervalTiles<64> {
  using IntervalTiles::IntervalTiles;
};

// Two tiles that follow each other in the union of two rows' tiles.
struct TilePair {
  int32_t index;   // -1 at the end
  int32_t second;  // -1: the union ends with the first
  uint32_t bits;   // 2 * i + r: tile i is active in row r
};

// Two tiles of 64 keys a stage, which two rows of 64 queries share.
template <bool kDocuments>
class ForwardTiles<WalkKind::kTiles64, kDocuments> {
 public:
  static constexpr int kDescribers = 4;
  __device__ ForwardTiles(const TileWalk& walk, const ColumnWalk&, const ForwardItem& item)
      : walk_(walk), pair_(item.block), walker_(walk, item.head, item.block) {}
  __device__ TilePair Next() {
    const TileRef first = walker_.Next();
    const TileRef second = first.index < 0 ? first : walker_.Next();
    return {first.index, second.index, first.bits | second.bits << 2};
  }
  __device__ void Describe(ForwardStep& step, const TilePair& tiles, bool last) const {
    const int lane = threadIdx.x % 32, row = lane % 2, tile = lane / 2;
    bool masked = false;
    if (lane < kDescribers) {
      const TileStep quarter =
          tiles.bits >> lane & 1
              ? MakeTileStep<kDocuments>(walk_, 2 * pair_ + row,
                                         tile == 0 ? tiles.index : tiles.second, 0, 0, 64, 64, last)
              : HiddenTileStep(last);
      step.quarter[row][tile] = quarter;
      masked = quarter.masked;
    }
    if (kDocuments && lane == 0) {
      step.first_query = pair_ * 128;
      step.first_key[0] = walk_.FirstKey(tiles.index);
      step.first_key[1] = walk_.FirstKey(max(tiles.second, 0));
    }
    masked = __any_sync(0xFFFFFFFFu, masked);
    if (lane == 0)
      step.all = {.diagonal = 0, .window = 0, .keys = 128, .masked = masked, .last = last};
  }

 private:
  const TileWalk& walk_;
  int32_t pair_;
  PairWalker<WalkDirection::kAlongRow, kDocuments> walker_;
};

template <bool kDocuments>
class ForwardTiles<WalkKind::kColumns, kDocuments> {
 public:
  static constexpr int kDescribers = 1;
  __device__ ForwardTiles(const TileWalk& walk, const ColumnWalk& columns, const ForwardItem& item)
      : walk_(walk), columns_(columns), item_(item) {
    tiles_ = (columns.counts[item.head] + kColumnTile - 1) / kColumnTile;
    rows_ = 128 >> walk.tile_log2;
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
      // Where tiles have 128 tokens, both consumers are in the same one.
      const uint32_t word = __shfl_sync(0xFFFFFFFFu, tile.bits, i % (rows_ * kColumnWords));
      if (lane == 0) step.visible[i / kColumnWords][i % kColumnWords] = word;
      masked |= word != 0xFFFFFFFFu;
    }
    for (int i = 0; kDocuments && i < 2; ++i) {
      const int32_t rows = QueriesOfFirstDocument(walk_, item_.block * 128 + i * 64);
      if (lane == 0) step.rows[i] = rows;
      masked |= rows < 64;
    }
    if (lane == 0) step.all = ColumnTileStep(masked, last);
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

// Stages of kStageGroups groups that one tile of 64 queries chose. A TileRef's bits are the group
// of the lane's slot, lane % kSlots.
template <WalkKind kKind, bool kDocuments>
requires(kHasGroups<kKind>) class ForwardTiles<kKind, kDocuments> {
 public:
  static constexpr int kSlots = kStageGroups<kKind>;
  static constexpr int kDescribers = 1;
  __device__ ForwardTiles(const TileWalk& walk, const ColumnWalk&, const GroupItem& item)
      : walk_(walk), first_query_(item.block * 64) {
    const int64_t row =
        static_cast<int64_t>(item.head / walk.list_head) * walk.query_tiles + item.block;
    next_ = walk.list_offsets[row];
    end_ = walk.list[row];
    groups_ = reinterpret_cast<const int32_t*>(walk.diagonals) + row * walk.diagonal_words;
    if (walk.part_groups() > 0) {
      if (item.part > 0) SkipBelow(item.part * walk.part_groups());
      limit_ = (item.part + 1) * walk.part_groups();
    }
    Fetch();
  }
  __device__ TileRef Next() {
    const int32_t group = fetched_;
    Fetch();
    // They ascend: where the first one lies beyond the limit, all do.
    if (__shfl_sync(0xFFFFFFFFu, group, 0) >= limit_) return {-1, 0};
    return {0, static_cast<uint32_t>(group < limit_ ? group : -1)};
  }
  // All keys of a group lie before the queries, so that documents alone hide some: of the group in
  // which the first query's document starts those before it, and all from queries of later
  // documents.
  __device__ void Describe(GroupStep<kSlots>& step, const TileRef& tile, bool last) const {
    constexpr uint32_t kAll = (1u << kGroupKeys) - 1;
    const int lane = threadIdx.x % 32;
    const int32_t group = static_cast<int32_t>(tile.bits);
    uint32_t visible = group < 0 ? 0 : kAll;
    int32_t rows = 64;
    if constexpr (kDocuments) {
      const int32_t before =
          walk_.DocumentStart(first_query_) - walk_.key_map.Position(max(group, 0) * kGroupKeys);
      if (before > 0) visible &= before < kGroupKeys ? kAll << before : 0;
      rows = QueriesOfFirstDocument(walk_, first_query_);
    }
    visible <<= lane % 4 * kGroupKeys;
    visible |= __shfl_sync(0xFFFFFFFFu, visible, lane ^ 1);
    visible |= __shfl_sync(0xFFFFFFFFu, visible, lane ^ 2);
    const bool masked = __ballot_sync(0xFFFFFFFFu, visible != 0xFFFFFFFFu) != 0 || rows < 64;
#pragma unroll
    for (int word = 0; word < kSlots / 4; ++word) {
      const uint32_t of_word = __shfl_sync(0xFFFFFFFFu, visible, 4 * word);
      if (lane == 0) step.visible[0][word] = of_word;
    }
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      const int32_t other = __shfl_sync(0xFFFFFFFFu, group, i);
      if (lane == 0) step.groups[i] = other;
    }
    if (lane != 0) return;
    step.rows[0] = rows;
    step.all = ColumnTileStep(masked, last);
  }

 private:
  // Starts to read the group of the lane's slot that comes after the next one.
  __device__ __forceinline__ void Fetch() {
    const int32_t i = next_ + static_cast<int32_t>(threadIdx.x % kSlots);
    fetched_ = i < end_ ? groups_[i] : INT32_MAX;
    next_ += kSlots;
  }
  // Moves next_ to the first group from `least` on. Each turn leaves one of 32 pieces.
  __device__ __forceinline__ void SkipBelow(int32_t least) {
    int32_t end = end_;
    while (next_ < end) {
      const int32_t piece = (end - next_ + 31) / 32,
                    first = next_ + static_cast<int32_t>(threadIdx.x % 32) * piece;
      const int32_t below =
          __popc(__ballot_sync(0xFFFFFFFFu, first < end && groups_[first] < least));
      if (below == 0) return;
      end = min(end, next_ + below * piece);
      next_ += (below - 1) * piece + 1;
    }
  }

  const TileWalk& walk_;
  int32_t first_query_;
  int32_t next_;
  int32_t end_;
  int32_t limit_ = INT32_MAX;  // of the groups
  int32_t fetched_;
  const int32_t* groups_;
};

}  // namespace ringleader::kernels::sm90
