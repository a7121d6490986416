// dQ of the deterministic backward, query-stationary: a CTA holds queries of one head with their dO
// and walks the keys that they attend to, in forward's stages. Its two consumer warpgroups hold dQ
// of 64 queries each in registers, and nobody else adds to these rows: the sum's order is the
// walk's.
//
// Per tile of keys:
//   S = Q K^T;  P = exp2(S - lse);  dP = dO V^T;  dS = P (dP - delta);  dQ += dS K.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/sm90/backward/attention_backward_tiles.cuh"
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

struct QueryGradientParams : ForwardWalk {
  const RowStats* row_stats = nullptr;  // [heads, query_blocks]
  float* dq = nullptr;
  int64_t token_stride = 0;  // of dq
  int64_t head_stride = 0;
  int32_t query_blocks = 0;  // of 64
  float scale = 0;
  float scale_log2 = 0;
};

template <int kHeadDim, WalkKind kKind>
struct QueryGradientPipeline : KeyStages<kHeadDim, kKind, kHeadDim == 128 ? 2 : 4> {
  using Tile = ForwardTile<kHeadDim, kKind>;
  alignas(1024) uint8_t query[Tile::kQueryBytes];
  alignas(1024) uint8_t d_out[Tile::kQueryBytes];
};

template <int kHeadDim, WalkKind kKind, bool kDocuments>
class QueryGradientConsumer {
 public:
  using Tile = ForwardTile<kHeadDim, kKind>;
  using Shared = QueryGradientPipeline<kHeadDim, kKind>;

  // `consumer` of the pipeline.
  __device__ QueryGradientConsumer(const QueryGradientParams& params, Shared& shared, int consumer)
      : params_(params), shared_(shared), consumer_(consumer) {}

  __device__ __forceinline__ void Run() {
    RingCursor<1> item_cursor;
    while (true) {
      ptx::MbarrierWait(&shared_.item_arrived, item_cursor.lap);
      const ForwardItem item = shared_.item;
      if (item.head < 0) break;
      LoadStats(item);
      Tiles();
      Release(&shared_.item_released);
      Add(item);
      item_cursor.Advance();
    }
  }

 private:
  // A tile's last product stays in flight while the next tile's scores are computed. At dim 128
  // there are no registers for it, and the other consumer keeps the tensor cores busy.
  static constexpr bool kPipelined = kHeadDim == 64;

  static __device__ __forceinline__ void Release(ptx::Mbarrier* barrier) {
    ptx::MbarrierArrive(barrier);
  }

  __device__ __forceinline__ void LoadStats(const ForwardItem& item) {
    const int32_t block = item.block * Tile::kConsumers + consumer_;
    const bool exists = block < params_.query_blocks;
    const RowStats* const stats =
        params_.row_stats + static_cast<int64_t>(item.head) * params_.query_blocks + block;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = FragmentRow() + half * 8;
      lse_log2_[half] = exists ? stats->lse_log2[row] : INFINITY;
      scaled_delta_[half] = exists ? stats->scaled_delta[row] : 0.0f;
    }
  }

  // product[64 queries, keys] = rows of this consumer * columns^T; issues it only.
  __device__ __forceinline__ void IssueProduct(float (&product)[Tile::kKeys / 2],
                                               const uint8_t* rows, const uint8_t* columns) {
    const uint64_t a = ptx::OperandDescriptor(rows + consumer_ * 64 * ptx::kSwizzleRowBytes);
    const uint64_t b = ptx::OperandDescriptor(columns);
    ptx::PinRegisters(product);
    ptx::WgmmaFence();
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
      ptx::Wgmma<Tile::kKeys>::SharedShared(
          product, ptx::DescriptorAdvance(a, (k / 4) * Tile::kQueryBlock + (k % 4) * 32),
          ptx::DescriptorAdvance(b, (k / 4) * Tile::kKeyBlock + (k % 4) * 32), k != 0);
    }
    ptx::WgmmaCommit();
  }

  // Issues dq += dS K.
  __device__ __forceinline__ void IssueQueryGradient(int stage) {
    const uint64_t b = ptx::OperandDescriptor(shared_.key[stage], Tile::kKeyBlock);
    ptx::PinRegisters(dq_);
    ptx::PinRegisters(d_scores_);
    ptx::WgmmaFence();
#pragma unroll
    for (int k = 0; k < Tile::kKeys / 16; ++k) {
      ptx::Wgmma<kHeadDim>::template RegisterShared<ptx::Major::kMn>(
          dq_, d_scores_ + 4 * k, ptx::DescriptorAdvance(b, k * 16 * ptx::kSwizzleRowBytes), true);
    }
    ptx::WgmmaCommit();
  }

  __device__ __forceinline__ void FinishProduct(int stage) {
    ptx::PinRegisters(dq_);
    ptx::PinRegisters(d_scores_);
    Release(&shared_.key_released[stage]);
  }

  // All tiles of an item, into dq_.
  __device__ __forceinline__ void Tiles() {
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) dq_[i] = 0;
    bool in_flight = false;
    int previous = 0;  // stage of the product in flight
    bool last;
    do {
      const int stage = stage_.index;
      ptx::MbarrierWait(&shared_.key_arrived[stage], stage_.lap);
      const TileStep step = shared_.step[stage].all;
      last = step.last;
      float scores[Tile::kKeys / 2], d_weights[Tile::kKeys / 2];
      IssueProduct(scores, shared_.query, shared_.key[stage]);
      ptx::MbarrierWait(&shared_.value_arrived[stage], stage_.lap);
      IssueProduct(d_weights, shared_.d_out, shared_.value[stage]);
      ptx::WgmmaWait<1>();
      ptx::PinRegisters(scores);
      if (in_flight) FinishProduct(previous);

      if (step.masked)
        MaskStage<kKind, kDocuments>(scores, params_.walk, shared_.step[stage], consumer_);
#pragma unroll
      for (int i = 0; i < Tile::kKeys / 2; ++i) {
        scores[i] = Exp2(fmaf(scores[i], params_.scale_log2, -lse_log2_[i / 2 % 2]));
      }
      ptx::WgmmaWait<0>();
      ptx::PinRegisters(d_weights);
      Release(&shared_.value_released[stage]);
#pragma unroll
      for (int i = 0; i < Tile::kKeys / 4; ++i) {
        const float delta = scaled_delta_[i % 2];
        d_scores_[i] =
            PackBf16(scores[2 * i] * fmaf(d_weights[2 * i], params_.scale, -delta),
                     scores[2 * i + 1] * fmaf(d_weights[2 * i + 1], params_.scale, -delta));
      }
      IssueQueryGradient(stage);
      if constexpr (kPipelined) {
        in_flight = true;
        previous = stage;
      } else {
        ptx::WgmmaWait<0>();
        FinishProduct(stage);
      }
      stage_.Advance();
    } while (!last);
    if constexpr (kPipelined) {
      ptx::WgmmaWait<0>();
      FinishProduct(previous);
    }
  }

  // Writes dq_ to global memory. Every element has one thread in the whole grid.
  __device__ __forceinline__ void Add(const ForwardItem& item) {
    const int32_t first = item.block * Tile::kQueries + consumer_ * 64 + FragmentRow();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t query = first + half * 8;
      if (query >= params_.walk.query_tokens) continue;
      float* const row = params_.dq + query * params_.token_stride +
                         item.head * params_.head_stride + 2 * (threadIdx.x % 4);
      float2 old[kHeadDim / 8];
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; ++j) old[j] = *reinterpret_cast<const float2*>(row + 8 * j);
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; ++j) {
        *reinterpret_cast<float2*>(row + 8 * j) =
            make_float2(old[j].x + dq_[4 * j + 2 * half], old[j].y + dq_[4 * j + 2 * half + 1]);
      }
    }
  }

  const QueryGradientParams& params_;
  Shared& shared_;
  const int consumer_;
  RingCursor<Shared::kStages> stage_;
  float lse_log2_[2];  // by row half
  float scaled_delta_[2];
  float dq_[kHeadDim / 2];
  uint32_t d_scores_[Tile::kKeys / 4];
};

template <int kHeadDim, WalkKind kKind, bool kDocuments>
__global__ void __launch_bounds__(ForwardTile<kHeadDim, kKind>::kThreads, 1)
    QueryGradientKernel(const __grid_constant__ QueryGradientParams params,
                        const __grid_constant__ CUtensorMap query_map,
                        const __grid_constant__ CUtensorMap key_map,
                        const __grid_constant__ CUtensorMap value_map,
                        const __grid_constant__ CUtensorMap d_out_map) {
  using Tile = ForwardTile<kHeadDim, kKind>;
  extern __shared__ __align__(1024) uint8_t raw_shared[];
  const auto pipelines = InitPipelines<QueryGradientPipeline<kHeadDim, kKind>>(
      raw_shared, &query_map, &key_map, &value_map, &d_out_map);
  RunRoles<Tile::kPipelines>(
      [&](int pipeline) {
        auto& shared = pipelines[pipeline];
        ProduceStages<kDocuments>(
            params, &key_map, &value_map, shared, [&](const ForwardItem& item) {
              const int32_t first_query = item.block * Tile::kQueries;
              ptx::MbarrierArriveExpect(&shared.item_arrived, 2 * Tile::kQueryBytes);
              ptx::TmaLoadTile(shared.query, &query_map, &shared.item_arrived, first_query,
                               item.head);
              ptx::TmaLoadTile(shared.d_out, &d_out_map, &shared.item_arrived, first_query,
                               item.head);
            });
      },
      [&](int consumer) {
        QueryGradientConsumer<kHeadDim, kKind, kDocuments>(
            params, pipelines[consumer / Tile::kConsumers], consumer % Tile::kConsumers)
            .Run();
      });
}

}  // namespace ringleader::kernels::sm90
