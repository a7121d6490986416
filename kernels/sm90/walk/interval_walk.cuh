// Masks that are intervals of keys for each query (TileSelection::intervals): the walk over the
// tiles that they leave, and what consumers are told of each. Both read the call's mask memory
// (mask_memory.cuh).
#pragma once

#include <cstdint>

#include "kernels/sm90/walk/tile_walk.cuh"

namespace ringleader::kernels::sm90 {

// For a line of tiles and 32 tiles across it a bit each: whether some pair of the tile is visible,
// and whether all are.
struct alignas(8) LineBits {
  uint32_t visible;
  uint32_t full;
};

RINGLEADER_HOST_DEVICE inline int32_t LineWords(int32_t tiles) {
  return (tiles + 31) / 32;
}

#if defined(__CUDACC__)

// A query sees local keys up to 128 from the first of a tile on: its four bounds, counted from
// there, are a byte each, and ascend.
constexpr int kBoundKeys = 128;
constexpr uint32_t kAllVisible = kBoundKeys << 24 | kBoundKeys << 16 | kBoundKeys << 8;

__device__ __forceinline__ uint32_t KeyBounds(const TileWalk& walk, int32_t query,
                                              int32_t first_key) {
  if (query >= walk.query_tokens) return kAllVisible;  // a row that nobody reads
  const int4 row = reinterpret_cast<const int4*>(walk.diagonals)[query];
  const auto bound = [&](int32_t key) {
    return static_cast<uint32_t>(min(max(key - first_key, 0), kBoundKeys));
  };
  return bound(row.x) | bound(row.y) << 8 | bound(row.z) << 16 | bound(row.w) << 24;
}
__device__ __forceinline__ int Bound(uint32_t bounds, int i) {
  return static_cast<int>(bounds >> 8 * i & 0xFF);
}

// Writes the bounds of kQueries queries from `first_query` on and returns whether one of them hides
// a key. A whole warp calls.
template <int kQueries>
__device__ __forceinline__ bool WriteBounds(uint32_t* bounds, const TileWalk& walk,
                                            int32_t first_query, int32_t first_key) {
  bool hides = false;
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < kQueries; i += 32) {
    const uint32_t row = KeyBounds(walk, first_query + i, first_key);
    bounds[i] = row;
    hides |= (row & 0xFFFF) != kBoundKeys << 8 && row >> 16 != kBoundKeys << 8;
  }
  return __any_sync(0xFFFFFFFFu, hides);
}

// Walks the tiles of line `line` that have a visible pair and, where the pattern is kCsr, are
// listed. A TileRef's bits say whether all pairs are visible. All 32 lanes call and get the same
// answers.
class IntervalWalker {
 public:
  __device__ IntervalWalker(const TileWalk& walk, int32_t head, int32_t line, int32_t part = 0)
      : walk_(&walk),
        bits_(reinterpret_cast<const LineBits*>(walk.diagonals) + walk.window +
              static_cast<int64_t>(line) * walk.diagonal_words) {
    end_ = walk.diagonal_words;
    if (walk.pattern != TilePattern::kCsr) return;
    const LineRange places = ListOf(walk, head, line, part);
    next_ = places.begin;
    end_ = places.end;
  }

  __device__ TileRef Next() {
    const bool listed = walk_->pattern == TilePattern::kCsr;
    while (lanes_ == 0) {
      if (next_ >= end_) return {-1, 0};
      listed ? FindListed() : FindWords();
      next_ += 32;
    }
    const int from = __ffs(lanes_) - 1;
    const uint32_t found = __shfl_sync(0xFFFFFFFFu, found_, from),
                   full = __shfl_sync(0xFFFFFFFFu, full_, from);
    if (listed) {
      lanes_ &= lanes_ - 1;
      return {static_cast<int32_t>(found), full};
    }
    const int bit = __ffs(found) - 1;
    const uint32_t left = found & (found - 1);
    if (left == 0) lanes_ &= lanes_ - 1;
    if (static_cast<int>(threadIdx.x % 32) == from) found_ = left;
    return {(next_ - 32 + from) * 32 + bit, full >> bit & 1};
  }

 private:
  // A lane holds a listed tile and whether it is full.
  __device__ void FindListed() {
    const int32_t i = next_ + static_cast<int32_t>(threadIdx.x % 32);
    found_ = i < end_ ? walk_->list[i] : 0;
    const LineBits bits = bits_[found_ / 32];
    full_ = bits.full >> found_ % 32 & 1;
    lanes_ = __ballot_sync(0xFFFFFFFFu, i < end_ && (bits.visible >> found_ % 32 & 1));
  }
  // A lane holds a word.
  __device__ void FindWords() {
    const int32_t i = next_ + static_cast<int32_t>(threadIdx.x % 32);
    const LineBits bits = i < end_ ? bits_[i] : LineBits{0, 0};
    found_ = bits.visible;
    full_ = bits.full;
    lanes_ = __ballot_sync(0xFFFFFFFFu, found_ != 0);
  }

  const TileWalk* walk_;
  const LineBits* bits_;
  int32_t next_ = 0;  // place in the list, or word
  int32_t end_;
  uint32_t found_ = 0, full_ = 0;
  uint32_t lanes_ = 0;  // that hold something
};

// Walks key tiles 2 * pair and 2 * pair + 1 of 64 tokens together. Of a TileRef's bits, bit i says
// whether line i visits the tile, and bit 2 + i whether all of its pairs are visible.
class IntervalPairWalker {
 public:
  __device__ IntervalPairWalker(const TileWalk& walk, int32_t head, int32_t pair, int32_t part)
      : lines_{{walk, head, 2 * pair, part},
               {walk, head, min(2 * pair + 1, walk.key_tiles - 1), part}} {
    next_[0] = lines_[0].Next();
    next_[1] = lines_[1].Next();
    if (2 * pair + 1 >= walk.key_tiles) next_[1].index = -1;
  }

  __device__ TileRef Next() {
    const uint32_t index = min(static_cast<uint32_t>(next_[0].index),  // -1 is the largest
                               static_cast<uint32_t>(next_[1].index));
    TileRef found = {static_cast<int32_t>(index), 0};
    if (found.index < 0) return found;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (next_[i].index != found.index) continue;
      found.bits |= 1u << i | next_[i].bits << (2 + i);
      next_[i] = lines_[i].Next();
    }
    return found;
  }

 private:
  IntervalWalker lines_[2];
  TileRef next_[2];
};

#endif  // __CUDACC__

}  // namespace ringleader::kernels::sm90
