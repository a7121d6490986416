// MoBA's gate by query where a sequence has at most 128 blocks and a query keeps few of them. A CTA
// has all means of a KV head in shared memory. Its warpgroups each take 128 queries of a head at a
// time, in two halves that the copy engine brings, and find the best scores in the registers that
// the product leaves them in: a row lies in a quad of lanes, each of which sorts its share; sorted
// lists are merged up to the length that is kept.
#pragma once

#include <cuda.h>

#include <cfloat>
#include <cstdint>

#include "kernels/index/gates/gate_params.h"
#include "kernels/sm90/ptx/mbarrier.cuh"
#include "kernels/sm90/ptx/sync.cuh"
#include "kernels/sm90/ptx/tma.cuh"
#include "kernels/sm90/ptx/wgmma.cuh"
#include "ringleader/kernels/index.h"

namespace ringleader::kernels::index {

inline constexpr int kFewBlocks = 128;
inline constexpr int kMostListed = 16;  // blocks that a query keeps besides its own
inline constexpr int kFewGroups = 4;    // warpgroups
inline constexpr int kFewThreads = kFewGroups * sm90::ptx::kWarpgroupThreads;
inline constexpr int kHalfRows = 64;
inline constexpr int kItemRows = 2 * kHalfRows;

template <int kHeadDim>
struct FewShared {
  // Both lie in the 128-byte swizzle, as [head_dim / 64][rows][64].
  alignas(1024) unsigned char means[2][kFewBlocks * kHeadDim * 2];
  alignas(1024) unsigned char q[kFewGroups][2][kHalfRows * kHeadDim * 2];
  // A bit for each of a warpgroup's queries, of the blocks before their own.
  alignas(16) uint16_t bits[kFewGroups][kFewBlocks][kItemRows / 16];
  sm90::ptx::Mbarrier full[kFewGroups][2];
};

__device__ __forceinline__ void Order(float& high, float& low) {
  const float a = high, b = low;
  high = fmaxf(a, b);
  low = fminf(a, b);
}

// Falling: Batcher's odd-even merge sort.
template <int kCount>
__device__ __forceinline__ void Sort(float (&x)[kCount]) {
#pragma unroll
  for (int run = 1; run < kCount; run *= 2) {
#pragma unroll
    for (int distance = run; distance >= 1; distance /= 2) {
#pragma unroll
      for (int i = 0; i + distance < kCount; ++i) {
        const int from = i - distance % run;  // places from the first that this step compares
        const bool compared = from >= 0 && from / distance % 2 == 0;
        if (compared && i / (2 * run) == (i + distance) / (2 * run)) Order(x[i], x[i + distance]);
      }
    }
  }
}

// Both fall; `best` becomes the largest of them all.
template <int kCount>
__device__ __forceinline__ void Merge(float (&best)[kCount], const float (&other)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) best[i] = fmaxf(best[i], other[kCount - 1 - i]);
#pragma unroll
  for (int distance = kCount / 2; distance >= 1; distance /= 2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if ((i & distance) == 0) Order(best[i], best[i + distance]);
    }
  }
}

// The column of a product that a lane holds as the `i`-th of a row.
__device__ __forceinline__ int ColumnOf(int i) {
  return i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
}

// Takes from a lane's share of two rows of scores what lies before `first` of them or from `own`
// on, which is the same for the warp.
template <int kValues>
__device__ __forceinline__ void HideBlocks(float (&x)[2][kValues], const int (&first)[2], int own) {
  constexpr int kPart = 4;
  const bool from_start = __all_sync(0xffffffffu, max(first[0], first[1]) == 0);
#pragma unroll
  for (int part = 0; part < kValues / kPart; ++part) {
    if (from_start && own >= 4 * kPart * (part + 1)) continue;
#pragma unroll
    for (int i = part * kPart; i < (part + 1) * kPart; ++i) {
      const int column = ColumnOf(i);
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        x[row][i] = column < own && column >= first[row] ? x[row][i] : -INFINITY;
      }
    }
  }
}

// A quad of lanes has a row of scores x, -infinity from column `own` on, which is the same for the
// warp: bits of those of this lane that are among the row's `keep` best, at most kListed; ties go
// to the lower column or, if is_late(), to the higher one. Neither -infinity nor what is not a
// number is kept. All of a warp call.
template <int kListed, int kValues, typename IsLate>
__device__ __forceinline__ uint32_t KeepBest(const float (&x)[kValues], int own, int keep,
                                             IsLate is_late) {
  float best[kListed];
#pragma unroll
  for (int part = 0; part < kValues / kListed; ++part) {
    if (part > 0 && own <= part * kListed * 4) continue;
    float of[kListed];
#pragma unroll
    for (int i = 0; i < kListed; ++i) of[i] = x[part * kListed + i];
    Sort(of);
    if (part > 0) {
      Merge(best, of);
    } else {
#pragma unroll
      for (int i = 0; i < kListed; ++i) best[i] = of[i];
    }
  }
#pragma unroll
  for (int lanes = 1; lanes <= 2; lanes *= 2) {
    float other[kListed];
#pragma unroll
    for (int i = 0; i < kListed; ++i) other[i] = __shfl_xor_sync(0xffffffffu, best[i], lanes);
    Merge(best, other);
  }
  float least = best[0];
#pragma unroll
  for (int i = 1; i < kListed; ++i) least = i < keep ? best[i] : least;
  // What is at least `least` is above `below`. A difference that is not a number has no sign.
  const float below = nextafterf(fmaxf(least, -FLT_MAX), -INFINITY);
  uint32_t above = 0;  // signs of differences, the last column's first
#pragma unroll
  for (int i = kValues - 1; i >= 0; --i) {
    above = __funnelshift_l(__float_as_uint(below - x[i]), above, 1);
  }
  uint32_t kept = keep > 0 ? above : 0;
  if constexpr (kValues < 32) kept &= (1u << kValues) - 1;
  int surplus = __popc(kept);
  surplus += __shfl_xor_sync(0xffffffffu, surplus, 1);
  surplus += __shfl_xor_sync(0xffffffffu, surplus, 2);
  surplus -= max(keep, 0);
  if (__all_sync(0xffffffffu, surplus <= 0)) return kept;
  uint32_t equal = 0;
#pragma unroll
  for (int i = 0; i < kValues; ++i) equal |= x[i] == least ? 1u << i : 0u;
  const bool late = is_late();
  const int mirror = late ? 4 * kValues - 1 : 0;  // turns the order of columns round
  for (; __any_sync(0xffffffffu, surplus > 0); --surplus) {
    const int i = late ? __ffs(static_cast<int>(equal)) - 1 : 31 - __clz(static_cast<int>(equal));
    const int mine = equal != 0 && surplus > 0 ? ColumnOf(i) ^ mirror : -1;
    int last = max(mine, __shfl_xor_sync(0xffffffffu, mine, 1));
    last = max(last, __shfl_xor_sync(0xffffffffu, last, 2));
    if (mine < 0 || mine != last) continue;
    equal ^= 1u << i;
    kept ^= 1u << i;
  }
  return kept;
}

// Eight lanes of the same place in their quads have bits of a row each: of the `i`-th column in bit
// i. Lane r of them gets column 8 k + r's rows in byte k.
__device__ __forceinline__ uint32_t RowsOfColumns(uint32_t bits) {
  constexpr uint32_t kLow[3] = {0x55555555u, 0x33333333u, 0x0f0f0f0fu};
#pragma unroll
  for (int k = 0; k < 3; ++k) {
    const int distance = 1 << k;
    const uint32_t other = __shfl_xor_sync(0xffffffffu, bits, 4 * distance);
    bits = (threadIdx.x & 4 * distance) == 0 ? (bits & kLow[k]) | (other & kLow[k]) << distance
                                             : (bits & ~kLow[k]) | (other >> distance & kLow[k]);
  }
  return bits;
}

// What a warpgroup works on at a time.
struct FewItem {
  int tile = 0;  // of 128 queries
  int head = 0;
};

template <int kHeadDim>
struct FewBlocksGate {
  static constexpr int kLoadBytes = kHalfRows * kHeadDim * 2;
  const GateParams& p;
  const CUtensorMap* query_map;
  FewShared<kHeadDim>& shared;
  int kv_head, worker, workers;  // warpgroups that share the KV head's queries
  int warpgroup = static_cast<int>(threadIdx.x) / sm90::ptx::kWarpgroupThreads;

  __device__ bool ItemOf(int n, FewItem& item) const {
    const int group = p.q.heads / p.kv_heads, number = worker + n * workers;
    item = {.tile = number / group, .head = kv_head * group + number % group};
    return item.tile < static_cast<int>((p.q.tokens + kItemRows - 1) / kItemRows);
  }
  __device__ void Meet() const {
    sm90::ptx::NamedBarrierSync(1 + warpgroup, sm90::ptx::kWarpgroupThreads);
  }
  // One thread of the warpgroup calls.
  __device__ void Load(int n, int half) const {
    FewItem item;
    if (!ItemOf(n, item)) return;
    sm90::ptx::Mbarrier* const full = &shared.full[warpgroup][half];
    sm90::ptx::MbarrierArriveExpect(full, kLoadBytes);
    sm90::ptx::TmaLoadTile(shared.q[warpgroup][half], query_map, full,
                           item.tile * kItemRows + half * kHalfRows, item.head);
  }

  // Scores of half `half` of the n-th item with the first kColumns blocks, once its queries are
  // there; then the next item's are sent for.
  template <int kColumns>
  __device__ __forceinline__ void Multiply(int n, int half, float (&scores)[kColumns / 2]) const {
    namespace ptx = sm90::ptx;
    const unsigned char* const q = shared.q[warpgroup][half];
    ptx::MbarrierWait(&shared.full[warpgroup][half], n & 1);
    ptx::WgmmaFence();
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
      for (int step = 0; step < kHeadDim / 16; ++step) {
        const int within = step % 4 * 32;
        ptx::Wgmma<kColumns>::SharedShared(
            scores, ptx::OperandDescriptor(q + step / 4 * (kHalfRows * 128) + within),
            ptx::OperandDescriptor(shared.means[part] + step / 4 * (kFewBlocks * 128) + within),
            part > 0 || step > 0);
      }
    }
    ptx::WgmmaCommit();
    ptx::WgmmaWait<0>();
    ptx::PinRegisters(scores);
    Meet();
    if (threadIdx.x % ptx::kWarpgroupThreads == 0) Load(n + 1, half);
  }

  // Leaves in shared.bits what the queries of a half keep of the blocks before their own, of which
  // there are at most kColumns.
  template <int kColumns, int kListed>
  __device__ __forceinline__ void Choose(int n, int half, int first_query, int own) const {
    constexpr int kValues = kColumns / 4;
    float scores[kColumns / 2];
    Multiply<kColumns>(n, half, scores);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    float x[2][kValues];
    int first[2] = {0, 0};
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const int query = first_query + warp * 16 + lane / 4 + upper * 8;
      if (p.document_starts != nullptr && query < p.q.tokens) {
        first[upper] = p.document_starts[query] / p.block_size;
      }
#pragma unroll
      for (int i = 0; i < kValues; ++i) x[upper][i] = scores[i / 2 * 4 + upper * 2 + i % 2];
    }
    HideBlocks(x, first, own);
    // Found again where heads differ in their budgets or there are ties, rather than held in a
    // register.
    const auto head = [&] {
      FewItem item;
      ItemOf(n, item);
      return item.head;
    };
    const auto is_late = [&] { return TiesGoLate(head()); };
    uint32_t rows[2];
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      int keep = p.Keep(first[upper], own, /*halves=*/2);
      if (p.head_halves != nullptr) keep = p.Keep(first[upper], own, p.head_halves[head()]);
      rows[upper] = RowsOfColumns(KeepBest<kListed>(x[upper], own, keep, is_late));
    }
    uint16_t(*const bits)[kItemRows / 16] = shared.bits[warpgroup];
#pragma unroll
    for (int k = 0; k < kValues / 8; ++k) {
      const uint32_t low = rows[0] >> 8 * k & 255, high = rows[1] >> 8 * k & 255;
      bits[ColumnOf(8 * k + lane / 4)][half * 4 + warp] = static_cast<uint16_t>(low | high << 8);
    }
  }

  // A thread writes a block's bits; a warp, which of 32 blocks a tile keeps.
  __device__ __forceinline__ void Store(const FewItem& item, const int (&own)[2]) const {
    const int block = threadIdx.x % kFewBlocks;
    const uint4 kept = *reinterpret_cast<const uint4*>(shared.bits[warpgroup][block]);
    uint32_t words[4] = {kept.x, kept.y, kept.z, kept.w};
    const auto left = static_cast<int>(
        min(p.q.tokens - static_cast<int64_t>(item.tile) * kItemRows, int64_t{kItemRows}));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int queries = left - i * 32;
      const uint32_t valid = queries >= 32 ? ~0u : queries <= 0 ? 0u : (1u << queries) - 1;
      words[i] = block < own[i / 2] ? words[i] & valid : block == own[i / 2] ? valid : 0;
    }
    const int64_t all_words = QueryWords(p.q.tokens), first_word = int64_t{item.tile} * 4;
    if (block < p.blocks) {
      uint32_t* const to =
          p.queries + (static_cast<int64_t>(item.head) * p.blocks + block) * all_words + first_word;
      if (all_words % 4 == 0) {
        *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (first_word + i < all_words) to[i] = words[i];
        }
      }
    }
    const int tiles = static_cast<int>((p.q.tokens + p.tile - 1) / p.tile);
    const int of_item = kItemRows / p.tile, block_words = BlockWords(p.blocks);
    for (int i = 0; i < of_item; ++i) {
      const uint32_t any = of_item == 1 ? words[0] | words[1] | words[2] | words[3]
                           : i == 0     ? words[0] | words[1]
                                        : words[2] | words[3];
      const uint32_t word = __ballot_sync(0xffffffffu, block < p.blocks && any != 0);
      const int tile = item.tile * of_item + i;
      if (block % 32 == 0 && block / 32 < block_words && tile < tiles) {
        p.chosen[(static_cast<int64_t>(item.head) * tiles + tile) * block_words + block / 32] =
            word;
      }
    }
  }
};

// All means of a KV head; rows from padded_blocks on are zeros. All threads call.
template <int kHeadDim>
__device__ __forceinline__ void LoadMeans(const GateParams& p, int kv_head,
                                          FewShared<kHeadDim>& shared) {
  constexpr int kChunks = kHeadDim / 8;  // of 16 bytes in a row
  for (int i = threadIdx.x; i < 2 * kFewBlocks * kChunks; i += kFewThreads) {
    const int part = i / (kFewBlocks * kChunks), row = i / kChunks % kFewBlocks,
              chunk = i % kChunks;
    const int64_t from =
        (static_cast<int64_t>(part) * p.kv_heads + kv_head) * p.padded_blocks + row;
    uint4 value = make_uint4(0, 0, 0, 0);
    if (row < p.padded_blocks) {
      value = *reinterpret_cast<const uint4*>(p.means + from * kHeadDim + chunk * 8);
    }
    *reinterpret_cast<uint4*>(shared.means[part] + chunk / 8 * (kFewBlocks * 128) + row * 128 +
                              ((chunk % 8) ^ (row % 8)) * 16) = value;
  }
  sm90::ptx::FenceAsyncShared();
}

// `ctas` of them share a KV head.
template <int kHeadDim, int kListed>
__global__ void __launch_bounds__(kFewThreads, 1)
    FewBlocksKernel(const GateParams p, int ctas, const __grid_constant__ CUtensorMap query_map) {
  extern __shared__ __align__(1024) unsigned char smem[];
  auto& shared = *reinterpret_cast<FewShared<kHeadDim>*>(smem);
  const int warpgroup = threadIdx.x / sm90::ptx::kWarpgroupThreads;
  const int kv_head = static_cast<int>(blockIdx.x) / ctas;
  const FewBlocksGate<kHeadDim> gate = {
      p,
      &query_map,
      shared,
      kv_head,
      static_cast<int>(blockIdx.x) % ctas * kFewGroups + warpgroup,
      ctas * kFewGroups};
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2 * kFewGroups; ++i) sm90::ptx::MbarrierInit(&shared.full[i / 2][i % 2], 1);
    sm90::ptx::MbarrierInitFence();
  }
  __syncthreads();
  if (threadIdx.x % sm90::ptx::kWarpgroupThreads == 0) {
    gate.Load(0, 0);
    gate.Load(0, 1);
  }
  LoadMeans(p, kv_head, shared);
  __syncthreads();
  FewItem item;
  for (int n = 0; gate.ItemOf(n, item); ++n) {
    int own[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Tiles of 64 queries or more lie in one block.
      const int first_query = item.tile * kItemRows + half * kHalfRows;
      own[half] = first_query < p.q.tokens
                      ? static_cast<int>(p.layout.Position(first_query)) / p.block_size
                      : 0;
    }
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const int first_query = item.tile * kItemRows + half * kHalfRows;
      const int of_half = half == 0 ? own[0] : own[1];
      if (of_half <= kFewBlocks / 2) {
        gate.template Choose<kFewBlocks / 2, kListed>(n, half, first_query, of_half);
      } else {
        gate.template Choose<kFewBlocks, kListed>(n, half, first_query, of_half);
      }
    }
    gate.Meet();
    gate.Store(item, own);
  }
}

}  // namespace ringleader::kernels::index
