#include <algorithm>
#include <climits>

#include "base/status_macros.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/index/gates/blocks.h"
#include "kernels/index/move.h"
#include "kernels/index/threshold.cuh"
#include "ringleader/kernels/index.h"

namespace ringleader::kernels::index {
namespace {

using fused::CheckPointer;
using fused::CheckSize;
using fused::CheckTile;

constexpr int kGateThreads = 256;
constexpr int kGateWarps = kGateThreads / 32;

__global__ void TileSumsKernel(const TokenMajor<const __nv_bfloat16> x, const ShardLayout layout,
                               const MeanKeys counted, int tile, float* sums) {
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * tile;
  const int tokens = static_cast<int>(min(static_cast<int64_t>(tile), x.tokens - begin));
  const int64_t position = layout.Position(begin);
  const int first = static_cast<int>(counted.First(position, position + tokens) - position),
            last = static_cast<int>(counted.End(position, position + tokens) - position);
  const int head = blockIdx.y;
  const __nv_bfloat16* row = x.data + begin * x.token_stride + head * x.head_stride + threadIdx.x;
  float sum = 0.0f;
#pragma unroll 8
  for (int t = first; t < last; ++t) sum += __bfloat162float(row[t * x.token_stride]);
  sums[(static_cast<int64_t>(blockIdx.x) * x.heads + head) * x.head_dim + threadIdx.x] = sum;
}

__global__ void TileFirstsKernel(const TokenMajor<const __nv_bfloat16> x, int tile, float* firsts) {
  const __nv_bfloat16* row = x.data + static_cast<int64_t>(blockIdx.x) * tile * x.token_stride +
                             blockIdx.y * x.head_stride;
  firsts[(static_cast<int64_t>(blockIdx.x) * x.heads + blockIdx.y) * x.head_dim + threadIdx.x] =
      __bfloat162float(row[threadIdx.x]);
}

// Fills means[kv head, block, :]. A thread takes one dimension and adds tiles in order.
__global__ void BlockMeansKernel(const BlockGateArgs args, int blocks) {
  const int block = blockIdx.x, head = blockIdx.y;
  const int64_t begin = static_cast<int64_t>(block) * args.block_size,
                end = min(begin + args.block_size, args.query_layout.tokens),
                first = args.counted.First(begin, end), last = args.counted.End(begin, end);
  float mean = 0.0f;
  for (int64_t b = first / args.tile; b * args.tile < last; ++b) {
    mean += args.key_sums[(b * args.kv_heads + head) * args.head_dim + threadIdx.x];
  }
  mean /= static_cast<float>(last - first);
  args.means[(static_cast<int64_t>(head) * blocks + block) * args.head_dim + threadIdx.x] = mean;
}

// Keys in the order of floats; -0 counts as 0.
__device__ __forceinline__ uint32_t OrderedKey(float x) {
  const uint32_t bits = __float_as_uint(x == 0.0f ? 0.0f : x);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

struct GateShared {
  uint32_t bins[256];
  int digit, left, ties_before;
  int warp_ties[kGateWarps];
};

// Sets bits of the `keep` largest of keys[0, count), lower places first among equals or, `late`,
// higher ones, and of `own`. 8 bits of the keys at a time, from the top.
__device__ void KeepLargest(const uint32_t* keys, int count, int keep, int own, int words,
                            bool late, uint32_t* chosen, GateShared& shared) {
  uint32_t prefix = 0;
  int left = keep;
  for (int shift = 24; shift >= 0 && keep < count && keep > 0; shift -= 8) {
    for (int b = threadIdx.x; b < 256; b += kGateThreads) shared.bins[b] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += kGateThreads) {
      if (shift == 24 || keys[i] >> (shift + 8) == prefix) {
        atomicAdd(&shared.bins[keys[i] >> shift & 255], 1u);
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int digit = 255, above = 0;
      while (above + static_cast<int>(shared.bins[digit]) < left) above += shared.bins[digit--];
      shared.digit = digit;
      shared.left = left - above;
    }
    __syncthreads();
    prefix = prefix << 8 | shared.digit;
    left = shared.left;
  }
  // Now `left` of the keys equal to `prefix` belong to it, unless all do or none.
  const bool is_cut = keep < count && keep > 0;
  const int all_ties = is_cut ? static_cast<int>(shared.bins[shared.digit]) : 0;
  if (threadIdx.x == 0) shared.ties_before = 0;
  __syncthreads();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int first = 0; first < words * 32; first += kGateThreads) {
    const int i = first + static_cast<int>(threadIdx.x);
    const bool inside = i < count && keep > 0;
    const bool equal = inside && keep < count && keys[i] == prefix;
    const uint32_t equal_lanes = __ballot_sync(0xffffffffu, equal);
    if (lane == 0) shared.warp_ties[warp] = __popc(equal_lanes);
    __syncthreads();
    int ties = shared.ties_before + __popc(equal_lanes & ((1u << lane) - 1));
    int all = 0;
    for (int w = 0; w < kGateWarps; ++w) {
      if (w < warp) ties += shared.warp_ties[w];
      all += shared.warp_ties[w];
    }
    const bool taken =
        i == own || (inside && (keep >= count || keys[i] > prefix ||
                                (equal && (late ? all_ties - 1 - ties : ties) < left)));
    const uint32_t word = __ballot_sync(0xffffffffu, taken);
    if (lane == 0 && i < words * 32) chosen[i / 32] = word;
    __syncthreads();
    if (threadIdx.x == 0) shared.ties_before += all;
    __syncthreads();
  }
}

extern __shared__ uint32_t row_keys[];

// The keys of a row of scores: of the blocks before a tile's own and, where it sees what comes
// after that, of all up to the last one.
__device__ __forceinline__ int RowKeys(const SeenBlocks& seen) {
  return seen.last > seen.own ? seen.last + 1 : seen.own;
}
// Whether one of them is a candidate.
__device__ __forceinline__ bool IsCandidate(const SeenBlocks& seen, int block) {
  return block >= seen.first && block != seen.own;
}

__device__ __forceinline__ float ScoreOf(uint32_t key) {
  return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

__device__ double BlockMax(double value, double* slots) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value = fmax(value, __shfl_xor_sync(0xffffffffu, value, distance));
  }
  if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = value;
  __syncthreads();
  for (int w = 0; w < kGateWarps; ++w) value = fmax(value, slots[w]);
  __syncthreads();
  return value;
}

// Adds in an order that depends on the number of threads alone.
__device__ double BlockSum(double value, double* slots) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, distance);
  }
  if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = value;
  __syncthreads();
  value = 0.0;
  for (int w = 0; w < kGateWarps; ++w) value += slots[w];
  __syncthreads();
  return value;
}

struct MoveShared {
  SmallSelectShared select;
  double slots[kGateWarps];
};

// How many of a row's candidates `move` would have it keep that would keep `keep`, besides its own
// block, whatever that loses.
__device__ __forceinline__ int MovedKeep(const SeenBlocks& seen, int keep, const ChoiceMove& move,
                                         uint32_t place) {
  return min(max(MovedCount(keep + 1, *move.factor, place) - 1, 0), seen.count() - 1);
}

// How many of them it then keeps, at least `moved`, so that of `mass_of` the candidates, and of
// `own_mass` besides, no more is lost than the tolerance: as the CPU engine's. All threads call.
template <typename MassOf>
__device__ int HeldKeep(const SeenBlocks& seen, int keep, int moved, int64_t own_mass,
                        float tolerance, const MassOf& mass_of, MoveShared& shared) {
  const int first = seen.first, count = RowKeys(seen);
  // A threshold that all elements together do not reach returns without a last barrier.
  const Threshold all =
      FindThreshold<1, kGateThreads>(shared.select, first, count, mass_of, INT_MAX, INT_MAX, One());
  __syncthreads();
  const Threshold kept =
      FindThreshold<1, kGateThreads>(shared.select, first, count, mass_of, keep, INT_MAX, One());
  __syncthreads();
  const Threshold held =
      FindThreshold<1, kGateThreads>(shared.select, first, count, mass_of, keep,
                                     HeldMass(kept.mass, all.mass + own_mass, tolerance), One());
  return max(moved, static_cast<int>(held.count));
}

// The same of scores, whose softmax is the candidates' mass.
__device__ int HeldKeepOfScores(const uint32_t* keys, const SeenBlocks& seen, int keep, int moved,
                                double scale, float tolerance, MoveShared& shared) {
  const int first = seen.first, count = RowKeys(seen);
  double most = -INFINITY, sum = 0.0;
  for (int i = first + static_cast<int>(threadIdx.x); i < count; i += kGateThreads) {
    if (i != seen.own) most = fmax(most, static_cast<double>(ScoreOf(keys[i])));
  }
  most = BlockMax(most, shared.slots);
  const auto weight_of = [&](int i) {
    return i == seen.own ? 0.0 : exp((static_cast<double>(ScoreOf(keys[i])) - most) * scale);
  };
  for (int i = first + static_cast<int>(threadIdx.x); i < count; i += kGateThreads) {
    sum += weight_of(i);
  }
  sum = BlockSum(sum, shared.slots);
  // What is not a number has no mass: the step's loss will say so.
  const auto mass_of = [&](int i) {
    const double share = weight_of(i) / sum;
    return share <= 1.0 ? static_cast<int>(rint(ldexp(share, kMassBits))) : 0;
  };
  return HeldKeep(seen, keep, moved, /*own_mass=*/0, tolerance, mass_of, shared);
}

template <bool kMoves>
__global__ void __launch_bounds__(kGateThreads)
    MeanGateKernel(const BlockGateArgs args, int query_tiles, int blocks) {
  __shared__ GateShared shared;
  __shared__ float query[256];
  const int a = blockIdx.x, head = blockIdx.y, d = args.head_dim;
  const SeenBlocks seen = SeenBlocksOf(args.seen, args.query_layout, a, args.tile, args.block_size);
  const int count = RowKeys(seen);
  if (static_cast<int>(threadIdx.x) < d) {
    query[threadIdx.x] =
        args.query_sums[(static_cast<int64_t>(a) * args.heads + head) * d + threadIdx.x];
  }
  __syncthreads();
  const float* means =
      args.means + static_cast<int64_t>(head / (args.heads / args.kv_heads)) * blocks * d;
  for (int block = threadIdx.x; block < count; block += kGateThreads) {
    if (!IsCandidate(seen, block)) {
      row_keys[block] = 0;  // below every score's
      continue;
    }
    // Rounded after each operation, as the CPU engine does, so that ties fall the same way.
    float score = 0.0f;
    for (int x = 0; x < d; x += 4) {
      const float4 mean =
          *reinterpret_cast<const float4*>(means + static_cast<int64_t>(block) * d + x);
      score = __fadd_rn(score, __fmul_rn(query[x], mean.x));
      score = __fadd_rn(score, __fmul_rn(query[x + 1], mean.y));
      score = __fadd_rn(score, __fmul_rn(query[x + 2], mean.z));
      score = __fadd_rn(score, __fmul_rn(query[x + 3], mean.w));
    }
    row_keys[block] = OrderedKey(score);
  }
  __syncthreads();
  const int words = (blocks + 31) / 32;
  int keep = min(OfHalves(args.topk_blocks, HalvesOf(args.head_halves, head)), seen.count() - 1);
  if constexpr (kMoves) {
    __shared__ MoveShared move_shared;
    const int64_t token = static_cast<int64_t>(a) * args.tile;
    const int64_t summed = min(args.choosing, args.query_layout.local_tokens()) - token;
    const int queries =
        static_cast<int>(max(int64_t{1}, min(static_cast<int64_t>(args.queries), summed)));
    const int moved = MovedKeep(seen, keep, args.move,
                                MovePlace(args.query_layout.Position(token) / args.tile, head));
    keep = moved >= keep
               ? moved
               : HeldKeepOfScores(row_keys, seen, keep, moved,
                                  static_cast<double>(args.scale) / static_cast<double>(queries),
                                  args.move.tolerance, move_shared);
  }
  KeepLargest(row_keys, count, keep, seen.own, words, TiesGoLate(head),
              args.chosen + (static_cast<int64_t>(head) * query_tiles + a) * words, shared);
}

template <bool kMoves>
__global__ void __launch_bounds__(kGateThreads)
    MassGateKernel(const MassGateStep args, int query_tiles, int blocks) {
  __shared__ GateShared shared;
  __shared__ uint64_t slots[32];
  const int a = blockIdx.x, head = blockIdx.y;
  const SeenBlocks seen = SeenBlocksOf(args.seen, args.query_layout, a, args.tile, args.tile);
  const int count = RowKeys(seen);
  const int64_t row = static_cast<int64_t>(head) * query_tiles + a;
  const int32_t* mass = args.mass + row * blocks;
  for (int b = threadIdx.x; b < count; b += kGateThreads) {
    row_keys[b] = IsCandidate(seen, b) ? static_cast<uint32_t>(mass[b]) + 1 : 0;
  }
  __syncthreads();
  int keep = BlocksOfShare(args.density[head], seen.count() - 1);
  if constexpr (kMoves) {
    __shared__ MoveShared move_shared;
    const int64_t token = static_cast<int64_t>(a) * args.tile;
    const int moved = MovedKeep(seen, keep, args.move,
                                MovePlace(args.query_layout.Position(token) / args.tile, head));
    const auto mass_of = [&](int i) { return i == seen.own ? 0 : mass[i]; };
    keep = moved >= keep ? moved
                         : HeldKeep(seen, keep, moved, mass[seen.own], args.move.tolerance, mass_of,
                                    move_shared);
  }
  const int words = (blocks + 31) / 32;
  uint32_t* chosen = args.chosen + row * words;
  KeepLargest(row_keys, count, keep, seen.own, words, TiesGoLate(head), chosen, shared);
  if (args.query_layout.Position(static_cast<int64_t>(a) * args.tile) >= args.content) return;
  __syncthreads();
  uint64_t kept = 0, total = 0;
  for (int b = threadIdx.x; b <= seen.last; b += kGateThreads) {
    const uint64_t m = static_cast<uint64_t>(mass[b]);
    total += m;
    if (chosen[b / 32] >> b % 32 & 1) kept += m;
  }
  kept = BlockScan(kept, slots).total;
  total = BlockScan(total, slots).total;
  if (threadIdx.x == 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(args.kept) + head, kept);
    atomicAdd(reinterpret_cast<unsigned long long*>(args.total) + head, total);
  }
}

absl::Status SumTiles(const TokenMajor<const __nv_bfloat16>& x, const ShardLayout& layout,
                      const MeanKeys& counted, int32_t tile, float* sums, cudaStream_t stream) {
  RETURN_IF_ERROR(CheckSize(x.head_dim, "TileSums: head_dim", 1, 256));
  RETURN_IF_ERROR(CheckSize(x.heads, "TileSums: heads", 1, 65535));
  RETURN_IF_ERROR(CheckTile(tile, "TileSums: tile"));
  RETURN_IF_ERROR(CheckPointer(x.data, "TileSums: x"));
  RETURN_IF_ERROR(CheckPointer(sums, "TileSums: sums"));
  const unsigned tiles = static_cast<unsigned>((x.tokens + tile - 1) / tile);
  if (tiles == 0) return absl::OkStatus();
  TileSumsKernel<<<dim3(tiles, x.heads), x.head_dim, 0, stream>>>(x, layout, counted, tile, sums);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "TileSums");
  return absl::OkStatus();
}

// A row of keys in 48 KiB of shared memory.
constexpr int kMaxBlocks = kMaxMassBlocks;

}  // namespace

absl::Status TileKeySums(const TokenMajor<const __nv_bfloat16>& k, const TileKeySumsStep& step,
                         cudaStream_t stream) {
  return SumTiles(k, step.layout, step.counted, step.tile, step.sums, stream);
}

absl::Status TileSums(const TokenMajor<const __nv_bfloat16>& x, int32_t tile, float* sums,
                      cudaStream_t stream) {
  return SumTiles(x, /*layout=*/{}, /*counted=*/{}, tile, sums, stream);
}

absl::Status TileFirsts(const TokenMajor<const __nv_bfloat16>& x, int32_t tile, float* firsts,
                        cudaStream_t stream) {
  RETURN_IF_ERROR(CheckSize(x.head_dim, "TileFirsts: head_dim", 1, 256));
  RETURN_IF_ERROR(CheckSize(x.heads, "TileFirsts: heads", 1, 65535));
  RETURN_IF_ERROR(CheckTile(tile, "TileFirsts: tile"));
  RETURN_IF_ERROR(CheckPointer(x.data, "TileFirsts: x"));
  RETURN_IF_ERROR(CheckPointer(firsts, "TileFirsts: firsts"));
  const unsigned tiles = static_cast<unsigned>((x.tokens + tile - 1) / tile);
  if (tiles == 0) return absl::OkStatus();
  TileFirstsKernel<<<dim3(tiles, x.heads), x.head_dim, 0, stream>>>(x, tile, firsts);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "TileFirsts");
  return absl::OkStatus();
}

absl::Status SelectBlocksByMean(const BlockGateArgs& args, cudaStream_t stream) {
  RETURN_IF_ERROR(CheckTile(args.tile, "SelectBlocksByMean: tile"));
  RETURN_IF_ERROR(
      CheckSize(args.block_size, "SelectBlocksByMean: block_size", args.tile, 1 << 24, args.tile));
  RETURN_IF_ERROR(CheckSize(args.head_dim, "SelectBlocksByMean: head_dim", 4, 256, 4));
  RETURN_IF_ERROR(CheckSize(args.kv_heads, "SelectBlocksByMean: kv_heads", 1, 65535));
  RETURN_IF_ERROR(
      CheckSize(args.heads, "SelectBlocksByMean: heads", args.kv_heads, 65535, args.kv_heads));
  // Half more is a number, too.
  RETURN_IF_ERROR(
      CheckSize(args.topk_blocks, "SelectBlocksByMean: topk_blocks", 0, INT32_MAX / 3 * 2));
  const int64_t tokens = args.query_layout.tokens;
  const int64_t blocks = (tokens + args.block_size - 1) / args.block_size;
  RETURN_IF_ERROR(CheckSize(blocks, "SelectBlocksByMean: blocks of the sequence", 1, kMaxBlocks));
  RETURN_IF_ERROR(CheckPointer(args.query_sums, "SelectBlocksByMean: query_sums"));
  RETURN_IF_ERROR(CheckPointer(args.key_sums, "SelectBlocksByMean: key_sums"));
  RETURN_IF_ERROR(CheckPointer(args.means, "SelectBlocksByMean: means"));
  RETURN_IF_ERROR(CheckPointer(args.chosen, "SelectBlocksByMean: chosen"));
  const int query_tiles =
      static_cast<int>((args.query_layout.local_tokens() + args.tile - 1) / args.tile);
  BlockMeansKernel<<<dim3(static_cast<unsigned>(blocks), args.kv_heads), args.head_dim, 0,
                     stream>>>(args, static_cast<int>(blocks));
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "SelectBlocksByMean: means");
  const auto kernel = args.move.factor == nullptr ? MeanGateKernel<false> : MeanGateKernel<true>;
  RETURN_IF_CUDA_ERROR(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            sizeof(uint32_t) * kMaxBlocks),
                       "SelectBlocksByMean: shared memory");
  kernel<<<dim3(query_tiles, args.heads), kGateThreads, sizeof(uint32_t) * blocks, stream>>>(
      args, query_tiles, static_cast<int>(blocks));
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "SelectBlocksByMean");
  return absl::OkStatus();
}

absl::Status SelectBlocksByMass(const MassGateStep& args, cudaStream_t stream) {
  RETURN_IF_ERROR(CheckTile(args.tile, "SelectBlocksByMass: tile"));
  RETURN_IF_ERROR(CheckSize(args.heads, "SelectBlocksByMass: heads", 1, 65535));
  const int64_t blocks = (args.query_layout.tokens + args.tile - 1) / args.tile;
  RETURN_IF_ERROR(CheckSize(blocks, "SelectBlocksByMass: blocks of the sequence", 1, kMaxBlocks));
  RETURN_IF_ERROR(CheckPointer(args.mass, "SelectBlocksByMass: mass"));
  RETURN_IF_ERROR(CheckPointer(args.density, "SelectBlocksByMass: density"));
  RETURN_IF_ERROR(CheckPointer(args.chosen, "SelectBlocksByMass: chosen"));
  RETURN_IF_ERROR(CheckPointer(args.kept, "SelectBlocksByMass: kept"));
  RETURN_IF_ERROR(CheckPointer(args.total, "SelectBlocksByMass: total"));
  const int query_tiles =
      static_cast<int>((args.query_layout.local_tokens() + args.tile - 1) / args.tile);
  RETURN_IF_CUDA_ERROR(cudaMemsetAsync(args.kept, 0, sizeof(int64_t) * args.heads, stream),
                       "SelectBlocksByMass");
  RETURN_IF_CUDA_ERROR(cudaMemsetAsync(args.total, 0, sizeof(int64_t) * args.heads, stream),
                       "SelectBlocksByMass");
  const auto kernel = args.move.factor == nullptr ? MassGateKernel<false> : MassGateKernel<true>;
  // With what a block has anyway, a longest row is more than it may have unasked.
  RETURN_IF_CUDA_ERROR(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            sizeof(uint32_t) * kMaxBlocks),
                       "SelectBlocksByMass: shared memory");
  kernel<<<dim3(query_tiles, args.heads), kGateThreads, sizeof(uint32_t) * blocks, stream>>>(
      args, query_tiles, static_cast<int>(blocks));
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "SelectBlocksByMass");
  return absl::OkStatus();
}

}  // namespace ringleader::kernels::index
