// The products behind the choice of groups of keys, S^T = K Q^T of narrow rows (64 dimensions in
// e4m3), summed to half precision. A CTA takes 384 queries of a head and 256 keys at a time: a warp
// loads, each of three warpgroups multiplies the keys with 128 queries of its own, which stay in
// shared memory. A thread thereby has the same 32 queries all along, two to a register: it keeps
// what they need in 16; and a group of keys is eight rows of one warp, so that what is left of its
// scores is four numbers to reduce for 64 x 128 pairs.
//
// Two kernels share everything but what they multiply and what becomes of the products:
// key_group_references.cuh finds what each query's products are compared with, and
// key_group_scores.cuh how far at the least those of a tile and a group lie below it.
#pragma once

#include <cuda.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/sm90/ptx/mbarrier.cuh"
#include "kernels/sm90/ptx/sync.cuh"
#include "kernels/sm90/ptx/tma.cuh"
#include "kernels/sm90/ptx/wgmma.cuh"
#include "kernels/sm90/ptx/wgmma_e4m3.cuh"
#include "kernels/sm90/warpgroup/fragment.cuh"
#include "kernels/sm90/warpgroup/ring_cursor.cuh"
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
inline constexpr int kProductThreads = (kWarpgroups + 1) * sm90::ptx::kWarpgroupThreads;
inline constexpr int kProductConsumerWarps = kWarpgroups * 4;
inline constexpr int kConsumerRegisters = 160;

// What KeyGroupBudget says of a tile.
struct TileBudget {
  int32_t kept = 0;
  int32_t is_sampled = 0;
};

// What one launch takes: the blocks of kBlockQueries local queries from first_block on, of all
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
  int chunks = 1;                       // of a block's keys, in scores
  const TileBudget* budgets = nullptr;  // [heads / heads_together, tiles]
  int heads_together = 1, tiles = 0;
  __half* references = nullptr;  // [heads, queries], of products
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
  // Whether the references of a tile are of the sample.
  __device__ __forceinline__ bool IsSampled(int head, int64_t tile) const {
    return budgets[head / heads_together * static_cast<int64_t>(tiles) + tile].is_sampled != 0;
  }
};

// The stages [begin, end) of keys that some of a block's queries need.
struct ProductItem {
  int head = 0, block = 0;
  int begin = 0, end = 0;
};

// A launch's items are of all heads and blocks, in scores of all chunks of keys. Neighbours, which
// run at the same time, read the same keys: heads first, then blocks, the longest first, then
// chunks. Takes a CTA's in turn: take(head, block, chunk).
template <typename Take>
__device__ __forceinline__ void ForEachBlock(const ProductParams& p, const Take& take) {
  const int64_t items = static_cast<int64_t>(p.heads) * p.blocks * p.chunks;
  for (int64_t i = blockIdx.x; i < items; i += gridDim.x) {
    const int64_t rest = i / p.heads;
    take(static_cast<int>(i % p.heads),
         p.first_block + p.blocks - 1 - static_cast<int>(rest % p.blocks),
         static_cast<int>(rest / p.blocks));
  }
}

// Tiles are in the 64-byte swizzle.
struct ProductShared {
  static constexpr int kQueryBytes = kWarpgroupQueries * kScoreDims;
  static constexpr int kKeyBytes = kStageKeys * kScoreDims;
  alignas(1024) unsigned char q[kWarpgroups][kQueryBytes];
  alignas(1024) unsigned char k[kKeyStages][kKeyBytes];
  sm90::ptx::Mbarrier q_full, q_empty;
  sm90::ptx::Mbarrier full[kKeyStages], empty[kKeyStages];
};

// Initializes the barriers, which all threads of a CTA see from here on.
__device__ __forceinline__ void InitBarriers(ProductShared& shared) {
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
}

// Loads a block's queries, when those before are no longer read; `more` bytes are to come beside.
__device__ __forceinline__ void LoadQueries(const CUtensorMap* query_map, int head, int block,
                                            int more, ProductShared& shared,
                                            sm90::RingCursor<1>& cursor) {
  namespace ptx = sm90::ptx;
  ptx::MbarrierWait(&shared.q_empty, cursor.lap ^ 1);
  ptx::MbarrierArriveExpect(&shared.q_full, kWarpgroups * ProductShared::kQueryBytes + more);
  for (int warpgroup = 0; warpgroup < kWarpgroups; ++warpgroup) {
    ptx::TmaLoadTile(shared.q[warpgroup], query_map, &shared.q_full,
                     block * kBlockQueries + warpgroup * kWarpgroupQueries, head);
  }
  cursor.Advance();
}

// Loads the stages of an item's keys one after another.
__device__ __forceinline__ void LoadStages(const CUtensorMap* key_map, const ProductItem& item,
                                           int kv_head, ProductShared& shared,
                                           sm90::RingCursor<kKeyStages>& cursor) {
  namespace ptx = sm90::ptx;
  for (int stage = item.begin; stage < item.end; ++stage) {
    const int slot = cursor.index;
    ptx::MbarrierWait(&shared.empty[slot], cursor.lap ^ 1);
    ptx::MbarrierArriveExpect(&shared.full[slot], ProductShared::kKeyBytes);
    ptx::TmaLoadTile(shared.k[slot], key_map, &shared.full[slot], stage * kStageKeys, kv_head);
    cursor.Advance();
  }
}

__device__ __forceinline__ void ArriveOnce(sm90::ptx::Mbarrier* barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) sm90::ptx::MbarrierArrive(barrier);
}

// Products of 64 keys with a warpgroup's 128 queries: in the i-th register the rows' half i % 2
// with the queries 8 * (i / 2) + 2 * (lane % 4) and the next one.
using Products = uint32_t[32];

// Starts the products of 64 keys with a warpgroup's queries.
__device__ __forceinline__ void StartProducts(const unsigned char* keys,
                                              const unsigned char* queries, Products& products) {
  namespace ptx = sm90::ptx;
  const uint64_t key_rows = ptx::BytesDescriptor(keys), query_rows = ptx::BytesDescriptor(queries);
  ptx::WgmmaFence();
#pragma unroll
  for (int first = 0; first < kScoreDims; first += 32) {
    ptx::WgmmaE4m3(products, ptx::DescriptorAdvance(key_rows, first),
                   ptx::DescriptorAdvance(query_rows, first), first > 0);
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
    const auto start = [&](int quarter, Products& products) {
      StartProducts(shared.k[slot] + quarter * (kQuarterKeys * kScoreDims), shared.q[warpgroup],
                    products);
    };
    ptx::MbarrierWait(&shared.full[slot], cursor.lap);
    start(0, even);
    start(1, odd);
    ptx::WgmmaWait<1>();
    ptx::PinRegisters(even);
    absorb(key, even);
    ptx::PinRegisters(even);
    start(2, even);
    ptx::WgmmaWait<1>();
    ptx::PinRegisters(odd);
    absorb(key + kQuarterKeys, odd);
    ptx::PinRegisters(odd);
    start(3, odd);
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

}  // namespace ringleader::kernels::index
