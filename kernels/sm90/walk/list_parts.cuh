// Lists of tiles (kCsr) in parts, of which a call walks one after the other. CTAs at lines whose
// lists differ are soon at different tiles, and what lies between them has to stay in L2: backward
// walks all keys for one part of the queries before the next, forward all queries for one part of
// the keys.
#pragma once

#include <cstdint>

#include "kernels/sm90/walk/tile_walk.cuh"

namespace ringleader::kernels::sm90 {

struct ListParts {
  int32_t most = 1;  // of a head
  // Of a part, in the mean over a head's lines. A head of shorter lists has fewer parts, lest
  // beginnings and ends of items take longer than L2 saves; these are the last ones.
  int32_t fewest_tiles = 1;
};

// What the producer of a call gets where it walks no item, or no more; every CTA may ask once more.
constexpr int32_t kNoItem = 0x7F7F7F7F;
constexpr int32_t kNoItemByte = kNoItem & 0xFF;  // each of its bytes
constexpr int64_t kMostCtas = 1024;

#if defined(__CUDACC__)

// Of a head: the tiles of queries, whose lists are of keys, or the other way round.
template <WalkDirection kDirection>
__host__ __device__ __forceinline__ int32_t LinesOf(const TileWalk& walk) {
  return kDirection == WalkDirection::kAlongRow ? walk.query_tiles : walk.key_tiles;
}

// Where the tiles of line `line` lie in walk.list that are of part `part`, of whole lists in
// `walk`.
template <WalkDirection kDirection>
__device__ __forceinline__ LineRange PartOfList(const TileWalk& walk, const ListParts& parts,
                                                int32_t head, int32_t line, int32_t part) {
  const int32_t lines = LinesOf<kDirection>(walk);
  const int32_t others = walk.query_tiles + walk.key_tiles - lines;
  const int32_t* const offsets = walk.list_offsets + head * walk.list_head;
  const int32_t mean = (offsets[lines] - offsets[0]) / lines;
  const int32_t count = min(max(mean / parts.fewest_tiles, 1), parts.most);
  const int32_t tiles = (others + count - 1) / count;
  const auto begin_of = [&](int32_t index) {
    int32_t low = offsets[line], high = offsets[line + 1];
    while (low < high) {
      const int32_t middle = low + (high - low) / 2;
      if (walk.list[middle] < index * tiles) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  };
  const int32_t index = part - (parts.most - count);  // less than 0: not one of this head's
  return {begin_of(index), begin_of(index + 1)};
}

#endif  // __CUDACC__

}  // namespace ringleader::kernels::sm90
