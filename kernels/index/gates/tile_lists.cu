#include <climits>

#include "base/status_macros.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/index/gates/blocks.h"
#include "kernels/index/threshold.cuh"

namespace ringleader::kernels::index {
namespace {

// Lists in one direction: lines are query tiles (kByRow) or key tiles, entries the others.
template <bool kByRow>
struct Listing {
  const TileListsArgs args;
  int query_tiles, key_tiles, blocks, words;

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

// The positions at which key tiles begin that a query tile sees.
struct SeenTiles {
  int first, last;

  __device__ bool operator()(int key) const { return key >= first && key <= last; }
};
__device__ __forceinline__ SeenTiles SeenTilesOf(const TileListsArgs& args, int a) {
  return {static_cast<int>(args.seen.Begin(static_cast<int64_t>(a) * args.tile)) - args.tile + 1,
          static_cast<int>(LastKeyOf(args.seen, args.query_layout, a, args.tile))};
}

// Whether there is room for entry `at`: what does not fit an int32 is past it, too.
__device__ __forceinline__ bool Fits(const TileListsArgs& args, int at) {
  return static_cast<uint32_t>(at) < static_cast<uint32_t>(args.capacity);
}

// How many of this rank's tokens lie before `position`.
__device__ __forceinline__ uint32_t TokensBefore(const ShardLayout& layout, uint32_t position) {
  if (layout.ranks == 1) return position;
  const auto rank = static_cast<uint32_t>(layout.rank), ranks = static_cast<uint32_t>(layout.ranks);
  const auto within = [position](uint32_t begin, uint32_t tokens) {
    return position <= begin ? 0 : min(position - begin, tokens);
  };
  switch (layout.kind) {
    case LayoutKind::kContiguous: {
      const auto held = static_cast<uint32_t>(layout.local_tokens());
      return within(rank * held, held);
    }
    case LayoutKind::kZigzag: {
      const uint32_t chunk = static_cast<uint32_t>(layout.tokens) / (2 * ranks);
      return within(rank * chunk, chunk) + within((2 * ranks - 1 - rank) * chunk, chunk);
    }
    case LayoutKind::kStriped: {
      const auto stripe = static_cast<uint32_t>(layout.stripe);
      const uint32_t round = position / (stripe * ranks);
      return round * stripe + within((round * ranks + rank) * stripe, stripe);
    }
  }
  return 0;
}

// How many of this rank's key tiles begin before `position`.
__device__ __forceinline__ int TilesBefore(const TileListsArgs& args, int64_t position) {
  const int64_t inside = max(int64_t{0}, min(position, args.key_layout.tokens));
  const auto tile = static_cast<uint32_t>(args.tile);
  return static_cast<int>(
      (TokensBefore(args.key_layout, static_cast<uint32_t>(inside)) + tile - 1) / tile);
}

constexpr int kListThreads = 256;
constexpr int kListWarps = kListThreads / 32;
constexpr int kRowsOfWarp = 4;
constexpr int kRowsOfBlock = kListWarps * kRowsOfWarp;
constexpr int kBlocksAtOnce = 2048;  // whose tiles are looked up in shared memory

// A warp takes query tiles of a head, a lane of it a block of keys: it counts the block's tiles
// into offsets (kFill false), or writes the entries, ascending.
template <bool kFill>
__global__ void __launch_bounds__(kListThreads) RowsKernel(const Listing<true> listing) {
  __shared__ int begins[kBlocksAtOnce + 1];  // the first tile of each block
  const TileListsArgs& args = listing.args;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y;
  const int first_row = static_cast<int>(blockIdx.x) * kRowsOfBlock + warp * kRowsOfWarp;
  const int rows = max(0, min(kRowsOfWarp, listing.query_tiles - first_row));
  int32_t* const offsets =
      listing.offsets() + int64_t{head} * (listing.query_tiles + 1) + first_row;
  int at[kRowsOfWarp], sees_from[kRowsOfWarp], sees_to[kRowsOfWarp];  // tiles
#pragma unroll
  for (int row = 0; row < kRowsOfWarp; ++row) {
    at[row] = sees_from[row] = sees_to[row] = 0;
    if (row >= rows) continue;
    const SeenTiles sees = SeenTilesOf(args, first_row + row);
    sees_from[row] = TilesBefore(args, sees.first);
    sees_to[row] = TilesBefore(args, int64_t{sees.last} + 1);
    if (kFill) at[row] = offsets[row];
  }
  for (int from = 0; from < listing.blocks; from += kBlocksAtOnce) {
    const int blocks = min(kBlocksAtOnce, listing.blocks - from);
    __syncthreads();
    for (int i = threadIdx.x; i <= blocks; i += kListThreads) {
      begins[i] = TilesBefore(args, int64_t{from + i} * args.block_size);
    }
    __syncthreads();
#pragma unroll
    for (int row = 0; row < kRowsOfWarp; ++row) {
      if (row >= rows) break;
      const uint32_t* const chosen = listing.ChosenBy(head, first_row + row) + from / 32;
      for (int b = 0; b < blocks && begins[b] < sees_to[row]; b += 32) {
        if (begins[min(b + 32, blocks)] <= sees_from[row]) continue;
        int begin = 0, count = 0;
        if (b + lane < blocks && (chosen[b / 32] >> lane & 1) != 0) {
          begin = max(begins[b + lane], sees_from[row]);
          count = max(0, min(begins[b + lane + 1], sees_to[row]) - begin);
        }
        if constexpr (!kFill) {
          at[row] += count;
        } else {
          int behind = count;  // entries up to this lane's last
#pragma unroll
          for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(0xffffffffu, behind, step);
            behind += lane >= step ? other : 0;
          }
          const int mine = at[row] + behind - count;
          uint32_t long_ones = __ballot_sync(0xffffffffu, count > 2);
          if (count <= 2) {
            for (int i = 0; i < count; ++i) {
              if (Fits(args, mine + i)) listing.list()[mine + i] = begin + i;
            }
          }
          for (; long_ones != 0; long_ones &= long_ones - 1) {
            const int source = __ffs(static_cast<int>(long_ones)) - 1;
            const int entries = __shfl_sync(0xffffffffu, count, source);
            const int to = __shfl_sync(0xffffffffu, mine, source);
            const int tile = __shfl_sync(0xffffffffu, begin, source);
            for (int i = lane; i < entries; i += 32) {
              if (Fits(args, to + i)) listing.list()[to + i] = tile + i;
            }
          }
          at[row] += __shfl_sync(0xffffffffu, behind, 31);
        }
      }
    }
  }
  if constexpr (!kFill) {
#pragma unroll
    for (int row = 0; row < kRowsOfWarp; ++row) {
      const int count =
          static_cast<int>(__reduce_add_sync(0xffffffffu, static_cast<unsigned>(at[row])));
      if (row < rows && lane == 0) offsets[row] = count;
    }
  }
}

constexpr int kColumnsOfBlock = 8;

// A block takes key tiles of a head, each of its warps a share of the query tiles, a lane one of
// them at a time.
template <bool kFill>
__global__ void __launch_bounds__(kListThreads) ColumnsKernel(const Listing<false> listing) {
  __shared__ int counts[kListWarps][kColumnsOfBlock];
  const TileListsArgs& args = listing.args;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y;
  const int first_column = static_cast<int>(blockIdx.x) * kColumnsOfBlock;
  const int share = (listing.query_tiles + kListWarps - 1) / kListWarps;
  const int first = min(listing.query_tiles, warp * share),
            end = min(listing.query_tiles, first + share);
  int keys[kColumnsOfBlock], blocks[kColumnsOfBlock], at[kColumnsOfBlock];
#pragma unroll
  for (int i = 0; i < kColumnsOfBlock; ++i) {
    const int b = first_column + i;
    keys[i] = b < listing.key_tiles ? listing.PositionOf(b) : INT_MAX;
    blocks[i] = b < listing.key_tiles ? keys[i] / args.block_size : 0;
    at[i] = 0;
  }
  // Calls visit(i, a, lanes) for each tile of keys: whether query tile a lists it, by lane.
  const auto visit_listed = [&](auto visit) {
    for (int from = first; from < end; from += 32) {
      const int a = from + lane;
      SeenTiles sees = {INT_MAX, -1};
      if (a < end) sees = SeenTilesOf(args, a);
      if (__all_sync(0xffffffffu, sees.last < keys[0])) continue;
      const uint32_t* const chosen = listing.ChosenBy(head, min(a, end - 1));
      uint32_t word = 0;
#pragma unroll
      for (int i = 0; i < kColumnsOfBlock; ++i) {
        if (i == 0 || blocks[i] / 32 != blocks[i - 1] / 32) word = chosen[blocks[i] / 32];
        const bool listed = sees(keys[i]) && (word >> blocks[i] % 32 & 1) != 0;
        visit(i, a, listed, __ballot_sync(0xffffffffu, listed));
      }
    }
  };
  visit_listed([&](int i, int, bool, uint32_t lanes) { at[i] += __popc(lanes); });
#pragma unroll
  for (int i = 0; i < kColumnsOfBlock; ++i) {
    if (lane == 0) counts[warp][i] = at[i];
  }
  __syncthreads();
  int32_t* const offsets =
      listing.offsets() + int64_t{head} * (listing.key_tiles + 1) + first_column;
  const int columns = min(kColumnsOfBlock, listing.key_tiles - first_column);
  if constexpr (!kFill) {
    if (threadIdx.x >= columns) return;
    int count = 0;
    for (int other = 0; other < kListWarps; ++other) count += counts[other][threadIdx.x];
    offsets[threadIdx.x] = count;
  } else {
#pragma unroll
    for (int i = 0; i < kColumnsOfBlock; ++i) {
      at[i] = i < columns ? offsets[i] : 0;
      for (int other = 0; other < warp; ++other) at[i] += counts[other][i];
    }
    visit_listed([&](int i, int a, bool listed, uint32_t lanes) {
      const int mine = at[i] + __popc(lanes & ((1u << lane) - 1));
      if (listed && Fits(args, mine)) listing.list()[mine] = a;
      at[i] += __popc(lanes);
    });
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
absl::Status VisitLines(const TileListsArgs& args, int query_tiles, int key_tiles, int blocks,
                        cudaStream_t stream) {
  const auto grid = [&](int lines, int of_block) {
    return dim3((lines + of_block - 1) / of_block, args.heads);
  };
  const int words = BlockWords(blocks);
  RowsKernel<kFill><<<grid(query_tiles, kRowsOfBlock), kListThreads, 0, stream>>>(
      {args, query_tiles, key_tiles, blocks, words});
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "BuildTileLists: rows");
  ColumnsKernel<kFill><<<grid(key_tiles, kColumnsOfBlock), kListThreads, 0, stream>>>(
      {args, query_tiles, key_tiles, blocks, words});
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
  const int blocks =
      static_cast<int>((args.query_layout.tokens + args.block_size - 1) / args.block_size);
  RETURN_IF_ERROR(VisitLines<false>(args, query_tiles, key_tiles, blocks, stream));
  OffsetsKernel<<<2, kSelectThreads, 0, stream>>>(args, query_tiles, key_tiles);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "BuildTileLists: offsets");
  return VisitLines<true>(args, query_tiles, key_tiles, blocks, stream);
}

}  // namespace ringleader::kernels::index
