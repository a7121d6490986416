#include <algorithm>
#include <bit>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/index/gates/antidiagonal.h"
#include "kernels/index/gates/antidiagonal_scores.cuh"
#include "kernels/index/threshold.cuh"
#include "kernels/sm90/hopper.h"
#include "kernels/sm90/launch/tensor_map.h"
#include "ringleader/kernels/index.h"

namespace ringleader::kernels::index {
namespace {

using fused::CheckPointer;
using fused::CheckSize;

constexpr int kKeepThreads = 256;
constexpr int kKeepWarps = kKeepThreads / 32;

struct KeepParams {
  int width = 0;  // groups of a tile, and of a block
  int tile = 0;
  int first_tile = 0;   // of the queries, of this launch
  int query_tiles = 0;  // of this rank
  float threshold = 0.0f;
  float density = 0.0f;
  const int32_t* head_halves = nullptr;  // HalvesOf
  ChoiceMove move = {};
  uint32_t* chosen = nullptr;
};

// Of each of a tile's rows, by items [first_item, last_item]: what turns an item's sums into shares
// of all that the row sees takes the place of its maximum. A warp takes a row. The order of the sum
// depends on the row's position alone.
__device__ void FinishRows(const ScoreParams& p, int64_t first_slot, int rows, int first_item,
                           int last_item) {
  const int lane = threadIdx.x % 32;
  for (int row = threadIdx.x / 32; row < rows; row += kKeepWarps) {
    float2* const items = p.items_of + (first_slot + row) * p.items;
    float maximum = -INFINITY, sum = 0.0f;
    for (int i = first_item + lane; i <= last_item; i += 32) maximum = fmaxf(maximum, items[i].x);
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, distance));
    }
    for (int i = first_item + lane; i <= last_item; i += 32) {
      if (items[i].x != -INFINITY) sum += items[i].y * sm90::ptx::Exp2(items[i].x - maximum);
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    }
    const float inverse = sum > 0 ? 1.0f / sum : 0.0f;
    for (int i = first_item + lane; i <= last_item; i += 32) {
      items[i].x = items[i].x == -INFINITY ? 0.0f : sm90::ptx::Exp2(items[i].x - maximum) * inverse;
    }
  }
}

// A block of threads takes a tile of queries of a head: masses of blocks, then which are kept.
__global__ void __launch_bounds__(kKeepThreads, 4)
    KeepKernel(const ScoreParams p, const KeepParams keep) {
  extern __shared__ int32_t mass[];  // of what the tile sees
  __shared__ SmallSelectShared shared;
  const int a = keep.first_tile + blockIdx.x, head = blockIdx.y;
  const SeenBlocks blocks = SeenBlocksOf(p.seen, p.layout, a, keep.tile, keep.tile);
  const int first = blocks.first, own = blocks.own - first;
  const int first_row = a * keep.width - p.first_row;
  const int rows = max(0, min(keep.width, p.rows - first_row));
  const int64_t first_slot = static_cast<int64_t>(head) * p.rows + first_row;
  const auto item_of = [&](int block) { return block * keep.width / kScoreColumns; };
  // Of items behind the last one that a row sees nothing was scored: there is no mass.
  const int last_item =
      rows == 0 ? -1
                : GroupPositions<true>{p}.Last(p.first_row + first_row + rows - 1) / kScoreColumns;
  FinishRows(p, first_slot, rows, item_of(first), last_item);
  __syncthreads();
  uint64_t total = 0;
  for (int block = first + static_cast<int>(threadIdx.x); block <= blocks.last;
       block += kKeepThreads) {
    const int item = item_of(block);
    float sum = 0.0f;
    if (item <= last_item) {
      const float2* const of_item = p.items_of + first_slot * p.items + item;
      const float* const of_block = p.block_sums + first_slot * p.blocks + block;
#pragma unroll 8
      for (int row = 0; row < rows; ++row) {
        const float share = of_item[int64_t{row} * p.items].x;
        // Sums of a row that is no number are none either: it has no mass, and the others have
        // theirs.
        if (share > 0) sum += of_block[int64_t{row} * p.blocks] * share;
      }
    }
    const int rounded = __float2int_rn(sum * static_cast<float>(1 << kMassBits));
    mass[block - first] = rounded;
    total += static_cast<uint64_t>(rounded);
  }
  total = BlockScan(total, shared.scan).total;  // and all masses are written
  const int seen = blocks.count(), forced = own == 0 ? 1 : 2;
  const int64_t forced_mass = own == 0 ? mass[0] : int64_t{mass[0]} + mass[own];
  const auto other_mass = [&](int i) { return i == 0 || i == own ? 0 : mass[i]; };
  const auto find = [&](int64_t count, int64_t of_mass) {
    return FindThreshold<1, kKeepThreads>(shared, 0, seen, other_mass, count, of_mass, One());
  };
  const auto all = static_cast<int64_t>(total);
  const int most =
      MostUnforced(keep.density, HalvesOf(keep.head_halves, p.first_head + head), seen, forced);
  Threshold threshold = find(most, MassTarget(all, keep.threshold) - forced_mass);
  if (keep.move.work_before != nullptr && threadIdx.x == 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(keep.move.work_before),
              static_cast<unsigned long long>(forced + threshold.count));
  }
  if (keep.move.factor != nullptr) {
    const int64_t before = threshold.count,
                  least = HeldMass(threshold.mass, all, keep.move.tolerance);
    const uint32_t place = MovePlace(blocks.own, p.first_head + head);
    threshold = find(MovedCount(forced + before, *keep.move.factor, place) - forced, INT_MAX);
    if (threshold.count < before && threshold.mass < least) threshold = find(before, least);
  }
  const int words = BlockWords(p.blocks);
  uint32_t* const chosen =
      keep.chosen + (static_cast<int64_t>(p.first_head + head) * keep.query_tiles + a) * words;
  // Of the equal ones odd heads pass those that they do not take.
  const int passed = TiesGoLate(p.first_head + head) ? threshold.equal - threshold.ties : 0;
  int ties = -passed;  // seen so far, those that are passed apart
  for (int from = 0; from < words * 32; from += kKeepThreads) {
    const int block = from + static_cast<int>(threadIdx.x), i = block - first;
    const bool is_seen = i >= 0 && i < seen;
    const int of_block = is_seen ? other_mass(i) : 0;
    const bool equal = of_block > 0 && of_block == threshold.value;
    const Scan scan = BlockScan(equal ? 1 : 0, shared.scan);
    const int tie = ties + static_cast<int>(scan.inclusive);
    const bool taken = (is_seen && (i == 0 || i == own)) ||
                       (of_block > 0 && of_block > threshold.value) ||
                       (equal && tie > 0 && tie <= threshold.ties);
    ties += static_cast<int>(scan.total);
    const uint32_t word = __ballot_sync(0xffffffffu, taken);
    if (threadIdx.x % 32 == 0 && block < words * 32) chosen[block / 32] = word;
  }
}

// How the rows of all heads are cut, so that what is known of those at work fits the workspace.
struct Batches {
  int64_t rows = 0, blocks = 0, items = 0;
  int64_t rows_at_once = 0, heads_at_once = 0;

  size_t RowBytes() const { return sizeof(float2) * items + sizeof(float) * blocks; }
  size_t Bytes() const { return RowBytes() * rows_at_once * heads_at_once; }
};

int64_t Align(int64_t value, int64_t to) {
  return (value + to - 1) / to * to;
}

Batches BatchesOf(int64_t query_tokens, int heads, const AntidiagonalGateStep& step) {
  Batches batches;
  batches.rows = std::min(query_tokens, step.choosing) / step.stride;
  batches.blocks = (step.query_layout.tokens + step.tile - 1) / step.tile;
  batches.items = (step.query_layout.tokens / step.stride + kScoreColumns - 1) / kScoreColumns;
  const auto fitting = static_cast<int64_t>(kAntidiagonalWorkspaceBytes / batches.RowBytes());
  const int64_t whole = std::max<int64_t>(kScoreRows, Align(batches.rows, kScoreRows));
  batches.rows_at_once =
      std::min(whole, std::max<int64_t>(kScoreRows, fitting / kScoreRows * kScoreRows));
  batches.heads_at_once = std::clamp<int64_t>(fitting / whole, 1, heads);
  return batches;
}

using Kernel = void (*)(ScoreParams, CUtensorMap, CUtensorMap);

template <bool kIntervals>
Kernel KernelOf(int width) {
  switch (width) {
    case 1:
      return ScoreKernel<1, kIntervals>;
    case 2:
      return ScoreKernel<2, kIntervals>;
    case 4:
      return ScoreKernel<4, kIntervals>;
    case 8:
      return ScoreKernel<8, kIntervals>;
    case 16:
      return ScoreKernel<16, kIntervals>;
    default:
      return nullptr;
  }
}

absl::Status Check(const TokenMajor<const __nv_bfloat16>& q,
                   const TokenMajor<const __nv_bfloat16>& k, const AntidiagonalGateStep& step) {
  if (step.tile != 64 && step.tile != 128) {
    return absl::InvalidArgumentError(
        absl::StrFormat("ChooseByAntidiagonals: tile is %d; 64 and 128 are supported", step.tile));
  }
  if (step.stride < 8 || step.stride > 64 || (step.stride & (step.stride - 1)) != 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "ChooseByAntidiagonals: stride is %d; allowed are 8, 16, 32 and 64", step.stride));
  }
  if (q.head_dim != 64 && q.head_dim != 128) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "ChooseByAntidiagonals: head_dim is %d; 64 and 128 are supported", q.head_dim));
  }
  RETURN_IF_ERROR(
      CheckSize(k.head_dim, "ChooseByAntidiagonals: head_dim of k", q.head_dim, q.head_dim));
  RETURN_IF_ERROR(CheckSize(k.heads, "ChooseByAntidiagonals: heads of k", 1, 65535));
  RETURN_IF_ERROR(CheckSize(q.heads, "ChooseByAntidiagonals: heads of q", k.heads, 65535, k.heads));
  RETURN_IF_ERROR(CheckSize(q.tokens, "ChooseByAntidiagonals: tokens of q (of the layout's rank)",
                            step.query_layout.local_tokens(), step.query_layout.local_tokens()));
  RETURN_IF_ERROR(CheckSize(k.tokens, "ChooseByAntidiagonals: tokens of k (of the sequence)",
                            step.query_layout.tokens, step.query_layout.tokens));
  RETURN_IF_ERROR(CheckSize((k.tokens + step.tile - 1) / step.tile,
                            "ChooseByAntidiagonals: blocks of the sequence", 1, kMaxScoredBlocks));
  return CheckPointer(step.chosen, "ChooseByAntidiagonals: chosen");
}

}  // namespace

size_t AntidiagonalWorkspaceBytes(const TokenMajor<const __nv_bfloat16>& q,
                                  const AntidiagonalGateStep& step) {
  return BatchesOf(q.tokens, q.heads, step).Bytes();
}

absl::Status ChooseByAntidiagonals(const TokenMajor<const __nv_bfloat16>& q,
                                   const TokenMajor<const __nv_bfloat16>& k,
                                   const AntidiagonalGateStep& step, void* workspace,
                                   cudaStream_t stream) {
  constexpr char kName[] = "ChooseByAntidiagonals";
  RETURN_IF_ERROR(Check(q, k, step));
  RETURN_IF_ERROR(CheckPointer(workspace, "ChooseByAntidiagonals: workspace"));
  RETURN_IF_ERROR(sm90::CheckHopper());
  const Batches batches = BatchesOf(q.tokens, q.heads, step);
  const int width = step.tile / step.stride;
  const Kernel kernel =
      step.seen.intervals == nullptr ? KernelOf<false>(width) : KernelOf<true>(width);
  CUtensorMap query_map = {}, key_map = {};
  if (batches.rows > 0) {
    ASSIGN_OR_RETURN(query_map, sm90::LoadGroupMap(q, step.stride, kScoreRows, kName));
    ASSIGN_OR_RETURN(key_map,
                     sm90::LoadGroupMap(k, step.stride, kScoreColumns / kScoreCluster, kName));
  }
  RETURN_IF_CUDA_ERROR(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            sizeof(ScoreShared)),
                       kName);
  const int mass_bytes = static_cast<int>(sizeof(int32_t) * batches.blocks);
  RETURN_IF_CUDA_ERROR(
      cudaFuncSetAttribute(KeepKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, mass_bytes),
      kName);
  int device = 0, multiprocessors = 0;
  RETURN_IF_CUDA_ERROR(cudaGetDevice(&device), kName);
  RETURN_IF_CUDA_ERROR(
      cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), kName);

  const auto query_tiles = static_cast<int>((q.tokens + step.tile - 1) / step.tile);
  ScoreParams params = {
      .layout = step.query_layout,
      .seen = step.seen,
      .stride = step.stride,
      .stride_log2 = std::countr_zero(static_cast<unsigned>(step.stride)),
      .head_blocks = q.head_dim / 64,
      .group = q.heads / k.heads,
      .blocks = static_cast<int>(batches.blocks),
      .items = static_cast<int>(batches.items),
      .scale_log2 = step.scale / static_cast<float>(step.stride) * sm90::ptx::kLog2E,
      .items_of = static_cast<float2*>(workspace),
      .block_sums =
          reinterpret_cast<float*>(static_cast<float2*>(workspace) +
                                   batches.items * batches.rows_at_once * batches.heads_at_once)};
  KeepParams keep = {.width = width,
                     .tile = step.tile,
                     .query_tiles = query_tiles,
                     .threshold = step.threshold,
                     .density = step.density,
                     .head_halves = step.head_halves,
                     .move = step.move,
                     .chosen = step.chosen};
  if (step.move.work_before != nullptr) {
    RETURN_IF_CUDA_ERROR(cudaMemsetAsync(step.move.work_before, 0, sizeof(int64_t), stream), kName);
  }
  for (int64_t head = 0; head < q.heads; head += batches.heads_at_once) {
    params.first_head = static_cast<int>(head);
    params.heads = static_cast<int>(std::min(batches.heads_at_once, q.heads - head));
    // Rows of whole tiles at a time; the last tile of the queries may have none.
    for (keep.first_tile = 0; keep.first_tile < query_tiles;
         keep.first_tile += static_cast<int>(batches.rows_at_once) / width) {
      params.first_row = keep.first_tile * width;
      params.rows = static_cast<int>(
          std::clamp<int64_t>(batches.rows - params.first_row, 0, batches.rows_at_once));
      if (params.rows > 0) {
        kernel<<<multiprocessors / kScoreCluster * kScoreCluster, kScoreThreads,
                 sizeof(ScoreShared), stream>>>(params, query_map, key_map);
        RETURN_IF_CUDA_ERROR(cudaGetLastError(), "ChooseByAntidiagonals: scores");
      }
      const int tiles =
          std::min(query_tiles - keep.first_tile, static_cast<int>(batches.rows_at_once) / width);
      KeepKernel<<<dim3(tiles, params.heads), kKeepThreads, mass_bytes, stream>>>(params, keep);
      RETURN_IF_CUDA_ERROR(cudaGetLastError(), "ChooseByAntidiagonals: keep");
    }
  }
  return absl::OkStatus();
}

absl::Status PackKeys(const TokenMajor<const __nv_bfloat16>& k, void* packed, cudaStream_t stream) {
  constexpr size_t kBytes = sizeof(__nv_bfloat16);
  RETURN_IF_ERROR(CheckPointer(packed, "PackKeys: packed"));
  const size_t row = kBytes * k.heads * k.head_dim;
  const bool dense = k.head_stride == k.head_dim;  // heads lie side by side
  for (int head = 0; head < (dense ? 1 : k.heads); ++head) {
    RETURN_IF_CUDA_ERROR(
        cudaMemcpy2DAsync(static_cast<char*>(packed) + kBytes * head * k.head_dim, row,
                          k.data + head * k.head_stride, kBytes * k.token_stride,
                          dense ? row : kBytes * k.head_dim, k.tokens, cudaMemcpyDeviceToDevice,
                          stream),
        "PackKeys");
  }
  return absl::OkStatus();
}

}  // namespace ringleader::kernels::index
