// Forward attention for Hopper: one persistent CTA a multiprocessor, a producer warp that walks
// tile lists and starts copies, and two consumer warpgroups of 64 query rows each. The queries stay
// in registers, as operands of every product with keys.
// With lists and block diagonals of 64-token tiles the two consumers have no tiles in common, or
// not at the same time. There each has a producer warp and stages of its own, so that the CTA is
// two of half the size. Where two heads have groups of keys in common, each consumer has one of
// them.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/sm90/forward/attention_forward_masks.cuh"
#include "kernels/sm90/forward/attention_forward_producer.cuh"
#include "kernels/sm90/ptx/mbarrier.cuh"
#include "kernels/sm90/ptx/sync.cuh"
#include "kernels/sm90/ptx/tma.cuh"
#include "kernels/sm90/ptx/wgmma.cuh"
#include "kernels/sm90/warpgroup/fragment.cuh"
#include "kernels/sm90/warpgroup/ring_cursor.cuh"
#include "kernels/sm90/warpgroup/roles.cuh"

namespace ringleader::kernels::sm90 {

struct ForwardParams : ForwardWalk {
  float* out = nullptr;
  float* lse = nullptr;
  int64_t out_token_stride = 0;
  int64_t out_head_stride = 0;
  // Where the output goes instead, rounded; out then holds what it is merged with, or is null.
  __nv_bfloat16* rounded_out = nullptr;
  int64_t rounded_token_stride = 0;
  int64_t rounded_head_stride = 0;
  uint8_t* written = nullptr;  // [heads, blocks of 64 queries], 1 where rounded_out was; or null
  float scale_log2 = 0;        // of logits, times log2(e)
};

// Has the number of stages that shared memory holds beside the queries.
template <int kHeadDim, WalkKind kKind>
struct ForwardPipeline : KeyStages<kHeadDim, kKind, kHeadDim == 128 ? 3 : 6> {
  using Tile = ForwardTile<kHeadDim, kKind>;
  alignas(1024) uint8_t query[Tile::kHeads][Tile::kQueryBytes];
};

// Named barriers that let the two consumer warpgroups take turns at the tensor cores: while one
// multiplies, the other computes its exponentials. Barrier 0 is __syncthreads.
constexpr int kTurnOfFirstConsumer = 1;
constexpr int kTurnThreads = 2 * ptx::kWarpgroupThreads;

template <int kHeadDim, WalkKind kKind, bool kDocuments>
class ForwardConsumer {
 public:
  using Tile = ForwardTile<kHeadDim, kKind>;
  using Shared = ForwardPipeline<kHeadDim, kKind>;
  using Stage = RingCursor<Shared::kStages>;

  // `consumer` of the pipeline.
  __device__ ForwardConsumer(const ForwardParams& params, Shared& shared, int consumer)
      : params_(params),
        shared_(shared),
        consumer_(consumer),
        head_(Tile::kHeads == 1 ? 0 : consumer),
        first_row_(Tile::kHeads == 1 ? consumer * 64 : 0) {}

  __device__ __forceinline__ void Run() {
    if (consumer_ == 1) PassTurn();
    RingCursor<1> item_cursor;
    while (true) {
      ptx::MbarrierWait(&shared_.item_arrived, item_cursor.lap);
      const ForwardItem item = shared_.item;
      if (item.head < 0) break;
      LoadQueries();
      Tiles();
      Finish(item);
      item_cursor.Advance();
    }
    if (consumer_ == 0) AwaitTurn();  // leaves the barrier as it was found
  }

 private:
  static constexpr bool kTurns = Tile::kConsumers == 2;
  __device__ __forceinline__ void AwaitTurn() {
    if (kTurns) ptx::NamedBarrierSync(kTurnOfFirstConsumer + consumer_, kTurnThreads);
  }
  __device__ __forceinline__ void PassTurn() {
    if (kTurns) ptx::NamedBarrierArrive(kTurnOfFirstConsumer + 1 - consumer_, kTurnThreads);
  }
  // Every thread arrives after its own reads. One arrival for each warp would be no faster, and
  // would hide the order from racecheck.
  static __device__ __forceinline__ void Release(ptx::Mbarrier* barrier) {
    ptx::MbarrierArrive(barrier);
  }

  __device__ __forceinline__ void LoadQueries() {
    const int lane = threadIdx.x % 32;
    const int row = first_row_ + threadIdx.x % 128 / 32 * 16 + lane % 16;
    const uint8_t* const queries = shared_.query[head_] + row * ptx::kSwizzleRowBytes;
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
      const int chunk = (k % 4 * 2 + lane / 16) ^ (lane % 8);
      ptx::LoadMatrices(queries_ + 4 * k, queries + k / 4 * Tile::kQueryBlock + chunk * 16);
    }
  }

  // Issues scores = Q K^T.
  __device__ __forceinline__ void IssueScores(int stage) {
    const uint64_t b = ptx::OperandDescriptor(shared_.key[stage], 16, Tile::kKeyAtom);
    ptx::PinRegisters(scores_);
    ptx::PinRegisters(queries_);
    ptx::WgmmaFence();
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
      ptx::Wgmma<Tile::kKeys>::template RegisterShared<ptx::Major::kK>(
          scores_, queries_ + 4 * k,
          ptx::DescriptorAdvance(b, (k / 4) * Tile::kKeyBlock + (k % 4) * 32), k != 0);
    }
    ptx::WgmmaCommit();
  }

  // Issues out += P V.
  __device__ __forceinline__ void IssueOutput(int stage, bool accumulate) {
    const uint64_t b =
        ptx::OperandDescriptor(shared_.value[stage], Tile::kKeyBlock, Tile::kKeyAtom);
    ptx::PinRegisters(out_);
    ptx::PinRegisters(weights_);
    ptx::WgmmaFence();
#pragma unroll
    for (int k = 0; k < Tile::kKeys / 16; ++k) {
      ptx::Wgmma<kHeadDim>::template RegisterShared<ptx::Major::kMn>(
          out_, weights_ + 4 * k, ptx::DescriptorAdvance(b, k * 2 * Tile::kKeyAtom),
          accumulate || k != 0);
    }
    ptx::WgmmaCommit();
  }

  __device__ __forceinline__ TileStep AwaitKeys() {
    ptx::MbarrierWait(&shared_.key_arrived[stage_.index], stage_.lap);
    return shared_.step[stage_.index].all;
  }

  // All tiles of an item. The product of one tile's weights overlaps the next tile's scores and
  // exponentials.
  __device__ __forceinline__ void Tiles() {
    reference_[0] = reference_[1] = -INFINITY;
    sum_[0] = sum_[1] = 0;
    TileStep step = AwaitKeys();
    AwaitTurn();
    IssueScores(stage_.index);
    PassTurn();
    ptx::WgmmaWait<0>();
    ptx::PinRegisters(scores_);
    // This must not come right after the loads: an arrival does not wait for loads on their way,
    // nor does the copy engine, which may then overwrite what they read.
    Release(&shared_.item_released);
    Exponentials(step);
    PackWeights();
    bool accumulate = false;
    while (!step.last) {
      const Stage value = stage_;  // its weights are not in the output yet
      stage_.Advance();
      step = AwaitKeys();
      AwaitTurn();
      IssueScores(stage_.index);
      ptx::MbarrierWait(&shared_.value_arrived[value.index], value.lap);
      IssueOutput(value.index, accumulate);
      PassTurn();
      accumulate = true;
      ptx::WgmmaWait<1>();
      ptx::PinRegisters(scores_);
      const bool rescale = Exponentials(step);
      ptx::WgmmaWait<0>();
      ptx::PinRegisters(out_);
      ptx::PinRegisters(weights_);
      Release(&shared_.value_released[value.index]);
      if (rescale) RescaleOutput();
      PackWeights();
    }
    ptx::MbarrierWait(&shared_.value_arrived[stage_.index], stage_.lap);
    IssueOutput(stage_.index, accumulate);
    ptx::WgmmaWait<0>();
    ptx::PinRegisters(out_);
    ptx::PinRegisters(weights_);
    Release(&shared_.value_released[stage_.index]);
    stage_.Advance();
  }

  // scores_ becomes exp2 of the scaled scores, relative to a reference that is the row's maximum or
  // at most 2^8 below it: then neither the weights nor their fp32 sums lose anything, and the
  // output is rescaled only when the maximum has really moved. Returns whether the output must be
  // multiplied by correction_.
  __device__ __forceinline__ bool Exponentials(const TileStep& step) {
    if (step.masked)
      MaskStage<kKind, kDocuments>(scores_, params_.walk, shared_.step[stage_.index], consumer_);
    Release(&shared_.key_released[stage_.index]);
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

  // Merges the row into what out and lse hold, or writes it, rounded. Of rows that attend to
  // nothing both stay.
  __device__ __forceinline__ void Finish(const ForwardItem& item) {
    if (params_.rounded_out != nullptr) return FinishRounded(item);
    const int lane = threadIdx.x % 32;
    const int row =
        item.block * Tile::kQueries + first_row_ + (threadIdx.x % 128) / 32 * 16 + lane / 4;
    const int head = item.head + head_;
    float* const lse_row =
        params_.lse + static_cast<int64_t>(head) * params_.walk.query_tokens + row;
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
                         head * params_.out_head_stride + 2 * (lane % 4);
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

  __device__ __forceinline__ void FinishRounded(const ForwardItem& item) {
    const int lane = threadIdx.x % 32;
    const int head = item.head + head_;
    const int block = (item.block * Tile::kQueries + first_row_) / 64;  // of 64 queries
    const int row = block * 64 + (threadIdx.x % 128) / 32 * 16 + lane / 4;
    const int32_t tokens = params_.walk.query_tokens;
    float* const lse_row = params_.lse + static_cast<int64_t>(head) * tokens + row;
    float lse_before[2] = {-INFINITY, -INFINITY};
    if (params_.out != nullptr) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (row + half * 8 < tokens) lse_before[half] = lse_row[half * 8];
      }
      __syncwarp();  // every lane of a quad has read before one of them writes
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = QuadSum(sum_[half]), before = lse_before[half];
      const int64_t query = row + half * 8;
      if (query >= tokens || (sum == 0 && before == -INFINITY)) continue;
      const float lse =
          sum == 0 ? -INFINITY : (reference_[half] * params_.scale_log2 + log2f(sum)) * kLn2;
      const float top = fmaxf(before, lse);
      const float merged = top + log1pf(expf(fminf(before, lse) - top));
      const float weight = sum == 0 ? 0.0f : expf(lse - merged) / sum;
      const float keep = expf(before - merged);
      auto* const to =
          reinterpret_cast<uint32_t*>(params_.rounded_out + query * params_.rounded_token_stride +
                                      head * params_.rounded_head_stride + 2 * (lane % 4));
      const float* const out = params_.out + query * params_.out_token_stride +
                               head * params_.out_head_stride + 2 * (lane % 4);
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; ++j) {
        float2 x = {0.0f, 0.0f};
        if (before != -INFINITY) x = *reinterpret_cast<const float2*>(out + 8 * j);
        x = {x.x * keep, x.y * keep};
        if (sum != 0) {  // else out_ has products of zeros with values, which may be infinite
          x = {fmaf(out_[4 * j + 2 * half], weight, x.x),
               fmaf(out_[4 * j + 2 * half + 1], weight, x.y)};
        }
        to[4 * j] = PackBf16(x.x, x.y);
      }
      if (lane % 4 == 0) lse_row[half * 8] = merged;
    }
    // The last item's second block may lie behind all queries.
    if (params_.written != nullptr && threadIdx.x % 128 == 0 && block * 64 < tokens) {
      params_.written[static_cast<int64_t>(head) * ((tokens + 63) / 64) + block] = 1;
    }
  }

  static constexpr float kReferenceSlackLog2 = 8.0f;

  const ForwardParams& params_;
  Shared& shared_;
  const int consumer_;
  const int head_, first_row_;  // which of an item's 64 queries it has
  Stage stage_;
  uint32_t queries_[kHeadDim / 4];
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
  const auto pipelines =
      InitPipelines<ForwardPipeline<kHeadDim, kKind>>(raw_shared, &query_map, &key_map, &value_map);
  RunRoles<Tile::kPipelines>(
      [&](int pipeline) {
        auto& shared = pipelines[pipeline];
        ProduceStages<kDocuments>(
            params, &key_map, &value_map, shared, [&](const ForwardItem& item) {
              ptx::MbarrierArriveExpect(&shared.item_arrived, Tile::kHeads * Tile::kQueryBytes);
              for (int head = 0; head < Tile::kHeads; ++head) {
                ptx::TmaLoadTile(shared.query[head], &query_map, &shared.item_arrived,
                                 item.block * Tile::kQueries, item.head + head);
              }
            });
      },
      [&](int consumer) {
        ForwardConsumer<kHeadDim, kKind, kDocuments>(params, pipelines[consumer / Tile::kConsumers],
                                                     consumer % Tile::kConsumers)
            .Run();
      });
}

}  // namespace ringleader::kernels::sm90
