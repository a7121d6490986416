#include <climits>

#include "base/status_macros.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/index/gates/blocks.h"
#include "kernels/index/rows/tile_ranges.cuh"
#include "kernels/index/threshold.cuh"

namespace ringleader::kernels::index {
namespace {

// Lists in one direction: lines are query tiles (kByRow) or key tiles, entries the others.
template <bool kByRow>
struct Listing {
  const TileListsArgs args;
  int query_tiles, key_tiles, words;

  __device__ int32_t* offsets() const { return kByRow ? args.row_offsets : args.column_offsets; }
  __device__ int32_t* list() const { return kByRow ? args.columns : args.rows; }
  // The words of a query tile's blocks.
  __device__ const uint32_t* ChosenBy(int head, int a) const {
    return args.chosen + (static_cast<int64_t>(head) * query_tiles + a) * words;
  }
  // Where key tile b begins.
  __device__ int PositionOf(int b) const {
    return static_cast<int>(args.key_layout.Position(static_cast<int64_t>(b) * args.tile));
  }
};

// Whether there is room for entry `at`: what does not fit an int32 is past it, too.
__device__ __forceinline__ bool Fits(const TileListsArgs& args, int at) {
  return static_cast<uint32_t>(at) < static_cast<uint32_t>(args.capacity);
}

// Local key tiles [begin, end), where that is more than nothing.
struct TileRange {
  int begin = 0, end = 0;

  // Those of 32 tiles from `first`, a bit each.
  __device__ uint32_t Within(int first) const {
    const int low = max(begin - first, 0), high = min(end - first, 32);
    return low < high ? 0xffffffffu >> (32 - (high - low)) << low : 0;
  }
};

// The key tiles that query tile `a` sees.
__device__ __forceinline__ TileRange SeenBy(const TileListsArgs& args, int a) {
  const int64_t last = LastKeyOf(args.seen, args.query_layout, a, args.tile);
  return {TilesBefore(args.key_layout, args.tile,
                      args.seen.Begin(static_cast<int64_t>(a) * args.tile) - args.tile + 1),
          TilesBefore(args.key_layout, args.tile, last + 1)};
}

constexpr uint32_t kWarp = 0xffffffffu;

// Which of 32 key tiles the query tile of this lane lists, a bit each. `chosen`: its blocks;
// `seen`: those of the tiles that it sees; `block`: of the lane's tile of keys.
__device__ __forceinline__ uint32_t ListedOf(const uint32_t* chosen, uint32_t seen, int block) {
  if (__all_sync(kWarp, seen == 0)) return 0;
  const int lane = threadIdx.x % 32;
  const int before = __shfl_up_sync(kWarp, block, 1);
  uint32_t begins = __ballot_sync(kWarp, lane == 0 || block != before);  // runs of one block
  const int first = __shfl_sync(kWarp, block, 0), last = __shfl_sync(kWarp, block, 31);
  if (begins == kWarp && first % 32 == 0 && last - first == 31) return chosen[first / 32] & seen;
  uint32_t listed = 0, word = 0;
  for (int known = -1; begins != 0;) {
    const int from = __ffs(static_cast<int>(begins)) - 1;
    begins &= begins - 1;
    const int to = begins == 0 ? 32 : __ffs(static_cast<int>(begins)) - 1;
    const int of_run = __shfl_sync(kWarp, block, from);
    if (of_run / 32 != known) {
      known = of_run / 32;
      word = chosen[known];
    }
    if ((word >> of_run % 32 & 1) != 0) listed |= kWarp >> (32 - (to - from)) << from;
  }
  return listed & seen;
}

// Bit i of lane j becomes bit j of lane i.
__device__ __forceinline__ uint32_t Transposed(uint32_t bits) {
  const int lane = threadIdx.x % 32;
  constexpr uint32_t kLow[] = {0x55555555u, 0x33333333u, 0x0f0f0f0fu, 0x00ff00ffu, 0x0000ffffu};
#pragma unroll
  for (int level = 4; level >= 0; --level) {
    const int step = 1 << level;
    const uint32_t low = kLow[level], other = __shfl_xor_sync(kWarp, bits, step);
    bits = (lane & step) == 0 ? (bits & low) | (other << step & ~low)
                              : (bits & ~low) | (other >> step & low);
  }
  return bits;
}

constexpr int kListWarps = 8;
constexpr int kListThreads = 32 * kListWarps;

// A block takes 32 lines of a head, one a lane, and all entries, 32 a warp at a time: it counts
// them into offsets (kFill false), or writes them, ascending.
template <bool kByRow, bool kFill>
__global__ void __launch_bounds__(kListThreads) ListKernel(const Listing<kByRow> listing) {
  __shared__ int counts[kListWarps][32];
  const TileListsArgs& args = listing.args;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y;
  const int lines = kByRow ? listing.query_tiles : listing.key_tiles;
  const int entries = kByRow ? listing.key_tiles : listing.query_tiles;
  const int first_line = static_cast<int>(blockIdx.x) * 32;
  int32_t* const offset = listing.offsets() + int64_t{head} * (lines + 1) + first_line + lane;
  const bool is_line = first_line + lane < lines;
  int at = kFill && is_line ? *offset : 0;
  const uint32_t* chosen = nullptr;  // of the lane's query tile
  TileRange sees;
  const auto take_queries = [&](int first) {
    const int a = min(first + lane, listing.query_tiles - 1);
    chosen = listing.ChosenBy(head, a);
    sees = first + lane == a ? SeenBy(args, a) : TileRange();
  };
  const auto block_of = [&](int first) {
    return listing.PositionOf(min(first + lane, listing.key_tiles - 1)) / args.block_size;
  };
  int block = 0;  // of the lane's key tile
  if constexpr (kByRow) {
    take_queries(first_line);
  } else {
    block = block_of(first_line);
  }
  for (int turn = 0; turn < entries; turn += kListThreads) {
    const int first = turn + 32 * warp;
    uint32_t listed = 0;  // entries of the lane's line
    if (first < entries) {
      if constexpr (kByRow) {
        const uint32_t seen = sees.Within(first);
        if (__any_sync(kWarp, seen != 0)) listed = ListedOf(chosen, seen, block_of(first));
      } else {
        take_queries(first);
        listed = Transposed(ListedOf(chosen, sees.Within(first_line), block));
      }
    }
    if constexpr (!kFill) {
      at += __popc(listed);
      continue;
    }
    counts[warp][lane] = __popc(listed);
    __syncthreads();
    int mine = at;
#pragma unroll
    for (int other = 0; other < kListWarps; ++other) {
      const int count = counts[other][lane];
      mine += other < warp ? count : 0;
      at += count;
    }
    for (uint32_t some = __ballot_sync(kWarp, listed != 0); some != 0; some &= some - 1) {
      const int line = __ffs(static_cast<int>(some)) - 1;
      const uint32_t bits = __shfl_sync(kWarp, listed, line);
      const int to = __shfl_sync(kWarp, mine, line) + __popc(bits & ((1u << lane) - 1));
      if ((bits >> lane & 1) != 0 && Fits(args, to)) listing.list()[to] = first + lane;
    }
    __syncthreads();
  }
  if constexpr (!kFill) {
    counts[warp][lane] = at;
    __syncthreads();
    if (warp > 0 || !is_line) return;
    for (int other = 1; other < kListWarps; ++other) at += counts[other][lane];
    *offset = at;
  }
}

// Counts to offsets, in place, by one block for each direction. A head's last offset is the next
// one's first. A thread adds up neighbours.
__global__ void __launch_bounds__(kSelectThreads)
    OffsetsKernel(const TileListsArgs args, int query_tiles, int key_tiles) {
  __shared__ uint64_t slots[32];
  const int heads = args.heads, lines = blockIdx.x == 0 ? query_tiles : key_tiles;
  int32_t* const offsets = blockIdx.x == 0 ? args.row_offsets : args.column_offsets;
  const int64_t count = static_cast<int64_t>(heads) * (lines + 1);
  const int64_t share = (count + kSelectThreads - 1) / kSelectThreads;
  const int64_t first = min(count, threadIdx.x * share), end = min(count, first + share);
  const auto each = [&](auto visit) {
    auto line = static_cast<int>(first % (lines + 1));
#pragma unroll 4
    for (int64_t i = first; i < end; ++i) {
      visit(offsets[i], line == lines);
      line = line == lines ? 0 : line + 1;
    }
  };
  uint64_t own = 0;
  each([&](int32_t count, bool behind) { own += behind ? 0 : static_cast<uint32_t>(count); });
  uint64_t before = BlockScan(own, slots).inclusive - own;
  each([&](int32_t& count, bool behind) {
    const uint32_t value = behind ? 0 : static_cast<uint32_t>(count);
    count = static_cast<int32_t>(before);
    before += value;
  });
}

// Counts the entries of all lines, or writes them.
template <bool kFill>
absl::Status VisitLines(const TileListsArgs& args, int query_tiles, int key_tiles, int words,
                        cudaStream_t stream) {
  const auto grid = [&](int lines) { return dim3((lines + 31) / 32, args.heads); };
  ListKernel<true, kFill>
      <<<grid(query_tiles), kListThreads, 0, stream>>>({args, query_tiles, key_tiles, words});
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "BuildTileLists: rows");
  ListKernel<false, kFill>
      <<<grid(key_tiles), kListThreads, 0, stream>>>({args, query_tiles, key_tiles, words});
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "BuildTileLists: columns");
  return absl::OkStatus();
}

}  // namespace

absl::Status BuildTileLists(const TileListsArgs& args, cudaStream_t stream) {
  RETURN_IF_ERROR(fused::CheckTile(args.tile, "BuildTileLists: tile"));
  RETURN_IF_ERROR(fused::CheckSize(args.heads, "BuildTileLists: heads", 1, 65535));
  RETURN_IF_ERROR(fused::CheckSize(args.block_size, "BuildTileLists: block_size", args.tile,
                                   1 << 24, args.tile));
  RETURN_IF_ERROR(fused::CheckSize(args.capacity, "BuildTileLists: capacity", 1, INT32_MAX));
  RETURN_IF_ERROR(fused::CheckSize(args.query_layout.local_tokens(), "BuildTileLists: local tokens",
                                   1, int64_t{1} << 30));
  RETURN_IF_ERROR(fused::CheckSize(args.query_layout.tokens, "BuildTileLists: tokens", 1,
                                   INT32_MAX - args.tile));
  RETURN_IF_ERROR(fused::CheckPointer(args.chosen, "BuildTileLists: chosen"));
  RETURN_IF_ERROR(fused::CheckPointer(args.row_offsets, "BuildTileLists: row_offsets"));
  RETURN_IF_ERROR(fused::CheckPointer(args.columns, "BuildTileLists: columns"));
  RETURN_IF_ERROR(fused::CheckPointer(args.column_offsets, "BuildTileLists: column_offsets"));
  RETURN_IF_ERROR(fused::CheckPointer(args.rows, "BuildTileLists: rows"));
  const auto tiles = [&](int64_t tokens) {
    return static_cast<int>((tokens + args.tile - 1) / args.tile);
  };
  const int query_tiles = tiles(args.query_layout.local_tokens());
  const int key_tiles = tiles(args.key_layout.local_tokens());
  const int words = BlockWords(
      static_cast<int>((args.query_layout.tokens + args.block_size - 1) / args.block_size));
  RETURN_IF_ERROR(VisitLines<false>(args, query_tiles, key_tiles, words, stream));
  OffsetsKernel<<<2, kSelectThreads, 0, stream>>>(args, query_tiles, key_tiles);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "BuildTileLists: offsets");
  return VisitLines<true>(args, query_tiles, key_tiles, words, stream);
}

}  // namespace ringleader::kernels::index
