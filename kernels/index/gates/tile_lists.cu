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

__device__ __forceinline__ bool IsChosen(const uint32_t* chosen, int block) {
  return (chosen[block / 32] >> block % 32 & 1) != 0;
}

// The positions at which key tiles begin that a query tile sees.
struct SeenTiles {
  int first, last;

  __device__ bool operator()(int key) const { return key >= first && key <= last; }
};
__device__ __forceinline__ SeenTiles SeenTilesOf(const TileListsArgs& args, int a) {
  return {static_cast<int>(args.seen.Begin(static_cast<int64_t>(a) * args.tile)) - args.tile + 1,
          static_cast<int>(LastKeyOf(args.seen, args.query_layout, a, args.tile))};
}

constexpr int kListThreads = 256;
constexpr int kListWarps = kListThreads / 32;

// A warp takes a query tile: it counts into offsets (kFill false), or writes the entries,
// ascending.
template <bool kFill>
__global__ void __launch_bounds__(kListThreads) RowsKernel(const Listing<true> listing) {
  const int warp = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32);
  const int lane = threadIdx.x % 32;
  const int head = warp / listing.query_tiles, a = warp % listing.query_tiles;
  if (head >= listing.args.heads) return;
  int32_t* const offset = listing.offsets() + int64_t{head} * (listing.query_tiles + 1) + a;
  const uint32_t* const chosen = listing.ChosenBy(head, a);
  const SeenTiles sees = SeenTilesOf(listing.args, a);
  int64_t at = kFill ? *offset : 0;
#pragma unroll 2
  for (int first = 0; first < listing.key_tiles; first += 32) {
    const int b = first + lane, key = b < listing.key_tiles ? listing.PositionOf(b) : INT_MAX;
    if (__all_sync(0xffffffffu, key > sees.last)) break;  // as all that follow
    const bool listed = sees(key) && IsChosen(chosen, key / listing.args.block_size);
    const uint32_t lanes = __ballot_sync(0xffffffffu, listed);
    const int64_t mine = at + __popc(lanes & ((1u << lane) - 1));
    if (kFill && listed && mine < listing.args.capacity) listing.list()[mine] = b;
    at += __popc(lanes);
  }
  if (!kFill && lane == 0) *offset = static_cast<int32_t>(at);
}

// Calls visit(a) with the query tiles of [first, end) that list key tile b of this lane, ascending.
// All of a warp call, each lane with a key tile of its own: neighbours read the same words.
template <typename Visit>
__device__ __forceinline__ void VisitListed(const Listing<false>& listing, int head, int b,
                                            int first, int end, Visit visit) {
  const int lane = threadIdx.x % 32;
  const int key = b < listing.key_tiles ? listing.PositionOf(b) : INT_MAX;
  const int lowest = __reduce_min_sync(0xffffffffu, key);
  const int block = key == INT_MAX ? 0 : key / listing.args.block_size;
  for (int from = first; from < end; from += 32) {
    SeenTiles mine = {INT_MAX, -1};  // of query tile from + lane
    if (from + lane < end) mine = SeenTilesOf(listing.args, from + lane);
    if (__all_sync(0xffffffffu, mine.last < lowest)) continue;
    const uint32_t* const chosen = listing.ChosenBy(head, from) + block / 32;
    uint32_t listed = 0;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const SeenTiles sees = {__shfl_sync(0xffffffffu, mine.first, i),
                              __shfl_sync(0xffffffffu, mine.last, i)};
      const int row = min(from + i, end - 1) - from;  // within the words
      const uint32_t word = chosen[static_cast<int64_t>(row) * listing.words];
      listed |= static_cast<uint32_t>(sees(key) && (word >> block % 32 & 1) != 0) << i;
    }
    for (; listed != 0; listed &= listed - 1) visit(from + __ffs(static_cast<int>(listed)) - 1);
  }
}

// A block takes 32 key tiles of a head, one a lane; each warp has a share of the query tiles.
template <bool kFill>
__global__ void __launch_bounds__(kListThreads) ColumnsKernel(const Listing<false> listing) {
  __shared__ int counts[kListWarps][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int head = blockIdx.y, b = static_cast<int>(blockIdx.x) * 32 + lane;
  const int share = (listing.query_tiles + kListWarps - 1) / kListWarps;
  const int first = min(listing.query_tiles, warp * share),
            end = min(listing.query_tiles, first + share);
  int32_t* const offset = listing.offsets() + int64_t{head} * (listing.key_tiles + 1) + b;
  int count = 0;
  VisitListed(listing, head, b, first, end, [&](int) { ++count; });
  counts[warp][lane] = count;
  __syncthreads();
  if constexpr (!kFill) {
    if (warp > 0 || b >= listing.key_tiles) return;
    for (int other = 1; other < kListWarps; ++other) count += counts[other][lane];
    *offset = count;
  } else {
    int64_t at = b < listing.key_tiles ? *offset : 0;
    for (int other = 0; other < warp; ++other) at += counts[other][lane];
    VisitListed(listing, head, b, first, end, [&](int a) {
      if (at < listing.args.capacity) listing.list()[at] = a;
      ++at;
    });
  }
}

// Counts to offsets, in place. A head's last offset is the next one's first. A thread adds up
// neighbours.
__global__ void __launch_bounds__(kSelectThreads)
    OffsetsKernel(int32_t* offsets, int heads, int lines) {
  __shared__ uint64_t slots[32];
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
void Visit(const Listing<true>& listing, bool fill, cudaStream_t stream) {
  const int64_t warps = int64_t{listing.query_tiles} * listing.args.heads;
  const auto grid = static_cast<unsigned>((warps + kListWarps - 1) / kListWarps);
  const auto kernel = fill ? RowsKernel<true> : RowsKernel<false>;
  kernel<<<grid, kListThreads, 0, stream>>>(listing);
}
void Visit(const Listing<false>& listing, bool fill, cudaStream_t stream) {
  const dim3 grid((listing.key_tiles + 31) / 32, listing.args.heads);
  const auto kernel = fill ? ColumnsKernel<true> : ColumnsKernel<false>;
  kernel<<<grid, kListThreads, 0, stream>>>(listing);
}

template <bool kByRow>
absl::Status BuildList(const TileListsArgs& args, cudaStream_t stream) {
  const auto tiles = [&](int64_t tokens) {
    return static_cast<int>((tokens + args.tile - 1) / args.tile);
  };
  const int blocks =
      static_cast<int>((args.query_layout.tokens + args.block_size - 1) / args.block_size);
  const Listing<kByRow> listing = {args, tiles(args.query_layout.local_tokens()),
                                   tiles(args.key_layout.local_tokens()), BlockWords(blocks)};
  const int lines = kByRow ? listing.query_tiles : listing.key_tiles;
  Visit(listing, /*fill=*/false, stream);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "BuildTileLists: count");
  OffsetsKernel<<<1, kSelectThreads, 0, stream>>>(kByRow ? args.row_offsets : args.column_offsets,
                                                  args.heads, lines);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "BuildTileLists: offsets");
  Visit(listing, /*fill=*/true, stream);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "BuildTileLists: fill");
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
  RETURN_IF_ERROR(BuildList<true>(args, stream));
  return BuildList<false>(args, stream);
}

}  // namespace ringleader::kernels::index
