// Scores of groups of keys, of the products with all of them (key_group_products.cuh): for each
// tile and group how far, at the least, a product lies below its query's reference, so that the
// smallest is best, and no less than 0. The scales of rows and logits, positive and a head's,
// change nothing.
#pragma once

#include <cuda.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/index/groups/key_group_products.cuh"
#include "kernels/sm90/warpgroup/fragment.cuh"
#include "kernels/sm90/warpgroup/ring_cursor.cuh"
#include "kernels/sm90/warpgroup/roles.cuh"
#include "ringleader/kernels/block_choice.h"

namespace ringleader::kernels::index {

inline constexpr int kChunkStages = 32;  // keys of an item, in stages

// A CTA's items in turn, without those that have no keys.
template <typename Take>
__device__ __forceinline__ void ForEachChunk(const ProductParams& p, const Take& take) {
  ForEachBlock(p, [&](int head, int block, int chunk) {
    const int64_t first = static_cast<int64_t>(block) * kBlockQueries;
    const int64_t last = min(first + kBlockQueries, p.queries) - 1;
    const int start = p.StartOf(static_cast<uint32_t>(first)) / kStageKeys;
    // Groups before the last tile.
    const int64_t end = p.PositionOf(last / kGroupTile * kGroupTile);
    const ProductItem item = {.head = head,
                              .block = block,
                              .begin = max(start, chunk * kChunkStages),
                              .end = min(static_cast<int>((end + kStageKeys - 1) / kStageKeys),
                                         (chunk + 1) * kChunkStages)};
    if (item.begin < item.end) take(item);
  });
}

// Leaves the scores of the eight groups from `key` on for both tiles. Queries see all keys of a
// candidate group but those before their documents. Distances, which are not negative, compare as
// their bits do; NaN is larger than all. Of bits three have their minimum in one instruction.
// `pairs`: by the first lanes, where a warp's pairs of groups of a tile are; null for other lanes.
__device__ __forceinline__ void StoreGroupScores(const ProductQueries& queries, uint32_t* pairs,
                                                 int key, const Products& products,
                                                 const uint32_t (&references)[16]) {
  constexpr uint32_t kFar = kHalfInfinity << 16 | kHalfInfinity;
  uint32_t nearest[2][2] = {{kFar, kFar}, {kFar, kFar}};  // tile, row half: two queries
  // How far the products of the `row`-th row half lie below the references of the i-th query, which
  // is even, and of the next one: 0 where they do not.
  const auto distances = [&](int i, int row) {
    return AsBits(__hfma2_relu(AsHalves(products[i + row]), __float2half2_rn(-1.0f),
                               AsHalves(references[i / 2])));
  };
  const bool all_visible = key >= queries.last_start;
  const int own_key = key + sm90::FragmentRow();
  if (all_visible) {
#pragma unroll
    for (int i = 0; i < 32; i += 4) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        uint32_t& of_group = nearest[i / 16][row];
        of_group = __vimin3_u16x2(of_group, distances(i, row), distances(i + 2, row));
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
      const int starts[2] = {queries.Start(i), queries.Start(i + 1)};
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const uint32_t visible = Hide(distances(i, row), kHalfInfinity, i,
                                      [&](int j) { return own_key + 8 * row < starts[j % 2]; });
        nearest[i / 16][row] = __vminu2(nearest[i / 16][row], visible);
      }
    }
  }
  uint32_t of_tiles[2];
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    // Two groups, each the nearer one of two queries.
    const uint32_t of_lane = __vminu2(__byte_perm(nearest[tile][0], nearest[tile][1], 0x5410),
                                      __byte_perm(nearest[tile][0], nearest[tile][1], 0x7632));
    of_tiles[tile] = __reduce_min_sync(0xFFFFFFFFu, of_lane & 0xFFFFu) |
                     __reduce_min_sync(0xFFFFFFFFu, of_lane >> 16) << 16;
  }
  if (pairs != nullptr) {
    pairs[static_cast<uint32_t>(key) / (2 * kGroupKeys)] =
        threadIdx.x % 32 == 0 ? of_tiles[0] : of_tiles[1];
  }
}

// Returns the references of a thread's queries.
__device__ __forceinline__ void LoadReferences(const ProductQueries& queries, int head,
                                               uint32_t (&references)[16]) {
  const __half* const of_head = queries.p.references + head * queries.p.queries;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    // At an infinite distance queries that do not exist have no say.
    const auto load = [&](int j) {
      return queries.Exists(j) ? of_head[queries.thread_first + ProductQueries::Offset(j)]
                               : __ushort_as_half(kHalfInfinity);
    };
    references[i] = AsBits(__halves2half2(load(2 * i), load(2 * i + 1)));
  }
  sm90::ptx::PinRegisters(references);  // in pairs: else the compiler pairs them each time anew
}

// Leaves the scores of an item's groups.
__device__ __forceinline__ void FindScores(const ProductItem& item, const ProductQueries& queries,
                                           int warpgroup, ProductShared& shared,
                                           sm90::RingCursor<kKeyStages>& cursor) {
  const ProductParams& p = queries.p;
  uint32_t references[16];
  LoadReferences(queries, item.head, references);
  // Lane 0 writes scores of the first tile, lane 1 of the second.
  const int tile = static_cast<int>(threadIdx.x) % 32;
  uint32_t* pairs = nullptr;
  if (tile < 2 && queries.first + tile * kGroupTile < p.queries) {
    const int64_t row =
        (static_cast<int64_t>(item.head) * p.blocks + item.block - p.first_block) * kBlockTiles +
        warpgroup * 2 + tile;
    pairs = reinterpret_cast<uint32_t*>(p.scores + row * p.row_groups) + threadIdx.x / 32 % 4;
  }
  ForEachProducts(shared, item, warpgroup, cursor, [&](int key, const Products& products) {
    StoreGroupScores(queries, pairs, key, products, references);
  });
}

inline __global__ void __launch_bounds__(kProductThreads, 1)
    ScoreKernel(const ProductParams p, const __grid_constant__ CUtensorMap query_map,
                const __grid_constant__ CUtensorMap key_map) {
  extern __shared__ __align__(1024) unsigned char smem[];
  auto& shared = *reinterpret_cast<ProductShared*>(smem);
  InitBarriers(shared);
  sm90::RingCursor<kKeyStages> cursor;
  sm90::RingCursor<1> q_cursor;
  sm90::RunRoles<1, kConsumerRegisters>(
      [&](int) {
        if (threadIdx.x > 0) return;
        ForEachChunk(p, [&](const ProductItem& item) {
          LoadQueries(&query_map, item.head, item.block, 0, shared, q_cursor);
          LoadStages(&key_map, item, item.head / p.group, shared, cursor);
        });
      },
      [&](int warpgroup) {
        ForEachChunk(p, [&](const ProductItem& item) {
          const ProductQueries queries(p, item, warpgroup);
          sm90::ptx::MbarrierWait(&shared.q_full, q_cursor.lap);
          q_cursor.Advance();
          FindScores(item, queries, warpgroup, shared, cursor);
          ArriveOnce(&shared.q_empty);
        });
      });
}

}  // namespace ringleader::kernels::index
