// The exact load of the chosen diagonals: how many tiles each owner's keys cost this rank.
#pragma once

#include <cstdint>

#include "kernels/index/threshold.cuh"
#include "ringleader/kernels/index.h"

namespace ringleader::kernels::index {

// Tiles that this rank's queries visit with the keys of one owner.
struct OwnerTiles {
  int owner;
  uint32_t tiles;
};

// The tiles of one diagonal, by owner: diagonal `delta` meets a chunk of `length` blocks with only
// two others, delta / length chunks back and one more. These are entries 0 and 1, of the second of
// two zigzag chunks 2 and 3.
__device__ __forceinline__ OwnerTiles DiagonalEntry(const ShardLayout& layout, int blocks,
                                                    int length, int delta, int entry) {
  const int ranks = layout.ranks, rank = layout.rank;
  const int back = static_cast<int>(static_cast<uint32_t>(delta) / static_cast<uint32_t>(length));
  const int rest = delta - back * length, apart = back + entry % 2;
  const int pairs = entry % 2 == 0 ? length - rest : rest;
  if (ranks > 1 && layout.kind == LayoutKind::kStriped) {
    // All of this rank's stripes but the first `turns` have one so far before them.
    const int owner = rank - apart >= 0 ? rank - apart : ranks - 1 - (apart - rank - 1) % ranks;
    const int turns = (apart - rank + owner) / ranks, left = blocks / (length * ranks) - turns;
    return {owner, left > 0 ? static_cast<uint32_t>(pairs) * left : 0u};
  }
  const int key = (entry < 2 ? rank : 2 * ranks - 1 - rank) - apart;
  return {key < ranks ? key : 2 * ranks - 1 - key, key >= 0 ? static_cast<uint32_t>(pairs) : 0u};
}

// Adds the tiles of `count` chosen diagonals to load[owner]. All threads of a block call.
__device__ inline void AddLoad(const ShardLayout& layout, int tile, int blocks,
                               const int32_t* chosen, int count, SelectShared& shared,
                               int64_t* load) {
  // Each warp has sums of its own for some owners at a time, where the histogram was.
  constexpr int kWarps = kSelectThreads / 32, kOwners = 64;
  static_assert(sizeof(shared.count) >= sizeof(uint64_t) * kWarps * kOwners);
  uint64_t* sums = reinterpret_cast<uint64_t*>(shared.count);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, ranks = layout.ranks;
  uint64_t* mine = sums + warp * kOwners;
  const bool zigzag = ranks > 1 && layout.kind == LayoutKind::kZigzag;
  const bool striped = ranks > 1 && layout.kind == LayoutKind::kStriped;
  const int length = striped ? layout.stripe / tile : blocks / (zigzag ? 2 * ranks : ranks);
  if (length == 0) return;  // chunks are whole tiles; shorter ones have none
  for (int first = 0; first < ranks; first += kOwners) {
    for (int i = lane; i < kOwners; i += 32) mine[i] = 0;
    __syncwarp();
    for (int at = warp * 32; at < count; at += kSelectThreads) {
      const int delta = at + lane < count ? chosen[at + lane] : -1;
      for (int entry = 0; entry < (zigzag ? 4 : 2); ++entry) {
        OwnerTiles of = {0, 0};
        if (delta >= 0) of = DiagonalEntry(layout, blocks, length, delta, entry);
        const int slot =
            of.tiles > 0 && of.owner >= first && of.owner < first + kOwners ? of.owner - first : -1;
        const uint32_t peers = __match_any_sync(0xffffffffu, slot);
        const uint32_t tiles = __reduce_add_sync(peers, of.tiles);
        if (slot >= 0 && lane == __ffs(peers) - 1) mine[slot] += tiles;
        __syncwarp();
      }
    }
    __syncthreads();
    const int owner = threadIdx.x;
    if (owner < kOwners && first + owner < ranks) {
      uint64_t tiles = 0;
      for (int w = 0; w < kWarps; ++w) tiles += sums[w * kOwners + owner];
      atomicAdd(reinterpret_cast<unsigned long long*>(load) + first + owner, tiles);
    }
    __syncthreads();
  }
}

}  // namespace ringleader::kernels::index
