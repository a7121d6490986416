#include <climits>

#include "base/status_macros.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/index/gates/blocks.h"
#include "kernels/index/threshold.cuh"

namespace ringleader::kernels::index {
namespace {

// One direction of the lists: lines are query tiles (kByRow) or key tiles.
template <bool kByRow>
struct Listing {
  const TileListsArgs args;
  int query_tiles, key_tiles, words;

  __device__ int lines() const { return kByRow ? query_tiles : key_tiles; }
  __device__ int entries() const { return kByRow ? key_tiles : query_tiles; }
  __device__ bool Listed(int head, int line, int entry) const {
    const int64_t a = kByRow ? line : entry, b = kByRow ? entry : line;
    const int64_t key = args.key_layout.Position(b * args.tile);
    if (!SeesTile(args.seen, args.query_layout, a, args.tile, key)) return false;
    const int block = static_cast<int>(key / args.block_size);
    const uint32_t* row = args.chosen + (head * static_cast<int64_t>(query_tiles) + a) * words;
    return (row[block / 32] >> block % 32 & 1) != 0;
  }
  __device__ int32_t* offsets() const { return kByRow ? args.row_offsets : args.column_offsets; }
  __device__ int32_t* list() const { return kByRow ? args.columns : args.rows; }
};

// A warp takes one line: it counts into offsets (kFill false), or writes the entries, ascending.
template <bool kByRow, bool kFill>
__global__ void ListKernel(const Listing<kByRow> listing) {
  const int warp = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32);
  const int lane = threadIdx.x % 32;
  const int lines = listing.lines(), head = warp / lines, line = warp % lines;
  if (head >= listing.args.heads) return;
  int32_t* offset = listing.offsets() + static_cast<int64_t>(head) * (lines + 1) + line;
  int64_t at = kFill ? *offset : 0;
  for (int first = 0; first < listing.entries(); first += 32) {
    const int entry = first + lane;
    const bool listed = entry < listing.entries() && listing.Listed(head, line, entry);
    const uint32_t lanes = __ballot_sync(0xffffffffu, listed);
    const int64_t mine = at + __popc(lanes & ((1u << lane) - 1));
    if (kFill && listed && mine < listing.args.capacity) listing.list()[mine] = entry;
    at += __popc(lanes);
  }
  if (!kFill && lane == 0) *offset = static_cast<int32_t>(at);
}

// Counts to offsets, in place. A head's last offset is the next one's first.
__global__ void __launch_bounds__(kSelectThreads)
    OffsetsKernel(int32_t* offsets, int heads, int lines) {
  __shared__ uint64_t slots[32];
  int64_t before = 0;
  const int64_t count = static_cast<int64_t>(heads) * (lines + 1);
  for (int64_t first = 0; first < count; first += kSelectThreads) {
    const int64_t i = first + threadIdx.x;
    const bool is_count = i < count && i % (lines + 1) != lines;
    const uint64_t value = is_count ? static_cast<uint64_t>(offsets[i]) : 0;
    const Scan scan = BlockScan(value, slots);
    if (i < count) offsets[i] = static_cast<int32_t>(before + scan.inclusive - value);
    before += static_cast<int64_t>(scan.total);
  }
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
  const unsigned grid = static_cast<unsigned>((int64_t{lines} * args.heads + 7) / 8);
  ListKernel<kByRow, false><<<grid, 256, 0, stream>>>(listing);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "BuildTileLists: count");
  OffsetsKernel<<<1, kSelectThreads, 0, stream>>>(kByRow ? args.row_offsets : args.column_offsets,
                                                  args.heads, lines);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "BuildTileLists: offsets");
  ListKernel<kByRow, true><<<grid, 256, 0, stream>>>(listing);
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
  RETURN_IF_ERROR(fused::CheckPointer(args.chosen, "BuildTileLists: chosen"));
  RETURN_IF_ERROR(fused::CheckPointer(args.row_offsets, "BuildTileLists: row_offsets"));
  RETURN_IF_ERROR(fused::CheckPointer(args.columns, "BuildTileLists: columns"));
  RETURN_IF_ERROR(fused::CheckPointer(args.column_offsets, "BuildTileLists: column_offsets"));
  RETURN_IF_ERROR(fused::CheckPointer(args.rows, "BuildTileLists: rows"));
  RETURN_IF_ERROR(BuildList<true>(args, stream));
  return BuildList<false>(args, stream);
}

}  // namespace ringleader::kernels::index
