// Backward attention to groups of keys (KeyGroups), query-stationary: what a tile of queries picked
// up has nothing in common with what its neighbours did, so that walking the keys would visit most
// tiles of queries. A consumer warpgroup holds 64 queries of one head, their dO, and dQ in
// registers, and walks their groups in forward's stages of 64 keys.
//
// An item has a part of the keys, so small that what is added to them stays in L2. All queries'
// items with one part are handed out before those with the next one, so that mostly one part is
// added to at a time; nothing waits for it.
//
// Per stage, keys in rows:
//   S^T = K Q^T;  P^T = exp2(S^T - lse);  dP^T = V dO^T;  dS^T = P^T (dP^T - delta);
//   dV += P^T dO;  dK += dS^T Q;  dQ += dS K.
// dV and dK of a stage are added to global memory at once, in any order: the same keys are in
// stages of other queries and heads. So is an item's dQ, for the other parts of the keys.
//
// These adds take the time. Where two heads have groups in common they are half as many: consumers
// have a head each and stages in common; the first sums up dV of both heads, the second dK, each
// from its own head's weights in registers and the other's in shared memory. Since both come to
// adding at the same time, the copy engine adds while they go on.
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

template <int kHeadDim, WalkKind kKind>
struct GroupBackwardPipeline : KeyStages<kHeadDim, kKind, kHeadDim == 128 ? 2 : 4> {
  using Tile = ForwardTile<kHeadDim, kKind>;
  static constexpr int kScoreBytes = 64 * ptx::kSwizzleRowBytes;  // [64 keys][64 queries]
  // By head of an item.
  alignas(1024) uint8_t query[Tile::kHeads][Tile::kQueryBytes];
  alignas(1024) uint8_t d_out[Tile::kHeads][Tile::kQueryBytes];
  alignas(1024) uint8_t d_scores[Tile::kHeads][kScoreBytes];
  alignas(1024) uint8_t second_weights[Tile::kHeads == 1 ? 1 : kScoreBytes];
  // By consumer of a pair, on their way to global memory: boxes of 8 rows, [d / 32, 8, 32].
  static constexpr int kBoxBytes = kGroupKeys * kHeadDim * sizeof(float);
  alignas(1024) uint8_t sums[Tile::kHeads][Tile::kHeads == 1 ? 16 : 8 * kBoxBytes];
  alignas(16) RowStats stats[Tile::kHeads];
};

// Named barriers of the consumers; 0 is __syncthreads.
constexpr int kGroupScores = 1;

// What is added to, in boxes of 8 rows. Of pairs.
struct GradientMaps {
  const CUtensorMap *dq, *dk, *dv;
};

template <int kHeadDim, WalkKind kKind>
class GroupBackwardConsumer {
 public:
  using Shared = GroupBackwardPipeline<kHeadDim, kKind>;
  using Tile = typename Shared::Tile;

  __device__ GroupBackwardConsumer(const GroupBackwardParams& params, const GradientMaps& maps,
                                   Shared& shared, int consumer)
      : params_(params),
        maps_(maps),
        shared_(shared),
        scores_barrier_(kGroupScores + (kPairs ? 0 : consumer)),
        head_(kPairs ? consumer : 0) {}

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
    if constexpr (kPairs) ptx::BulkWaitAll();
  }

 private:
  static constexpr bool kPairs = Tile::kHeads == 2;

  // product[64 keys, 64 queries] = keys * queries^T; issues it only.
  static __device__ __forceinline__ void IssueProduct(float (&product)[32], const uint8_t* keys,
                                                      const uint8_t* queries) {
    const uint64_t a = ptx::OperandDescriptor(keys, 16, Tile::kKeyAtom);
    const uint64_t b = ptx::OperandDescriptor(queries);
    ptx::PinRegisters(product);
    ptx::WgmmaFence();
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
      const int block = k / 4, column = (k % 4) * 32;
      ptx::Wgmma<64>::SharedShared(
          product, ptx::DescriptorAdvance(a, block * Tile::kKeyBlock + column),
          ptx::DescriptorAdvance(b, block * Tile::kQueryBlock + column), k != 0);
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

  // gradient += the same, with weights in shared memory; issues it only.
  static __device__ __forceinline__ void AddKeyGradient(float (&gradient)[kHeadDim / 2],
                                                        const uint8_t* weights,
                                                        const uint8_t* rows) {
    const uint64_t a = ptx::OperandDescriptor(weights);
    const uint64_t b = ptx::OperandDescriptor(rows, Tile::kQueryBlock);
    ptx::PinRegisters(gradient);
    ptx::WgmmaFence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      ptx::Wgmma<kHeadDim>::template SharedShared<ptx::Major::kK, ptx::Major::kMn>(
          gradient, ptx::DescriptorAdvance(a, k * 32),
          ptx::DescriptorAdvance(b, k * 16 * ptx::kSwizzleRowBytes), true);
    }
    ptx::WgmmaCommit();
  }

  // Issues dq += dS K.
  __device__ __forceinline__ void IssueQueryGradient(const uint8_t* keys) {
    const uint64_t a = ptx::OperandDescriptor(shared_.d_scores[head_]);
    const uint64_t b = ptx::OperandDescriptor(keys, Tile::kKeyBlock, Tile::kKeyAtom);
    ptx::PinRegisters(dq_);
    ptx::WgmmaFence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      ptx::Wgmma<kHeadDim>::template SharedShared<ptx::Major::kMn, ptx::Major::kMn>(
          dq_, ptx::DescriptorAdvance(a, k * 16 * ptx::kSwizzleRowBytes),
          ptx::DescriptorAdvance(b, k * 2 * Tile::kKeyAtom), true);
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
  static __device__ __forceinline__ void Mask(float (&scores)[32], const StepOf<kKind>& step) {
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

  // Stores dS^T or P^T as [64 keys][64 queries], which the dQ product reads transposed.
  static __device__ __forceinline__ void StoreScores(uint8_t* to, const uint32_t (&scores)[16]) {
    const int lane = threadIdx.x % 32;
    const int key = threadIdx.x % 128 / 32 * 16 + lane / 8 % 2 * 8 + lane % 8;
    uint8_t* const row = to + key * ptx::kSwizzleRowBytes;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int chunk = 2 * k + lane / 16;
      ptx::StoreMatrices(row + (chunk ^ lane % 8) * 16, scores + 4 * k);
    }
  }

  // All of the item's consumers have come here.
  __device__ __forceinline__ void AwaitScores() const {
    ptx::NamedBarrierSync(scores_barrier_, Tile::kHeads * ptx::kWarpgroupThreads);
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

  // Adds a group's rows of a fragment, the first of which is at `rows`; null where nothing is
  // added. Of a row a thread has what AddRow says. Neighbouring rows exchange what neighbours
  // within them have exchanged, so that 128 bytes of a row are added at a time.
  template <typename Of>
  static __device__ __forceinline__ void AddGroup(float* rows, int64_t stride, const Of& of) {
    const int lane = threadIdx.x % 32;
    const bool is_odd = lane % 2 != 0, is_odd_row = lane / 4 % 2 != 0;
    const auto four = [&](int j) {
      const float2 mine = is_odd ? make_float2(of(2 * j + 2), of(2 * j + 3))
                                 : make_float2(of(2 * j), of(2 * j + 1)),
                   given = is_odd ? make_float2(of(2 * j), of(2 * j + 1))
                                  : make_float2(of(2 * j + 2), of(2 * j + 3));
      const float2 taken = {__shfl_xor_sync(0xFFFFFFFFu, given.x, 1),
                            __shfl_xor_sync(0xFFFFFFFFu, given.y, 1)};
      return is_odd ? make_float4(taken.x, taken.y, mine.x, mine.y)
                    : make_float4(mine.x, mine.y, taken.x, taken.y);
    };
    float* const even_row = rows + lane / 8 * 2 * stride;
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; j += 4) {
      const float4 first = four(j), second = four(j + 2), given = is_odd_row ? first : second;
      const float4 taken = {
          __shfl_xor_sync(0xFFFFFFFFu, given.x, 4), __shfl_xor_sync(0xFFFFFFFFu, given.y, 4),
          __shfl_xor_sync(0xFFFFFFFFu, given.z, 4), __shfl_xor_sync(0xFFFFFFFFu, given.w, 4)};
      if (rows == nullptr) continue;
      const int column = 8 * (j + 2 * is_odd_row + lane % 2) + lane % 4 / 2 * 4;
      ptx::AddFour(even_row + column, is_odd_row ? taken : first);
      ptx::AddFour(even_row + stride + column, is_odd_row ? second : taken);
    }
  }

  // Adds a warp's 16 rows of a fragment by the copy engine, eight to the rows from firsts[0] on and
  // eight from firsts[1] on; below 0: nowhere. Whole warps call.
  __device__ __forceinline__ void SendRows(const float (&fragment)[kHeadDim / 2],
                                           const CUtensorMap* map, const int32_t (&firsts)[2],
                                           int32_t head) {
    const int lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
    uint8_t* const boxes = shared_.sums[head_] + threadIdx.x % 128 / 32 * 2 * Shared::kBoxBytes;
    ptx::BulkWaitRead<0>();
    __syncwarp();
    uint8_t* const own = boxes + row * ptx::kSwizzleRowBytes + quad % 2 * 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; ++j) {
        const int chunk = j % 4 * 2 + quad / 2;
        *reinterpret_cast<float2*>(own + half * Shared::kBoxBytes + j / 4 * ptx::kSwizzleAtomBytes +
                                   (chunk ^ row) * 16) =
            make_float2(fragment[4 * j + 2 * half], fragment[4 * j + 2 * half + 1]);
      }
    }
    ptx::FenceAsyncShared();
    __syncwarp();
    const int32_t first = lane == 0 ? firsts[0] : firsts[1];
    if (lane < 2 && first >= 0) {
      ptx::TmaAddTile(map, boxes + lane * Shared::kBoxBytes, first, 0, head);
    }
    ptx::BulkCommit();
  }

  // Adds a stage's gradient to the rows that its groups came from.
  __device__ __forceinline__ void Scatter(const float (&gradient)[kHeadDim / 2],
                                          const TokenMajor<float>& sum, const int32_t (&groups)[2],
                                          int32_t kv_head) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t key = static_cast<int64_t>(groups[half]) * kGroupKeys;
      AddGroup(groups[half] < 0 ? nullptr
                                : sum.data + key * sum.token_stride + kv_head * sum.head_stride,
               sum.token_stride, [&](int i) { return gradient[i / 2 * 4 + 2 * half + i % 2]; });
    }
  }

  // One stage of keys. Returns whether it was the item's last.
  __device__ __forceinline__ bool Stage(int32_t kv_head) {
    const int stage = stage_.index;
    ptx::MbarrierWait(&shared_.key_arrived[stage], stage_.lap);
    const StepOf<kKind>& step = shared_.step[stage];
    const bool last = step.all.last;
    // A warp's 16 rows are two groups.
    const int first = threadIdx.x % 128 / 32 * 2;
    const int32_t groups[2] = {step.groups[first], step.groups[first + 1]};
    float scores[32], d_weights[32];
    IssueProduct(scores, shared_.key[stage], shared_.query[head_]);
    ptx::MbarrierWait(&shared_.value_arrived[stage], stage_.lap);
    IssueProduct(d_weights, shared_.value[stage], shared_.d_out[head_]);
    ptx::WgmmaWait<1>();
    ptx::PinRegisters(scores);
    if (step.all.masked) Mask(scores, step);
    uint32_t weights[16], d_scores[16];
    float2 row[8];
    LoadStats(row, shared_.stats[head_].lse_log2);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      scores[2 * i] = Exp2(fmaf(scores[2 * i], params_.scale_log2, -row[i / 2].x));
      scores[2 * i + 1] = Exp2(fmaf(scores[2 * i + 1], params_.scale_log2, -row[i / 2].y));
      weights[i] = PackBf16(scores[2 * i], scores[2 * i + 1]);
    }
    ptx::WgmmaWait<0>();
    ptx::PinRegisters(d_weights);
    ptx::MbarrierArrive(&shared_.value_released[stage]);
    LoadStats(row, shared_.stats[head_].scaled_delta);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      d_scores[i] =
          PackBf16(scores[2 * i] * fmaf(d_weights[2 * i], params_.scale, -row[i / 2].x),
                   scores[2 * i + 1] * fmaf(d_weights[2 * i + 1], params_.scale, -row[i / 2].y));
    }

    if constexpr (kPairs) {
      AddStageOfPair(weights, d_scores, groups, kv_head);
    } else {
      AddStage(weights, d_scores, groups, kv_head);
    }
    stage_.Advance();
    return last;
  }

  // Adds what the stage's keys weigh to dV, dK and dq_, and releases the keys.
  __device__ __forceinline__ void AddStage(uint32_t (&weights)[16], uint32_t (&d_scores)[16],
                                           const int32_t (&groups)[2], int32_t kv_head) {
    const int stage = stage_.index;
    float gradient[kHeadDim / 2];
    IssueKeyGradient(gradient, weights, shared_.d_out[0]);
    // All warps are done with the dQ product of the stage before.
    AwaitScores();
    StoreScores(shared_.d_scores[0], d_scores);
    ptx::FenceAsyncShared();
    AwaitScores();
    ptx::WgmmaWait<0>();
    ptx::PinRegisters(gradient);
    ptx::PinRegisters(weights);
    IssueQueryGradient(shared_.key[stage]);
    Scatter(gradient, params_.dv, groups, kv_head);
    IssueKeyGradient(gradient, d_scores, shared_.query[0]);
    ptx::WgmmaWait<0>();
    ptx::PinRegisters(gradient);
    ptx::PinRegisters(d_scores);
    ptx::PinRegisters(dq_);
    ptx::MbarrierArrive(&shared_.key_released[stage]);
    Scatter(gradient, params_.dk, groups, kv_head);
  }

  // The same where the other consumer has another head and the same keys.
  __device__ __forceinline__ void AddStageOfPair(const uint32_t (&weights)[16],
                                                 const uint32_t (&d_scores)[16],
                                                 const int32_t (&groups)[2], int32_t kv_head) {
    const int stage = stage_.index;
    const bool of_values = head_ == 0;
    const auto& rows = of_values ? shared_.d_out : shared_.query;
    uint32_t own[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) own[i] = of_values ? weights[i] : d_scores[i];
    float gradient[kHeadDim / 2];
    IssueKeyGradient(gradient, own, rows[head_]);
    // All warps are done with the products of the stage before.
    AwaitScores();
    StoreScores(shared_.d_scores[head_], d_scores);
    if (!of_values) StoreScores(shared_.second_weights, weights);
    ptx::FenceAsyncShared();
    AwaitScores();
    AddKeyGradient(gradient, of_values ? shared_.second_weights : shared_.d_scores[0],
                   rows[1 - head_]);
    IssueQueryGradient(shared_.key[stage]);
    ptx::WgmmaWait<1>();
    ptx::PinRegisters(gradient);
    ptx::PinRegisters(own);
    SendRows(gradient, of_values ? maps_.dv : maps_.dk,
             {groups[0] * kGroupKeys, groups[1] * kGroupKeys}, kv_head);
    ptx::WgmmaWait<0>();
    ptx::PinRegisters(dq_);
    ptx::MbarrierArrive(&shared_.key_released[stage]);
  }

  // Adds dq_ to global memory.
  __device__ __forceinline__ void AddQueryGradient(const ForwardItem& item) {
    const int32_t head = item.head + head_;
    if constexpr (kPairs) {
      const int32_t first = item.block * Tile::kQueries + threadIdx.x % 128 / 32 * 16;
      SendRows(dq_, maps_.dq, {first, first + 8}, head);
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t query = item.block * Tile::kQueries + FragmentRow() + half * 8;
        AddRow(
            query >= params_.walk.query_tokens
                ? nullptr
                : params_.dq.data + query * params_.dq.token_stride + head * params_.dq.head_stride,
            [&](int i) { return dq_[i / 2 * 4 + 2 * half + i % 2]; });
      }
    }
  }

  const GroupBackwardParams& params_;
  const GradientMaps maps_;
  Shared& shared_;
  const int scores_barrier_;
  const int head_;  // of the item's
  RingCursor<Shared::kStages> stage_;
  float dq_[kHeadDim / 2];
};

template <int kHeadDim, WalkKind kKind, bool kDocuments>
__global__ void __launch_bounds__(ForwardTile<kHeadDim, kKind>::kThreads, 1)
    GroupBackwardKernel(const __grid_constant__ GroupBackwardParams params,
                        const __grid_constant__ CUtensorMap query_map,
                        const __grid_constant__ CUtensorMap key_map,
                        const __grid_constant__ CUtensorMap value_map,
                        const __grid_constant__ CUtensorMap d_out_map,
                        const __grid_constant__ CUtensorMap dq_map,
                        const __grid_constant__ CUtensorMap dk_map,
                        const __grid_constant__ CUtensorMap dv_map) {
  using Tile = ForwardTile<kHeadDim, kKind>;
  extern __shared__ __align__(1024) uint8_t raw_shared[];
  const auto pipelines = InitPipelines<GroupBackwardPipeline<kHeadDim, kKind>>(
      raw_shared, &query_map, &key_map, &value_map, &d_out_map);
  RunRoles<Tile::kPipelines>(
      [&](int pipeline) {
        auto& shared = pipelines[pipeline];
        ProduceStages<kDocuments>(
            params, &key_map, &value_map, shared, [&](const ForwardItem& item) {
              ptx::MbarrierArriveExpect(&shared.item_arrived,
                                        Tile::kHeads * (2 * Tile::kQueryBytes + sizeof(RowStats)));
              const int32_t first_query = item.block * Tile::kQueries;
              for (int i = 0; i < Tile::kHeads; ++i) {
                const int32_t head = item.head + i;
                ptx::TmaLoadTile(shared.query[i], &query_map, &shared.item_arrived, first_query,
                                 head);
                ptx::TmaLoadTile(shared.d_out[i], &d_out_map, &shared.item_arrived, first_query,
                                 head);
                const int64_t block = static_cast<int64_t>(head) * params.query_blocks + item.block;
                ptx::BulkLoad(&shared.stats[i], params.row_stats + block, sizeof(RowStats),
                              &shared.item_arrived);
              }
            });
      },
      [&](int consumer) {
        GroupBackwardConsumer<kHeadDim, kKind>(params, {&dq_map, &dk_map, &dv_map},
                                               pipelines[consumer / Tile::kConsumers], consumer)
            .Run();
      });
}

}  // namespace ringleader::kernels::sm90
