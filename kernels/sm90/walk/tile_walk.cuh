// Which tiles a kernel visits, apart from what it does with them. One warp (the producer's) walks a
// row of tiles, all lanes together, 32 candidates at a time; the consumers learn of each tile
// through a TileStep (tile_step.cuh) that travels with its data, so they never see a list.
#pragma once

#include <cstdint>

#include "ringleader/kernels/attention.h"

namespace ringleader::kernels::sm90 {

// Below it, differences of positions and a bound beyond all of them are 32-bit integers.
constexpr int32_t kMaxSequenceTokens = 1 << 30;

// ShardLayout in 32-bit arithmetic.
struct PositionMap {
  LayoutKind kind = LayoutKind::kContiguous;
  int32_t ranks = 1;
  int32_t rank = 0;
  int32_t chunk = 0;  // tokens: the local shard (contiguous), a zigzag chunk or a stripe

  static PositionMap From(const ShardLayout& layout) {
    PositionMap map;
    map.ranks = layout.ranks;
    map.rank = layout.rank;
    map.kind = layout.ranks == 1 ? LayoutKind::kContiguous : layout.kind;
    switch (map.kind) {
      case LayoutKind::kContiguous:
        map.chunk = static_cast<int32_t>(layout.local_tokens());
        break;
      case LayoutKind::kZigzag:
        map.chunk = static_cast<int32_t>(layout.tokens / (2 * layout.ranks));
        break;
      case LayoutKind::kStriped:
        map.chunk = layout.stripe;
        break;
    }
    return map;
  }

  RINGLEADER_HOST_DEVICE int32_t Position(int32_t i) const {
    if (kind == LayoutKind::kContiguous) return rank * chunk + i;
    if (kind == LayoutKind::kZigzag) {
      return i < chunk ? rank * chunk + i : (2 * ranks - 2 - rank) * chunk + i;
    }
    const int32_t stripe = i / chunk;
    return (stripe * ranks + rank) * chunk + (i - stripe * chunk);
  }
};

// TileSelection and layouts as the kernels want them.
struct TileWalk {
  TilePattern pattern = TilePattern::kCausal;
  int32_t tile_log2 = 7;
  int32_t window = 0;
  int32_t query_tokens = 0;
  int32_t key_tokens = 0;
  int32_t query_tiles = 0;
  int32_t key_tiles = 0;
  PositionMap query_map;
  PositionMap key_map;
  // kToeplitz. With a QueryChoice, which goes with kCsr alone, they hold its words and block_size,
  // and `window` the number of the sequence's blocks (SetChoice): fields of its own changed the
  // machine code of instances without a choice.
  const uint64_t* diagonals = nullptr;
  int32_t diagonal_words = 0;
  // The list of the walked direction: by query tile in forward, by key tile in backward.
  // Line l of a head begins in `list` at list_offsets[head * list_head + part * list_part + l] and
  // ends at the offset list_end further: whole, or in parts (list_parts.cuh).
  int32_t list_head = 0, list_part = 0, list_end = 1;
  const int32_t* list_offsets = nullptr;
  const int32_t* list = nullptr;
  const int32_t* document_starts = nullptr;  // by local query

  void SetChoice(const QueryChoice& choice, int64_t tokens) {
    diagonals = reinterpret_cast<const uint64_t*>(choice.chosen);
    diagonal_words = choice.block_size;
    window = static_cast<int32_t>((tokens + choice.block_size - 1) / choice.block_size);
  }

  // kHasGroups, for the same reason: the lists hold where rows of groups begin and end, the
  // diagonals the groups, list_head how many heads have a row in common, `window` how many of the
  // owner's groups an item walks at most; 0: all.
  void SetGroups(const KeyGroups& groups, int32_t part_groups) {
    list_offsets = groups.begins;
    list = groups.ends;
    diagonals = reinterpret_cast<const uint64_t*>(groups.groups);
    diagonal_words = groups.capacity;
    list_head = groups.heads_together;
    window = part_groups;
  }
  RINGLEADER_HOST_DEVICE int32_t part_groups() const { return window; }
  // The parts that this makes of the owner's keys.
  RINGLEADER_HOST_DEVICE int32_t GroupParts() const {
    if (window == 0) return 1;
    return (key_tokens + window * kGroupKeys - 1) / (window * kGroupKeys);
  }

  // WalkKind::kIntervals128 and 64, for the same reason: the diagonals hold the call's mask memory
  // (mask_memory.cuh), `window` where the bits of the walked direction begin, and diagonal_words
  // the words of a line.
  void SetIntervals(const void* memory, int64_t first_bits, int32_t words) {
    diagonals = static_cast<const uint64_t*>(memory);
    window = static_cast<int32_t>(first_bits);
    diagonal_words = words;
  }

#if defined(__CUDACC__)
  __device__ __forceinline__ int32_t tile() const {
    return 1 << tile_log2;
  }
  __device__ __forceinline__ int32_t FirstQuery(int32_t row) const {
    return query_map.Position(row << tile_log2);
  }
  __device__ __forceinline__ int32_t LastQuery(int32_t row) const {
    return query_map.Position(min((row + 1) << tile_log2, query_tokens) - 1);
  }
  __device__ __forceinline__ int32_t FirstKey(int32_t column) const {
    return key_map.Position(column << tile_log2);
  }
  __device__ __forceinline__ int32_t LastKey(int32_t column) const {
    return key_map.Position(min((column + 1) << tile_log2, key_tokens) - 1);
  }

  // Bit i says whether local query 32 * word + i attends to the block of key tile `column`.
  __device__ __forceinline__ uint32_t ChosenBy(int32_t head, int32_t column, int32_t word) const {
    const int32_t words = (query_tokens + 31) / 32;
    if (word >= words) return 0;
    const int32_t blocks = window, block_size = diagonal_words;
    const int64_t row = static_cast<int64_t>(head) * blocks + FirstKey(column) / block_size;
    return reinterpret_cast<const uint32_t*>(diagonals)[row * words + word];
  }

  // Position of the first token of the document of local query `query`; ascends with it.
  // kDocuments.
  __device__ __forceinline__ int32_t DocumentStart(int32_t query) const {
    return document_starts[min(query, query_tokens - 1)];
  }
  __device__ __forceinline__ int32_t TileDocumentStart(int32_t row) const {
    return DocumentStart(row << tile_log2);
  }

  // Whether all keys of the tile lie before what its queries may see: outside the window or the
  // document.
  template <bool kDocuments>
  __device__ __forceinline__ bool LiesBefore(int32_t column, int32_t row) const {
    if (kDocuments && LastKey(column) < TileDocumentStart(row)) return true;
    return pattern == TilePattern::kWindow && FirstQuery(row) - LastKey(column) >= window;
  }
  // Whether queries may see less than all keys up to their own.
  template <bool kDocuments>
  __device__ __forceinline__ bool ForgetsKeys() const {
    return kDocuments || pattern == TilePattern::kWindow;
  }

  // Whether some pair of the tile is visible.
  template <bool kDocuments>
  __device__ __forceinline__ bool Reaches(int32_t row, int32_t column) const {
    if (pattern == TilePattern::kFull) return true;
    if (FirstKey(column) > LastQuery(row)) return false;
    return !LiesBefore<kDocuments>(column, row);
  }

  template <bool kDocuments>
  __device__ __forceinline__ bool Active(int32_t head, int32_t row, int32_t column) const {
    if (!Reaches<kDocuments>(row, column)) return false;
    if (pattern != TilePattern::kToeplitz) return true;
    const int32_t delta = (FirstQuery(row) - FirstKey(column)) >> tile_log2;
    return delta >= 0 && DiagonalIsSet(head, delta);
  }

  __device__ __forceinline__ bool DiagonalIsSet(int32_t head, int32_t delta) const {
    return delta < diagonal_words * 64 &&
           (diagonals[static_cast<int64_t>(head) * diagonal_words + (delta >> 6)] >> (delta & 63) &
            1);
  }
#endif
};

#if defined(__CUDACC__)

enum class WalkDirection { kAlongRow, kAlongColumn };

// What a kernel instance walks. With kDocuments, TileWalk::document_starts bounds what queries see:
// in instances of its own, because as a branch it cost the others up to 11 % (producers of tiles of
// 64, which are short of registers).
enum class WalkKind {
  kTiles128,     // tiles of 128 tokens
  kTiles64,      // tiles of 64: two lines that share most tiles
  kLists64,      // lists of tiles of 64 (kCsr): two lines that share few
  kColumns,      // all tiles of selected columns
  kDiagonals64,  // block diagonals of 64 (kToeplitz), each line by itself; forward alone
  // Lists of tiles (kCsr) of which the queries attend that chose the block.
  kChosen128,
  kChosen64,
  kGroups64,  // groups of keys (KeyGroups) of tiles of 64 queries
  // The same, of tiles of two heads, which have them in common; 128 keys a stage, or 64.
  kPairGroups128,
  kPairGroups64,
  // Tiles in which intervals of keys (TileSelection::intervals) show a pair, and which are listed,
  // if there are lists. What others do with documents, these do with their intervals.
  kIntervals128,
  kIntervals64,
};

template <WalkKind kKind>
inline constexpr bool kHasChoice = kKind == WalkKind::kChosen128 || kKind == WalkKind::kChosen64;
template <WalkKind kKind>
inline constexpr bool kOfPairs =
    kKind == WalkKind::kPairGroups128 || kKind == WalkKind::kPairGroups64;
template <WalkKind kKind>
inline constexpr bool kHasGroups = kKind == WalkKind::kGroups64 || kOfPairs<kKind>;
template <WalkKind kKind>
inline constexpr bool kHasIntervals =
    kKind == WalkKind::kIntervals128 || kKind == WalkKind::kIntervals64;
// Whether two lines of tiles of 64 share few.
template <WalkKind kKind>
inline constexpr bool kHasLists64 =
    kKind == WalkKind::kLists64 || kKind == WalkKind::kChosen64 || kKind == WalkKind::kIntervals64;

// The first i in [0, count] for which `holds` is false; it holds for a prefix. A warp's 32-ary
// search.
template <typename Predicate>
__device__ __forceinline__ int32_t PartitionPoint(int32_t count, Predicate holds) {
  const int32_t lane = threadIdx.x % 32;
  int32_t low = 0;
  while (low < count) {
    const int32_t step = (count - low + 31) / 32;
    const int32_t i = min(low + (lane + 1) * step, count) - 1;
    const int prefix = __popc(__ballot_sync(0xFFFFFFFFu, holds(i)));
    if (prefix == 32) return count;
    count = min(low + (prefix + 1) * step, count) - 1;
    low = min(low + prefix * step, count);
  }
  return low;
}

struct LineRange {
  int32_t begin;
  int32_t end;
};

// The places in walk.list of line `fixed`.
__device__ __forceinline__ LineRange ListOf(const TileWalk& walk, int32_t head, int32_t fixed,
                                            int32_t part) {
  const int32_t* const offset =
      walk.list_offsets + head * walk.list_head + part * walk.list_part + fixed;
  return {offset[0], offset[walk.list_end]};
}

// The columns that row `fixed` reaches (kAlongRow), or the rows that reach column `fixed`.
// Positions grow with the index, so that is one interval. kCsr: of the list.
template <WalkDirection kDirection, bool kDocuments>
__device__ __forceinline__ LineRange ReachedBy(const TileWalk& walk, int32_t head, int32_t fixed,
                                               int32_t part = 0) {
  if (walk.pattern == TilePattern::kCsr) return ListOf(walk, head, fixed, part);
  LineRange range;
  if (kDirection == WalkDirection::kAlongRow) {
    range.begin =
        walk.ForgetsKeys<kDocuments>()
            ? PartitionPoint(walk.key_tiles,
                             [&](int32_t c) { return walk.LiesBefore<kDocuments>(c, fixed); })
            : 0;
    range.end = walk.pattern == TilePattern::kFull
                    ? walk.key_tiles
                    : PartitionPoint(walk.key_tiles, [&](int32_t c) {
                        return walk.FirstKey(c) <= walk.LastQuery(fixed);
                      });
  } else {
    range.begin =
        walk.pattern == TilePattern::kFull ? 0 : PartitionPoint(walk.query_tiles, [&](int32_t r) {
          return walk.LastQuery(r) < walk.FirstKey(fixed);
        });
    range.end =
        walk.ForgetsKeys<kDocuments>()
            ? PartitionPoint(walk.query_tiles,
                             [&](int32_t r) { return !walk.LiesBefore<kDocuments>(fixed, r); })
            : walk.query_tiles;
  }
  return range;
}

// Walks the active tiles of query tile `fixed` in ascending key order (kAlongRow), or those of key
// tile `fixed` in ascending query order (kAlongColumn), of lists in parts those of one. All 32
// lanes call and get the same answers.
template <WalkDirection kDirection, bool kDocuments>
class TileWalker {
 public:
  __device__ TileWalker(const TileWalk& walk, int32_t head, int32_t fixed, int32_t part = 0)
      : walk_(&walk),
        head_(head),
        fixed_(fixed),
        fixed_position_(kDirection == WalkDirection::kAlongRow ? walk.FirstQuery(fixed)
                                                               : walk.FirstKey(fixed)),
        lane_(threadIdx.x % 32) {
    const LineRange range = ReachedBy<kDirection, kDocuments>(walk, head, fixed, part);
    next_ = range.begin;
    end_ = range.end;
  }

  // The next active tile's column (or row), -1 at the end.
  __device__ int32_t Next() {
    while (pending_ == 0) {
      if (next_ >= end_) return -1;
      const int32_t i = next_ + lane_;
      bool active = i < end_;
      if (walk_->pattern == TilePattern::kCsr) {
        candidate_ = active ? walk_->list[i] : 0;
        active = active && Active(candidate_);
      } else {
        candidate_ = i;
        // Between next_ and end_ every tile reaches; what is left to ask is the diagonal's bit.
        active = active && (walk_->pattern != TilePattern::kToeplitz || OnDiagonal(i));
      }
      pending_ = __ballot_sync(0xFFFFFFFFu, active);
      next_ += 32;
    }
    const int bit = __ffs(pending_) - 1;
    pending_ &= pending_ - 1;
    return __shfl_sync(0xFFFFFFFFu, candidate_, bit);
  }

 private:
  __device__ bool OnDiagonal(int32_t other) const {
    const int32_t distance = kDirection == WalkDirection::kAlongRow
                                 ? fixed_position_ - walk_->FirstKey(other)
                                 : walk_->FirstQuery(other) - fixed_position_;
    return distance >= 0 && walk_->DiagonalIsSet(head_, distance >> walk_->tile_log2);
  }
  __device__ bool Active(int32_t other) const {
    return kDirection == WalkDirection::kAlongRow ? walk_->Active<kDocuments>(head_, fixed_, other)
                                                  : walk_->Active<kDocuments>(head_, other, fixed_);
  }

  const TileWalk* walk_;
  int32_t head_;
  int32_t fixed_;
  int32_t fixed_position_;
  int32_t lane_;
  int32_t next_ = 0;
  int32_t end_ = 0;
  int32_t candidate_ = 0;
  uint32_t pending_ = 0;
};

// A tile that a walker found: its column (or row), -1 at the end, and what else is known of it.
struct TileRef {
  int32_t index;
  uint32_t bits;
};

// Walks two adjacent lines of 64-token tiles, 2 * pair and 2 * pair + 1, together: tiles that are
// active in either; bit i of `bits` says whether line i is. It examines the candidates of both
// lines together, and serves every pattern but kCsr.
template <WalkDirection kDirection, bool kDocuments>
class PairWalker {
 public:
  __device__ PairWalker(const TileWalk& walk, int32_t head, int32_t pair, int32_t /*part*/ = 0)
      : walk_(&walk),
        diagonals_(reinterpret_cast<const uint32_t*>(walk.diagonals + static_cast<int64_t>(head) *
                                                                          walk.diagonal_words)),
        lane_(threadIdx.x % 32) {
    const int32_t lines = kAlongRow ? walk.query_tiles : walk.key_tiles;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int32_t line = min(2 * pair + i, lines - 1);
      range_[i] = ReachedBy<kDirection, kDocuments>(walk, head, line);
      position_[i] = kAlongRow ? walk.FirstQuery(line) : walk.FirstKey(line);
    }
    if (2 * pair + 1 >= lines) range_[1] = {range_[0].begin, range_[0].begin};
    next_ = min(range_[0].begin, range_[1].begin);
  }

  __device__ TileRef Next() {
    while ((active_[0] | active_[1]) == 0) {
      if (next_ >= max(range_[0].end, range_[1].end)) return {-1, 0};
      const int32_t other = next_ + lane_;
      const int32_t position = kAlongRow ? walk_->FirstKey(other) : walk_->FirstQuery(other);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int32_t distance = kAlongRow ? position_[i] - position : position - position_[i];
        active_[i] = __ballot_sync(
            0xFFFFFFFFu, other >= range_[i].begin && other < range_[i].end && OnDiagonal(distance));
      }
      next_ += 32;
    }
    const int bit = __ffs(active_[0] | active_[1]) - 1;
    const TileRef found = {next_ - 32 + bit, (active_[0] >> bit & 1) | (active_[1] >> bit & 1)
                                                                           << 1};
    active_[0] &= ~(1u << bit);
    active_[1] &= ~(1u << bit);
    return found;
  }

 private:
  static constexpr bool kAlongRow = kDirection == WalkDirection::kAlongRow;
  __device__ bool OnDiagonal(int32_t distance) const {
    if (walk_->pattern != TilePattern::kToeplitz) return true;
    const int32_t delta = distance >> 6;
    return delta >= 0 && delta < walk_->diagonal_words * 64 &&
           (diagonals_[delta / 32] >> (delta % 32) & 1);
  }

  const TileWalk* walk_;
  const uint32_t* diagonals_;
  int32_t lane_;
  LineRange range_[2];
  int32_t position_[2];
  int32_t next_;
  uint32_t active_[2] = {0, 0};
};

// The same along columns in kCsr: it merges the lists of the two lines.
template <bool kDocuments>
class ListPairWalker {
 public:
  __device__ ListPairWalker(const TileWalk& walk, int32_t head, int32_t pair, int32_t part)
      : walk_(&walk), pair_(pair) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int32_t column = 2 * pair + i;
      range_[i] = {0, 0};
      if (column < walk.key_tiles) {
        range_[i] = ReachedBy<WalkDirection::kAlongColumn, kDocuments>(walk, head, column, part);
      }
      next_[i] = Advance(i);
    }
  }

  __device__ TileRef Next() {
    const int32_t index = min(next_[0], next_[1]);
    if (index == kEnd) return {-1, 0};
    TileRef found = {index, 0};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (next_[i] != index) continue;
      found.bits |= 1u << i;
      next_[i] = Advance(i);
    }
    return found;
  }

 private:
  static constexpr int32_t kEnd = 0x7FFFFFFF;
  __device__ int32_t Advance(int line) {
    while (active_[line] == 0) {
      if (range_[line].begin >= range_[line].end) return kEnd;
      const int32_t i = range_[line].begin + static_cast<int32_t>(threadIdx.x % 32);
      const bool exists = i < range_[line].end;
      row_[line] = exists ? walk_->list[i] : 0;
      active_[line] = __ballot_sync(0xFFFFFFFFu, exists && Reaches(row_[line], 2 * pair_ + line));
      range_[line].begin += 32;
    }
    const int bit = __ffs(active_[line]) - 1;
    active_[line] &= active_[line] - 1;
    return __shfl_sync(0xFFFFFFFFu, row_[line], bit);
  }
  // TileWalk::Reaches for a whole tile of keys, in fewer registers.
  __device__ bool Reaches(int32_t row, int32_t column) const {
    const int32_t first_key = walk_->FirstKey(column);
    if (kDocuments && first_key + 63 < walk_->TileDocumentStart(row)) return false;
    return first_key <= walk_->LastQuery(row);
  }

  const TileWalk* walk_;
  int32_t pair_;
  LineRange range_[2];  // what is left of the lists
  int32_t row_[2];      // this lane's candidates
  uint32_t active_[2] = {0, 0};
  int32_t next_[2];
};

#endif  // __CUDACC__

}  // namespace ringleader::kernels::sm90
