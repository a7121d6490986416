// dQ of the deterministic backward, query-stationary: a CTA holds 128 queries of one head with
// their dO and walks the keys that they attend to, as forward does. Its two consumer warpgroups
// hold dQ of 64 queries each in registers, and nobody else adds to these rows: the sum's order is
// the walk's.
//
// Per tile of keys:
//   S = Q K^T;  P = exp2(S - lse);  dP = dO V^T;  dS = P (dP - delta);  dQ += dS K.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/sm90/attention_backward_tiles.cuh"
#include "kernels/sm90/attention_forward_tiles.cuh"
#include "kernels/sm90/fragment.cuh"
#include "kernels/sm90/ptx/mbarrier.cuh"
#include "kernels/sm90/ptx/sync.cuh"
#include "kernels/sm90/ptx/tma.cuh"
#include "kernels/sm90/ptx/wgmma.cuh"
#include "kernels/sm90/ring_cursor.cuh"

namespace ringleader::kernels::sm90 {

struct QueryGradientParams {
  TileWalk walk;                        // along rows
  ColumnWalk columns;                   // WalkKind::kColumns
  const RowStats* row_stats = nullptr;  // [heads, query_blocks]
  float* dq = nullptr;
  int64_t token_stride = 0;  // of dq
  int64_t head_stride = 0;
  int32_t heads = 0;
  int32_t kv_heads = 0;
  int32_t query_blocks = 0;  // of 64
  float scale = 0;
  float scale_log2 = 0;
  int32_t* next_item = nullptr;
};

template <int kHeadDim, WalkKind kKind>
struct QueryGradientShared {
  using Tile = ForwardTile<kHeadDim, kKind>;
  alignas(1024) uint8_t query[Tile::kQueryBytes];
  alignas(1024) uint8_t d_out[Tile::kQueryBytes];
  alignas(1024) uint8_t key[Tile::kStages][Tile::kKeyBytes];
  alignas(1024) uint8_t value[Tile::kStages][Tile::kKeyBytes];
  ptx::Mbarrier item_arrived, item_released;
  ptx::Mbarrier key_arrived[Tile::kStages], key_released[Tile::kStages];
  ptx::Mbarrier value_arrived[Tile::kStages], value_released[Tile::kStages];
  ForwardItem item;
  ForwardStep step[Tile::kStages];
};

template <int kHeadDim, WalkKind kKind, bool kDocuments>
__device__ __forceinline__ void QueryGradientProduce(const QueryGradientParams& params,
                                                     const CUtensorMap* query_map,
                                                     const CUtensorMap* key_map,
                                                     const CUtensorMap* value_map,
                                                     const CUtensorMap* d_out_map,
                                                     QueryGradientShared<kHeadDim, kKind>& shared) {
  using Tile = ForwardTile<kHeadDim, kKind>;
  const int lane = threadIdx.x % 32;
  const int32_t group = params.heads / params.kv_heads;
  RingCursor<1> item_cursor;
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
    if (tile.index < 0) continue;  // these queries attend to nothing: their gradients stay

    const int32_t kv_head = item.head / group;
    ptx::MbarrierWait(&shared.item_released, item_cursor.lap ^ 1);
    if (lane == 0) {
      shared.item = item;
      const int32_t first_query = item.block * kForwardQueries;
      ptx::MbarrierArriveExpect(&shared.item_arrived, 2 * Tile::kQueryBytes);
      ptx::TmaLoadTile(shared.query, query_map, &shared.item_arrived, first_query, item.head);
      ptx::TmaLoadTile(shared.d_out, d_out_map, &shared.item_arrived, first_query, item.head);
    }
    item_cursor.Advance();
    while (tile.index >= 0) {
      const TileRef following = tiles.Next();
      const int32_t first_key = tile.index * Tile::kKeys;
      ptx::MbarrierWait(&shared.key_released[stage.index], stage.lap ^ 1);
      if (lane == 0) {
        ptx::MbarrierExpect(&shared.key_arrived[stage.index], Tile::kKeyBytes);
        ptx::TmaLoadTile(shared.key[stage.index], key_map, &shared.key_arrived[stage.index],
                         first_key, kv_head);
      }
      tiles.Describe(shared.step[stage.index], tile, following.index < 0);
      if (lane == 0) ptx::MbarrierArrive(&shared.key_arrived[stage.index]);
      ptx::MbarrierWait(&shared.value_released[stage.index], stage.lap ^ 1);
      if (lane == 0) {
        ptx::MbarrierArriveExpect(&shared.value_arrived[stage.index], Tile::kKeyBytes);
        ptx::TmaLoadTile(shared.value[stage.index], value_map, &shared.value_arrived[stage.index],
                         first_key, kv_head);
      }
      stage.Advance();
      tile = following;
    }
  }
  ptx::MbarrierWait(&shared.item_released, item_cursor.lap ^ 1);
  if (lane == 0) {
    shared.item = {-1, 0};
    ptx::MbarrierArrive(&shared.item_arrived);
  }
}

template <int kHeadDim, WalkKind kKind, bool kDocuments>
class QueryGradientConsumer {
 public:
  using Tile = ForwardTile<kHeadDim, kKind>;

  __device__ QueryGradientConsumer(const QueryGradientParams& params,
                                   QueryGradientShared<kHeadDim, kKind>& shared, int consumer)
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
  // A tile's last product stays in flight while the next tile's scores are computed. Not with tiles
  // of 64: what comes next for this consumer may be further away than the ring is deep, so its
  // stage has to be given back first. At dim 128 there are no registers for it, and the other
  // consumer keeps the tensor cores busy.
  static constexpr bool kPipelined = kKind != WalkKind::kTiles64 && kHeadDim == 64;

  static __device__ __forceinline__ void Release(ptx::Mbarrier* barrier) {
    ptx::MbarrierArrive(barrier);
  }
  // First of the rows whose accumulator elements this thread holds, of this consumer's 64.
  static __device__ __forceinline__ int FragmentRow() {
    return (threadIdx.x % 128) / 32 * 16 + (threadIdx.x % 32) / 4;
  }

  __device__ __forceinline__ void LoadStats(const ForwardItem& item) {
    const int32_t block = 2 * item.block + consumer_;
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

  // product[64 queries, keys] = rows of this consumer * columns^T, issued.
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

  // dq += dS K, issued.
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
      const TileStep step = shared_.step[stage].part[kKind == WalkKind::kTiles64 ? consumer_ : 0];
      last = step.last;
      if constexpr (kKind == WalkKind::kTiles64) {
        if (step.keys == 0) {  // a stage for the other consumer alone
          Release(&shared_.key_released[stage]);
          // A phase nobody here waited for would make the wait one lap later return at once.
          ptx::MbarrierWait(&shared_.value_arrived[stage], stage_.lap);
          Release(&shared_.value_released[stage]);
          stage_.Advance();
          continue;
        }
      }
      float scores[Tile::kKeys / 2], d_weights[Tile::kKeys / 2];
      IssueProduct(scores, shared_.query, shared_.key[stage]);
      ptx::MbarrierWait(&shared_.value_arrived[stage], stage_.lap);
      IssueProduct(d_weights, shared_.d_out, shared_.value[stage]);
      ptx::WgmmaWait<1>();
      ptx::PinRegisters(scores);
      if (in_flight) FinishProduct(previous);

      if (step.masked) {
        const ForwardStep& described = shared_.step[stage];
        if constexpr (kKind == WalkKind::kColumns) {
          MaskRowColumns<Tile::kKeys, kDocuments>(scores, params_.walk, described, consumer_);
        } else {
          MaskRows<Tile::kKeys>(scores, step, kKind == WalkKind::kTiles64 ? 0 : consumer_ * 64);
          if constexpr (kDocuments) {
            MaskRowDocuments<Tile::kKeys>(scores, params_.walk, described, consumer_);
          }
        }
      }
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

  // dq_ to global memory. Every element has one thread in the whole grid.
  __device__ __forceinline__ void Add(const ForwardItem& item) {
    const int32_t first = item.block * kForwardQueries + consumer_ * 64 + FragmentRow();
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
  QueryGradientShared<kHeadDim, kKind>& shared_;
  const int consumer_;
  RingCursor<Tile::kStages> stage_;
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
  auto& shared = *reinterpret_cast<QueryGradientShared<kHeadDim, kKind>*>(raw_shared);
  if (threadIdx.x == 0) {
    constexpr int kConsumerThreads = Tile::kConsumers * ptx::kWarpgroupThreads;
    ptx::MbarrierInit(&shared.item_arrived, 1);
    ptx::MbarrierInit(&shared.item_released, kConsumerThreads);
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
    ptx::PrefetchTensorMap(&d_out_map);
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(0xFFFFFFFFu, threadIdx.x / ptx::kWarpgroupThreads, 0);
  if (warpgroup == 0) {
    ptx::RegistersShrink<24>();
    if (threadIdx.x < 32) {
      QueryGradientProduce<kHeadDim, kKind, kDocuments>(params, &query_map, &key_map, &value_map,
                                                        &d_out_map, shared);
    }
  } else {
    ptx::RegistersGrow<240>();
    QueryGradientConsumer<kHeadDim, kKind, kDocuments>(params, shared, warpgroup - 1).Run();
  }
}

}  // namespace ringleader::kernels::sm90
