// Lists of tiles (kCsr) along columns, cut into parts of the queries. Backward attention walks all
// keys for one part before the next: CTAs at blocks of keys whose lists differ are soon at
// different queries, and what lies between them has to stay in L2.
#pragma once

#include <cstdint>

#include "kernels/sm90/walk/tile_walk.cuh"

namespace ringleader::kernels::sm90 {

struct ListParts {
  int32_t most = 1;  // of a head
  // Of 64 queries, in the mean over a head's blocks of keys. A head of short lists has fewer parts,
  // lest beginnings and ends of items take longer than L2 saves.
  int32_t fewest_steps = 1;
};

// What the producer of a call gets beyond the last item; every CTA may ask once more.
constexpr int32_t kNoItem = 0x7F7F7F7F;
constexpr int64_t kMostCtas = 1024;

// A call's memory for them, in int32: where the lists of each part begin, and those of the last one
// end, [heads, most + 1, key_tiles]; of how many of the first blocks of keys a part has something,
// [heads, most]; and the items that are not empty, (head * most + part) * blocks + block, in order.
struct ListPartsMemory {
  int64_t counts = 0, items = 0, end = 0;

  RINGLEADER_HOST_DEVICE ListPartsMemory(int64_t heads, int64_t key_tiles, int64_t blocks,
                                         int64_t most)
      : counts(heads * (most + 1) * key_tiles),
        items(counts + heads * most),
        end(items + heads * most * blocks + kMostCtas) {}
};

#if defined(__CUDACC__)

// Where the tiles of key tile `line` lie in walk.list that are of part `part`, of whole lists in
// `walk`. Parts beyond a head's hold nothing. blocks: of keys.
__device__ __forceinline__ LineRange PartOfList(const TileWalk& walk, const ListParts& parts,
                                                int32_t blocks, int32_t head, int32_t line,
                                                int32_t part) {
  const int32_t* const offsets = walk.list_offsets + head * walk.list_head;
  const int32_t steps = (offsets[walk.key_tiles] - offsets[0]) / blocks * (walk.tile() / 64);
  const int32_t count = min(max(steps / parts.fewest_steps, 1), parts.most);
  const int32_t tiles = (walk.query_tiles + count - 1) / count;
  const auto begin_of = [&](int32_t index) {
    int32_t low = offsets[line], high = offsets[line + 1];
    if (index >= count) return high;
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
  return {begin_of(part), begin_of(part + 1)};
}

#endif  // __CUDACC__

}  // namespace ringleader::kernels::sm90
