// The products behind the choice of groups of keys, S^T = K Q^T of narrow rows (64 dimensions in
// e4m3), summed to half precision. A CTA takes 384 queries of a head and 256 keys at a time: a warp
// loads, each of three warpgroups multiplies the keys with 128 queries of its own, which stay in
// shared memory. A thread thereby has the same 32 queries all along, two to a register: it keeps
// what they need in 16; and a group of keys is eight rows of one warp, so that what is left of its
// scores is four numbers to reduce for 64 x 128 pairs.
//
// Two kernels share everything but what they do with the products, which are the same bits in both:
// one leaves each query's largest, the other for each tile and group of keys how far, at the least,
// a product lies below that (so the smallest is best; the scales of rows and logits, positive and a
// head's, change nothing).
#pragma once

#include <cuda.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>

#include "kernels/sm90/ptx/mbarrier.cuh"
#include "kernels/sm90/ptx/sync.cuh"
#include "kernels/sm90/ptx/tma.cuh"
#include "kernels/sm90/ptx/wgmma.cuh"
#include "kernels/sm90/ptx/wgmma_e4m3.cuh"
#include "kernels/sm90/warpgroup/fragment.cuh"
#include "kernels/sm90/warpgroup/ring_cursor.cuh"
#include "kernels/sm90/warpgroup/roles.cuh"
#include "ringleader/kernels/attention.h"
#include "ringleader/kernels/block_choice.h"
#include "ringleader/kernels/shard_layout.h"

namespace ringleader::kernels::index {

inline constexpr int kWarpgroupQueries = 2 * kGroupTile;
// With two, products and what becomes of them took turns.
inline constexpr int kWarpgroups = 3;
inline constexpr int kBlockQueries = kWarpgroups * kWarpgroupQueries;  // of a CTA
inline constexpr int kBlockTiles = kBlockQueries / kGroupTile;
inline constexpr int kStageKeys = 256;
inline constexpr int kQuarterKeys = kStageKeys / 4;  // rows of a product
inline constexpr int kStageGroups = kStageKeys / kGroupKeys;
inline constexpr int kKeyStages = 4;
inline constexpr int kChunkStages = 32;  // keys of an item of scores, in stages
inline constexpr int kProductThreads = (kWarpgroups + 1) * sm90::ptx::kWarpgroupThreads;
inline constexpr int kProductConsumerWarps = kWarpgroups * 4;

// What one launch scores: the blocks of kBlockQueries local queries from first_block on, of all
// heads.
struct ProductParams {
  ShardLayout layout;                        // of the queries
  const int32_t* document_starts = nullptr;  // may be null
  SpreadRows rows;                           // of the queries
  int64_t queries = 0;                       // rows of this rank
  uint32_t last_query = 0;                   // of this rank
  int heads = 0;
  int group = 0;  // query heads a KV head
  int first_block = 0, blocks = 0;
  int chunks = 1;             // of a block's keys, in scores
  __half* row_max = nullptr;  // [heads, queries], of products
  // [heads, blocks * kBlockTiles, row_groups]: bits of distances in half precision, which compare
  // as these do, since a candidate's is not negative. Where no query of the tile sees a key:
  // +infinity.
  uint16_t* scores = nullptr;
  int64_t row_groups = 0;  // whole stages of them

  // Where the document of a row's query starts. Called for each row and stage that a document's
  // start or the diagonal crosses: with 64 bits, or a division, registers would spill.
  __device__ __forceinline__ int StartOf(uint32_t row) const {
    if (document_starts == nullptr) return 0;
    return document_starts[min(rows.QueryOf(row), last_query)];
  }
  __device__ __forceinline__ int64_t PositionOf(int64_t row) const {
    return layout.Position(rows.QueryOf(row));
  }
};

// The stages [begin, end) of keys that some of a block's queries need.
struct ProductItem {
  int head = 0, block = 0;
  int begin = 0, end = 0;
};

// Item `i`. Neighbours, which run at the same time, read the same keys: heads first, then blocks,
// the longest first, then chunks of keys. A query's largest product needs all of its keys in one
// item.
template <bool kScores>
__device__ __forceinline__ ProductItem ItemOf(const ProductParams& p, int64_t i) {
  ProductItem item;
  item.head = static_cast<int>(i % p.heads);
  const int64_t rest = i / p.heads;
  item.block = p.first_block + p.blocks - 1 - static_cast<int>(rest % p.blocks);
  const int64_t first = static_cast<int64_t>(item.block) * kBlockQueries;
  const int64_t last = min(first + kBlockQueries, p.queries) - 1;
  item.begin = p.StartOf(static_cast<uint32_t>(first)) / kStageKeys;
  if constexpr (kScores) {
    // Groups before the last tile.
    const int64_t end = p.PositionOf(last / kGroupTile * kGroupTile);
    const int chunk = static_cast<int>(rest / p.blocks);
    item.begin = max(item.begin, chunk * kChunkStages);
    item.end =
        min(static_cast<int>((end + kStageKeys - 1) / kStageKeys), (chunk + 1) * kChunkStages);
  } else {
    // The last tile may have fewer queries.
    item.end = static_cast<int>(min(p.PositionOf(last), p.layout.tokens - 1) / kStageKeys) + 1;
  }
  return item;
}

// A CTA's items in turn, without those that have no keys.
template <bool kScores, typename Take>
__device__ __forceinline__ void ForEachItem(const ProductParams& p, const Take& take) {
  const int64_t items = static_cast<int64_t>(p.heads) * p.blocks * p.chunks;
  for (int64_t i = blockIdx.x; i < items; i += gridDim.x) {
    const ProductItem item = ItemOf<kScores>(p, i);
    if (item.begin < item.end) take(item);
  }
}

// Tiles are in the 64-byte swizzle.
struct ProductShared {
  static constexpr int kQueryBytes = kWarpgroupQueries * kScoreDims;
  static constexpr int kKeyBytes = kStageKeys * kScoreDims;
  alignas(1024) unsigned char q[kWarpgroups][kQueryBytes];
  alignas(1024) unsigned char k[kKeyStages][kKeyBytes];
  __half warp_max[kWarpgroups][4][kWarpgroupQueries];
  sm90::ptx::Mbarrier q_full, q_empty;
  sm90::ptx::Mbarrier full[kKeyStages], empty[kKeyStages];
};

template <bool kScores>
__device__ __forceinline__ void ProduceTiles(const ProductParams& p, const CUtensorMap* query_map,
                                             const CUtensorMap* key_map, ProductShared& shared) {
  namespace ptx = sm90::ptx;
  sm90::RingCursor<kKeyStages> cursor;
  sm90::RingCursor<1> q_cursor;
  ForEachItem<kScores>(p, [&](const ProductItem& item) {
    ptx::MbarrierWait(&shared.q_empty, q_cursor.lap ^ 1);
    ptx::MbarrierArriveExpect(&shared.q_full, kWarpgroups * ProductShared::kQueryBytes);
    for (int warpgroup = 0; warpgroup < kWarpgroups; ++warpgroup) {
      ptx::TmaLoadTile(shared.q[warpgroup], query_map, &shared.q_full,
                       item.block * kBlockQueries + warpgroup * kWarpgroupQueries, item.head);
    }
    q_cursor.Advance();
    for (int stage = item.begin; stage < item.end; ++stage) {
      const int slot = cursor.index;
      ptx::MbarrierWait(&shared.empty[slot], cursor.lap ^ 1);
      ptx::MbarrierArriveExpect(&shared.full[slot], ProductShared::kKeyBytes);
      ptx::TmaLoadTile(shared.k[slot], key_map, &shared.full[slot], stage * kStageKeys,
                       item.head / p.group);
      cursor.Advance();
    }
  });
}

__device__ __forceinline__ void ArriveOnce(sm90::ptx::Mbarrier* barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) sm90::ptx::MbarrierArrive(barrier);
}

// Products of 64 keys with a warpgroup's 128 queries: in the i-th register the rows' half i % 2
// with the queries 8 * (i / 2) + 2 * (lane % 4) and the next one.
using Products = uint32_t[32];

// Starts the products of a quarter of the keys of a stage with a warpgroup's queries.
__device__ __forceinline__ void StartProducts(const ProductShared& shared, int slot, int quarter,
                                              int warpgroup, Products& products) {
  namespace ptx = sm90::ptx;
  const uint64_t keys =
      ptx::BytesDescriptor(shared.k[slot] + quarter * (kQuarterKeys * kScoreDims));
  const uint64_t queries = ptx::BytesDescriptor(shared.q[warpgroup]);
  ptx::WgmmaFence();
#pragma unroll
  for (int first = 0; first < kScoreDims; first += 32) {
    ptx::WgmmaE4m3(products, ptx::DescriptorAdvance(keys, first),
                   ptx::DescriptorAdvance(queries, first), first > 0);
  }
  ptx::WgmmaCommit();
}

// Hands the products with 64 keys from `key` on to absorb(key, products), for all keys of an item.
// A quarter is absorbed while the next one is multiplied, and the last one while other warpgroups
// have the tensor cores: the compiler lets no product run on into the next turn.
template <typename Absorb>
__device__ __forceinline__ void ForEachProducts(ProductShared& shared, const ProductItem& item,
                                                int warpgroup, sm90::RingCursor<kKeyStages>& cursor,
                                                const Absorb& absorb) {
  namespace ptx = sm90::ptx;
  Products even, odd;
  for (int stage = item.begin; stage < item.end; ++stage) {
    const int slot = cursor.index, key = stage * kStageKeys;
    ptx::MbarrierWait(&shared.full[slot], cursor.lap);
    StartProducts(shared, slot, 0, warpgroup, even);
    StartProducts(shared, slot, 1, warpgroup, odd);
    ptx::WgmmaWait<1>();
    ptx::PinRegisters(even);
    absorb(key, even);
    ptx::PinRegisters(even);
    StartProducts(shared, slot, 2, warpgroup, even);
    ptx::WgmmaWait<1>();
    ptx::PinRegisters(odd);
    absorb(key + kQuarterKeys, odd);
    ptx::PinRegisters(odd);
    StartProducts(shared, slot, 3, warpgroup, odd);
    ptx::WgmmaWait<1>();
    ptx::PinRegisters(even);
    absorb(key + 2 * kQuarterKeys, even);
    ptx::WgmmaWait<0>();
    ptx::PinRegisters(odd);
    ArriveOnce(&shared.empty[slot]);
    cursor.Advance();
    absorb(key + 3 * kQuarterKeys, odd);
  }
}

// A warpgroup's 128 queries, and which 32 of them a thread has: the i-th is Offset(i) after its
// first, which is the warpgroup's 2 * (lane % 4)-th.
struct ProductQueries {
  const ProductParams& p;
  int64_t first;  // local, of the warpgroup
  int64_t thread_first;
  int count;         // of queries that exist, from the thread's first on
  int positions[2];  // of the tiles' first queries
  int last_start;    // where the document of the last query starts

  __device__ ProductQueries(const ProductParams& p, const ProductItem& item, int warpgroup)
      : p(p),
        first(static_cast<int64_t>(item.block) * kBlockQueries + warpgroup * kWarpgroupQueries),
        thread_first(first + ThreadOffset()),
        count(static_cast<int>(min(p.queries - thread_first, int64_t{kWarpgroupQueries}))) {
    for (int tile = 0; tile < 2; ++tile) {
      const int64_t query = first + tile * kGroupTile;
      positions[tile] = query < p.queries ? static_cast<int>(p.PositionOf(query)) : 0;
    }
    const int64_t last = min(first + kWarpgroupQueries, p.queries) - 1;
    last_start = last < first ? 0 : p.StartOf(static_cast<uint32_t>(last));
  }
  static __device__ __forceinline__ int ThreadOffset() {
    return 2 * static_cast<int>(threadIdx.x % 4);
  }
  static __device__ __forceinline__ constexpr int Offset(int i) { return i / 2 * 8 + i % 2; }
  __device__ __forceinline__ bool Exists(int i) const { return Offset(i) < count; }
  // Where the document of the i-th starts.
  __device__ __forceinline__ int Start(int i) const {
    return Exists(i) ? p.StartOf(static_cast<uint32_t>(thread_first) + Offset(i)) : 0;
  }
  // Where the i-th is; padding is nowhere, and has no products.
  __device__ __forceinline__ int PositionOf(int i) const {
    return positions[i / 16] + ThreadOffset() + Offset(i) % kGroupTile;
  }
};

__device__ __forceinline__ __half2 AsHalves(uint32_t pair) {
  return *reinterpret_cast<const __half2*>(&pair);
}
__device__ __forceinline__ uint32_t AsBits(__half2 pair) {
  return *reinterpret_cast<const uint32_t*>(&pair);
}

constexpr uint32_t kHalfInfinity = 0x7C00, kHalfMinusInfinity = 0xFC00;

// `pair` with `bits` instead of what is hidden of the i-th query of a thread, which is even, and of
// the one after it.
template <typename Hidden>
__device__ __forceinline__ uint32_t Hide(uint32_t pair, uint32_t bits, int i,
                                         const Hidden& hidden) {
  if (hidden(i)) pair = (pair & 0xFFFF0000u) | bits;
  if (hidden(i + 1)) pair = (pair & 0xFFFFu) | bits << 16;
  return pair;
}

// Takes products into the maxima of a thread's 32 queries: of pairs that are visible.
__device__ __forceinline__ void AbsorbMaxima(const ProductQueries& queries, int key,
                                             const Products& products, uint32_t (&maxima)[16]) {
  if (key >= queries.last_start && key + kQuarterKeys - 1 <= queries.positions[0]) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      uint32_t& maximum = maxima[i / 2];
      maximum = AsBits(__hmax2(AsHalves(maximum), AsHalves(products[i])));
    }
    return;
  }
  const int own_key = key + sm90::FragmentRow();
#pragma unroll
  for (int i = 0; i < 32; i += 2) {
    const int starts[2] = {queries.Start(i), queries.Start(i + 1)};
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int at = own_key + 8 * row;
      const uint32_t visible = Hide(products[i + row], kHalfMinusInfinity, i, [&](int j) {
        return at < starts[j % 2] || at > queries.PositionOf(j);
      });
      maxima[i / 2] = AsBits(__hmax2(AsHalves(maxima[i / 2]), AsHalves(visible)));
    }
  }
}

// Puts the maxima of all threads of a warpgroup together.
__device__ __forceinline__ void StoreMaxima(const ProductQueries& queries, int head, int warpgroup,
                                            ProductShared& shared, const uint32_t (&maxima)[16]) {
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
  if (query < queries.p.queries) {
    queries.p.row_max[head * queries.p.queries + query] =
        __hmax(__hmax(warp_max[0][column], warp_max[1][column]),
               __hmax(warp_max[2][column], warp_max[3][column]));
  }
  sm90::ptx::NamedBarrierSync(1 + warpgroup, sm90::ptx::kWarpgroupThreads);
}

// Leaves the scores of the eight groups from `key` on for both tiles. Queries see all keys of a
// candidate group but those before their documents. Distances, which are not negative, compare as
// their bits do; NaN is larger than all. Of bits three have their minimum in one instruction.
// `pairs`: by the first lanes, where a warp's pairs of groups of a tile are; null for other lanes.
__device__ __forceinline__ void StoreGroupScores(const ProductQueries& queries, uint32_t* pairs,
                                                 int key, const Products& products,
                                                 const uint32_t (&maxima)[16]) {
  constexpr uint32_t kFar = kHalfInfinity << 16 | kHalfInfinity;
  uint32_t nearest[2][2] = {{kFar, kFar}, {kFar, kFar}};  // tile, row half: two queries
  // How far the products of the `row`-th row half lie below the largest ones of the i-th query,
  // which is even, and of the next one.
  const auto distances = [&](int i, int row) {
    return AsBits(__hsub2(AsHalves(maxima[i / 2]), AsHalves(products[i + row])));
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

// Returns the maxima of a thread's queries.
__device__ __forceinline__ void LoadMaxima(const ProductQueries& queries, int head,
                                           uint32_t (&maxima)[16]) {
  const __half* const of_head = queries.p.row_max + head * queries.p.queries;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    // At an infinite distance queries that do not exist have no say.
    const auto load = [&](int j) {
      return queries.Exists(j) ? of_head[queries.thread_first + ProductQueries::Offset(j)]
                               : __ushort_as_half(kHalfInfinity);
    };
    maxima[i] = AsBits(__halves2half2(load(2 * i), load(2 * i + 1)));
  }
  sm90::ptx::PinRegisters(maxima);  // in pairs: else the compiler pairs them each time anew
}

// Leaves the largest products of an item's queries.
__device__ __forceinline__ void FindMaxima(const ProductItem& item, const ProductQueries& queries,
                                           int warpgroup, ProductShared& shared,
                                           sm90::RingCursor<kKeyStages>& cursor) {
  uint32_t maxima[16];
#pragma unroll
  for (uint32_t& pair : maxima) pair = kHalfMinusInfinity << 16 | kHalfMinusInfinity;
  ForEachProducts(shared, item, warpgroup, cursor, [&](int key, const Products& products) {
    AbsorbMaxima(queries, key, products, maxima);
  });
  StoreMaxima(queries, item.head, warpgroup, shared, maxima);
}

// Leaves the scores of an item's groups.
__device__ __forceinline__ void FindScores(const ProductItem& item, const ProductQueries& queries,
                                           int warpgroup, ProductShared& shared,
                                           sm90::RingCursor<kKeyStages>& cursor) {
  const ProductParams& p = queries.p;
  uint32_t maxima[16];
  LoadMaxima(queries, item.head, maxima);
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
    StoreGroupScores(queries, pairs, key, products, maxima);
  });
}

template <bool kScores>
__device__ __forceinline__ void ConsumeTiles(const ProductParams& p, int warpgroup,
                                             ProductShared& shared) {
  sm90::RingCursor<kKeyStages> cursor;
  sm90::RingCursor<1> q_cursor;
  ForEachItem<kScores>(p, [&](const ProductItem& item) {
    const ProductQueries queries(p, item, warpgroup);
    sm90::ptx::MbarrierWait(&shared.q_full, q_cursor.lap);
    q_cursor.Advance();
    if constexpr (kScores) {
      FindScores(item, queries, warpgroup, shared, cursor);
    } else {
      FindMaxima(item, queries, warpgroup, shared, cursor);
    }
    ArriveOnce(&shared.q_empty);
  });
}

template <bool kScores>
__global__ void __launch_bounds__(kProductThreads, 1)
    ProductKernel(const ProductParams p, const __grid_constant__ CUtensorMap query_map,
                  const __grid_constant__ CUtensorMap key_map) {
  extern __shared__ __align__(1024) unsigned char smem[];
  auto& shared = *reinterpret_cast<ProductShared*>(smem);
  if (threadIdx.x == 0) {
    sm90::ptx::MbarrierInit(&shared.q_full, 1);
    sm90::ptx::MbarrierInit(&shared.q_empty, kProductConsumerWarps);
    for (int slot = 0; slot < kKeyStages; ++slot) {
      sm90::ptx::MbarrierInit(&shared.full[slot], 1);
      sm90::ptx::MbarrierInit(&shared.empty[slot], kProductConsumerWarps);
    }
    sm90::ptx::MbarrierInitFence();
  }
  __syncthreads();
  sm90::RunRoles<1, /*kConsumerRegisters=*/160>(
      [&](int) {
        if (threadIdx.x == 0) ProduceTiles<kScores>(p, &query_map, &key_map, shared);
      },
      [&](int warpgroup) { ConsumeTiles<kScores>(p, warpgroup, shared); });
}

}  // namespace ringleader::kernels::index
