// Forward attention for Hopper: one persistent CTA a multiprocessor, a producer warp that walks
// tile lists and starts copies, and two consumer warpgroups of 64 query rows each.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/sm90/attention_forward_tiles.cuh"
#include "kernels/sm90/fragment.cuh"
#include "kernels/sm90/ptx/mbarrier.cuh"
#include "kernels/sm90/ptx/sync.cuh"
#include "kernels/sm90/ptx/tma.cuh"
#include "kernels/sm90/ptx/wgmma.cuh"
#include "kernels/sm90/ring_cursor.cuh"

namespace ringleader::kernels::sm90 {

struct ForwardParams {
  TileWalk walk;
  ColumnWalk columns;  // WalkKind::kColumns
  float* out = nullptr;
  float* lse = nullptr;
  int64_t out_token_stride = 0;
  int64_t out_head_stride = 0;
  int32_t heads = 0;
  int32_t kv_heads = 0;
  float scale_log2 = 0;  // of logits, times log2(e)
  int32_t* next_item = nullptr;
};

template <int kHeadDim, WalkKind kKind>
struct ForwardShared {
  using Tile = ForwardTile<kHeadDim, kKind>;
  alignas(1024) uint8_t query[2][Tile::kQueryBytes];
  alignas(1024) uint8_t key[Tile::kStages][Tile::kKeyBytes];
  alignas(1024) uint8_t value[Tile::kStages][Tile::kKeyBytes];
  ptx::Mbarrier query_arrived[2], query_released[2];
  ptx::Mbarrier key_arrived[Tile::kStages], key_released[Tile::kStages];
  ptx::Mbarrier value_arrived[Tile::kStages], value_released[Tile::kStages];
  ForwardItem item[2];
  ForwardStep step[Tile::kStages];
};

template <int kHeadDim, WalkKind kKind, bool kDocuments>
__device__ __forceinline__ void ForwardProduce(const ForwardParams& params,
                                               const CUtensorMap* query_map,
                                               const CUtensorMap* key_map,
                                               const CUtensorMap* value_map,
                                               ForwardShared<kHeadDim, kKind>& shared) {
  using Tile = ForwardTile<kHeadDim, kKind>;
  const int lane = threadIdx.x % 32;
  const int32_t group = params.heads / params.kv_heads;
  RingCursor<2> query;
  RingCursor<Tile::kStages> stage;
  while (true) {
    int32_t index = 0;
    if (lane == 0) index = atomicAdd(params.next_item, 1);
    index = __shfl_sync(0xFFFFFFFFu, index, 0);
    const ForwardItem item =
        ForwardItemAt(params.heads, params.kv_heads, params.walk.query_tokens, index);
    if (item.head < 0) break;
    ForwardTiles<kKind, kDocuments> tiles(params.walk, params.columns, item);
    TileRef tile = tiles.Next();
    if (tile.index < 0) continue;  // nothing to attend to: out and lse keep what they hold

    const int32_t kv_head = item.head / group;
    ptx::MbarrierWait(&shared.query_released[query.index], query.lap ^ 1);
    if (lane == 0) {
      shared.item[query.index] = item;
      ptx::MbarrierArriveExpect(&shared.query_arrived[query.index], Tile::kQueryBytes);
      ptx::TmaLoadTile(shared.query[query.index], query_map, &shared.query_arrived[query.index],
                       item.block * kForwardQueries, item.head);
    }
    query.Advance();
    while (tile.index >= 0) {
      const TileRef following = tiles.Next();
      ptx::MbarrierWait(&shared.key_released[stage.index], stage.lap ^ 1);
      // The copy starts before the step is described; consumers come after the arrival.
      if (lane == 0) {
        ptx::MbarrierExpect(&shared.key_arrived[stage.index], Tile::kKeyBytes);
        ptx::TmaLoadTile(shared.key[stage.index], key_map, &shared.key_arrived[stage.index],
                         tile.index * Tile::kKeys, kv_head);
      }
      tiles.Describe(shared.step[stage.index], tile, following.index < 0);
      if (lane == 0) ptx::MbarrierArrive(&shared.key_arrived[stage.index]);
      ptx::MbarrierWait(&shared.value_released[stage.index], stage.lap ^ 1);
      if (lane == 0) {
        ptx::MbarrierArriveExpect(&shared.value_arrived[stage.index], Tile::kKeyBytes);
        ptx::TmaLoadTile(shared.value[stage.index], value_map, &shared.value_arrived[stage.index],
                         tile.index * Tile::kKeys, kv_head);
      }
      stage.Advance();
      tile = following;
    }
  }
  ptx::MbarrierWait(&shared.query_released[query.index], query.lap ^ 1);
  if (lane == 0) {
    shared.item[query.index] = {-1, 0};
    ptx::MbarrierArrive(&shared.query_arrived[query.index]);
  }
}

// Named barriers that let the two consumer warpgroups take turns at the tensor cores: while one
// multiplies, the other computes its exponentials. Barrier 0 is __syncthreads.
constexpr int kTurnOfFirstConsumer = 1;
constexpr int kTurnThreads = 2 * ptx::kWarpgroupThreads;

template <int kHeadDim, WalkKind kKind, bool kDocuments>
class ForwardConsumer {
 public:
  using Tile = ForwardTile<kHeadDim, kKind>;

  __device__ ForwardConsumer(const ForwardParams& params, ForwardShared<kHeadDim, kKind>& shared,
                             int consumer)
      : params_(params), shared_(shared), consumer_(consumer) {}

  __device__ __forceinline__ void Run() {
    if (consumer_ == 1) PassTurn();
    RingCursor<2> query;
    while (true) {
      ptx::MbarrierWait(&shared_.query_arrived[query.index], query.lap);
      const ForwardItem item = shared_.item[query.index];
      if (item.head < 0) break;
      Tiles(query.index);
      Finish(item);
      query.Advance();
    }
    if (consumer_ == 0) AwaitTurn();  // leaves the barrier as it was found
  }

 private:
  // Lists of 64-token tiles differ between the consumers, so they cannot take turns.
  static constexpr bool kTurns = kKind != WalkKind::kTiles64;
  __device__ __forceinline__ void AwaitTurn() {
    if (kTurns) ptx::NamedBarrierSync(kTurnOfFirstConsumer + consumer_, kTurnThreads);
  }
  __device__ __forceinline__ void PassTurn() {
    if (kTurns) ptx::NamedBarrierArrive(kTurnOfFirstConsumer + 1 - consumer_, kTurnThreads);
  }
  // Every thread arrives after its own reads. One arrival a warp is no faster, and leaves racecheck
  // blind to the order.
  static __device__ __forceinline__ void Release(ptx::Mbarrier* barrier) {
    ptx::MbarrierArrive(barrier);
  }

  // scores = Q K^T, issued.
  __device__ __forceinline__ void IssueScores(int query, int stage) {
    const uint64_t a =
        ptx::OperandDescriptor(shared_.query[query] + consumer_ * 64 * ptx::kSwizzleRowBytes);
    const uint64_t b = ptx::OperandDescriptor(shared_.key[stage]);
    ptx::PinRegisters(scores_);
    ptx::WgmmaFence();
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
      ptx::Wgmma<Tile::kKeys>::SharedShared(
          scores_, ptx::DescriptorAdvance(a, (k / 4) * Tile::kQueryBlock + (k % 4) * 32),
          ptx::DescriptorAdvance(b, (k / 4) * Tile::kKeyBlock + (k % 4) * 32), k != 0);
    }
    ptx::WgmmaCommit();
  }

  // out += P V, issued.
  __device__ __forceinline__ void IssueOutput(int stage, bool accumulate) {
    const uint64_t b = ptx::OperandDescriptor(shared_.value[stage], Tile::kKeyBlock);
    ptx::PinRegisters(out_);
    ptx::PinRegisters(weights_);
    ptx::WgmmaFence();
#pragma unroll
    for (int k = 0; k < Tile::kKeys / 16; ++k) {
      ptx::Wgmma<kHeadDim>::template RegisterShared<ptx::Major::kMn>(
          out_, weights_ + 4 * k, ptx::DescriptorAdvance(b, k * 16 * ptx::kSwizzleRowBytes),
          accumulate || k != 0);
    }
    ptx::WgmmaCommit();
  }

  __device__ __forceinline__ TileStep AwaitKeys() {
    ptx::MbarrierWait(&shared_.key_arrived[stage_.index], stage_.lap);
    return shared_.step[stage_.index].part[kKind == WalkKind::kTiles64 ? consumer_ : 0];
  }

  // Passes over stages that are for the other consumer alone; `step` is that of stage_ then, or the
  // item's last.
  __device__ __forceinline__ void SkipHidden(TileStep& step) {
    while (step.keys == 0) {
      Release(&shared_.key_released[stage_.index]);
      // A phase nobody here waited for would make the wait one lap later return at once.
      ptx::MbarrierWait(&shared_.value_arrived[stage_.index], stage_.lap);
      Release(&shared_.value_released[stage_.index]);
      stage_.Advance();
      if (step.last) return;
      step = AwaitKeys();
    }
  }

  // Scores and weights of stage_, with nothing else in flight.
  __device__ __forceinline__ bool ScoresAlone(int query, const TileStep& step) {
    AwaitTurn();
    IssueScores(query, stage_.index);
    PassTurn();
    ptx::WgmmaWait<0>();
    ptx::PinRegisters(scores_);
    if (step.last) Release(&shared_.query_released[query]);
    const bool rescale = Exponentials(step);
    PackWeights();
    return rescale;
  }

  __device__ __forceinline__ void OutputAlone(const RingCursor<Tile::kStages>& value,
                                              bool accumulate) {
    ptx::MbarrierWait(&shared_.value_arrived[value.index], value.lap);
    IssueOutput(value.index, accumulate);
    ptx::WgmmaWait<0>();
    ptx::PinRegisters(out_);
    ptx::PinRegisters(weights_);
    Release(&shared_.value_released[value.index]);
  }

  // All tiles of an item. The product of one tile's weights overlaps the next tile's scores and
  // exponentials.
  __device__ __forceinline__ void Tiles(int query) {
    reference_[0] = reference_[1] = -INFINITY;
    sum_[0] = sum_[1] = 0;
    TileStep step = AwaitKeys();
    if constexpr (kKind == WalkKind::kTiles64) {
      SkipHidden(step);
      if (step.keys == 0) {
        Release(&shared_.query_released[query]);
        return;
      }
    }
    ScoresAlone(query, step);
    bool accumulate = false;
    while (!step.last) {
      const RingCursor<Tile::kStages> value = stage_;  // its weights are not in the output yet
      stage_.Advance();
      step = AwaitKeys();
      if constexpr (kKind == WalkKind::kTiles64) {
        if (step.keys == 0) {
          // The stage of the waiting weights must be given back first: what comes next for this
          // consumer may be further away than the ring is deep.
          OutputAlone(value, accumulate);
          accumulate = true;
          SkipHidden(step);
          if (step.keys == 0) {
            Release(&shared_.query_released[query]);
            return;
          }
          if (ScoresAlone(query, step)) RescaleOutput();
          continue;
        }
      }
      AwaitTurn();
      IssueScores(query, stage_.index);
      ptx::MbarrierWait(&shared_.value_arrived[value.index], value.lap);
      IssueOutput(value.index, accumulate);
      PassTurn();
      accumulate = true;
      ptx::WgmmaWait<1>();
      ptx::PinRegisters(scores_);
      if (step.last) Release(&shared_.query_released[query]);
      const bool rescale = Exponentials(step);
      ptx::WgmmaWait<0>();
      ptx::PinRegisters(out_);
      ptx::PinRegisters(weights_);
      Release(&shared_.value_released[value.index]);
      if (rescale) RescaleOutput();
      PackWeights();
    }
    OutputAlone(stage_, accumulate);
    stage_.Advance();
  }

  // scores_ becomes exp2 of the scaled scores, relative to a reference that is the row's maximum or
  // at most 2^8 below it: then neither the weights nor their fp32 sums lose anything, and the
  // output is rescaled only when the maximum has really moved. Returns whether the output must be
  // multiplied by correction_.
  __device__ __forceinline__ bool Exponentials(const TileStep& step) {
    if constexpr (kKind == WalkKind::kColumns) {
      if (step.masked) {
        MaskRowColumns<Tile::kKeys, kDocuments>(scores_, params_.walk, shared_.step[stage_.index],
                                                consumer_);
      }
      Release(&shared_.key_released[stage_.index]);
    } else {
      if (kDocuments && step.masked) {  // before the step is given back
        MaskRowDocuments<Tile::kKeys>(scores_, params_.walk, shared_.step[stage_.index], consumer_);
      }
      Release(&shared_.key_released[stage_.index]);
      if (step.masked) {
        MaskRows<Tile::kKeys>(scores_, step, kKind == WalkKind::kTiles64 ? 0 : consumer_ * 64);
      }
    }
    float maximum[2] = {scores_[0], scores_[2]};
#pragma unroll
    for (int i = 0; i < Tile::kKeys / 2; ++i)
      maximum[(i / 2) % 2] = fmaxf(maximum[(i / 2) % 2], scores_[i]);
    bool moved = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      maximum[half] = QuadMax(maximum[half]);
      moved |= (maximum[half] - reference_[half]) * params_.scale_log2 > kReferenceSlackLog2;
    }
    const bool rescale = __any_sync(0xFFFFFFFFu, moved);
    if (rescale) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float reference = fmaxf(reference_[half], maximum[half]);
        correction_[half] = reference == -INFINITY
                                ? 1.0f
                                : exp2f((reference_[half] - reference) * params_.scale_log2);
        reference_[half] = reference;
        sum_[half] *= correction_[half];
      }
    }
    const float scale = params_.scale_log2;
    const float offset[2] = {reference_[0] == -INFINITY ? 0.0f : reference_[0] * scale,
                             reference_[1] == -INFINITY ? 0.0f : reference_[1] * scale};
#pragma unroll
    for (int i = 0; i < Tile::kKeys / 2; ++i) {
      const int half = (i / 2) % 2;
      scores_[i] = Exp2(fmaf(scores_[i], scale, -offset[half]));
      sum_[half] += scores_[i];
    }
    return rescale;
  }

  __device__ __forceinline__ void RescaleOutput() {
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) out_[i] *= correction_[(i / 2) % 2];
  }

  __device__ __forceinline__ void PackWeights() {
#pragma unroll
    for (int i = 0; i < Tile::kKeys / 4; ++i)
      weights_[i] = PackBf16(scores_[2 * i], scores_[2 * i + 1]);
  }

  // Merges the row into what out and lse hold.
  __device__ __forceinline__ void Finish(const ForwardItem& item) {
    const int lane = threadIdx.x % 32;
    const int row =
        item.block * kForwardQueries + consumer_ * 64 + (threadIdx.x % 128) / 32 * 16 + lane / 4;
    float* const lse_row =
        params_.lse + static_cast<int64_t>(item.head) * params_.walk.query_tokens + row;
    float lse_before[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      lse_before[half] = row + half * 8 < params_.walk.query_tokens ? lse_row[half * 8] : 0.0f;
    }
    __syncwarp();  // every lane of a quad has read before one of them writes
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = QuadSum(sum_[half]);
      const int query = row + half * 8;
      if (query >= params_.walk.query_tokens || sum == 0) continue;
      const float lse = (reference_[half] * params_.scale_log2 + log2f(sum)) * kLn2;
      float* const out = params_.out + query * params_.out_token_stride +
                         item.head * params_.out_head_stride + 2 * (lane % 4);
      const float before = lse_before[half];
      const float top = fmaxf(before, lse);
      const float merged = top + log1pf(expf(fminf(before, lse) - top));
      const float weight = expf(lse - merged) / sum;
      if (before == -INFINITY) {
#pragma unroll
        for (int j = 0; j < kHeadDim / 8; ++j) {
          *reinterpret_cast<float2*>(out + 8 * j) =
              make_float2(out_[4 * j + 2 * half] * weight, out_[4 * j + 2 * half + 1] * weight);
        }
      } else {
        const float keep = expf(before - merged);
        float2 old[kHeadDim / 8];
#pragma unroll
        for (int j = 0; j < kHeadDim / 8; ++j)
          old[j] = *reinterpret_cast<const float2*>(out + 8 * j);
#pragma unroll
        for (int j = 0; j < kHeadDim / 8; ++j) {
          *reinterpret_cast<float2*>(out + 8 * j) =
              make_float2(fmaf(out_[4 * j + 2 * half], weight, old[j].x * keep),
                          fmaf(out_[4 * j + 2 * half + 1], weight, old[j].y * keep));
        }
      }
      if (lane % 4 == 0) lse_row[half * 8] = merged;
    }
  }

  static constexpr float kReferenceSlackLog2 = 8.0f;

  const ForwardParams& params_;
  ForwardShared<kHeadDim, kKind>& shared_;
  const int consumer_;
  RingCursor<Tile::kStages> stage_;
  float scores_[Tile::kKeys / 2];
  float out_[kHeadDim / 2];
  uint32_t weights_[Tile::kKeys / 4];
  float reference_[2];  // of the exponentials, by row half
  float correction_[2];
  float sum_[2];  // this thread's part of the row sums
};

template <int kHeadDim, WalkKind kKind, bool kDocuments>
__global__ void __launch_bounds__(ForwardTile<kHeadDim, kKind>::kThreads, 1)
    AttentionForwardKernel(const __grid_constant__ ForwardParams params,
                           const __grid_constant__ CUtensorMap query_map,
                           const __grid_constant__ CUtensorMap key_map,
                           const __grid_constant__ CUtensorMap value_map) {
  using Tile = ForwardTile<kHeadDim, kKind>;
  extern __shared__ __align__(1024) uint8_t raw_shared[];
  auto& shared = *reinterpret_cast<ForwardShared<kHeadDim, kKind>*>(raw_shared);
  if (threadIdx.x == 0) {
    constexpr int kConsumerThreads = Tile::kConsumers * ptx::kWarpgroupThreads;
    for (int i = 0; i < 2; ++i) {
      ptx::MbarrierInit(&shared.query_arrived[i], 1);
      ptx::MbarrierInit(&shared.query_released[i], kConsumerThreads);
    }
    for (int i = 0; i < Tile::kStages; ++i) {
      ptx::MbarrierInit(&shared.key_arrived[i], 1);
      ptx::MbarrierInit(&shared.key_released[i], kConsumerThreads);
      ptx::MbarrierInit(&shared.value_arrived[i], 1);
      ptx::MbarrierInit(&shared.value_released[i], kConsumerThreads);
    }
    ptx::MbarrierInitFence();
    ptx::PrefetchTensorMap(&query_map);
    ptx::PrefetchTensorMap(&key_map);
    ptx::PrefetchTensorMap(&value_map);
  }
  __syncthreads();
  // Uniform across the warp, and known to be so by the compiler.
  const int warpgroup = __shfl_sync(0xFFFFFFFFu, threadIdx.x / ptx::kWarpgroupThreads, 0);
  if (warpgroup == 0) {
    ptx::RegistersShrink<24>();
    if (threadIdx.x < 32)
      ForwardProduce<kHeadDim, kKind, kDocuments>(params, &query_map, &key_map, &value_map, shared);
  } else {
    ptx::RegistersGrow<240>();
    ForwardConsumer<kHeadDim, kKind, kDocuments>(params, shared, warpgroup - 1).Run();
  }
}

}  // namespace ringleader::kernels::sm90
