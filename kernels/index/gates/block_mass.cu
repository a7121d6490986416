// The exact mass of every pair of a query tile and a key block, in one pass over the keys: of each
// row and each 64 keys the logarithm of the sum of exponentials stays, in memory of the block that
// works on it; once a row has met all its keys these add up to its log-sum-exp, and their shares of
// it to masses.
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

constexpr int kConsumerWarps = kConsumerThreads / 32;
constexpr int kConsumersMeet = 1 + kConsumers;  // a named barrier; ProductTurn has those before it

struct MassParams {
  ShardLayout query_layout;
  SeenKeys seen;
  const __nv_bfloat16* k;
  int64_t k_token_stride, k_head_stride;
  int32_t* mass;
  int query_tiles;
  int* taken;   // [kMassSlots], parts of the workspace of which a block takes one
  float* sums;  // [kMassSlots, kBlockRuns, halves, kRun], in base 2
  int halves;   // of key tiles: the sequence's runs of 64 keys, an even number
};

// Keys that rows of a block see between them: tiles [first, end). All of a warp call.
template <int kHeadDim>
__device__ __forceinline__ void FindTiles(const EstimateParams& p,
                                          const EstimateShared<kHeadDim>& shared, int& first,
                                          int& end) {
  int begin = INT_MAX, last = -1;
  for (int row = threadIdx.x % 32; row < kBlockQueries; row += 32) {
    const int position = shared.query_position[row];
    if (position == kNoQuery) continue;
    begin = min(begin, shared.query_start[row]);
    last = max(last, position);
  }
  begin = __reduce_min_sync(0xffffffffu, begin);
  last = __reduce_max_sync(0xffffffffu, last);
  end = last < 0 ? 0 : min(p.key_tiles, last / kKeyTile + 1);
  first = min(begin / kKeyTile, end);
}

// What a block keeps of its rows.
struct RowSums {
  float* sums;  // [kBlockRuns, halves, kRun]
  int halves;
  int begin, end;  // halves that the block's rows have met

  __device__ float* Of(int run, int half) const {
    return sums + (static_cast<int64_t>(run) * halves + half) * kRun;
  }
  // This lane's two of the rows of a run; those of what they have not met are -infinity.
  __device__ float2 Load(int run, int half) const {
    if (half < begin || half >= end) return {-INFINITY, -INFINITY};
    return __ldcg(reinterpret_cast<const float2*>(Of(run, half)) + threadIdx.x % 32);
  }
};

// Leaves in shared.bias what sums of a row's exponentials are relative to: its logit, in base 2,
// with the last key that it sees, which is no more than its largest. Consumer threads call.
template <int kHeadDim>
__device__ __forceinline__ void FindReferences(const EstimateParams& p, const MassParams& m,
                                               const BlockWork& work,
                                               EstimateShared<kHeadDim>& shared) {
  for (int row = threadIdx.x; row < work.run_count * kRun; row += kConsumerThreads) {
    const int query = work.FirstQuery(p, row / kRun) + row % kRun;
    float logit = 0.0f;
    if (query < p.queries) {
      const int64_t key =
          min(max(m.seen.Last(m.query_layout, query), int64_t{0}), int64_t{p.keys - 1});
      const auto* const q = reinterpret_cast<const uint4*>(
          p.q + query * p.q_token_stride + work.Head(p, row / kRun) * p.q_head_stride);
      const auto* const k = reinterpret_cast<const uint4*>(m.k + key * m.k_token_stride +
                                                           work.kv_head * m.k_head_stride);
#pragma unroll 4
      for (int chunk = 0; chunk < kHeadDim / 8; ++chunk) {
        const uint4 a = q[chunk], b = k[chunk];
        const auto* const x = reinterpret_cast<const __nv_bfloat162*>(&a);
        const auto* const y = reinterpret_cast<const __nv_bfloat162*>(&b);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 u = __bfloat1622float2(x[i]), v = __bfloat1622float2(y[i]);
          logit = fmaf(u.x, v.x, fmaf(u.y, v.y, logit));
        }
      }
    }
    logit *= p.scale_log2;
    shared.bias[row] = logit == -INFINITY ? 0.0f : logit;
  }
}

// Where a lane has the `e`-th of a row's 16 numbers of half a tile, among those of a product.
__device__ __forceinline__ int PlaceOf(int upper, int half, int e) {
  return half * 32 + e / 2 * 4 + upper * 2 + e % 2;
}

// The sums of a lane's numbers of exp2(scale s - shift), by row and half of the tile.
__device__ __forceinline__ void SumExponentials(const float (&s)[64], float scale,
                                                const float (&shift)[2][2], float (&sum)[2][2]) {
  float odd[2][2] = {};
#pragma unroll
  for (int e = 0; e < 16; ++e) {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float x = Exp2(fmaf(s[PlaceOf(upper, half, e)], scale, -shift[upper][half]));
        float& part = e % 2 == 0 ? sum[upper][half] : odd[upper][half];
        part = e < 2 ? x : part + x;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) sum[i / 2][i % 2] += odd[i / 2][i % 2];
}

// A quad of lanes has logits of two rows and both halves of a tile: lane l of it gets the logarithm
// of the sum of exponentials of row l / 2 and half l % 2. All of a warp call.
__device__ __forceinline__ float LogSums(const float (&s)[64], const float (&reference)[2],
                                         float scale) {
  constexpr float kMost = 0x1p100f;  // beyond, the maximum of what is summed is the reference
  const int lane = threadIdx.x % 32;
  float shift[2][2] = {{reference[0], reference[0]}, {reference[1], reference[1]}}, sum[2][2];
  SumExponentials(s, scale, shift, sum);
  const float of_lane = QuadSum(sum);
  const float found = (lane & 2 ? reference[1] : reference[0]) + __log2f(of_lane);
  if (!__any_sync(0xffffffffu, of_lane > kMost)) return found;
#pragma unroll
  for (int upper = 0; upper < 2; ++upper) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float most = -INFINITY;
#pragma unroll
      for (int e = 0; e < 16; ++e) most = fmaxf(most, s[PlaceOf(upper, half, e)]);
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
      shift[upper][half] = most == -INFINITY ? 0.0f : most * scale;
    }
  }
  SumExponentials(s, scale, shift, sum);
  const float shifts[2] = {lane & 1 ? shift[0][1] : shift[0][0],
                           lane & 1 ? shift[1][1] : shift[1][0]};
  const float again = (lane & 2 ? shifts[1] : shifts[0]) + __log2f(QuadSum(sum));
  return of_lane > kMost ? again : found;
}

// A warpgroup's share of the keys, for the 64 queries of its run.
template <int kHeadDim, bool kBegins>
__device__ __forceinline__ void SumByHalves(const EstimateParams& p, const BlockWork& work,
                                            EstimateShared<kHeadDim>& shared, const RowSums& kept) {
  const int turns = work.run_count == 1 ? 4 : work.run_count == 2 ? 2 : 1;
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int run = warpgroup % (kConsumers / turns);
  if (run >= work.run_count) return;
  int last[2], start[2];  // keys that are seen
  float reference[2];
#pragma unroll
  for (int upper = 0; upper < 2; ++upper) {
    const int row = run * kRun + warp * 16 + lane / 4 + upper * 8;
    last[upper] = shared.query_position[row];
    start[upper] = kBegins ? shared.query_start[row] : 0;
    reference[upper] = shared.bias[row];
  }
  const ProductTurn turn(work.run_count == kBlockRuns && work.tile_count > 0, warpgroup);
  const char* const q = reinterpret_cast<const char*>(shared.q) + run * (kRun * 128);
  // Of the lane's row and half, of the four that its quad has.
  float* const to = kept.Of(run, kept.begin + lane % 2) + warp * 16 + lane / 4 + lane / 2 % 2 * 8;
  for (int i = warpgroup / (kConsumers / turns); i < work.tile_count; i += turns) {
    float s[64];
    ptx::MbarrierWait(&shared.full[i % kStages], i / kStages & 1);
    turn.Begin();
    Multiply(s, shared, i % kStages, q, turn, i + 1 == work.tile_count);
    const int key = work.Tile(i) * kKeyTile;
    const bool all_seen = key + kKeyTile <= p.keys && key + kKeyTile - 1 <= min(last[0], last[1]) &&
                          (!kBegins || key >= max(start[0], start[1]));
    if (!__all_sync(0xffffffffu, all_seen)) {
#pragma unroll
      for (int e = 0; e < 64; ++e) {
        const int at = key + e / 4 * 8 + lane % 4 * 2 + e % 2, upper = e / 2 % 2;
        const bool is_seen = at < p.keys && at <= last[upper] && (!kBegins || at >= start[upper]);
        s[e] = is_seen ? s[e] : -INFINITY;
      }
    }
    to[static_cast<int64_t>(i) * (2 * kRun)] = LogSums(s, reference, p.scale_log2);
  }
}

// Leaves in shared.bias the log-sum-exps of a block's rows, infinity for one that sees nothing.
// Which sums are added in which order is a matter of their keys alone. Consumer threads call.
template <int kHeadDim>
__device__ __forceinline__ void SumRows(const BlockWork& work, EstimateShared<kHeadDim>& shared,
                                        const RowSums& kept) {
  constexpr int kTogether = 16;
  // Of each warp, maxima and sums relative to them: [kConsumerWarps, kBlockQueries].
  auto* const maxima = reinterpret_cast<float*>(shared.k[0]);
  float* const sums = maxima + kConsumerWarps * kBlockQueries;
  static_assert(sizeof(shared.k) >= 2 * kConsumerWarps * kBlockQueries * sizeof(float));
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  constexpr int kStep = kConsumerWarps * kTogether;
  for (int run = 0; run < work.run_count; ++run) {
    float most[2] = {-INFINITY, -INFINITY}, sum[2] = {};
    for (int first = kept.begin / kStep * kStep; first < kept.end; first += kStep) {
      float2 values[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        values[i] = kept.Load(run, first + i * kConsumerWarps + warp);
      }
      float next[2] = {most[0], most[1]}, shift[2];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        next[0] = fmaxf(next[0], values[i].x);
        next[1] = fmaxf(next[1], values[i].y);
      }
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        shift[row] = next[row] == -INFINITY ? 0.0f : next[row];
        sum[row] *= Exp2(most[row] - shift[row]);
        most[row] = next[row];
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        sum[0] += Exp2(values[i].x - shift[0]);
        sum[1] += Exp2(values[i].y - shift[1]);
      }
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int at = warp * kBlockQueries + run * kRun + lane * 2 + row;
      maxima[at] = most[row];
      sums[at] = sum[row];
    }
  }
  ptx::NamedBarrierSync(kConsumersMeet, kConsumerThreads);
  for (int row = threadIdx.x; row < work.run_count * kRun; row += kConsumerThreads) {
    float most = -INFINITY, sum = 0.0f;
    for (int i = 0; i < kConsumerWarps; ++i) most = fmaxf(most, maxima[i * kBlockQueries + row]);
    const float shift = most == -INFINITY ? 0.0f : most;
    for (int i = 0; i < kConsumerWarps; ++i) {
      sum += sums[i * kBlockQueries + row] * Exp2(maxima[i * kBlockQueries + row] - shift);
    }
    const bool sees = shared.query_position[row] != kNoQuery && sum != 0.0f;
    shared.bias[row] = sees ? shift + __log2f(sum) : INFINITY;
  }
  ptx::NamedBarrierSync(kConsumersMeet, kConsumerThreads);
}

// Lane l gets the sum over lanes of v[l]. v is used up.
template <int kDistance = 16>
__device__ __forceinline__ float SumOfLanes(float (&v)[32]) {
  const bool upper = (threadIdx.x & kDistance) != 0;
#pragma unroll
  for (int i = 0; i < kDistance; ++i) {
    const float mine = upper ? v[i + kDistance] : v[i], other = upper ? v[i] : v[i + kDistance];
    v[i] = mine + __shfl_xor_sync(0xffffffffu, other, kDistance);
  }
  if constexpr (kDistance > 1) return SumOfLanes<kDistance / 2>(v);
  return v[0];
}

// Adds up the masses of a block's rows, 32 halves of tiles at a time. Consumer threads call.
template <int kHeadDim>
__device__ __forceinline__ void AddMasses(const EstimateParams& p, const MassParams& m,
                                          const BlockWork& work,
                                          const EstimateShared<kHeadDim>& shared,
                                          const RowSums& kept) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int run = 0; run < work.run_count; ++run) {
    const float2 lse = *reinterpret_cast<const float2*>(&shared.bias[run * kRun + lane * 2]);
    int32_t* const mass = m.mass + (static_cast<int64_t>(work.Head(p, run)) * m.query_tiles +
                                    work.FirstQuery(p, run) / p.tile) *
                                       p.blocks;
    for (int first = kept.begin + warp * 32; first < kept.end; first += kConsumerWarps * 32) {
      float shares[32];
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const float2 sums = kept.Load(run, first + i);
        // A row that is no number has none, and the others have theirs.
        shares[i] = fmaxf(Exp2(sums.x - lse.x), 0.0f) + fmaxf(Exp2(sums.y - lse.y), 0.0f);
      }
      const int rounded = __float2int_rn(SumOfLanes(shares) * static_cast<float>(1 << kMassBits));
      if (rounded > 0)
        atomicAdd(mass + static_cast<int64_t>(first + lane) * kRun / p.tile, rounded);
    }
  }
}

// Every local query is an estimate query here. Blocks with the most keys to see go first.
// kBegins: whether what a query sees may begin after the sequence does.
template <int kHeadDim, bool kBegins>
__global__ void __launch_bounds__(kBlockThreads, 1)
    BlockMassKernel(const EstimateParams p, const MassParams m,
                    const __grid_constant__ CUtensorMap key_map) {
  extern __shared__ __align__(1024) unsigned char smem[];
  auto& shared = *reinterpret_cast<EstimateShared<kHeadDim>*>(smem);
  __shared__ int slot;
  BlockWork work(p, static_cast<int>(gridDim.x - 1 - blockIdx.x));
  InitBarriers(shared, work.run_count);
  if (threadIdx.x == 0) {
    int free = static_cast<int>(blockIdx.x) % kMassSlots;
    while (atomicCAS(m.taken + free, 0, 1) != 0) free = (free + 1) % kMassSlots;
    __threadfence();
    slot = free;
  }
  if (threadIdx.x < kConsumerThreads) {
    LoadQueries(
        p, work, shared, [&](int e) { return m.seen.Last(m.query_layout, e); },
        [&](int e) { return kBegins ? m.seen.Begin(e) : 0; });
    FindReferences(p, m, work, shared);
  }
  __syncthreads();
  int end;
  FindTiles(p, shared, work.first_tile, end);
  work.tile_count = end - work.first_tile;
  if (threadIdx.x >= kConsumerThreads) {
    return ProduceKeys(p, work, &key_map, shared, 0, work.tile_count);
  }
  const RowSums kept = {.sums = m.sums + static_cast<int64_t>(slot) * kBlockRuns * m.halves * kRun,
                        .halves = m.halves,
                        .begin = 2 * work.first_tile,
                        .end = 2 * end};
  SumByHalves<kHeadDim, kBegins>(p, work, shared, kept);
  ptx::NamedBarrierSync(kConsumersMeet, kConsumerThreads);
  SumRows(work, shared, kept);
  AddMasses(p, m, work, shared, kept);
  ptx::NamedBarrierSync(kConsumersMeet, kConsumerThreads);
  if (threadIdx.x == 0) {
    __threadfence();
    atomicExch(m.taken + slot, 0);
  }
}

static_assert(kMassQueries == kBlockQueries && kKeyTile == 2 * kRun);
// Of the workspace's marks of slots that are taken.
constexpr int64_t kTakenBytes = 1024;
static_assert(kTakenBytes >= kMassSlots * static_cast<int64_t>(sizeof(int)));

template <int kHeadDim>
absl::Status Launch(const TokenMajor<const __nv_bfloat16>& q,
                    const TokenMajor<const __nv_bfloat16>& k, const BlockMassStep& step,
                    char* workspace, cudaStream_t stream) {
  RETURN_IF_ERROR(sm90::CheckHopper());
  ASSIGN_OR_RETURN(const CUtensorMap key_map, sm90::LoadMap(k, kKeyTile, "BlockMass: k"));
  const EstimateParams params =
      MakeEstimateParams(q, k, {.tokens = step.query_layout.tokens}, step.tile, step.scale);
  const MassParams mass = {.query_layout = step.query_layout,
                           .seen = step.seen,
                           .k = k.data,
                           .k_token_stride = k.token_stride,
                           .k_head_stride = k.head_stride,
                           .mass = step.mass,
                           .query_tiles = static_cast<int>((q.tokens + step.tile - 1) / step.tile),
                           .taken = reinterpret_cast<int*>(workspace),
                           .sums = reinterpret_cast<float*>(workspace + kTakenBytes),
                           .halves = static_cast<int>(MassHalves(k.tokens))};
  RETURN_IF_CUDA_ERROR(cudaMemsetAsync(workspace, 0, kTakenBytes, stream), "BlockMass");
  RETURN_IF_CUDA_ERROR(
      cudaMemsetAsync(step.mass, 0, sizeof(int32_t) * q.heads * mass.query_tiles * params.blocks,
                      stream),
      "BlockMass");
  const bool begins = step.seen.document_starts != nullptr || step.seen.intervals != nullptr;
  const auto kernel = begins ? BlockMassKernel<kHeadDim, true> : BlockMassKernel<kHeadDim, false>;
  return LaunchEstimate<kHeadDim>("BlockMass", kernel, k.heads * params.block_groups, stream,
                                  params, mass, key_map);
}

}  // namespace

size_t BlockMassWorkspaceBytes(int64_t tokens) {
  return static_cast<size_t>(kTakenBytes + MassSumsBytes(tokens));
}

absl::Status BlockMass(const TokenMajor<const __nv_bfloat16>& q,
                       const TokenMajor<const __nv_bfloat16>& k, const BlockMassStep& step,
                       void* workspace, cudaStream_t stream) {
  RETURN_IF_ERROR(CheckQueriesAndKeys("BlockMass", q, k, {.tokens = step.query_layout.tokens},
                                      step.tile, step.scale));
  RETURN_IF_ERROR(CheckSize(q.tokens, "BlockMass: tokens of q (of the layout's rank)",
                            step.query_layout.local_tokens(), step.query_layout.local_tokens()));
  RETURN_IF_ERROR(CheckPointer(step.mass, "BlockMass: mass"));
  RETURN_IF_ERROR(CheckPointer(workspace, "BlockMass: workspace"));
  if (q.tokens == 0) return absl::OkStatus();
  auto* const memory = static_cast<char*>(workspace);
  return q.head_dim == 64 ? Launch<64>(q, k, step, memory, stream)
                          : Launch<128>(q, k, step, memory, stream);
}

}  // namespace ringleader::kernels::index
