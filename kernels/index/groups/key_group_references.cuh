// What each query's products are compared with (KeyGroupGateStep): the largest of all, or of its
// tile's keys and the sample's. A kernel each, for the tiles that take the one or the other
// (key_group_products.cuh).
#pragma once

#include <cuda.h>
#include <cuda_fp16.h>

#include <climits>
#include <cstdint>

#include "kernels/index/groups/key_group_products.cuh"
#include "kernels/sm90/warpgroup/fragment.cuh"
#include "kernels/sm90/warpgroup/ring_cursor.cuh"
#include "kernels/sm90/warpgroup/roles.cuh"
#include "ringleader/kernels/block_choice.h"

namespace ringleader::kernels::index {

struct ReferenceShared {
  static constexpr int kOwnBytes = kGroupTile * kScoreDims;
  ProductShared products;
  alignas(1024) unsigned char own[kBlockTiles][kOwnBytes];  // keys of the tiles, for samples
  __half warp_max[kWarpgroups][4][kWarpgroupQueries];
};

// A CTA's items in turn: of the blocks that have tiles with references of the sample or, else, with
// those of all keys. Stages are of the sample, and may be none, or of all.
template <bool kSampled, typename Take>
__device__ __forceinline__ void ForEachReferenceItem(const ProductParams& p, const Take& take) {
  ForEachBlock(p, [&](int head, int block, int) {
    const int64_t first = static_cast<int64_t>(block) * kBlockQueries;
    const int64_t last = min(first + kBlockQueries, p.queries) - 1;
    bool some = false;
    for (int64_t tile = first / kGroupTile; tile <= last / kGroupTile; ++tile) {
      some |= p.IsSampled(head, tile) == kSampled;
    }
    if (!some) return;
    const int64_t start = p.StartOf(static_cast<uint32_t>(first));
    // One past the keys that are needed: those before the last tile, or up to the last query, after
    // which the last tile may have none.
    const int64_t end = kSampled ? p.PositionOf(last / kGroupTile * kGroupTile)
                                 : min(p.PositionOf(last), p.layout.tokens - 1) + 1;
    constexpr int64_t kStageTokens = int64_t{kStageKeys} * (kSampled ? kSampleEvery : 1);
    take({.head = head,
          .block = block,
          .begin = static_cast<int>(start / kStageTokens),
          .end = static_cast<int>((end + kStageTokens - 1) / kStageTokens)});
  });
}

// Loads the keys of a block's own tiles. Of tiles that do not exist it loads any.
__device__ __forceinline__ void LoadOwnKeys(const ProductParams& p, const CUtensorMap* own_map,
                                            const ProductItem& item, ReferenceShared& shared) {
#pragma unroll 1
  for (int tile = 0; tile < kBlockTiles; ++tile) {
    const int64_t query = static_cast<int64_t>(item.block) * kBlockQueries + tile * kGroupTile;
    const int position = query < p.queries ? static_cast<int>(p.PositionOf(query)) : 0;
    sm90::ptx::TmaLoadTile(shared.own[tile], own_map, &shared.products.q_full, position,
                           item.head / p.group);
  }
}

// Takes products into the largest of a thread's 32 queries. Of what is not a number the maximum
// takes no notice.
__device__ __forceinline__ void AbsorbAll(const Products& products, uint32_t (&maxima)[16]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    uint32_t& maximum = maxima[i / 2];
    maximum = AsBits(__hmax2(AsHalves(maximum), AsHalves(products[i])));
  }
}

// The same without keys before the queries' documents and, where `before`, from their tiles on, or
// else behind them. keys: where those of both row halves are, by the queries' tile.
__device__ __forceinline__ void AbsorbVisible(const ProductQueries& queries,
                                              const Products& products, const int (&keys)[2][2],
                                              bool before, uint32_t (&maxima)[16]) {
#pragma unroll
  for (int i = 0; i < 32; i += 2) {
    const int starts[2] = {queries.Start(i), queries.Start(i + 1)};
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int at = keys[i / 16][row];
      const uint32_t visible = Hide(products[i + row], kHalfMinusInfinity, i, [&](int j) {
        return at < starts[j % 2] ||
               (before ? at >= queries.positions[j / 16] : at > queries.PositionOf(j));
      });
      maxima[i / 2] = AsBits(__hmax2(AsHalves(maxima[i / 2]), AsHalves(visible)));
    }
  }
}

// The same of a warpgroup's products with the keys of its queries' own tiles.
__device__ __forceinline__ void AbsorbOwn(const ProductQueries& queries,
                                          const ReferenceShared& shared, int warpgroup,
                                          uint32_t (&maxima)[16]) {
  constexpr int kNowhere = INT_MAX;  // hidden from the other tile
#pragma unroll 1
  for (int tile = 0; tile < 2; ++tile) {
    Products products;
    StartProducts(shared.own[2 * warpgroup + tile], shared.products.q[warpgroup], products);
    sm90::ptx::WgmmaWait<0>();
    sm90::ptx::PinRegisters(products);
    const int key = (tile == 0 ? queries.positions[0] : queries.positions[1]) + sm90::FragmentRow();
    const int keys[2] = {key, key + 8};
    AbsorbVisible(queries, products,
                  {{tile == 0 ? keys[0] : kNowhere, tile == 0 ? keys[1] : kNowhere},
                   {tile == 1 ? keys[0] : kNowhere, tile == 1 ? keys[1] : kNowhere}},
                  /*before=*/false, maxima);
  }
}

// Puts the maxima of all threads of a warpgroup together, for its tiles whose references these are.
template <bool kSampled>
__device__ __forceinline__ void StoreMaxima(const ProductQueries& queries, int head, int warpgroup,
                                            ReferenceShared& shared, const uint32_t (&maxima)[16]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  auto& warp_max = shared.warp_max[warpgroup];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    __half2 maximum = AsHalves(maxima[i]);
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) {
      maximum = __hmax2(maximum, AsHalves(__shfl_xor_sync(0xFFFFFFFFu, AsBits(maximum), distance)));
    }
    if (lane < 4) {
      *reinterpret_cast<__half2*>(
          &warp_max[warp][ProductQueries::ThreadOffset() + ProductQueries::Offset(2 * i)]) =
          maximum;
    }
  }
  sm90::ptx::NamedBarrierSync(1 + warpgroup, sm90::ptx::kWarpgroupThreads);
  const int column = threadIdx.x % sm90::ptx::kWarpgroupThreads;
  const int64_t query = queries.first + column;
  const ProductParams& p = queries.p;
  if (query < p.queries && p.IsSampled(head, query / kGroupTile) == kSampled) {
    p.references[head * p.queries + query] =
        __hmax(__hmax(warp_max[0][column], warp_max[1][column]),
               __hmax(warp_max[2][column], warp_max[3][column]));
  }
  sm90::ptx::NamedBarrierSync(1 + warpgroup, sm90::ptx::kWarpgroupThreads);
}

// Leaves the references of an item's queries.
template <bool kSampled>
__device__ __forceinline__ void FindReferences(const ProductItem& item,
                                               const ProductQueries& queries, int warpgroup,
                                               ReferenceShared& shared,
                                               sm90::RingCursor<kKeyStages>& cursor) {
  uint32_t maxima[16];
#pragma unroll
  for (uint32_t& pair : maxima) pair = kHalfMinusInfinity << 16 | kHalfMinusInfinity;
  if constexpr (kSampled) AbsorbOwn(queries, shared, warpgroup, maxima);
  constexpr int kEvery = kSampled ? kSampleEvery : 1;
  ForEachProducts(shared.products, item, warpgroup, cursor, [&](int key, const Products& products) {
    const int last = (key + kQuarterKeys) * kEvery - 1;
    if (key * kEvery >= queries.last_start && last < queries.positions[0]) {
      return AbsorbAll(products, maxima);
    }
    int keys[2] = {key + sm90::FragmentRow(), key + sm90::FragmentRow() + 8};
    if constexpr (kSampled) {
      for (int& of_row : keys) of_row = SampleKey(of_row);
    }
    AbsorbVisible(queries, products, {{keys[0], keys[1]}, {keys[0], keys[1]}}, kSampled, maxima);
  });
  StoreMaxima<kSampled>(queries, item.head, warpgroup, shared, maxima);
}

// key_map: of all keys, or of the sample; own_map: of boxes of a tile's, for samples.
template <bool kSampled>
__global__ void __launch_bounds__(kProductThreads, 1)
    ReferenceKernel(const ProductParams p, const __grid_constant__ CUtensorMap query_map,
                    const __grid_constant__ CUtensorMap key_map,
                    const __grid_constant__ CUtensorMap own_map) {
  extern __shared__ __align__(1024) unsigned char smem[];
  auto& shared = *reinterpret_cast<ReferenceShared*>(smem);
  InitBarriers(shared.products);
  sm90::RingCursor<kKeyStages> cursor;
  sm90::RingCursor<1> q_cursor;
  sm90::RunRoles<1, kConsumerRegisters>(
      [&](int) {
        if (threadIdx.x > 0) return;
        ForEachReferenceItem<kSampled>(p, [&](const ProductItem& item) {
          LoadQueries(&query_map, item.head, item.block, kSampled ? sizeof(shared.own) : 0,
                      shared.products, q_cursor);
          if constexpr (kSampled) LoadOwnKeys(p, &own_map, item, shared);
          LoadStages(&key_map, item, item.head / p.group, shared.products, cursor);
        });
      },
      [&](int warpgroup) {
        ForEachReferenceItem<kSampled>(p, [&](const ProductItem& item) {
          const ProductQueries queries(p, item, warpgroup);
          sm90::ptx::MbarrierWait(&shared.products.q_full, q_cursor.lap);
          q_cursor.Advance();
          FindReferences<kSampled>(item, queries, warpgroup, shared, cursor);
          ArriveOnce(&shared.products.q_empty);
        });
      });
}

}  // namespace ringleader::kernels::index
