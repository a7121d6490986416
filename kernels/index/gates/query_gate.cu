#include <algorithm>
#include <climits>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/index/gates/few_blocks_gate.cuh"
#include "kernels/index/gates/gate_params.h"
#include "kernels/index/gates/query_gate.h"
#include "kernels/sm90/hopper.h"
#include "kernels/sm90/launch/tensor_map.h"
#include "kernels/sm90/ptx/sync.cuh"
#include "kernels/sm90/ptx/wgmma.cuh"

namespace ringleader::kernels::index {
namespace {

namespace ptx = sm90::ptx;
using fused::CheckPointer;
using fused::CheckSize;

constexpr int kGateQueries = 64;  // of a CTA
constexpr int kGateBlocks = 64;   // multiplied at a time
constexpr int kGateThreads = 256;
constexpr int kGateWarps = kGateThreads / 32;

// A thread takes one dimension and adds tiles in order. Blocks beyond the last are zeros.
__global__ void SplitMeansKernel(const float* key_sums, const MeanKeys counted, GateParams p,
                                 __nv_bfloat16* means) {
  const int block = blockIdx.x, head = blockIdx.y, d = blockDim.x;
  float mean = 0.0f;
  if (block < p.blocks) {
    const int64_t begin = static_cast<int64_t>(block) * p.block_size,
                  end = min(begin + p.block_size, p.layout.tokens),
                  first = counted.First(begin, end), last = counted.End(begin, end);
    for (int64_t b = first / p.tile; b * p.tile < last; ++b) {
      mean += key_sums[(b * p.kv_heads + head) * d + threadIdx.x];
    }
    mean /= static_cast<float>(last - first);
  }
  const __nv_bfloat16 high = __float2bfloat16_rn(mean);
  const int64_t at = (static_cast<int64_t>(head) * p.padded_blocks + block) * d + threadIdx.x;
  means[at] = high;
  means[static_cast<int64_t>(p.kv_heads) * p.padded_blocks * d + at] =
      __float2bfloat16_rn(mean - __bfloat162float(high));
}

template <int kHeadDim>
struct GateShared {
  // Both lie in the 128-byte swizzle, as [head_dim / 64][64 rows][64].
  alignas(1024) unsigned char q[kGateQueries * kHeadDim * 2];
  alignas(1024) unsigned char means[2][kGateBlocks * kHeadDim * 2];
};

// The scores of a row, for their order: [kGateQueries, padded_blocks + 1] after GateShared; then
// the bits of each block's queries, [blocks, 2].
template <int kHeadDim>
__device__ float* ScoresBehind(GateShared<kHeadDim>& shared) {
  return reinterpret_cast<float*>(&shared + 1);
}
size_t GateSharedBytes(size_t tiles_bytes, int padded_blocks, int blocks) {
  return tiles_bytes + sizeof(float) * kGateQueries * (padded_blocks + 1) +
         sizeof(uint32_t) * 2 * blocks;
}

// 64 rows of kHeadDim, `stride` elements apart, to shared memory; rows from `rows` on are zeros.
template <int kHeadDim>
__device__ void LoadRows(unsigned char* to, const __nv_bfloat16* from, int64_t stride, int rows) {
  constexpr int kChunks = kHeadDim / 8;  // of 16 bytes in a row
  for (int i = threadIdx.x; i < 64 * kChunks; i += kGateThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    uint4 value = make_uint4(0, 0, 0, 0);
    if (row < rows) value = *reinterpret_cast<const uint4*>(from + row * stride + chunk * 8);
    *reinterpret_cast<uint4*>(to + chunk / 8 * (64 * 128) + row * 128 +
                              ((chunk % 8) ^ (row % 8)) * 16) = value;
  }
}

// One warpgroup: scores[64, 64 of padded_blocks from first_block on].
template <int kHeadDim>
__device__ void MultiplyGate(const GateShared<kHeadDim>& shared, float* scores, int row_stride,
                             int first_block) {
  float sums[32];
  ptx::WgmmaFence();
#pragma unroll
  for (int part = 0; part < 2; ++part) {
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      const int offset = step / 4 * (64 * 128) + step % 4 * 32;
      ptx::Wgmma<64>::SharedShared(sums, ptx::OperandDescriptor(shared.q + offset),
                                   ptx::OperandDescriptor(shared.means[part] + offset),
                                   part > 0 || step > 0);
    }
  }
  ptx::WgmmaCommit();
  ptx::WgmmaWait<0>();
  ptx::PinRegisters(sums);
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int column = first_block + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
    scores[(row + i / 2 % 2 * 8) * row_stride + column] = sums[i];
  }
}

// Keys in the order of floats; -0 counts as 0.
__device__ __forceinline__ uint32_t OrderedKey(float x) {
  const uint32_t bits = __float_as_uint(x == 0.0f ? 0.0f : x);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// A warp: calls take(block) for the `keep` best of blocks [first, own), ties to the lower block or,
// `late`, to the higher one. kSlots * 32 blocks hold all.
template <int kSlots, typename Take>
__device__ __forceinline__ void TakeBest(const float* scores, int first, int own, int keep,
                                         bool late, Take take) {
  const int lane = threadIdx.x % 32;
  // Places are blocks, in the order in which equal ones are taken.
  const auto block_of = [&](int place) { return late ? own - 1 - place : place; };
  uint32_t keys[kSlots];
#pragma unroll
  for (int j = 0; j < kSlots; ++j) {
    const int block = block_of(j * 32 + lane);
    keys[j] = block >= first && block < own ? max(OrderedKey(scores[block]), 1u) : 0;
  }
  for (int taken = 0; taken < keep; ++taken) {
    uint32_t best = 0;
#pragma unroll
    for (int j = 0; j < kSlots; ++j) best = max(best, keys[j]);
    best = __reduce_max_sync(0xffffffffu, best);
    uint32_t place = UINT_MAX;
#pragma unroll
    for (int j = kSlots - 1; j >= 0; --j) {
      if (keys[j] == best) place = j * 32 + lane;
    }
    place = __reduce_min_sync(0xffffffffu, place);
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      if (place == static_cast<uint32_t>(j * 32 + lane)) keys[j] = 0;
    }
    take(block_of(static_cast<int>(place)));
  }
}

template <typename T, typename Combine>
__device__ T OverWarp(T value, Combine combine) {
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    value = combine(value, __shfl_xor_sync(0xffffffffu, value, lanes));
  }
  return value;
}

// A warp: how many of blocks [first, own) a query of `head` at `position` keeps that would keep
// `keep`; as the CPU engine's.
template <int kSlots>
__device__ int MovedKeep(const float* scores, int first, int own, int keep, const GateParams& p,
                         int64_t position, int head) {
  keep = max(keep, 0);
  const int moved =
      min(max(MovedCount(keep + 1, *p.move.factor, MovePlace(position, head)) - 1, 0), own - first);
  if (moved >= keep) return moved;
  const int lane = threadIdx.x % 32;
  const auto add = [](auto a, auto b) { return a + b; };
  double most = -INFINITY, sum = 0.0;
  for (int i = first + lane; i < own; i += 32) most = fmax(most, static_cast<double>(scores[i]));
  most = OverWarp(most, [](double a, double b) { return fmax(a, b); });
  const auto weight_of = [&](int i) {
    return exp((static_cast<double>(scores[i]) - most) * static_cast<double>(p.scale));
  };
  for (int i = first + lane; i < own; i += 32) sum += weight_of(i);
  sum = OverWarp(sum, add);
  // What is not a number has no mass: the step's loss will say so.
  const auto mass_of = [&](int i) {
    const double share = weight_of(i) / sum;
    return share <= 1.0 ? static_cast<long long>(rint(ldexp(share, kMassBits))) : 0LL;
  };
  long long total = 0, kept = 0, mass = 0;
  for (int i = first + lane; i < own; i += 32) total += mass_of(i);
  total = OverWarp(total, add);
  const bool late = TiesGoLate(head);
  TakeBest<kSlots>(scores, first, own, keep, late, [&](int block) { kept += mass_of(block); });
  const long long held = HeldMass(kept, total, p.move.tolerance);
  int count = 0;
  TakeBest<kSlots>(scores, first, own, keep, late, [&](int block) {
    if (count >= moved && mass >= held) return;
    mass += mass_of(block);
    ++count;
  });
  return count;
}

// A CTA takes 64 queries of a head.
template <int kHeadDim, int kSlots, bool kMoved>
__global__ void __launch_bounds__(kGateThreads) QueryGateKernel(const GateParams p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  auto& shared = *reinterpret_cast<GateShared<kHeadDim>*>(smem);
  float* const scores = ScoresBehind(shared);
  const int row_stride = p.padded_blocks + 1;
  uint32_t* const bits = reinterpret_cast<uint32_t*>(scores + kGateQueries * row_stride);
  const int head = blockIdx.y, kv_head = head / (p.q.heads / p.kv_heads);
  const int64_t first_query = static_cast<int64_t>(blockIdx.x) * kGateQueries;
  const int rows =
      static_cast<int>(min(static_cast<int64_t>(kGateQueries), p.q.tokens - first_query));
  for (int i = threadIdx.x; i < 2 * p.blocks; i += kGateThreads) bits[i] = 0;
  LoadRows<kHeadDim>(shared.q, p.q.data + first_query * p.q.token_stride + head * p.q.head_stride,
                     p.q.token_stride, rows);
  const int last_own = static_cast<int>(p.layout.Position(first_query + rows - 1) / p.block_size);
  for (int block = 0; block < last_own; block += kGateBlocks) {
    for (int part = 0; part < 2; ++part) {
      const int64_t row =
          (static_cast<int64_t>(part) * p.kv_heads + kv_head) * p.padded_blocks + block;
      LoadRows<kHeadDim>(shared.means[part], p.means + row * kHeadDim, kHeadDim, kGateBlocks);
    }
    ptx::FenceAsyncShared();
    __syncthreads();
    if (threadIdx.x < ptx::kWarpgroupThreads) {
      MultiplyGate(shared, scores, row_stride, block);
    }
    __syncthreads();
  }
  __syncthreads();  // where there was nothing to multiply, bits are zero
  const int halves = HalvesOf(p.head_halves, head);
  for (int row = threadIdx.x / 32; row < rows; row += kGateWarps) {
    const int64_t query = first_query + row;
    const int own = static_cast<int>(p.layout.Position(query) / p.block_size);
    const int first = p.document_starts == nullptr ? 0 : p.document_starts[query] / p.block_size;
    const float* const of_row = scores + row * row_stride;
    int keep = p.Keep(first, own, halves);
    if constexpr (kMoved) {
      keep = MovedKeep<kSlots>(of_row, first, own, keep, p, p.layout.Position(query), head);
    }
    uint32_t* const of_word = bits + row / 32;
    const uint32_t bit = 1u << row % 32;
    TakeBest<kSlots>(of_row, first, own, keep, TiesGoLate(head), [&](int block) {
      if (threadIdx.x % 32 == 0) atomicOr(of_word + block * 2, bit);
    });
    if (threadIdx.x % 32 == 0) atomicOr(of_word + own * 2, bit);
  }
  __syncthreads();
  const int64_t words = QueryWords(p.q.tokens), first_word = first_query / 32;
  for (int i = threadIdx.x; i < 2 * p.blocks; i += kGateThreads) {
    if (first_word + i % 2 >= words) continue;
    p.queries[(static_cast<int64_t>(head) * p.blocks + i / 2) * words + first_word + i % 2] =
        bits[i];
  }
}

// A thread makes a word of 32 blocks of a tile of queries.
__global__ void TilesOfQueriesKernel(const uint32_t* queries, int64_t query_words, int blocks,
                                     int tile_words, int tiles, int64_t rows, uint32_t* chosen) {
  const int words = BlockWords(blocks);
  const int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= rows * words) return;
  const int64_t row = at / words, head = row / tiles, first = row % tiles * tile_words;
  uint32_t word = 0;
  for (int i = 0; i < 32; ++i) {
    const int block = static_cast<int>(at % words) * 32 + i;
    if (block >= blocks) break;
    const uint32_t* const of_block = queries + (head * blocks + block) * query_words;
    for (int64_t w = first; w < min(query_words, first + tile_words); ++w) {
      if (of_block[w] != 0) word |= 1u << i;
    }
  }
  chosen[at] = word;
}

int PaddedBlocks(const QueryGateStep& step) {
  const int64_t blocks = (step.query_layout.tokens + step.block_size - 1) / step.block_size;
  return static_cast<int>((blocks + kGateBlocks - 1) / kGateBlocks) * kGateBlocks;
}

template <int kHeadDim, int kSlots>
absl::Status Launch(const GateParams& params, cudaStream_t stream) {
  const auto kernel = params.move.factor == nullptr ? QueryGateKernel<kHeadDim, kSlots, false>
                                                    : QueryGateKernel<kHeadDim, kSlots, true>;
  const int bytes = static_cast<int>(
      GateSharedBytes(sizeof(GateShared<kHeadDim>), params.padded_blocks, params.blocks));
  RETURN_IF_CUDA_ERROR(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
      "ChooseByQuery");
  const auto parts = static_cast<unsigned>((params.q.tokens + kGateQueries - 1) / kGateQueries);
  kernel<<<dim3(parts, params.q.heads), kGateThreads, bytes, stream>>>(params);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "ChooseByQuery: gate");
  return absl::OkStatus();
}

// Whether FewBlocksKernel can take it.
bool FitsFewBlocks(const GateParams& params) {
  return params.blocks <= kFewBlocks && params.move.factor == nullptr &&
         params.MostKept() <= kMostListed;
}

template <int kHeadDim>
absl::Status LaunchFewBlocks(const GateParams& params, cudaStream_t stream) {
  constexpr char kName[] = "ChooseByQuery: few blocks";
  ASSIGN_OR_RETURN(const int processors, sm90::MultiprocessorCount());
  ASSIGN_OR_RETURN(const CUtensorMap query_map,
                   sm90::LoadMap(params.q, kHalfRows, "ChooseByQuery: q"));
  const auto kernel = params.MostKept() <= 8 ? FewBlocksKernel<kHeadDim, 8>
                                             : FewBlocksKernel<kHeadDim, kMostListed>;
  constexpr int kBytes = static_cast<int>(sizeof(FewShared<kHeadDim>));
  RETURN_IF_CUDA_ERROR(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), kName);
  const int ctas = std::max(1, processors / params.kv_heads);
  kernel<<<params.kv_heads * ctas, kFewThreads, kBytes, stream>>>(params, ctas, query_map);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), kName);
  return absl::OkStatus();
}

template <int kHeadDim>
absl::Status LaunchForBlocks(const GateParams& params, cudaStream_t stream) {
  if (params.blocks <= 128) return Launch<kHeadDim, 4>(params, stream);
  if (params.blocks <= 256) return Launch<kHeadDim, 8>(params, stream);
  return Launch<kHeadDim, kMaxGatedBlocks / 32>(params, stream);
}

absl::Status Check(const TokenMajor<const __nv_bfloat16>& q, int32_t kv_heads,
                   const QueryGateStep& step) {
  if (q.head_dim != 64 && q.head_dim != 128) {
    return absl::InvalidArgumentError(
        absl::StrFormat("ChooseByQuery: head_dim is %d; 64 and 128 are supported", q.head_dim));
  }
  if (step.tile != 64 && step.tile != 128) {
    return absl::InvalidArgumentError(
        absl::StrFormat("ChooseByQuery: tile is %d; 64 and 128 are supported", step.tile));
  }
  RETURN_IF_ERROR(
      CheckSize(step.block_size, "ChooseByQuery: block_size", step.tile, 1 << 24, step.tile));
  RETURN_IF_ERROR(CheckSize(kv_heads, "ChooseByQuery: kv_heads", 1, 65535));
  RETURN_IF_ERROR(CheckSize(q.heads, "ChooseByQuery: heads", kv_heads, 65535, kv_heads));
  RETURN_IF_ERROR(CheckSize(q.tokens, "ChooseByQuery: tokens of q (of the layout's rank)",
                            step.query_layout.local_tokens(), step.query_layout.local_tokens()));
  RETURN_IF_ERROR(CheckSize(q.token_stride, "ChooseByQuery: q.token_stride", 0, INT64_MAX, 8));
  RETURN_IF_ERROR(CheckSize(q.head_stride, "ChooseByQuery: q.head_stride", 0, INT64_MAX, 8));
  RETURN_IF_ERROR(CheckSize((step.query_layout.tokens + step.block_size - 1) / step.block_size,
                            "ChooseByQuery: blocks of the sequence", 1, kMaxGatedBlocks));
  RETURN_IF_ERROR(CheckPointer(q.data, "ChooseByQuery: q"));
  RETURN_IF_ERROR(CheckPointer(step.key_sums, "ChooseByQuery: key_sums"));
  RETURN_IF_ERROR(CheckPointer(step.queries, "ChooseByQuery: queries"));
  return CheckPointer(step.chosen, "ChooseByQuery: chosen");
}

}  // namespace

size_t QueryGateWorkspaceBytes(const TokenMajor<const __nv_bfloat16>& q, int32_t kv_heads,
                               const QueryGateStep& step) {
  return 2 * sizeof(__nv_bfloat16) * kv_heads * PaddedBlocks(step) * q.head_dim;
}

absl::Status ChooseByQuery(const TokenMajor<const __nv_bfloat16>& q, int32_t kv_heads,
                           const QueryGateStep& step, void* workspace, cudaStream_t stream) {
  RETURN_IF_ERROR(Check(q, kv_heads, step));
  RETURN_IF_ERROR(CheckPointer(workspace, "ChooseByQuery: workspace"));
  RETURN_IF_ERROR(sm90::CheckHopper());
  const auto tiles_of = [&](int64_t tokens) {
    return static_cast<int>((tokens + step.tile - 1) / step.tile);
  };
  const GateParams params = {
      .q = q,
      .means = static_cast<const __nv_bfloat16*>(workspace),
      .layout = step.query_layout,
      .document_starts = step.document_starts,
      .kv_heads = kv_heads,
      .tile = step.tile,
      .block_size = step.block_size,
      .blocks =
          static_cast<int>((step.query_layout.tokens + step.block_size - 1) / step.block_size),
      .padded_blocks = PaddedBlocks(step),
      .topk_blocks = step.topk_blocks,
      .density = step.density,
      .head_halves = step.head_halves,
      .scale = step.scale,
      .move = step.move,
      .queries = step.queries,
      .chosen = step.chosen};
  SplitMeansKernel<<<dim3(params.padded_blocks, kv_heads), q.head_dim, 0, stream>>>(
      step.key_sums, step.counted, params, static_cast<__nv_bfloat16*>(workspace));
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "ChooseByQuery: means");
  if (FitsFewBlocks(params)) {  // and says what tiles choose, too
    return q.head_dim == 64 ? LaunchFewBlocks<64>(params, stream)
                            : LaunchFewBlocks<128>(params, stream);
  }
  RETURN_IF_ERROR(q.head_dim == 64 ? LaunchForBlocks<64>(params, stream)
                                   : LaunchForBlocks<128>(params, stream));
  constexpr int kThreads = 128;
  const int tiles = tiles_of(q.tokens);
  const int64_t rows = int64_t{q.heads} * tiles, words = rows * BlockWords(params.blocks);
  TilesOfQueriesKernel<<<static_cast<unsigned>((words + kThreads - 1) / kThreads), kThreads, 0,
                         stream>>>(step.queries, QueryWords(q.tokens), params.blocks,
                                   step.tile / 32, tiles, rows, step.chosen);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "ChooseByQuery: tiles");
  return absl::OkStatus();
}

}  // namespace ringleader::kernels::index
