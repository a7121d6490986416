// The consumers of backward attention, apart from the order of their steps: products, masks,
// exponentials, and gradients on their way to global memory.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/sm90/backward/attention_backward_producer.cuh"
#include "kernels/sm90/ptx/mbarrier.cuh"
#include "kernels/sm90/ptx/sync.cuh"
#include "kernels/sm90/ptx/tma.cuh"
#include "kernels/sm90/ptx/wgmma.cuh"
#include "kernels/sm90/warpgroup/fragment.cuh"
#include "kernels/sm90/warpgroup/ring_cursor.cuh"

namespace ringleader::kernels::sm90 {

// Who computes dQ.
enum class QueryGradient {
  kTogether,   // both consumers, in one product over their 128 keys
  kApart,      // each consumer for its 64 keys; kHasLists64
  kElsewhere,  // another kernel: dq_map is not used
};

// Named barriers. 0 is __syncthreads.
constexpr int kScoresStored = 1;       // both consumers: dS of this step lies in shared memory
constexpr int kKeyGradientStaged = 2;  // one consumer: a part of dK or dV does; + consumer

template <int kHeadDim, WalkKind kKind, QueryGradient kQueryGradient, bool kDocuments>
class BackwardConsumer {
 public:
  using Tile = BackwardTile<kHeadDim>;

  __device__ BackwardConsumer(const BackwardParams& params, const CUtensorMap* dq_map,
                              const CUtensorMap* dk_map, const CUtensorMap* dv_map,
                              BackwardShared<kHeadDim, KeyStepOf<kKind>>& shared, int consumer)
      : params_(params),
        dq_map_(dq_map),
        dk_map_(dk_map),
        dv_map_(dv_map),
        shared_(shared),
        consumer_(consumer) {}

  __device__ __forceinline__ void Run() {
    RingCursor<1> item_cursor;
    while (true) {
      ptx::MbarrierWait(&shared_.item_arrived, item_cursor.lap);
      const BackwardItem item = shared_.item;
      if (item.kv_head < 0) break;
      bool any = true;  // of this consumer's keys are attended to
      if constexpr (kQueryGradient == QueryGradient::kApart) {
        any = StepsApart();
      } else {
        StepsTogether();
      }
      Release(&shared_.item_released);
      if (any) {
        AddKeyGradient(dv_map_, dv_, item);
        AddKeyGradient(dk_map_, dk_, item);
      }
      item_cursor.Advance();
    }
    if (Leads()) ptx::BulkWaitAll();
  }

 private:
  // Whether a step describes each consumer's keys by themselves.
  static constexpr bool kTiles64 = kKind == WalkKind::kTiles64 || kHasLists64<kKind>;

  // All steps of an item: attention_backward_together.cuh.
  __device__ void StepsTogether();
  // All steps of an item that are this consumer's, and whether there was one:
  // attention_backward_apart.cuh.
  __device__ bool StepsApart();

  __device__ __forceinline__ bool Leads() const { return threadIdx.x % 128 == 0; }
  // Every thread arrives after its own reads. One arrival for each warp would be no faster, and
  // would hide the order from racecheck.
  static __device__ __forceinline__ void Release(ptx::Mbarrier* barrier) {
    ptx::MbarrierArrive(barrier);
  }
  // product^T[64 keys, 64 queries] = keys (rows of this consumer) * queries^T; issues it only.
  __device__ __forceinline__ void IssueTransposedScores(float (&product)[32], const uint8_t* keys,
                                                        const uint8_t* queries) {
    const uint64_t a = ptx::OperandDescriptor(keys + consumer_ * 64 * ptx::kSwizzleRowBytes);
    const uint64_t b = ptx::OperandDescriptor(queries);
    ptx::PinRegisters(product);
    ptx::WgmmaFence();
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
      ptx::Wgmma<64>::SharedShared(
          product, ptx::DescriptorAdvance(a, (k / 4) * Tile::kKeyBlock + (k % 4) * 32),
          ptx::DescriptorAdvance(b, (k / 4) * Tile::kQueryBlock + (k % 4) * 32), k != 0);
    }
    ptx::WgmmaCommit();
  }

  // gradient[64 keys, d] += weights^T[64 keys, 64 queries] * rows[64 queries, d]; issues it only.
  __device__ __forceinline__ void IssueKeyGradient(float (&gradient)[kHeadDim / 2],
                                                   uint32_t (&weights)[16], const uint8_t* rows,
                                                   bool accumulate) {
    const uint64_t b = ptx::OperandDescriptor(rows, Tile::kQueryBlock);
    ptx::PinRegisters(gradient);
    ptx::PinRegisters(weights);
    ptx::WgmmaFence();
#pragma unroll
    for (int k = 0; k < kBackwardQueries / 16; ++k) {
      ptx::Wgmma<kHeadDim>::template RegisterShared<ptx::Major::kMn>(
          gradient, weights + 4 * k, ptx::DescriptorAdvance(b, k * 16 * ptx::kSwizzleRowBytes),
          accumulate || k != 0);
    }
    ptx::WgmmaCommit();
  }

  // The same with the weights from shared memory, [128 keys][64 queries]: registers are short.
  __device__ __forceinline__ void IssueKeyGradient(float (&gradient)[kHeadDim / 2],
                                                   const uint8_t* weights, const uint8_t* rows,
                                                   bool accumulate) {
    const uint64_t a = ptx::OperandDescriptor(weights + consumer_ * 64 * ptx::kSwizzleRowBytes);
    const uint64_t b = ptx::OperandDescriptor(rows, Tile::kQueryBlock);
    ptx::PinRegisters(gradient);
    ptx::WgmmaFence();
#pragma unroll
    for (int k = 0; k < kBackwardQueries / 16; ++k) {
      ptx::Wgmma<kHeadDim>::template SharedShared<ptx::Major::kK, ptx::Major::kMn>(
          gradient, ptx::DescriptorAdvance(a, k * 32),
          ptx::DescriptorAdvance(b, k * 16 * ptx::kSwizzleRowBytes), accumulate || k != 0);
    }
    ptx::WgmmaCommit();
  }

  // dq[64 queries, half of d] = dS[64 queries, 64 keys] * K[64 keys, half of d] of this consumer's
  // keys; issues it only.
  __device__ __forceinline__ void IssueOwnQueryGradient(float (&dq)[Tile::kDqColumns / 2],
                                                        int part) {
    const int own_keys = consumer_ * 64 * ptx::kSwizzleRowBytes;
    const int columns_byte = part * Tile::kDqColumns * 2;
    const uint64_t a = ptx::OperandDescriptor(shared_.d_scores + own_keys);
    const uint64_t b = ptx::OperandDescriptor(
        shared_.key + own_keys + columns_byte / 128 * Tile::kKeyBlock + columns_byte % 128);
    ptx::PinRegisters(dq);
    ptx::WgmmaFence();
#pragma unroll
    for (int k = 0; k < 64 / 16; ++k) {
      const int advance = k * 16 * ptx::kSwizzleRowBytes;
      ptx::Wgmma<Tile::kDqColumns>::template SharedShared<ptx::Major::kMn, ptx::Major::kMn>(
          dq, ptx::DescriptorAdvance(a, advance), ptx::DescriptorAdvance(b, advance), k != 0);
    }
    ptx::WgmmaCommit();
  }

  // dq[64 queries, half of d] = dS[64 queries, 128 keys] * K[128 keys, half of d]; issues it only.
  __device__ __forceinline__ void IssueQueryGradient(float (&dq)[Tile::kDqColumns / 2],
                                                     const uint8_t* d_scores) {
    const int columns_byte = consumer_ * Tile::kDqColumns * 2;
    const uint8_t* const keys =
        shared_.key + columns_byte / 128 * Tile::kKeyBlock + columns_byte % 128;
    const uint64_t a = ptx::OperandDescriptor(d_scores);
    const uint64_t b = ptx::OperandDescriptor(keys);
    ptx::PinRegisters(dq);
    ptx::WgmmaFence();
#pragma unroll
    for (int k = 0; k < kBackwardKeys / 16; ++k) {
      const int advance = k * 16 * ptx::kSwizzleRowBytes;
      ptx::Wgmma<Tile::kDqColumns>::template SharedShared<ptx::Major::kMn, ptx::Major::kMn>(
          dq, ptx::DescriptorAdvance(a, advance), ptx::DescriptorAdvance(b, advance), k != 0);
    }
    ptx::WgmmaCommit();
  }

  static __device__ __forceinline__ void LoadStats(float2 (&out)[8], const float* stats) {
    const int quad = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      out[j] = *reinterpret_cast<const float2*>(stats + 8 * j + 2 * quad);
    }
  }

  // Sets scores to -infinity where nothing is visible.
  __device__ __forceinline__ void Mask(float (&scores)[32], const TileStep& step, int stage) {
    const KeyStepOf<kKind>& described = shared_.step[stage];
    if constexpr (kHasIntervals<kKind>) {
      MaskIntervals(scores, described.bounds, step.keys > 0);
    } else if constexpr (kKind == WalkKind::kColumns) {
      MaskColumns(scores, described.visible);
      if constexpr (kDocuments) MaskQueries(scores, described.queries);
    } else {
      MaskScores(scores, step);
      if constexpr (kDocuments) MaskDocuments(scores, described.first_query);
      if constexpr (kHasChoice<kKind>) {
        MaskChosen(scores, described.visible + (kTiles64 ? 2 * consumer_ : 0));
      }
    }
  }

  __device__ __forceinline__ void MaskScores(float (&scores)[32], const TileStep& step) {
    const int quad = threadIdx.x % 4;
    const int first_key = kTiles64 ? 0 : consumer_ * 64;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = first_key + FragmentRow() + half * 8;
      const int begin = key < step.keys ? key - step.diagonal : kBackwardQueries;
      const int end = key - step.diagonal + step.window;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int low = 0; low < 2; ++low) {
          const int query = 8 * j + 2 * quad + low;
          if (query < begin || query >= end) scores[4 * j + 2 * half + low] = -INFINITY;
        }
      }
    }
  }

  // Hides keys that are not in a query's document.
  __device__ __forceinline__ void MaskDocuments(float (&scores)[32], int32_t first_query) {
    const int32_t first_key = shared_.item.key_block * kBackwardKeys + consumer_ * 64;
    const int32_t key = params_.walk.key_map.Position(first_key) + FragmentRow();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int low = 0; low < 2; ++low) {
        const int query = 8 * j + 2 * static_cast<int>(threadIdx.x % 4) + low;
        const int32_t start = params_.walk.DocumentStart(first_query + query);
        if (key < start) scores[4 * j + low] = -INFINITY;
        if (key + 8 < start) scores[4 * j + 2 + low] = -INFINITY;
      }
    }
  }

  __device__ __forceinline__ void MaskColumns(float (&scores)[32], const uint32_t* visible) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = consumer_ * 64 + FragmentRow() + half * 8;
      if (visible[key / 32] >> (key % 32) & 1) continue;
#pragma unroll
      for (int i = 0; i < 16; ++i) scores[i / 2 * 4 + half * 2 + i % 2] = -INFINITY;
    }
  }

  // Hides queries, of which `chosen` has a bit each, that did not choose the keys' block.
  __device__ __forceinline__ void MaskChosen(float (&scores)[32], const uint32_t* chosen) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int query = i / 4 * 8 + 2 * static_cast<int>(threadIdx.x % 4) + i % 2;
      if (!(chosen[i / 16] >> (query % 32) & 1)) scores[i] = -INFINITY;
    }
  }

  // Hides keys that are not in a query's intervals; all of them unless they are `visited`.
  __device__ __forceinline__ void MaskIntervals(float (&scores)[32], const uint32_t* bounds,
                                                bool visited) {
    const int key = consumer_ * 64 + FragmentRow();
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int query = i / 2 * 8 + 2 * static_cast<int>(threadIdx.x % 4) + i % 2;
      const uint32_t row = visited ? bounds[query] : 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // Bounds ascend: a key at or after an odd number of them is visible.
        bool visible = false;
#pragma unroll
        for (int bound = 0; bound < 4; ++bound) visible ^= key + half * 8 >= Bound(row, bound);
        if (!visible) scores[i / 2 * 4 + 2 * half + i % 2] = -INFINITY;
      }
    }
  }

  // Hides queries from `count` on.
  __device__ __forceinline__ void MaskQueries(float (&scores)[32], int count) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int query = i / 4 * 8 + 2 * static_cast<int>(threadIdx.x % 4) + i % 2;
      if (query >= count) scores[i] = -INFINITY;
    }
  }

  // scores become P, relative to lse; `weights` the same for the tensor cores.
  __device__ __forceinline__ void Exponentials(float (&scores)[32], uint32_t (&weights)[16],
                                               const float2 (&lse)[8]) {
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
      scores[i] = Exp2(fmaf(scores[i], params_.scale_log2, -lse[i / 4].x));
      scores[i + 1] = Exp2(fmaf(scores[i + 1], params_.scale_log2, -lse[i / 4].y));
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) weights[i] = PackBf16(scores[2 * i], scores[2 * i + 1]);
  }

  // Computes dS from P and dP.
  __device__ __forceinline__ void PackScoreGradient(uint32_t (&d_scores)[16],
                                                    const float (&scores)[32],
                                                    const float (&d_weights)[32],
                                                    const RowStats& stats) {
    float2 delta[8];
    LoadStats(delta, stats.scaled_delta);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float2 row_delta = delta[i / 2];
      d_scores[i] =
          PackBf16(scores[2 * i] * fmaf(d_weights[2 * i], params_.scale, -row_delta.x),
                   scores[2 * i + 1] * fmaf(d_weights[2 * i + 1], params_.scale, -row_delta.y));
    }
  }

  // Stores dS as [128 keys][64 queries], which the dQ product reads transposed.
  __device__ __forceinline__ void StoreScores(const uint32_t (&d_scores)[16]) {
    const int lane = threadIdx.x % 32;
    const int key = consumer_ * 64 + (threadIdx.x % 128) / 32 * 16 + lane / 8 % 2 * 8 + lane % 8;
    uint8_t* const row = shared_.d_scores + key * ptx::kSwizzleRowBytes;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int chunk = 2 * k + lane / 16;
      ptx::StoreMatrices(row + (chunk ^ lane % 8) * 16, d_scores + 4 * k);
    }
  }

  struct DqTarget {
    int32_t head;
    int32_t first_query;
  };

  // A gradient's 64 rows of kDqColumns columns go to shared memory in the swizzle of AddMap: 32
  // columns a row. Odd rows store their column groups in another order, so that the rows of half a
  // warp hit different banks.
  __device__ __forceinline__ void Stage(const float* gradient) {
    const int lane = threadIdx.x % 32;
    const int row = FragmentRow();
    const bool odd = row % 2;
    uint8_t* const base = shared_.staged[buffer_][consumer_] + row * 128 + lane % 2 * 8;
    const int swizzle = (lane % 4 / 2) ^ (row % 8) ^ (odd ? 4 : 0);
#pragma unroll
    for (int j = 0; j < Tile::kDqColumns / 8; ++j) {
      const int other = j ^ 2;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = 4 * j + 2 * half, k = 4 * other + 2 * half;
        *reinterpret_cast<float2*>(base + j / 4 * (kBackwardQueries * 128) + half * 1024 +
                                   ((2 * (j % 4)) ^ swizzle) * 16) =
            make_float2(odd ? gradient[k] : gradient[i], odd ? gradient[k + 1] : gradient[i + 1]);
      }
    }
  }

  // Adds to global memory what was staged last, and has been fenced and synchronised since: rows
  // from `token`, columns from column_part * kDqColumns.
  __device__ __forceinline__ void Send(const CUtensorMap* map, int32_t token, int column_part,
                                       int32_t head) {
    if (Leads()) {
      constexpr int kParts = Tile::kDqColumns / 32;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        ptx::TmaAddTile(map, shared_.staged[buffer_][consumer_] + part * (kBackwardQueries * 128),
                        token, column_part * kParts + part, head);
      }
      ptx::BulkCommit();
    }
    buffer_ ^= 1;
  }
  __device__ __forceinline__ void SendDq(const DqTarget& target) {
    Send(dq_map_, target.first_query, consumer_, target.head);
  }

  // Adds a gradient of this consumer's 64 keys. The buffer that comes next is free.
  __device__ __forceinline__ void AddKeyGradient(const CUtensorMap* map,
                                                 const float (&gradient)[kHeadDim / 2],
                                                 const BackwardItem& item) {
    const int32_t key = item.key_block * kBackwardKeys + consumer_ * 64;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      Stage(gradient + part * (kHeadDim / 4));
      ptx::FenceAsyncShared();
      if (Leads()) ptx::BulkWaitRead<0>();  // then the other buffer is free, too
      ptx::NamedBarrierSync(kKeyGradientStaged + consumer_, ptx::kWarpgroupThreads);
      Send(map, key, part, item.kv_head);
    }
  }
  const BackwardParams& params_;
  const CUtensorMap* const dq_map_;
  const CUtensorMap* const dk_map_;
  const CUtensorMap* const dv_map_;
  BackwardShared<kHeadDim, KeyStepOf<kKind>>& shared_;
  const int consumer_;
  RingCursor<Tile::kQueryStages> query_;
  RingCursor<Tile::kOutStages> d_out_;
  uint32_t d_scores_lap_ = 0;
  int buffer_ = 0;
  float dk_[kHeadDim / 2];
  float dv_[kHeadDim / 2];
};

}  // namespace ringleader::kernels::sm90
