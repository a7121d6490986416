// Backward attention for Hopper, key-stationary: a CTA holds 128 keys of one KV head and walks the
// queries that attend to them, over some query heads of the group. Its two consumer warpgroups hold
// dK and dV of 64 keys each in registers. All gradients are added to global memory in fp32 by the
// copy engine.
//
// Per step of 64 queries, transposed so that P and dS come out as register operands:
//   S^T = K Q^T;  P^T = exp2(S^T - lse);  dP^T = V dO^T;  dS^T = P^T (dP^T - delta)
//   dV += P^T dO;  dK += dS^T Q;  dQ = dS K (through shared memory: it sums over both warpgroups).
//
// Lists of 64-token tiles differ between the consumers' keys. Where rows that both list are few,
// QueryGradient::kApart lets each consumer walk its own rows at its own pace: it gives back at once
// the stages that are for the other alone, and adds its own part of dQ.
//
// Deterministic mode: fp32 terms that several CTAs add to one element make its bits depend on which
// comes first. So here no element has two: dQ comes from attention_query_gradient_kernel.cuh, where
// one CTA sums all of a query's terms, and an item takes all heads of a group, so that one CTA sums
// all of a key's. What a CTA sums it sums in the order of its walk, which depends on the arguments
// and the number of multiprocessors alone. No CTA waits for another: there is no order between
// items that could be cyclic.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/sm90/attention_backward_tiles.cuh"
#include "kernels/sm90/fragment.cuh"
#include "kernels/sm90/ptx/mbarrier.cuh"
#include "kernels/sm90/ptx/sync.cuh"
#include "kernels/sm90/ptx/tma.cuh"
#include "kernels/sm90/ptx/wgmma.cuh"
#include "kernels/sm90/ring_cursor.cuh"

namespace ringleader::kernels::sm90 {

// Who computes dQ.
enum class QueryGradient {
  kTogether,   // both consumers, in one product over their 128 keys
  kApart,      // each consumer for its 64 keys; WalkKind::kTiles64
  kElsewhere,  // another kernel: dq_map is not used
};

template <int kHeadDim>
struct BackwardTile {
  // Q of a step is read from the middle of the step before it (scores) to the start of the step
  // after it (dK); dO within its own step.
  static constexpr int kQueryStages = 3;
  static constexpr int kOutStages = 2;
  static constexpr int kConsumers = 2;
  static constexpr int kThreads = (kConsumers + 1) * ptx::kWarpgroupThreads;
  static constexpr int kQueryBytes = kBackwardQueries * kHeadDim * 2;
  static constexpr int kKeyBytes = kBackwardKeys * kHeadDim * 2;
  static constexpr int kScoreBytes = kBackwardKeys * kBackwardQueries * 2;
  // Bytes between the 64-column halves of a tile.
  static constexpr int kQueryBlock = kBackwardQueries * ptx::kSwizzleRowBytes;
  static constexpr int kKeyBlock = kBackwardKeys * ptx::kSwizzleRowBytes;
  // A consumer adds this many columns of dQ.
  static constexpr int kDqColumns = kHeadDim / 2;
  static constexpr int kDqBytes = kBackwardQueries * kDqColumns * 4;
};

template <int kHeadDim>
struct BackwardShared {
  using Tile = BackwardTile<kHeadDim>;
  alignas(1024) uint8_t key[Tile::kKeyBytes];
  alignas(1024) uint8_t value[Tile::kKeyBytes];
  alignas(1024) uint8_t query[Tile::kQueryStages][Tile::kQueryBytes];
  alignas(1024) uint8_t d_out[Tile::kOutStages][Tile::kQueryBytes];
  alignas(1024) uint8_t d_scores[Tile::kScoreBytes];
  alignas(1024) uint8_t staged[2][Tile::kConsumers][Tile::kDqBytes];  // gradients to be added
  alignas(16) RowStats stats[Tile::kQueryStages];
  BackwardStep step[Tile::kQueryStages];
  BackwardItem item;
  ptx::Mbarrier item_arrived, item_released;
  ptx::Mbarrier query_arrived[Tile::kQueryStages], query_released[Tile::kQueryStages];
  ptx::Mbarrier d_out_arrived[Tile::kOutStages], d_out_released[Tile::kOutStages];
  ptx::Mbarrier d_scores_released;
};

template <int kHeadDim, WalkKind kKind>
__device__ __forceinline__ void BackwardProduce(
    const BackwardParams& params, const CUtensorMap* query_map, const CUtensorMap* key_map,
    const CUtensorMap* value_map, const CUtensorMap* d_out_map, BackwardShared<kHeadDim>& shared) {
  using Tile = BackwardTile<kHeadDim>;
  const int lane = threadIdx.x % 32;
  const int32_t tile_tokens = params.walk.tile();
  RingCursor<1> item_cursor;
  RingCursor<Tile::kQueryStages> query;
  RingCursor<Tile::kOutStages> d_out;
  while (true) {
    int32_t index = 0;
    if (lane == 0) index = atomicAdd(params.next_item, 1);
    index = __shfl_sync(0xFFFFFFFFu, index, 0);
    const BackwardItem item = BackwardItemAt<kKind>(params, index);
    if (item.kv_head < 0) break;

    int32_t head = item.first_head;
    BackwardTiles<kKind> tiles(params, head, item);
    const auto next_tile = [&] {
      TileRef tile = tiles.Next();
      while (tile.index < 0 && head < item.end_head - 1) {
        tiles = BackwardTiles<kKind>(params, ++head, item);
        tile = tiles.Next();
      }
      return tile;
    };
    TileRef tile = next_tile();
    if (tile.index < 0) continue;  // nobody attends to these keys: their gradients stay

    ptx::MbarrierWait(&shared.item_released, item_cursor.lap ^ 1);
    if (lane == 0) {
      shared.item = item;
      ptx::MbarrierArriveExpect(&shared.item_arrived, 2 * Tile::kKeyBytes);
      ptx::TmaLoadTile(shared.key, key_map, &shared.item_arrived, item.key_block * kBackwardKeys,
                       item.kv_head);
      ptx::TmaLoadTile(shared.value, value_map, &shared.item_arrived,
                       item.key_block * kBackwardKeys, item.kv_head);
    }
    item_cursor.Advance();
    while (tile.index >= 0) {
      const int32_t step_head = head;
      const TileRef following = next_tile();
      for (int32_t offset = 0; offset < tile_tokens; offset += kBackwardQueries) {
        const int32_t first_query = tile.index * tile_tokens + offset;
        if (first_query >= params.walk.query_tokens) break;
        const bool last =
            following.index < 0 && (offset + kBackwardQueries >= tile_tokens ||
                                    first_query + kBackwardQueries >= params.walk.query_tokens);
        ptx::MbarrierWait(&shared.query_released[query.index], query.lap ^ 1);
        // The copies start before the step is described; consumers come after the arrival.
        BackwardStep& step = shared.step[query.index];
        ptx::Mbarrier* const query_arrived = &shared.query_arrived[query.index];
        if (lane == 0) {
          const int64_t block = static_cast<int64_t>(step_head) * params.query_blocks +
                                first_query / kBackwardQueries;
          ptx::MbarrierExpect(query_arrived, Tile::kQueryBytes + sizeof(RowStats));
          ptx::TmaLoadTile(shared.query[query.index], query_map, query_arrived, first_query,
                           step_head);
          ptx::BulkLoad(&shared.stats[query.index], params.row_stats + block, sizeof(RowStats),
                        query_arrived);
          step.head = step_head;
          step.first_query = first_query;
        }
        tiles.Describe(step, params.walk, tile, offset, last);
        if (lane == 0) ptx::MbarrierArrive(query_arrived);
        query.Advance();
        ptx::MbarrierWait(&shared.d_out_released[d_out.index], d_out.lap ^ 1);
        if (lane == 0) {
          ptx::Mbarrier* const arrived = &shared.d_out_arrived[d_out.index];
          ptx::MbarrierArriveExpect(arrived, Tile::kQueryBytes);
          ptx::TmaLoadTile(shared.d_out[d_out.index], d_out_map, arrived, first_query, step_head);
        }
        d_out.Advance();
      }
      tile = following;
    }
  }
  ptx::MbarrierWait(&shared.item_released, item_cursor.lap ^ 1);
  if (lane == 0) {
    shared.item = {.kv_head = -1};
    ptx::MbarrierArrive(&shared.item_arrived);
  }
}

// Named barriers. 0 is __syncthreads.
constexpr int kScoresStored = 1;       // both consumers: dS of this step lies in shared memory
constexpr int kKeyGradientStaged = 2;  // one consumer: a part of dK or dV does; + consumer

template <int kHeadDim, WalkKind kKind, QueryGradient kQueryGradient>
class BackwardConsumer {
 public:
  using Tile = BackwardTile<kHeadDim>;

  __device__ BackwardConsumer(const BackwardParams& params, const CUtensorMap* dq_map,
                              const CUtensorMap* dk_map, const CUtensorMap* dv_map,
                              BackwardShared<kHeadDim>& shared, int consumer)
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
        Steps();
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
  __device__ __forceinline__ bool Leads() const { return threadIdx.x % 128 == 0; }
  // Every thread arrives after its own reads. One arrival a warp is no faster, and leaves racecheck
  // blind to the order.
  static __device__ __forceinline__ void Release(ptx::Mbarrier* barrier) {
    ptx::MbarrierArrive(barrier);
  }
  // First of the key rows whose accumulator elements this thread holds, of this consumer's 64.
  static __device__ __forceinline__ int FragmentRow() {
    return (threadIdx.x % 128) / 32 * 16 + (threadIdx.x % 32) / 4;
  }

  // product^T[64 keys, 64 queries] = keys (rows of this consumer) * queries^T, issued.
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

  // gradient[64 keys, d] += weights^T[64 keys, 64 queries] * rows[64 queries, d], issued.
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
  // keys, issued.
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

  // dq[64 queries, half of d] = dS[64 queries, 128 keys] * K[128 keys, half of d], issued.
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

  // All steps of an item, software-pipelined so that the tensor cores always have work queued:
  // while the exponentials of a step are computed, its dP and the last step's dK are in flight;
  // while dS is computed, dV is; and the next step's scores go before this step's dQ and dK. dQ
  // leaves one step late, behind the barrier that the next dS needs anyway.
  __device__ __forceinline__ void Steps() {
    float scores[32];
    ptx::MbarrierWait(&shared_.query_arrived[query_.index], query_.lap);
    IssueTransposedScores(scores, shared_.key, shared_.query[query_.index]);
    bool accumulate = false;
    int previous = 0;  // stage of the last step's queries
    DqTarget target = {};
    bool last;
    do {
      const int query = query_.index;
      const RowStats& stats = shared_.stats[query];
      ptx::MbarrierWait(&shared_.d_out_arrived[d_out_.index], d_out_.lap);
      float d_weights[32];
      IssueTransposedScores(d_weights, shared_.value, shared_.d_out[d_out_.index]);
      const TileStep step = shared_.step[query].part[kKind == WalkKind::kTiles64 ? consumer_ : 0];
      ptx::WgmmaWait<1>();
      ptx::PinRegisters(scores);
      if (accumulate) {
        Release(&shared_.query_released[previous]);
        Release(&shared_.d_scores_released);
      }

      if (step.masked) {
        if constexpr (kKind == WalkKind::kColumns) {
          MaskColumns(scores, shared_.step[query].visible);
        } else {
          MaskScores(scores, step);
        }
      }
      float2 lse[8];
      LoadStats(lse, stats.lse_log2);
#pragma unroll
      for (int i = 0; i < 32; i += 2) {
        scores[i] = Exp2(fmaf(scores[i], params_.scale_log2, -lse[i / 4].x));
        scores[i + 1] = Exp2(fmaf(scores[i + 1], params_.scale_log2, -lse[i / 4].y));
      }
      uint32_t weights[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) weights[i] = PackBf16(scores[2 * i], scores[2 * i + 1]);
      IssueKeyGradient(dv_, weights, shared_.d_out[d_out_.index], accumulate);
      ptx::WgmmaWait<1>();
      ptx::PinRegisters(d_weights);

      float2 delta[8];
      LoadStats(delta, stats.scaled_delta);
      uint32_t d_scores[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const float2 row_delta = delta[i / 2];
        d_scores[i] =
            PackBf16(scores[2 * i] * fmaf(d_weights[2 * i], params_.scale, -row_delta.x),
                     scores[2 * i + 1] * fmaf(d_weights[2 * i + 1], params_.scale, -row_delta.y));
      }
      if (accumulate) {
        ptx::MbarrierWait(&shared_.d_scores_released, d_scores_lap_);
        d_scores_lap_ ^= 1;
      }
      StoreScores(d_scores);
      ptx::WgmmaWait<0>();
      ptx::PinRegisters(dv_);
      ptx::PinRegisters(weights);
      Release(&shared_.d_out_released[d_out_.index]);
      d_out_.Advance();
      query_.Advance();
      // Read here and not with the rest of the step: the compiler would wait for it between the
      // products that it issues.
      last = shared_.step[query].part[kKind == WalkKind::kTiles64 ? consumer_ : 0].last;
      if (!last) ptx::MbarrierWait(&shared_.query_arrived[query_.index], query_.lap);
      // On the last step the product is of stale data and is not used: a branch around it would
      // make the compiler wait for the tensor cores.
      IssueTransposedScores(scores, shared_.key, shared_.query[query_.index]);
      ptx::FenceAsyncShared();
      if constexpr (kQueryGradient == QueryGradient::kTogether) {
        if (Leads()) ptx::BulkWaitRead<0>();
        ptx::NamedBarrierSync(kScoresStored, 2 * ptx::kWarpgroupThreads);
        if (accumulate) SendDq(target);
        target = {shared_.step[query].head, shared_.step[query].first_query};

        float dq[Tile::kDqColumns / 2];
        IssueQueryGradient(dq, shared_.d_scores);
        IssueKeyGradient(dk_, shared_.d_scores, shared_.query[query], accumulate);
        ptx::WgmmaWait<1>();
        ptx::PinRegisters(dq);
        Stage(dq);
      } else {
        ptx::NamedBarrierSync(kScoresStored, 2 * ptx::kWarpgroupThreads);
        IssueKeyGradient(dk_, shared_.d_scores, shared_.query[query], accumulate);
        ptx::WgmmaWait<1>();
        ptx::PinRegisters(scores);
      }
      accumulate = true;
      previous = query;
    } while (!last);
    ptx::WgmmaWait<0>();
    ptx::PinRegisters(dk_);
    ptx::PinRegisters(scores);
    Release(&shared_.query_released[previous]);
    if constexpr (kQueryGradient == QueryGradient::kTogether) {
      ptx::FenceAsyncShared();
      if (Leads()) ptx::BulkWaitRead<0>();  // the other buffer is free for what follows
      ptx::NamedBarrierSync(kScoresStored, 2 * ptx::kWarpgroupThreads);
      SendDq(target);
    } else {
      // The next item's first dS overwrites what the other consumer's product may still read.
      ptx::NamedBarrierSync(kScoresStored, 2 * ptx::kWarpgroupThreads);
    }
  }

  // All steps of an item that are this consumer's; whether there was one. Not pipelined: what keeps
  // the tensor cores busy is the other consumer, which is at another step.
  __device__ __forceinline__ bool StepsApart() {
    bool accumulate = false;
    bool last;
    do {
      const int query = query_.index, d_out = d_out_.index;
      ptx::MbarrierWait(&shared_.query_arrived[query], query_.lap);
      const TileStep step = shared_.step[query].part[consumer_];
      last = step.last;
      query_.Advance();
      if (step.keys == 0) {  // the other consumer's alone
        Release(&shared_.query_released[query]);
        // A phase nobody here waited for would make the wait one lap later return at once.
        ptx::MbarrierWait(&shared_.d_out_arrived[d_out], d_out_.lap);
        Release(&shared_.d_out_released[d_out]);
        d_out_.Advance();
        continue;
      }
      float scores[32], d_weights[32];
      IssueTransposedScores(scores, shared_.key, shared_.query[query]);
      ptx::MbarrierWait(&shared_.d_out_arrived[d_out], d_out_.lap);
      d_out_.Advance();
      IssueTransposedScores(d_weights, shared_.value, shared_.d_out[d_out]);
      const RowStats& stats = shared_.stats[query];
      float2 lse[8];
      LoadStats(lse, stats.lse_log2);
      ptx::WgmmaWait<1>();
      ptx::PinRegisters(scores);
      if (step.masked) MaskScores(scores, step);
#pragma unroll
      for (int i = 0; i < 32; i += 2) {
        scores[i] = Exp2(fmaf(scores[i], params_.scale_log2, -lse[i / 4].x));
        scores[i + 1] = Exp2(fmaf(scores[i + 1], params_.scale_log2, -lse[i / 4].y));
      }
      uint32_t weights[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) weights[i] = PackBf16(scores[2 * i], scores[2 * i + 1]);
      IssueKeyGradient(dv_, weights, shared_.d_out[d_out], accumulate);
      ptx::WgmmaWait<1>();
      ptx::PinRegisters(d_weights);

      float2 delta[8];
      LoadStats(delta, stats.scaled_delta);
      uint32_t d_scores[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const float2 row_delta = delta[i / 2];
        d_scores[i] =
            PackBf16(scores[2 * i] * fmaf(d_weights[2 * i], params_.scale, -row_delta.x),
                     scores[2 * i + 1] * fmaf(d_weights[2 * i + 1], params_.scale, -row_delta.y));
      }
      StoreScores(d_scores);
      const DqTarget target = {shared_.step[query].head, shared_.step[query].first_query};
      ptx::FenceAsyncShared();
      if (Leads()) ptx::BulkWaitRead<0>();  // both buffers are free
      ptx::NamedBarrierSync(kKeyGradientStaged + consumer_, ptx::kWarpgroupThreads);
      float dq[Tile::kDqColumns / 2];
      IssueOwnQueryGradient(dq, 0);
      IssueKeyGradient(dk_, shared_.d_scores, shared_.query[query], accumulate);
      accumulate = true;
      ptx::WgmmaWait<1>();
      ptx::PinRegisters(dv_);
      ptx::PinRegisters(weights);
      ptx::PinRegisters(dq);
      Release(&shared_.d_out_released[d_out]);
      Stage(dq);
      ptx::FenceAsyncShared();
      ptx::NamedBarrierSync(kKeyGradientStaged + consumer_, ptx::kWarpgroupThreads);
      Send(dq_map_, target.first_query, 0, target.head);
      IssueOwnQueryGradient(dq, 1);
      ptx::WgmmaWait<0>();
      ptx::PinRegisters(dk_);
      ptx::PinRegisters(dq);
      Release(&shared_.query_released[query]);
      Stage(dq);
      ptx::FenceAsyncShared();
      ptx::NamedBarrierSync(kKeyGradientStaged + consumer_, ptx::kWarpgroupThreads);
      Send(dq_map_, target.first_query, 1, target.head);
    } while (!last);
    if (accumulate) {
      if (Leads()) ptx::BulkWaitRead<0>();  // both buffers are free for what follows
      ptx::NamedBarrierSync(kKeyGradientStaged + consumer_, ptx::kWarpgroupThreads);
    }
    return accumulate;
  }

  static __device__ __forceinline__ void LoadStats(float2 (&out)[8], const float* stats) {
    const int quad = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      out[j] = *reinterpret_cast<const float2*>(stats + 8 * j + 2 * quad);
    }
  }

  __device__ __forceinline__ void MaskScores(float (&scores)[32], const TileStep& step) {
    const int quad = threadIdx.x % 4;
    const int first_key = kKind == WalkKind::kTiles64 ? 0 : consumer_ * 64;
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

  __device__ __forceinline__ void MaskColumns(float (&scores)[32], const uint32_t* visible) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = consumer_ * 64 + FragmentRow() + half * 8;
      if (visible[key / 32] >> (key % 32) & 1) continue;
#pragma unroll
      for (int i = 0; i < 16; ++i) scores[i / 2 * 4 + half * 2 + i % 2] = -INFINITY;
    }
  }

  // As [128 keys][64 queries], which the dQ product reads transposed.
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

  // What was staged last, and fenced and synchronised since, is added to global memory: rows from
  // `token`, columns from column_part * kDqColumns.
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
  BackwardShared<kHeadDim>& shared_;
  const int consumer_;
  RingCursor<Tile::kQueryStages> query_;
  RingCursor<Tile::kOutStages> d_out_;
  uint32_t d_scores_lap_ = 0;
  int buffer_ = 0;
  float dk_[kHeadDim / 2];
  float dv_[kHeadDim / 2];
};

template <int kHeadDim, WalkKind kKind, QueryGradient kQueryGradient>
__global__ void __launch_bounds__(BackwardTile<kHeadDim>::kThreads, 1) AttentionBackwardKernel(
    const __grid_constant__ BackwardParams params, const __grid_constant__ CUtensorMap query_map,
    const __grid_constant__ CUtensorMap key_map, const __grid_constant__ CUtensorMap value_map,
    const __grid_constant__ CUtensorMap d_out_map, const __grid_constant__ CUtensorMap dq_map,
    const __grid_constant__ CUtensorMap dk_map, const __grid_constant__ CUtensorMap dv_map) {
  using Tile = BackwardTile<kHeadDim>;
  extern __shared__ __align__(1024) uint8_t raw_shared[];
  auto& shared = *reinterpret_cast<BackwardShared<kHeadDim>*>(raw_shared);
  if (threadIdx.x == 0) {
    constexpr int kConsumerThreads = Tile::kConsumers * ptx::kWarpgroupThreads;
    ptx::MbarrierInit(&shared.item_arrived, 1);
    ptx::MbarrierInit(&shared.item_released, kConsumerThreads);
    ptx::MbarrierInit(&shared.d_scores_released, kConsumerThreads);
    for (int i = 0; i < Tile::kQueryStages; ++i) {
      ptx::MbarrierInit(&shared.query_arrived[i], 1);
      ptx::MbarrierInit(&shared.query_released[i], kConsumerThreads);
    }
    for (int i = 0; i < Tile::kOutStages; ++i) {
      ptx::MbarrierInit(&shared.d_out_arrived[i], 1);
      ptx::MbarrierInit(&shared.d_out_released[i], kConsumerThreads);
    }
    ptx::MbarrierInitFence();
    ptx::PrefetchTensorMap(&query_map);
    ptx::PrefetchTensorMap(&key_map);
    ptx::PrefetchTensorMap(&value_map);
    ptx::PrefetchTensorMap(&d_out_map);
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(0xFFFFFFFFu, threadIdx.x / ptx::kWarpgroupThreads, 0);
  if (warpgroup == 0) {
    ptx::RegistersShrink<24>();
    if (threadIdx.x < 32) {
      BackwardProduce<kHeadDim, kKind>(params, &query_map, &key_map, &value_map, &d_out_map,
                                       shared);
    }
  } else {
    ptx::RegistersGrow<240>();
    BackwardConsumer<kHeadDim, kKind, kQueryGradient>(params, &dq_map, &dk_map, &dv_map, shared,
                                                      warpgroup - 1)
        .Run();
  }
}

// RowStats of one block of queries a warp pair: fills `stats` [heads, query_blocks].
__global__ void PrepareRowStats(RowStats* stats, const float* lse, const float* delta,
                                int32_t query_tokens, float scale) {
  const int32_t query = blockIdx.x * kBackwardQueries + threadIdx.x;
  const int64_t source = static_cast<int64_t>(blockIdx.y) * query_tokens + query;
  const bool exists = query < query_tokens;
  const float row_lse = exists ? lse[source] : -INFINITY;
  RowStats& block = stats[static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x];
  block.lse_log2[threadIdx.x] = row_lse == -INFINITY ? INFINITY : row_lse * kLog2E;
  block.scaled_delta[threadIdx.x] = row_lse == -INFINITY ? 0.0f : delta[source] * scale;
}

}  // namespace ringleader::kernels::sm90
