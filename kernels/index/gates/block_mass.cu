// The exact mass of every pair of a query tile and a key block: AdaSpa's second pass.
#include "base/status_macros.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/index/estimate_kernel.cuh"
#include "kernels/index/estimate_launch.cuh"
#include "kernels/index/gates/blocks.h"
#include "kernels/sm90/hopper.h"
#include "kernels/sm90/launch/tensor_map.h"

namespace ringleader::kernels::index {
namespace {

using fused::CheckPointer;
using fused::CheckSize;

struct MassParams {
  ShardLayout query_layout;
  SeenKeys seen;
  const float* lse;
  int32_t* mass;
  int query_tiles;
};

// Every local query is an estimate query here. Blocks with the most keys to see go first.
// kBegins: whether what a query sees may begin after the sequence does.
template <int kHeadDim, bool kBegins>
__global__ void __launch_bounds__(kBlockThreads, 1)
    BlockMassKernel(const EstimateParams p, const MassParams m,
                    const __grid_constant__ CUtensorMap key_map) {
  extern __shared__ __align__(1024) unsigned char smem[];
  auto& shared = *reinterpret_cast<EstimateShared<kHeadDim>*>(smem);
  BlockWork work(p, gridDim.x - 1 - blockIdx.x);
  int64_t last_position = 0;
  for (int run = 0; run < work.run_count; ++run) {
    const int last = min(p.queries, work.FirstQuery(p, run) + kRun) - 1;
    last_position = max(last_position, m.seen.Last(m.query_layout, last));
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
        p, work, shared, [&](int e) { return m.seen.Last(m.query_layout, e); },
        [&](int e) { return kBegins ? m.seen.Begin(e) : 0; });
  }
  __syncthreads();
  if (threadIdx.x >= kConsumerThreads)
    return ProduceKeys(p, work, &key_map, shared, 0, work.tile_count);

  const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int run = warpgroup % (kConsumers / turns);
  if (run >= work.run_count) return;
  const int head = work.Head(p, run), first_query = work.FirstQuery(p, run);
  int last[2], start[2];  // keys that are seen
  float bias[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp * 16 + lane / 4 + half * 8, query = first_query + row;
    last[half] = shared.query_position[run * kRun + row];
    start[half] = kBegins ? shared.query_start[run * kRun + row] : 0;
    const float lse =
        query < p.queries ? m.lse[static_cast<int64_t>(head) * p.queries + query] : -INFINITY;
    bias[half] = lse == -INFINITY ? -INFINITY : -lse * ptx::kLog2E;
  }
  int32_t* mass =
      m.mass + (static_cast<int64_t>(head) * m.query_tiles + first_query / p.tile) * p.blocks;

  const ProductTurn turn(work.run_count == kBlockRuns && work.tile_count > 0, warpgroup);
  const char* q = reinterpret_cast<const char*>(shared.q) + run * (kRun * 128);
  for (int i = warpgroup / (kConsumers / turns); i < work.tile_count; i += turns) {
    float s[64];
    int key_position[2];
    RowLogits(s, shared, work, i, q, INT_MAX, turn, key_position);
    const int key = work.Tile(i) * kKeyTile;
    const bool all_visible =
        key + kKeyTile <= p.keys &&
        max(key_position[0], key_position[1]) + kRun - 1 <= min(last[0], last[1]) &&
        (!kBegins || min(key_position[0], key_position[1]) >= max(start[0], start[1]));
    float part[2] = {};  // of each half of the tile
#pragma unroll
    for (int e = 0; e < 64; ++e) {
      const int column = e / 4 * 8 + lane % 4 * 2 + e % 2;
      const int at = key_position[e / 32] + column % kRun;
      const bool visible_pair = all_visible || (key + column < p.keys && at <= last[e / 2 % 2] &&
                                                (!kBegins || at >= start[e / 2 % 2]));
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
  RETURN_IF_ERROR(sm90::CheckHopper());
  ASSIGN_OR_RETURN(const CUtensorMap key_map, sm90::LoadMap(args.k, kKeyTile, "BlockMass: k"));
  const EstimateParams params =
      MakeEstimateParams(args.q, args.k, args.key_layout, args.tile, args.scale);
  const MassParams mass = {
      .query_layout = args.query_layout,
      .seen = args.seen,
      .lse = args.lse,
      .mass = args.mass,
      .query_tiles = static_cast<int>((args.q.tokens + args.tile - 1) / args.tile)};
  const bool begins = args.seen.document_starts != nullptr || args.seen.intervals != nullptr;
  const auto kernel = begins ? BlockMassKernel<kHeadDim, true> : BlockMassKernel<kHeadDim, false>;
  return LaunchEstimate<kHeadDim>("BlockMass", kernel, args.k.heads * params.block_groups, stream,
                                  params, mass, key_map);
}

}  // namespace

absl::Status BlockMass(const BlockMassArgs& args, cudaStream_t stream) {
  RETURN_IF_ERROR(
      CheckQueriesAndKeys("BlockMass", args.q, args.k, args.key_layout, args.tile, args.scale));
  RETURN_IF_ERROR(CheckSize(args.q.tokens, "BlockMass: tokens of q (of the layout's rank)",
                            args.query_layout.local_tokens(), args.query_layout.local_tokens()));
  RETURN_IF_ERROR(CheckPointer(args.lse, "BlockMass: lse"));
  RETURN_IF_ERROR(CheckPointer(args.mass, "BlockMass: mass"));
  return args.q.head_dim == 64 ? Launch<64>(args, stream) : Launch<128>(args, stream);
}

}  // namespace ringleader::kernels::index
