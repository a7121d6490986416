// Backward attention to groups of keys (KeyGroups), query-stationary: what a tile of queries picked
// up has nothing in common with what its neighbours did, so that walking the keys would visit most
// tiles of queries. A consumer warpgroup holds 64 queries of one head, their dO, and dQ in
// registers, and walks their groups in forward's stages of 64 keys.
//
// Items are parts of the keys, few enough that what is added to them stays in L2: all queries are
// through with one before the next comes.
//
// Per stage, keys in rows:
//   S^T = K Q^T;  P^T = exp2(S^T - lse);  dP^T = V dO^T;  dS^T = P^T (dP^T - delta);
//   dV += P^T dO;  dK += dS^T Q;  dQ += dS K.
// dV and dK of a stage are added to global memory at once, in any order: the same keys are in
// stages of other queries and heads. So is an item's dQ, for the other parts of the keys.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/sm90/backward/attention_backward_tiles.cuh"
#include "kernels/sm90/forward/attention_forward_producer.cuh"
#include "kernels/sm90/ptx/mbarrier.cuh"
#include "kernels/sm90/ptx/sync.cuh"
#include "kernels/sm90/ptx/tma.cuh"
#include "kernels/sm90/ptx/wgmma.cuh"
#include "kernels/sm90/warpgroup/fragment.cuh"
#include "kernels/sm90/warpgroup/ring_cursor.cuh"
#include "kernels/sm90/warpgroup/roles.cuh"

namespace ringleader::kernels::sm90 {

struct GroupBackwardParams : ForwardWalk {
  const RowStats* row_stats = nullptr;  // [heads, query_blocks]
  TokenMajor<float> dq;                 // [n_q, heads, d]
  TokenMajor<float> dk, dv;             // [n_k, kv_heads, d]
  int32_t query_blocks = 0;             // of 64
  float scale = 0;
  float scale_log2 = 0;
};

template <int kHeadDim>
struct GroupBackwardPipeline : KeyStages<kHeadDim, WalkKind::kGroups64, kHeadDim == 128 ? 2 : 4> {
  using Tile = ForwardTile<kHeadDim, WalkKind::kGroups64>;
  alignas(1024) uint8_t query[Tile::kQueryBytes];
  alignas(1024) uint8_t d_out[Tile::kQueryBytes];
  alignas(1024) uint8_t d_scores[64 * ptx::kSwizzleRowBytes];  // [64 keys][64 queries]
  alignas(16) RowStats stats;
};

// Named barriers of the consumers; 0 is __syncthreads.
constexpr int kGroupScores = 1;

template <int kHeadDim>
class GroupBackwardConsumer {
 public:
  using Shared = GroupBackwardPipeline<kHeadDim>;
  using Tile = typename Shared::Tile;

  __device__ GroupBackwardConsumer(const GroupBackwardParams& params, Shared& shared, int pipeline)
      : params_(params), shared_(shared), pipeline_(pipeline) {}

  __device__ __forceinline__ void Run() {
    RingCursor<1> item_cursor;
    while (true) {
      ptx::MbarrierWait(&shared_.item_arrived, item_cursor.lap);
      const ForwardItem item = shared_.item;
      if (item.head < 0) break;
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; ++i) dq_[i] = 0;
      const int32_t kv_head = item.head / (params_.heads / params_.kv_heads);
      while (!Stage(kv_head)) {
      }
      ptx::MbarrierArrive(&shared_.item_released);
      AddQueryGradient(item);
      item_cursor.Advance();
    }
  }

 private:
  // product[64 keys, 64 queries] = keys * queries^T; issues it only.
  static __device__ __forceinline__ void IssueProduct(float (&product)[32], const uint8_t* keys,
                                                      const uint8_t* queries) {
    const uint64_t a = ptx::OperandDescriptor(keys);
    const uint64_t b = ptx::OperandDescriptor(queries);
    ptx::PinRegisters(product);
    ptx::WgmmaFence();
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
      const int advance = (k / 4) * Tile::kKeyBlock + (k % 4) * 32;
      ptx::Wgmma<64>::SharedShared(product, ptx::DescriptorAdvance(a, advance),
                                   ptx::DescriptorAdvance(b, advance), k != 0);
    }
    ptx::WgmmaCommit();
  }

  // gradient[64 keys, d] = weights[64 keys, 64 queries] * rows[64 queries, d]; issues it only.
  static __device__ __forceinline__ void IssueKeyGradient(float (&gradient)[kHeadDim / 2],
                                                          uint32_t (&weights)[16],
                                                          const uint8_t* rows) {
    const uint64_t b = ptx::OperandDescriptor(rows, Tile::kQueryBlock);
    ptx::PinRegisters(gradient);
    ptx::PinRegisters(weights);
    ptx::WgmmaFence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      ptx::Wgmma<kHeadDim>::template RegisterShared<ptx::Major::kMn>(
          gradient, weights + 4 * k, ptx::DescriptorAdvance(b, k * 16 * ptx::kSwizzleRowBytes),
          k != 0);
    }
    ptx::WgmmaCommit();
  }

  // Issues dq += dS K.
  __device__ __forceinline__ void IssueQueryGradient(const uint8_t* keys) {
    const uint64_t a = ptx::OperandDescriptor(shared_.d_scores);
    const uint64_t b = ptx::OperandDescriptor(keys, Tile::kKeyBlock);
    ptx::PinRegisters(dq_);
    ptx::WgmmaFence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int advance = k * 16 * ptx::kSwizzleRowBytes;
      ptx::Wgmma<kHeadDim>::template SharedShared<ptx::Major::kMn, ptx::Major::kMn>(
          dq_, ptx::DescriptorAdvance(a, advance), ptx::DescriptorAdvance(b, advance), true);
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
  static __device__ __forceinline__ void Mask(float (&scores)[32], const GroupStep& step) {
    const int rows = step.rows[0];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = FragmentRow() + half * 8;
      const bool hidden = !(step.visible[0][key / 32] >> (key % 32) & 1);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int query = i / 2 * 8 + 2 * static_cast<int>(threadIdx.x % 4) + i % 2;
        if (hidden || query >= rows) scores[i / 2 * 4 + half * 2 + i % 2] = -INFINITY;
      }
    }
  }

  // Stores dS^T as [64 keys][64 queries], which the dQ product reads transposed.
  __device__ __forceinline__ void StoreScores(const uint32_t (&d_scores)[16]) {
    const int lane = threadIdx.x % 32;
    const int key = threadIdx.x % 128 / 32 * 16 + lane / 8 % 2 * 8 + lane % 8;
    uint8_t* const row = shared_.d_scores + key * ptx::kSwizzleRowBytes;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int chunk = 2 * k + lane / 16;
      ptx::StoreMatrices(row + (chunk ^ lane % 8) * 16, d_scores + 4 * k);
    }
  }

  // Adds a row's part of a fragment, of which a thread has `of(i)`: the columns 8 * (i / 2) +
  // 2 * (lane % 4) + i % 2. Two neighbours exchange, so that each adds four columns that are next
  // to each other. Whole warps call; `row` is null where nothing is added.
  template <typename Of>
  static __device__ __forceinline__ void AddRow(float* row, const Of& of) {
    const int lane = threadIdx.x % 32;
    const bool is_odd = lane % 2 != 0;
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; j += 2) {
      const float2 mine = is_odd ? make_float2(of(2 * j + 2), of(2 * j + 3))
                                 : make_float2(of(2 * j), of(2 * j + 1)),
                   given = is_odd ? make_float2(of(2 * j), of(2 * j + 1))
                                  : make_float2(of(2 * j + 2), of(2 * j + 3));
      const float2 taken = {__shfl_xor_sync(0xFFFFFFFFu, given.x, 1),
                            __shfl_xor_sync(0xFFFFFFFFu, given.y, 1)};
      if (row == nullptr) continue;
      ptx::AddFour(row + 8 * (j + lane % 2) + lane % 4 / 2 * 4,
                   is_odd ? make_float4(taken.x, taken.y, mine.x, mine.y)
                          : make_float4(mine.x, mine.y, taken.x, taken.y));
    }
  }

  // Adds a stage's gradient to the rows that its groups came from.
  __device__ __forceinline__ void Scatter(const float (&gradient)[kHeadDim / 2],
                                          const TokenMajor<float>& sum, const int32_t (&groups)[2],
                                          int32_t kv_head) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t key = static_cast<int64_t>(groups[half]) * kGroupKeys + threadIdx.x % 32 / 4;
      AddRow(groups[half] < 0 ? nullptr
                              : sum.data + key * sum.token_stride + kv_head * sum.head_stride,
             [&](int i) { return gradient[i / 2 * 4 + 2 * half + i % 2]; });
    }
  }

  // One stage of keys. Returns whether it was the item's last.
  __device__ __forceinline__ bool Stage(int32_t kv_head) {
    const int stage = stage_.index;
    ptx::MbarrierWait(&shared_.key_arrived[stage], stage_.lap);
    const GroupStep& step = shared_.step[stage];
    const bool last = step.all.last;
    // A warp's 16 rows are two groups.
    const int first = threadIdx.x % 128 / 32 * 2;
    const int32_t groups[2] = {step.groups[first], step.groups[first + 1]};
    float scores[32], d_weights[32];
    IssueProduct(scores, shared_.key[stage], shared_.query);
    ptx::MbarrierWait(&shared_.value_arrived[stage], stage_.lap);
    IssueProduct(d_weights, shared_.value[stage], shared_.d_out);
    ptx::WgmmaWait<1>();
    ptx::PinRegisters(scores);
    if (step.all.masked) Mask(scores, step);
    uint32_t weights[16], d_scores[16];
    float2 row[8];
    LoadStats(row, shared_.stats.lse_log2);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      scores[2 * i] = Exp2(fmaf(scores[2 * i], params_.scale_log2, -row[i / 2].x));
      scores[2 * i + 1] = Exp2(fmaf(scores[2 * i + 1], params_.scale_log2, -row[i / 2].y));
      weights[i] = PackBf16(scores[2 * i], scores[2 * i + 1]);
    }
    ptx::WgmmaWait<0>();
    ptx::PinRegisters(d_weights);
    ptx::MbarrierArrive(&shared_.value_released[stage]);
    LoadStats(row, shared_.stats.scaled_delta);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      d_scores[i] =
          PackBf16(scores[2 * i] * fmaf(d_weights[2 * i], params_.scale, -row[i / 2].x),
                   scores[2 * i + 1] * fmaf(d_weights[2 * i + 1], params_.scale, -row[i / 2].y));
    }

    float gradient[kHeadDim / 2];
    IssueKeyGradient(gradient, weights, shared_.d_out);
    // All warps are done with the dQ product of the stage before.
    ptx::NamedBarrierSync(kGroupScores + pipeline_, ptx::kWarpgroupThreads);
    StoreScores(d_scores);
    ptx::FenceAsyncShared();
    ptx::NamedBarrierSync(kGroupScores + pipeline_, ptx::kWarpgroupThreads);
    ptx::WgmmaWait<0>();
    ptx::PinRegisters(gradient);
    ptx::PinRegisters(weights);
    IssueQueryGradient(shared_.key[stage]);
    Scatter(gradient, params_.dv, groups, kv_head);
    IssueKeyGradient(gradient, d_scores, shared_.query);
    ptx::WgmmaWait<0>();
    ptx::PinRegisters(gradient);
    ptx::PinRegisters(d_scores);
    ptx::PinRegisters(dq_);
    ptx::MbarrierArrive(&shared_.key_released[stage]);
    Scatter(gradient, params_.dk, groups, kv_head);
    stage_.Advance();
    return last;
  }

  // Adds dq_ to global memory.
  __device__ __forceinline__ void AddQueryGradient(const ForwardItem& item) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t query = item.block * Tile::kQueries + FragmentRow() + half * 8;
      AddRow(query >= params_.walk.query_tokens
                 ? nullptr
                 : params_.dq.data + query * params_.dq.token_stride +
                       item.head * params_.dq.head_stride,
             [&](int i) { return dq_[i / 2 * 4 + 2 * half + i % 2]; });
    }
  }

  const GroupBackwardParams& params_;
  Shared& shared_;
  const int pipeline_;
  RingCursor<Shared::kStages> stage_;
  float dq_[kHeadDim / 2];
};

template <int kHeadDim, bool kDocuments>
__global__ void __launch_bounds__(ForwardTile<kHeadDim, WalkKind::kGroups64>::kThreads, 1)
    GroupBackwardKernel(const __grid_constant__ GroupBackwardParams params,
                        const __grid_constant__ CUtensorMap query_map,
                        const __grid_constant__ CUtensorMap key_map,
                        const __grid_constant__ CUtensorMap value_map,
                        const __grid_constant__ CUtensorMap d_out_map) {
  using Tile = ForwardTile<kHeadDim, WalkKind::kGroups64>;
  extern __shared__ __align__(1024) uint8_t raw_shared[];
  const auto pipelines = InitPipelines<GroupBackwardPipeline<kHeadDim>>(
      raw_shared, &query_map, &key_map, &value_map, &d_out_map);
  RunRoles<Tile::kPipelines>(
      [&](int pipeline) {
        auto& shared = pipelines[pipeline];
        ProduceStages<kDocuments>(
            params, &key_map, &value_map, shared, [&](const ForwardItem& item) {
              ptx::MbarrierArriveExpect(&shared.item_arrived,
                                        2 * Tile::kQueryBytes + sizeof(RowStats));
              const int32_t first_query = item.block * Tile::kQueries;
              ptx::TmaLoadTile(shared.query, &query_map, &shared.item_arrived, first_query,
                               item.head);
              ptx::TmaLoadTile(shared.d_out, &d_out_map, &shared.item_arrived, first_query,
                               item.head);
              const int64_t block =
                  static_cast<int64_t>(item.head) * params.query_blocks + item.block;
              ptx::BulkLoad(&shared.stats, params.row_stats + block, sizeof(RowStats),
                            &shared.item_arrived);
            });
      },
      [&](int consumer) {
        GroupBackwardConsumer<kHeadDim>(params, pipelines[consumer], consumer).Run();
      });
}

}  // namespace ringleader::kernels::sm90
