// What groups of queries see of groups of keys: products of groups along their antidiagonals, as
// one matrix product whose inner dimension is a group's tokens and their head_dim. A CTA takes 128
// groups of queries and 256 of keys at a time: a warp loads, two warpgroups multiply and leave, of
// each row, the sum of exponentials of each block of keys and of all, beside the row's maximum over
// these keys. The softmax over all keys is put together from that (antidiagonal.cu). The CTAs of a
// cluster have neighbouring queries and the same keys; each loads a part of these for all.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/sm90/ptx/cluster.cuh"
#include "kernels/sm90/ptx/exp2.cuh"
#include "kernels/sm90/ptx/mbarrier.cuh"
#include "kernels/sm90/ptx/wgmma.cuh"
#include "kernels/sm90/warpgroup/ring_cursor.cuh"
#include "kernels/sm90/warpgroup/roles.cuh"
#include "ringleader/kernels/block_choice.h"
#include "ringleader/kernels/seen_keys.h"
#include "ringleader/kernels/shard_layout.h"

namespace ringleader::kernels::index {

inline constexpr int kScoreRows = 128;     // groups of queries that a CTA takes
inline constexpr int kScoreColumns = 256;  // groups of keys: an item
inline constexpr int kScoreThreads = 384;
inline constexpr int kScoreStages = 4;
inline constexpr int kScoreCluster = 2;  // CTAs
inline constexpr int kClusterRows = kScoreRows * kScoreCluster;

// What one launch scores: `rows` groups of queries from first_row on, of `heads` heads from
// first_head on.
struct ScoreParams {
  ShardLayout layout;  // of the queries
  SeenKeys seen = {};
  int stride = 0;  // tokens of a group: 1 << stride_log2
  int stride_log2 = 0;
  int head_blocks = 0;  // of 64 elements in a head
  int group = 0;        // query heads a KV head
  int first_head = 0, heads = 0;
  int first_row = 0, rows = 0;
  int blocks = 0;           // of keys of the sequence
  int items = 0;            // of a row
  float scale_log2 = 0.0f;  // of a group's summed logits
  // max and sum: 2^(logit - max) over an item's groups that the row sees; -infinity and 0 if none.
  float2* items_of = nullptr;   // [heads, rows, items]
  float* block_sums = nullptr;  // [heads, rows, blocks]: the parts of `sum`
};

// Positions of groups, as numbers of groups. kIntervals: whether a mask of intervals is known.
template <bool kIntervals>
struct GroupPositions {
  const ScoreParams& p;

  // The first and the last group of keys that a row sees.
  __device__ int Start(int row) const {
    return static_cast<int>(Seen().Begin(static_cast<int64_t>(row) << p.stride_log2) >>
                            p.stride_log2);
  }
  __device__ int Last(int row) const {
    return static_cast<int>(LastGroupOf(Seen(), p.layout, p.stride_log2, row));
  }

 private:
  __device__ SeenKeys Seen() const {
    return {p.seen.document_starts, kIntervals ? p.seen.intervals : nullptr};
  }
};

// The work of a cluster in turn: of the items that some row of its tiles sees, head by head, every
// one after as many as there are clusters. What rows see first and last ascends with them, so the
// items of neighbouring tiles are neighbours.
template <bool kIntervals>
struct ScoreWalk {
  const ScoreParams& p;
  int head = 0, row = 0, item = 0;  // row: the cluster's first, from first_row on

  __device__ explicit ScoreWalk(const ScoreParams& p) : p(p), offset_(blockIdx.x / kScoreCluster) {
    Settle();
  }
  __device__ bool done() const { return head >= p.heads; }
  __device__ void Advance() {
    offset_ += gridDim.x / kScoreCluster;
    Settle();
  }

 private:
  __device__ void Settle() {
    const GroupPositions<kIntervals> positions = {p};
    for (; head < p.heads; ++head, row = 0) {
      for (; row < p.rows; row += kClusterRows) {
        const int first = p.first_row + row;
        const int last = p.first_row + min(row + kClusterRows, p.rows) - 1;
        const int begin = positions.Start(first) / kScoreColumns;
        const int count = positions.Last(last) / kScoreColumns + 1 - begin;
        item = begin + static_cast<int>(offset_);
        if (offset_ < count) return;
        offset_ -= count;
      }
    }
  }

  int64_t offset_;  // items from the first of these rows on
};

struct ScoreShared {
  // Both lie in the 128-byte swizzle, in rows of 64 elements.
  alignas(1024) unsigned char q[kScoreStages][kScoreRows * 128];
  alignas(1024) unsigned char k[kScoreStages][kScoreColumns * 128];
  sm90::ptx::Mbarrier full[kScoreStages];
  sm90::ptx::Mbarrier empty[kScoreStages];
};
inline constexpr int kScoreStageBytes = (kScoreRows + kScoreColumns) * 128;
inline constexpr int kScoreConsumerWarps = 8;

// Copies a box of LoadGroupMap: 64 columns of the `within`-th token of each group.
__device__ __forceinline__ void LoadGroups(void* smem, const CUtensorMap* map,
                                           sm90::ptx::Mbarrier* barrier, int group, int within,
                                           int block, int head) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(sm90::ptx::SmemAddress(smem)),
      "l"(map), "r"(sm90::ptx::SmemAddress(barrier)), "r"(0), "r"(group), "r"(within), "r"(block),
      "r"(head)
      : "memory");
}

// The same, to all CTAs of the cluster, and counted by the barriers that they have there.
__device__ __forceinline__ void LoadGroupsForAll(void* smem, const CUtensorMap* map,
                                                 sm90::ptx::Mbarrier* barrier, int group,
                                                 int within, int block, int head) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(
          sm90::ptx::SmemAddress(smem)),
      "l"(map), "r"(sm90::ptx::SmemAddress(barrier)), "r"(0), "r"(group), "r"(within), "r"(block),
      "r"(head), "h"(static_cast<uint16_t>((1 << kScoreCluster) - 1))
      : "memory");
}

// One thread loads: of each stage 64 columns of one token of each group of queries, and of the
// token of each group of keys that it meets. A stage is free when all of the cluster have read it.
template <bool kIntervals>
__device__ __forceinline__ void ProduceScores(const ScoreParams& p, const CUtensorMap* query_map,
                                              const CUtensorMap* key_map, ScoreShared& shared) {
  constexpr int kPart = kScoreColumns / kScoreCluster;
  const int rank = sm90::ptx::ClusterRank();
  sm90::RingCursor<kScoreStages> cursor;
  for (ScoreWalk<kIntervals> walk(p); !walk.done(); walk.Advance()) {
    const int head = p.first_head + walk.head, row = p.first_row + walk.row + rank * kScoreRows;
    for (int i = 0; i < p.stride; ++i) {
      for (int block = 0; block < p.head_blocks; ++block) {
        const int stage = cursor.index;
        sm90::ptx::MbarrierWait(&shared.empty[stage], cursor.lap ^ 1);
        sm90::ptx::MbarrierArriveExpect(&shared.full[stage], kScoreStageBytes);
        LoadGroups(shared.q[stage], query_map, &shared.full[stage], row, i, block, head);
        LoadGroupsForAll(shared.k[stage] + rank * kPart * 128, key_map, &shared.full[stage],
                         walk.item * kScoreColumns + rank * kPart, p.stride - 1 - i, block,
                         head / p.group);
        cursor.Advance();
      }
    }
  }
}

// A warpgroup's 64 rows against an item's 256 columns.
struct ScoreAccumulators {
  float of[2][64];  // of the columns' halves
};

__device__ __forceinline__ void ReleaseScores(ScoreShared& shared, int stage) {
  __syncwarp();
  const int lane = threadIdx.x % 32;
  if (lane < kScoreCluster) sm90::ptx::MbarrierArriveAt(&shared.empty[stage], lane);
}

// Calls `meanwhile` while the first products run.
template <typename Meanwhile>
__device__ __forceinline__ void MultiplyScores(const ScoreParams& p, int warpgroup,
                                               ScoreShared& shared,
                                               sm90::RingCursor<kScoreStages>& cursor,
                                               ScoreAccumulators& sums,
                                               const Meanwhile& meanwhile) {
  namespace ptx = sm90::ptx;
  const int steps = p.stride * p.head_blocks;
  int previous = -1;
  for (int step = 0; step < steps; ++step) {
    const int stage = cursor.index;
    ptx::MbarrierWait(&shared.full[stage], cursor.lap);
    const unsigned char* const q = shared.q[stage] + warpgroup * (64 * 128);
    ptx::WgmmaFence();
#pragma unroll
    for (int part = 0; part < 4; ++part) {  // 16 columns: 32 bytes
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        ptx::Wgmma<128>::SharedShared(
            sums.of[half], ptx::OperandDescriptor(q + part * 32),
            ptx::OperandDescriptor(shared.k[stage] + half * (128 * 128) + part * 32),
            step > 0 || part > 0);
      }
    }
    ptx::WgmmaCommit();
    if (previous >= 0) {
      ptx::WgmmaWait<1>();
      ReleaseScores(shared, previous);
    } else {
      meanwhile();
    }
    previous = stage;
    cursor.Advance();
  }
  ptx::WgmmaWait<0>();
  ptx::PinRegisters(sums.of[0]);
  ptx::PinRegisters(sums.of[1]);
  ReleaseScores(shared, previous);
}

__device__ __forceinline__ float OverQuad(float value) {
  value += __shfl_xor_sync(0xffffffffu, value, 1);
  return value + __shfl_xor_sync(0xffffffffu, value, 2);
}

// One row's 64 exponentials, e(half, 8-column group, low bit), to sums of blocks of kWidth groups,
// the item's first of which is `first`. The four lanes of a quad have the row's columns between
// them, and share the writing; returns this lane's part of the row's sum. All of a warp call.
template <int kWidth, typename Exponential>
__device__ __forceinline__ float StoreBlockSums(float* to, int first, int blocks, bool valid,
                                                const Exponential& e) {
  const int quad = threadIdx.x % 4;
  float total = 0.0f;
  const auto store = [&](int block, float value) {
    if (valid && first + block < blocks) to[first + block] = value;
  };
  if constexpr (kWidth >= 8) {
    constexpr int kGroups = kWidth / 8;  // 8-column groups of a block
    const bool upper = quad / 2 == 1, odd = quad % 2 == 1;
#pragma unroll
    for (int four = 0; four < 32 / kGroups; four += 4) {
      float part[4];
#pragma unroll
      for (int at = 0; at < 4; ++at) {
        part[at] = 0.0f;
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          const int j = (four + at) * kGroups + g;
          part[at] += e(j / 16, j % 16, 0) + e(j / 16, j % 16, 1);
        }
      }
      // Lanes swap halves and add: each ends with one of the four blocks.
      float pair[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        pair[i] = upper ? part[2 + i] : part[i];
        pair[i] += __shfl_xor_sync(0xffffffffu, upper ? part[i] : part[2 + i], 2);
      }
      float mine = odd ? pair[1] : pair[0];
      mine += __shfl_xor_sync(0xffffffffu, odd ? pair[0] : pair[1], 1);
      total += mine;
      store(four + quad, mine);
    }
  } else {
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      const float low = e(j / 16, j % 16, 0), high = e(j / 16, j % 16, 1);
      total += low + high;
      if constexpr (kWidth == 4) {
        const float pair = low + high + __shfl_xor_sync(0xffffffffu, low + high, 1);
        if (quad % 2 == 0) store(2 * j + quad / 2, pair);
      } else if constexpr (kWidth == 2) {
        store(4 * j + quad, low + high);
      } else {
        store(8 * j + 2 * quad, low);
        store(8 * j + 2 * quad + 1, high);
      }
    }
  }
  return total;
}

// An item of a walk, and what of it the two rows of a thread see.
struct ScoreItem {
  int head = 0, item = 0;
  int row[2];             // from first_row on
  int start[2], last[2];  // columns; none of rows behind the last
  bool whole = false;     // the rows of the warp see all columns, and larger products are more
};

// All of a warp call.
template <bool kIntervals>
__device__ __forceinline__ ScoreItem ItemOf(const ScoreParams& p, const ScoreWalk<kIntervals>& walk,
                                            int warpgroup) {
  const GroupPositions<kIntervals> positions = {p};
  ScoreItem item{.head = walk.head, .item = walk.item};
  const int first = walk.item * kScoreColumns;
  bool whole = p.scale_log2 > 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = walk.row + sm90::ptx::ClusterRank() * kScoreRows + warpgroup * 64 +
                    threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 + 8 * i;
    const bool valid = row < p.rows;
    item.row[i] = row;
    item.start[i] = valid ? positions.Start(p.first_row + row) : 0;
    item.last[i] = valid ? positions.Last(p.first_row + row) : -1;
    whole &= item.start[i] <= first && item.last[i] >= first + kScoreColumns - 1;
  }
  item.whole = __all_sync(0xffffffffu, whole);
  return item;
}

// What is left of an item: maxima, exponentials, sums. kWhole: item.whole.
template <int kWidth, bool kWhole>
__device__ __forceinline__ void StoreScores(const ScoreParams& p, const ScoreItem& item,
                                            ScoreAccumulators& sums) {
  const int quad = threadIdx.x % 4;
  const int first_column = item.item * kScoreColumns + 2 * quad;
#pragma unroll
  for (int half_row = 0; half_row < 2; ++half_row) {
    const bool valid = item.row[half_row] < p.rows;
    float maximum = -INFINITY;
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      float& x = sums.of[i / 32][i % 32 / 2 * 4 + half_row * 2 + i % 2];
      if constexpr (!kWhole) {
        const int column = first_column + i / 32 * 128 + i % 32 / 2 * 8 + i % 2;
        const bool seen = column <= item.last[half_row] && column >= item.start[half_row];
        x = seen ? x * p.scale_log2 : -INFINITY;
      }
      maximum = fmaxf(maximum, x);
    }
    maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, 1));
    maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, 2));
    if constexpr (kWhole) maximum *= p.scale_log2;
    const float shift = maximum == -INFINITY ? 0.0f : maximum;
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      float& x = sums.of[i / 32][i % 32 / 2 * 4 + half_row * 2 + i % 2];
      x = sm90::ptx::Exp2(kWhole ? fmaf(x, p.scale_log2, -shift) : x - shift);
    }
    const int64_t slot =
        static_cast<int64_t>(item.head) * p.rows + (valid ? item.row[half_row] : 0);
    const float sum = OverQuad(StoreBlockSums<kWidth>(
        p.block_sums + slot * p.blocks, item.item * (kScoreColumns / kWidth), p.blocks, valid,
        [&](int half, int j, int low) { return sums.of[half][j * 4 + half_row * 2 + low]; }));
    if (valid && quad == 0) p.items_of[slot * p.items + item.item] = make_float2(maximum, sum);
  }
}

// kWidth: groups of a block.
template <int kWidth, bool kIntervals>
__global__ void __cluster_dims__(kScoreCluster) __launch_bounds__(kScoreThreads, 1)
    ScoreKernel(const ScoreParams p, const __grid_constant__ CUtensorMap query_map,
                const __grid_constant__ CUtensorMap key_map) {
  extern __shared__ __align__(1024) unsigned char smem[];
  auto& shared = *reinterpret_cast<ScoreShared*>(smem);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kScoreStages; ++stage) {
      sm90::ptx::MbarrierInit(&shared.full[stage], 1);
      sm90::ptx::MbarrierInit(&shared.empty[stage], kScoreConsumerWarps * kScoreCluster);
    }
    sm90::ptx::MbarrierInitFence();
  }
  sm90::ptx::ClusterSync();
  sm90::RunRoles<1>(
      [&](int) {
        if (threadIdx.x == 0) ProduceScores<kIntervals>(p, &query_map, &key_map, shared);
      },
      [&](int warpgroup) {
        sm90::RingCursor<kScoreStages> cursor;
        ScoreAccumulators sums;
        for (ScoreWalk<kIntervals> walk(p); !walk.done();) {
          ScoreItem item;
          MultiplyScores(p, warpgroup, shared, cursor, sums, [&] {
            item = ItemOf(p, walk, warpgroup);
            walk.Advance();
          });
          if (item.whole) {
            StoreScores<kWidth, true>(p, item, sums);
          } else {
            StoreScores<kWidth, false>(p, item, sums);
          }
        }
      });
  __syncwarp();
  sm90::ptx::ClusterSync();  // Nobody leaves whose shared memory others still fill or signal.
}

}  // namespace ringleader::kernels::index
