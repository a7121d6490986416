// The exact mass of every pair of a query tile and a key block: AdaSpa's second pass.
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/index/blocks.h"
#include "kernels/index/estimate_kernel.cuh"
#include "kernels/sm90/device.h"
#include "kernels/sm90/launch/tensor_map.h"

namespace ringleader::kernels::index {
namespace {

using fused::CheckPointer;
using fused::CheckSize;

constexpr float kLog2e = 1.44269504088896340736f;

struct MassParams {
  ShardLayout query_layout;
  const int32_t* document_starts;  // may be null
  const float* lse;
  int32_t* mass;
  int query_tiles;
};

// Every local query is an estimate query here. Blocks with the most keys to see go first.
template <int kHeadDim, bool kDocuments>
__global__ void __launch_bounds__(kBlockThreads, 1)
    BlockMassKernel(const EstimateParams p, const MassParams m,
                    const __grid_constant__ CUtensorMap key_map) {
  extern __shared__ __align__(1024) unsigned char smem[];
  auto& shared = *reinterpret_cast<EstimateShared<kHeadDim>*>(smem);
  BlockWork work(p, gridDim.x - 1 - blockIdx.x);
  int64_t last_position = 0;
  for (int run = 0; run < work.run_count; ++run) {
    const int last = min(p.queries, work.FirstQuery(p, run) + kRun) - 1;
    last_position = max(last_position, m.query_layout.Position(last));
  }
  // Positions of tiles ascend: those ahead of every query are at the end.
  int visible = 0;
  for (int bound = work.tile_count; visible < bound;) {
    const int middle = (visible + bound) / 2;
    if (p.key_layout.Position(static_cast<int64_t>(middle) * kKeyTile) <= last_position) {
      visible = middle + 1;
    } else {
      bound = middle;
    }
  }
  work.tile_count = visible;

  const int turns = work.run_count == 1 ? 4 : work.run_count == 2 ? 2 : 1;
  InitBarriers(shared, work.run_count);
  if (threadIdx.x < kConsumerThreads) {
    LoadQueries(
        p, work, shared, [&](int e) { return m.query_layout.Position(e); },
        [&](int e) { return kDocuments ? m.document_starts[e] : 0; });
  }
  __syncthreads();
  if (threadIdx.x >= kConsumerThreads)
    return ProduceKeys(p, work, &key_map, shared, 0, work.tile_count);

  const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int run = warpgroup % (kConsumers / turns);
  if (run >= work.run_count) return;
  const int head = work.Head(p, run), first_query = work.FirstQuery(p, run);
  int position[2], start[2];
  float bias[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp * 16 + lane / 4 + half * 8, query = first_query + row;
    position[half] = shared.query_position[run * kRun + row];
    start[half] = kDocuments ? shared.query_start[run * kRun + row] : 0;
    const float lse =
        query < p.queries ? m.lse[static_cast<int64_t>(head) * p.queries + query] : -INFINITY;
    bias[half] = lse == -INFINITY ? -INFINITY : -lse * kLog2e;
  }
  int32_t* mass =
      m.mass + (static_cast<int64_t>(head) * m.query_tiles + first_query / p.tile) * p.blocks;

  const ProductTurn turn(work.run_count == kBlockRuns && work.tile_count > 0, warpgroup);
  const char* q = reinterpret_cast<const char*>(shared.q) + run * (kRun * 128);
  for (int i = warpgroup / (kConsumers / turns); i < work.tile_count; i += turns) {
    const int stage = i % kStages;
    float s[64];
    ptx::MbarrierWait(&shared.full[stage], i / kStages & 1);
    const int key_position[2] = {KeyPosition(shared, stage, 0), KeyPosition(shared, stage, 1)};
    turn.Begin();
    StartLogits<kHeadDim>(s, q, kBlockQueries, reinterpret_cast<const char*>(shared.k[stage]),
                          kKeyTile);
    turn.End(i + 1 == work.tile_count);
    FinishLogits(s);
    ReleaseStage(shared, stage);

    const int key = (work.first_tile + i) * kKeyTile;
    const bool all_visible =
        key + kKeyTile <= p.keys &&
        max(key_position[0], key_position[1]) + kRun - 1 <= min(position[0], position[1]) &&
        (!kDocuments || min(key_position[0], key_position[1]) >= max(start[0], start[1]));
    float part[2] = {};  // of each half of the tile
#pragma unroll
    for (int e = 0; e < 64; ++e) {
      const int column = e / 4 * 8 + lane % 4 * 2 + e % 2;
      const int at = key_position[e / 32] + column % kRun;
      const bool visible_pair =
          all_visible || (key + column < p.keys && at <= position[e / 2 % 2] &&
                          (!kDocuments || at >= start[e / 2 % 2]));
      const float share = Exp2(fmaf(s[e], p.scale_log2, bias[e / 2 % 2]));
      part[e / 32] += visible_pair ? share : 0.0f;
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      part[0] += __shfl_xor_sync(0xffffffffu, part[0], distance);
      part[1] += __shfl_xor_sync(0xffffffffu, part[1], distance);
    }
    if (lane < 2) {
      const int rounded =
          __float2int_rn((lane == 0 ? part[0] : part[1]) * static_cast<float>(1 << kMassBits));
      const int block = (lane == 0 ? key_position[0] : key_position[1]) / p.tile;
      if (rounded > 0) atomicAdd(mass + block, rounded);
    }
  }
}

template <int kHeadDim>
absl::Status Launch(const BlockMassArgs& args, cudaStream_t stream) {
  RETURN_IF_ERROR(sm90::MultiprocessorCount().status());
  ASSIGN_OR_RETURN(const CUtensorMap key_map, sm90::LoadMap(args.k, kKeyTile, "BlockMass: k"));
  const int runs = static_cast<int>((args.q.tokens + kRun - 1) / kRun);
  const int group = args.q.heads / args.k.heads;
  const EstimateParams params = {
      .q = args.q.data,
      .q_token_stride = args.q.token_stride,
      .q_head_stride = args.q.head_stride,
      .query_positions = nullptr,
      .query_starts = nullptr,
      .row_max = nullptr,
      .row_sum = nullptr,
      .column_mass = nullptr,
      .diagonal_mass = nullptr,
      .key_layout = args.key_layout,
      .keys = static_cast<int>(args.k.tokens),
      .key_tiles = static_cast<int>((args.k.tokens + kKeyTile - 1) / kKeyTile),
      .queries = static_cast<int>(args.q.tokens),
      .runs = runs,
      .group = group,
      .block_groups = (group * runs + kBlockRuns - 1) / kBlockRuns,
      .chunks = 1,
      .tile = args.tile,
      .blocks = (args.key_layout.tokens + args.tile - 1) / args.tile,
      .scale = args.scale,
      .scale_log2 = args.scale * kLog2e,
  };
  const MassParams mass = {
      .query_layout = args.query_layout,
      .document_starts = args.document_starts,
      .lse = args.lse,
      .mass = args.mass,
      .query_tiles = static_cast<int>((args.q.tokens + args.tile - 1) / args.tile)};
  constexpr size_t kSharedBytes = sizeof(EstimateShared<kHeadDim>);
  const auto kernel = args.document_starts == nullptr ? BlockMassKernel<kHeadDim, false>
                                                      : BlockMassKernel<kHeadDim, true>;
  RETURN_IF_CUDA_ERROR(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            static_cast<int>(kSharedBytes)),
                       "BlockMass");
  kernel<<<args.k.heads * params.block_groups, kBlockThreads, kSharedBytes, stream>>>(params, mass,
                                                                                      key_map);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "BlockMass");
  return absl::OkStatus();
}

}  // namespace

absl::Status BlockMass(const BlockMassArgs& args, cudaStream_t stream) {
  if (args.q.head_dim != 64 && args.q.head_dim != 128) {
    return absl::InvalidArgumentError(
        absl::StrFormat("BlockMass: head_dim is %d; 64 and 128 are supported", args.q.head_dim));
  }
  if (args.k.head_dim != args.q.head_dim || args.k.heads < 1 || args.q.heads % args.k.heads != 0 ||
      args.q.heads < args.k.heads) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "BlockMass: q has %d heads of %d, k has %d of %d; head_dim must be one, and the heads of "
        "q a multiple of k's",
        args.q.heads, args.q.head_dim, args.k.heads, args.k.head_dim));
  }
  if (args.tile != 64) RETURN_IF_ERROR(CheckSize(args.tile, "BlockMass: tile", 128, 128));
  RETURN_IF_ERROR(CheckSize(args.query_layout.tokens, "BlockMass: tokens of the sequence", 1,
                            INT32_MAX - kKeyTile));
  RETURN_IF_ERROR(CheckSize(args.q.tokens, "BlockMass: tokens of q (of the layout's rank)",
                            args.query_layout.local_tokens(), args.query_layout.local_tokens()));
  RETURN_IF_ERROR(CheckSize(args.k.tokens, "BlockMass: tokens of k (of the layout's rank)",
                            args.key_layout.local_tokens(), args.key_layout.local_tokens()));
  RETURN_IF_ERROR(CheckSize(args.q.token_stride, "BlockMass: q.token_stride", 0, INT64_MAX, 8));
  RETURN_IF_ERROR(CheckSize(args.q.head_stride, "BlockMass: q.head_stride", 0, INT64_MAX, 8));
  RETURN_IF_ERROR(CheckPointer(args.q.data, "BlockMass: q"));
  RETURN_IF_ERROR(CheckPointer(args.lse, "BlockMass: lse"));
  RETURN_IF_ERROR(CheckPointer(args.mass, "BlockMass: mass"));
  return args.q.head_dim == 64 ? Launch<64>(args, stream) : Launch<128>(args, stream);
}

}  // namespace ringleader::kernels::index
