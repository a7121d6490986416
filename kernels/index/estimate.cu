#include <algorithm>
#include <string>

#include "base/status_macros.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/index/estimate.h"
#include "kernels/index/estimate_kernel.cuh"
#include "kernels/index/estimate_launch.cuh"
#include "kernels/sm90/hopper.h"
#include "kernels/sm90/launch/tensor_map.h"

namespace ringleader::kernels::index {
namespace {

using fused::CheckPointer;
using fused::CheckSize;

// The maximum of floats through integer atomics: their order is that of the bits, reversed below 0.
__device__ __forceinline__ void AtomicMax(float* address, float value) {
  if (value >= 0) {
    atomicMax(reinterpret_cast<int*>(address), __float_as_int(value));
  } else {
    atomicMin(reinterpret_cast<unsigned*>(address), __float_as_uint(value));
  }
}

__global__ void FillKernel(float* out, int count, float value) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) out[i] = value;
}

// All threads call: the queries of a block are loaded, and the first keys are on their way.
template <bool kDocuments, typename Shared>
__device__ __forceinline__ void StartBlock(const EstimateParams& p, const BlockWork& work,
                                           const CUtensorMap* key_map, Shared& shared,
                                           int consumers, bool crossed = false) {
  InitBarriers(shared, consumers);
  if (threadIdx.x < kConsumerThreads) {
    LoadQueries(
        p, work, shared, [&](int e) { return p.query_positions[e]; },
        [&](int e) { return kDocuments ? p.query_starts[e] : 0; }, crossed);
  } else {
    ProduceKeys(p, work, key_map, shared, 0, kStages);
  }
  __syncthreads();
}

// What a lane's two rows see of the halves of a tile of keys. Of spread queries, a row sees nearly
// every half as a whole or not at all.
struct TileView {
  bool none[2][2];  // [row half][tile half]
  bool cut;         // a row sees part of a half

  // Of both halves of the tile.
  __device__ bool None(int half) const { return none[half][0] && none[half][1]; }
};
template <bool kDocuments>
__device__ __forceinline__ TileView ViewOf(const int (&key_position)[2], const int (&position)[2],
                                           const int (&start)[2]) {
  TileView view = {.cut = false};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int half = i / 2, first = key_position[i % 2], last = first + kRun - 1;
    view.none[half][i % 2] = first > position[half] || (kDocuments && last < start[half]);
    const bool all = last <= position[half] && (!kDocuments || first >= start[half]);
    view.cut |= !all && !view.none[half][i % 2];
  }
  return view;
}

// Takes from a lane's logits of a tile of keys, whose first is `key`, those that its two rows may
// not see: from `keys` on, after the row's position, or before its document.
template <bool kDocuments>
__device__ __forceinline__ void HideKeys(float (&s)[64], int key, int keys,
                                         const int (&key_position)[2], const int (&position)[2],
                                         const int (&start)[2]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int e = 0; e < 64; ++e) {
    const int column = e / 4 * 8 + lane % 4 * 2 + e % 2;
    const int at = key_position[e / 32] + column % kRun;
    if (key + column >= keys || at > position[e / 2 % 2] || (kDocuments && at < start[e / 2 % 2])) {
      s[e] = -INFINITY;
    }
  }
}

// The largest logits that a quad of lanes has seen of its two rows go to the maxima of all blocks.
__device__ __forceinline__ void RaiseMaxima(const EstimateParams& p, int head,
                                            const int (&query)[2], float (&top)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    top[half] = fmaxf(top[half], __shfl_xor_sync(0xffffffffu, top[half], 1));
    top[half] = fmaxf(top[half], __shfl_xor_sync(0xffffffffu, top[half], 2));
    if (threadIdx.x % 4 == 0 && query[half] < p.queries && top[half] > -INFINITY) {
      AtomicMax(p.row_max + head * p.queries + query[half], top[half] * p.scale);
    }
  }
}

// Row maxima (kSum false) or, given them, row sums. Queries are rows of the product, so a row is
// reduced within a quad of lanes. Four runs of queries cross the four warpgroups; with fewer, each
// takes one, and one or two are taken in turns at the tiles. kDocuments: keys before a query's
// document are hidden.
template <int kHeadDim, bool kSum, bool kDocuments>
__global__ void __launch_bounds__(kBlockThreads, 1)
    RowKernel(const EstimateParams p, const __grid_constant__ CUtensorMap key_map) {
  extern __shared__ __align__(1024) unsigned char smem[];
  auto& shared = *reinterpret_cast<EstimateShared<kHeadDim>*>(smem);
  const BlockWork work(p, blockIdx.x);
  const int turns = work.run_count == 1 ? 4 : work.run_count == 2 ? 2 : 1;
  const bool crossed = work.run_count == kBlockRuns;
  StartBlock<kDocuments>(p, work, &key_map, shared, work.run_count, crossed);
  if (threadIdx.x >= kConsumerThreads)
    return ProduceKeys(p, work, &key_map, shared, kStages, work.tile_count);

  const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int first_row = warpgroup % (kConsumers / turns) * kRun;
  if (first_row >= work.run_count * kRun) return;
  const int* const positions = shared.query_position + first_row;
  const int last_position =
      __reduce_max_sync(0xffffffffu, max(positions[lane], positions[lane + 32]));
  const int run = BlockWork::Place(first_row + warp * 16, crossed).run;
  const int head = work.Head(p, run);
  int position[2], query[2], start[2];
  float shift[2], top[2] = {-INFINITY, -INFINITY};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first_row + warp * 16 + lane / 4 + half * 8;
    query[half] = work.FirstQuery(p, run) + BlockWork::Place(row, crossed).row;
    position[half] = shared.query_position[row];
    start[half] = kDocuments ? shared.query_start[row] : 0;
    const bool valid = query[half] < p.queries;
    const float max = kSum && valid ? p.row_max[head * p.queries + query[half]] : -INFINITY;
    shift[half] = max == -INFINITY ? 0.0f : max * ptx::kLog2E;
  }
  // The row and half tile that this lane sums up: see QuadSum.
  const int mine = (lane & 2) != 0 ? query[1] : query[0];
  float* const run_sums =
      p.run_sums + (int64_t{head} * p.queries + min(mine, p.queries - 1)) * p.key_runs;
  uint64_t sum = 0;

  // The maximum is too short for turns to pay.
  const ProductTurn turn(kSum && crossed && work.tile_count > 0, warpgroup);
  const char* q = reinterpret_cast<const char*>(shared.q) + first_row * 128;
  for (int i = warpgroup / (kConsumers / turns); i < work.tile_count; i += turns) {
    float s[64];
    int key_position[2];
    if (!RowLogits(s, shared, work, i, q, last_position, turn, key_position)) continue;
    // Many queries that are spread over the sequence come before a tile of keys. Nobody reads what
    // run_sums would hold of them.
    if (__all_sync(0xffffffffu, key_position[0] > max(position[0], position[1]))) continue;
    const int key = work.Tile(i) * kKeyTile;
    const TileView view = ViewOf<kDocuments>(key_position, position, start);
    if (__any_sync(0xffffffffu, view.cut) || key + kKeyTile > p.keys) {
      HideKeys<kDocuments>(s, key, p.keys, key_position, position, start);
    }
    float part[2][2];  // [row half][tile half]
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      part[half][0] = part[half][1] = kSum ? 0.0f : -INFINITY;
      if (__all_sync(0xffffffffu, view.None(half))) continue;
#pragma unroll
      for (int e = 0; e < 32; ++e) {  // neighbouring pairs of the row
        float& of = part[half][e / 16];
        const float x = s[e / 2 * 4 + half * 2 + e % 2];
        of = kSum ? of + Exp2(fmaf(x, p.scale_log2, -shift[half])) : fmaxf(of, x);
      }
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        if (view.none[half][k]) part[half][k] = kSum ? 0.0f : -INFINITY;
      }
    }
    if constexpr (kSum) {
      const float of_run = QuadSum(part);
      const int run_of_keys = 2 * work.Tile(i) + lane % 2;
      if (mine < p.queries && run_of_keys < p.key_runs) run_sums[run_of_keys] = of_run;
      sum += __float2ull_rn(of_run * static_cast<float>(int64_t{1} << kRowSumBits));
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        top[half] = fmaxf(top[half], fmaxf(part[half][0], part[half][1]));
      }
    }
  }

  if constexpr (kSum) {
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    if (lane % 2 == 0 && mine < p.queries) {
      atomicAdd(reinterpret_cast<unsigned long long*>(p.row_sum) + head * p.queries + mine, sum);
    }
  } else {
    RaiseMaxima(p, head, query, top);
  }
}

// All threads call, once the queries are loaded: what turns logits of each row into shares of its
// sum.
template <typename Shared>
__device__ __forceinline__ void PrepareMasses(const EstimateParams& p, const BlockWork& work,
                                              Shared& shared) {
  // exp(logit - max) / sum = 2^(dot * scale_log2 + bias); an invalid row gets no share.
  for (int row = threadIdx.x; row < kBlockQueries; row += kBlockThreads) {
    float bias = -INFINITY;
    if (shared.query_position[row] != kNoQuery) {
      const int at =
          work.Head(p, row / kRun) * p.queries + work.FirstQuery(p, row / kRun) + row % kRun;
      const int64_t sum = p.row_sum[at];
      if (sum > 0)
        bias = static_cast<float>(kRowSumBits) - p.row_max[at] * ptx::kLog2E -
               log2f(static_cast<float>(sum));
    }
    shared.bias[row] = bias;
  }
  __syncthreads();
}

// What kGroup queries side by side see: all of them up to `all_before` and from `all_from` on, none
// after `last`.
struct GroupView {
  int all_from = 0, all_before = INT_MAX, last = -1;
};
template <bool kDocuments, typename Shared>
__device__ __forceinline__ GroupView GroupViewOf(const Shared& shared, int group) {
  GroupView view;
#pragma unroll
  for (int row = group * kGroup; row < (group + 1) * kGroup; ++row) {
    const int position = shared.query_position[row];
    view.all_before = min(view.all_before, position);
    if (position != kNoQuery) view.last = max(view.last, position);
    if (kDocuments) view.all_from = max(view.all_from, shared.query_start[row]);
  }
  return view;
}

// Masses of columns. Keys are the rows of the product here, so that the sum over the
// queries of a head stays in a quad of lanes. A warpgroup takes half a tile of keys and two runs of
// queries; with two runs or fewer, pairs of warpgroups take turns at the tiles.
template <int kHeadDim, bool kDocuments>
__global__ void __launch_bounds__(kBlockThreads, 1)
    MassKernel(const EstimateParams p, const __grid_constant__ CUtensorMap key_map) {
  extern __shared__ __align__(1024) unsigned char smem[];
  auto& shared = *reinterpret_cast<EstimateShared<kHeadDim>*>(smem);
  const BlockWork work(p, blockIdx.x);
  const int turns = work.run_count <= 2 ? 2 : 1;
  StartBlock<kDocuments>(p, work, &key_map, shared, kConsumers / turns);
  PrepareMasses(p, work, shared);
  if (threadIdx.x >= kConsumerThreads)
    return ProduceKeys(p, work, &key_map, shared, kStages, work.tile_count);

  const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  constexpr int kGroups = 2 * kRun / kGroup;
  const int half = warpgroup % 2, pair = turns == 1 ? warpgroup / 2 : 0;
  const int first_row = pair * 2 * kRun;
  const float* bias = shared.bias + first_row + lane % 4 * 2;
  const GroupView group = GroupViewOf<kDocuments>(shared, first_row / kGroup + lane % kGroups);
  // After QuadSum this lane has the sum of one row over one of the two runs.
  const int run = pair * 2 + lane % 2, row = warp * 16 + lane / 4 + lane / 2 % 2 * 8;
  const bool run_valid = run < work.run_count;
  const int head = work.Head(p, run_valid ? run : 0);
  const ProductTurn turn(turns == 1 && work.tile_count > 0, warpgroup);
  const char* q = reinterpret_cast<const char*>(shared.q) + first_row * 128;

  for (int i = turns == 1 ? 0 : warpgroup / 2; i < work.tile_count; i += turns) {
    const int stage = i % kStages;
    float s[64];
    ptx::MbarrierWait(&shared.full[stage], i / kStages & 1);
    const int key_position = KeyPosition(shared, stage, half);
    const char* k = reinterpret_cast<const char*>(shared.k[stage]) + half * (kRun * 128);
    turn.Begin();
    StartLogits<kHeadDim>(s, k, kKeyTile, q, kBlockQueries);
    turn.End(i + 1 == work.tile_count);
    FinishLogits(s);
    ReleaseStage(shared, stage);

    const int key = work.Tile(i) * kKeyTile + half * kRun;
    // A bit a group. Where queries are spread over the sequence, many come before these keys.
    const uint32_t seen = __ballot_sync(0xffffffffu, key_position <= group.last);
    const uint32_t cut = __ballot_sync(
        0xffffffffu, key + kRun > p.keys || key_position + kRun - 1 > group.all_before ||
                         (kDocuments && key_position < group.all_from));
    float part[2][2] = {};  // [row half][run]
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      if ((seen >> j & 1) == 0) continue;
      const int column = first_row + j * kGroup + lane % 4 * 2;
      if ((cut >> j & 1) != 0) {
        const int2 at = *reinterpret_cast<const int2*>(shared.query_position + column);
        int2 start = {0, 0};
        if (kDocuments) start = *reinterpret_cast<const int2*>(shared.query_start + column);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int r = warp * 16 + lane / 4 + e / 2 * 8;
          if (key + r >= p.keys || key_position + r > (e % 2 ? at.y : at.x) ||
              (kDocuments && key_position + r < (e % 2 ? start.y : start.x))) {
            s[4 * j + e] = -INFINITY;
          }
        }
      }
      const float2 b = *reinterpret_cast<const float2*>(bias + j * kGroup);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        part[e / 2][j / 8] += Exp2(fmaf(s[4 * j + e], p.scale_log2, e % 2 ? b.y : b.x));
      }
    }
    const int mass = __float2int_rn(QuadSum(part) * static_cast<float>(1 << kMassBits));
    if (run_valid && key + row < p.keys) {
      int32_t* out = p.column_mass + static_cast<int64_t>(head) * p.keys + key + row;
      if (p.runs == 1) {
        *out = mass;
      } else {
        atomicAdd(out, mass);
      }
    }
  }
}

// Where block `block` of the sequence lies among this rank's; -1 if another rank has it.
__device__ __forceinline__ int LocalBlock(const EstimateParams& p, int block) {
  const ShardLayout& layout = p.key_layout;
  if (layout.ranks == 1 || block < 0) return block;
  if (layout.kind == LayoutKind::kStriped) {  // without divisions of 64 bits
    const uint32_t length = layout.stripe / p.tile, stripe = static_cast<uint32_t>(block) / length,
                   turn = stripe / layout.ranks;
    if (stripe - turn * layout.ranks != static_cast<uint32_t>(layout.rank)) return -1;
    return static_cast<int>(turn * length + (block - stripe * length));
  }
  const int64_t position = static_cast<int64_t>(block) * p.tile;
  if (layout.Owner(position) != layout.rank) return -1;
  return static_cast<int>(layout.LocalIndex(position) / p.tile);
}

constexpr int kDiagonalWarps = 8;
constexpr int kDiagonalThreads = kDiagonalWarps * 32;

// Masses of diagonals from the sums of runs of keys: of 32 diagonals a block, one a lane. Each warp
// takes some of the queries, of each of which a diagonal holds one block of keys.
__global__ void __launch_bounds__(kDiagonalThreads) DiagonalKernel(const EstimateParams p) {
  __shared__ float share[kMaxEstimateQueries];  // of the row in 2^-kMassBits, of a run's sum
  __shared__ int query_block[kMaxEstimateQueries];
  __shared__ int masses[kDiagonalWarps][32];
  const int head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int e = threadIdx.x; e < p.queries; e += kDiagonalThreads) {
    const int64_t sum = p.row_sum[head * p.queries + e];
    constexpr double kUnit = static_cast<double>(int64_t{1} << (kMassBits + kRowSumBits));
    share[e] = sum > 0 ? static_cast<float>(kUnit / static_cast<double>(sum)) : 0.0f;
    query_block[e] = static_cast<int>(p.query_positions[e] / p.tile);
  }
  __syncthreads();
  const int delta = static_cast<int>(blockIdx.x) * 32 + lane, runs = p.tile / kRun;
  const float* sums = p.run_sums + static_cast<int64_t>(head) * p.queries * p.key_runs;
  int mass = 0;
#pragma unroll 4
  for (int e = warp; e < p.queries; e += kDiagonalWarps) {
    const int block = LocalBlock(p, query_block[e] - delta), first = block * runs;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      if (block < 0 || k >= runs || first + k >= p.key_runs) continue;
      mass += __float2int_rn(sums[static_cast<int64_t>(e) * p.key_runs + first + k] * share[e]);
    }
  }
  masses[warp][lane] = mass;
  __syncthreads();
  if (warp > 0 || delta >= p.blocks) return;
  for (int other = 1; other < kDiagonalWarps; ++other) mass += masses[other][lane];
  p.diagonal_mass[static_cast<int64_t>(head) * p.blocks + delta] = mass;
}

absl::Status Check(const EstimateArgs& args, const std::string& step) {
  RETURN_IF_ERROR(
      CheckQueriesAndKeys(step, args.q, args.k, args.key_layout, args.tile, args.scale));
  RETURN_IF_ERROR(
      CheckSize(args.q.tokens, (step + ": estimate queries").c_str(), 1, kMaxEstimateQueries));
  RETURN_IF_ERROR(CheckPointer(args.query_positions, (step + ": query_positions").c_str()));
  RETURN_IF_ERROR(CheckPointer(args.run_sums, (step + ": run_sums").c_str()));
  return CheckPointer(args.row_max, (step + ": row_max").c_str());
}

enum class Step { kMax, kSum, kMass };

template <int kHeadDim, bool kDocuments>
auto KernelOf(Step step) {
  return step == Step::kMax   ? RowKernel<kHeadDim, false, kDocuments>
         : step == Step::kSum ? RowKernel<kHeadDim, true, kDocuments>
                              : MassKernel<kHeadDim, kDocuments>;
}

template <int kHeadDim>
absl::Status Launch(const EstimateArgs& args, Step step, const char* name, cudaStream_t stream) {
  ASSIGN_OR_RETURN(const int processors, sm90::MultiprocessorCount());
  ASSIGN_OR_RETURN(const CUtensorMap key_map, sm90::LoadMap(args.k, kKeyTile, "k"));
  EstimateParams params =
      MakeEstimateParams(args.q, args.k, args.key_layout, args.tile, args.scale);
  params.query_positions = args.query_positions;
  params.query_starts = args.query_starts;
  params.row_max = args.row_max;
  params.row_sum = args.row_sum;
  params.run_sums = args.run_sums;
  params.column_mass = args.column_mass;
  params.diagonal_mass = args.diagonal_mass;
  const int combinations = args.k.heads * params.block_groups;
  params.chunks = std::clamp(processors / combinations, 1, params.key_tiles);
  const auto kernel = args.query_starts == nullptr ? KernelOf<kHeadDim, false>(step)
                                                   : KernelOf<kHeadDim, true>(step);
  RETURN_IF_ERROR(LaunchEstimate<kHeadDim>(name, kernel, combinations * params.chunks, stream,
                                           params, key_map));
  if (step != Step::kMass) return absl::OkStatus();
  const auto parts = static_cast<unsigned>((params.blocks + 31) / 32);
  DiagonalKernel<<<dim3(parts, args.q.heads), kDiagonalThreads, 0, stream>>>(params);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), name);
  return absl::OkStatus();
}

absl::Status Dispatch(const EstimateArgs& args, Step step, const char* name, cudaStream_t stream) {
  return args.q.head_dim == 64 ? Launch<64>(args, step, name, stream)
                               : Launch<128>(args, step, name, stream);
}

}  // namespace

absl::Status EstimateRowMax(const EstimateArgs& args, cudaStream_t stream) {
  RETURN_IF_ERROR(Check(args, "EstimateRowMax"));
  const int rows = static_cast<int>(args.q.heads * args.q.tokens);
  FillKernel<<<(rows + 255) / 256, 256, 0, stream>>>(args.row_max, rows, -INFINITY);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "EstimateRowMax");
  return Dispatch(args, Step::kMax, "EstimateRowMax", stream);
}

absl::Status EstimateRowSum(const EstimateArgs& args, cudaStream_t stream) {
  RETURN_IF_ERROR(Check(args, "EstimateRowSum"));
  RETURN_IF_ERROR(CheckPointer(args.row_sum, "EstimateRowSum: row_sum"));
  RETURN_IF_CUDA_ERROR(
      cudaMemsetAsync(args.row_sum, 0, sizeof(int64_t) * args.q.heads * args.q.tokens, stream),
      "EstimateRowSum");
  return Dispatch(args, Step::kSum, "EstimateRowSum", stream);
}

absl::Status EstimateMass(const EstimateArgs& args, cudaStream_t stream) {
  RETURN_IF_ERROR(Check(args, "EstimateMass"));
  RETURN_IF_ERROR(CheckPointer(args.row_sum, "EstimateMass: row_sum"));
  RETURN_IF_ERROR(CheckPointer(args.column_mass, "EstimateMass: column_mass"));
  RETURN_IF_ERROR(CheckPointer(args.diagonal_mass, "EstimateMass: diagonal_mass"));
  if (args.q.tokens > kRun) {  // several runs add up; a single one stores
    RETURN_IF_CUDA_ERROR(cudaMemsetAsync(args.column_mass, 0,
                                         sizeof(int32_t) * args.q.heads * args.k.tokens, stream),
                         "EstimateMass");
  }
  return Dispatch(args, Step::kMass, "EstimateMass", stream);
}

}  // namespace ringleader::kernels::index
