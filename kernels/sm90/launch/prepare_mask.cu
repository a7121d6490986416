#include "base/status_macros.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/sm90/launch/prepare_mask.h"
#include "kernels/sm90/walk/mask_memory.cuh"

namespace ringleader::kernels::sm90 {
namespace {

constexpr int kWarps = 4;  // of a CTA, each by itself

__global__ void MarkRows(const __grid_constant__ TileWalk walk, const KeyIntervals* given,
                         LineBits* memory) {
  const int32_t row = blockIdx.x * kWarps + threadIdx.x / 32;
  if (row >= walk.query_tiles) return;
  const MaskMemory at(walk.query_tokens, walk.query_tiles, walk.key_tiles);
  MarkRow(walk, given, memory, at, row);
}

__global__ void MarkColumns(const __grid_constant__ TileWalk walk, LineBits* memory) {
  const int32_t row_word = blockIdx.x * kWarps + threadIdx.x / 32;
  if (row_word >= LineWords(walk.query_tiles)) return;
  const MaskMemory at(walk.query_tokens, walk.query_tiles, walk.key_tiles);
  TransposeBits(walk, memory, at, row_word, blockIdx.y);
}

int32_t Blocks(int32_t warps) {
  return (warps + kWarps - 1) / kWarps;
}

}  // namespace

int64_t MaskBytes(const AttentionShape& shape, const TileSelection& tiles) {
  if (tiles.intervals == nullptr) return 0;
  const int64_t tile = tiles.tile == 64 ? 64 : 128;
  const auto in_tiles = [&](int64_t tokens) {
    return static_cast<int32_t>((tokens + tile - 1) / tile);
  };
  const MaskMemory at(static_cast<int32_t>(shape.query_tokens), in_tiles(shape.query_tokens),
                      in_tiles(shape.key_tokens));
  return (at.bytes() + 255) / 256 * 256;
}

absl::Status PrepareMask(const AttentionShape& shape, const ShardLayout& query_layout,
                         const ShardLayout& key_layout, const TileSelection& tiles, bool by_column,
                         void* memory, cudaStream_t stream) {
  const TileWalk walk = MakeTileWalk(shape, query_layout, key_layout, tiles, by_column);
  const auto bits = static_cast<LineBits*>(memory);
  MarkRows<<<Blocks(walk.query_tiles), 32 * kWarps, 0, stream>>>(walk, tiles.intervals, bits);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "mask: rows");
  if (!by_column) return absl::OkStatus();
  const dim3 words(Blocks(LineWords(walk.query_tiles)), LineWords(walk.key_tiles));
  MarkColumns<<<words, 32 * kWarps, 0, stream>>>(walk, bits);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "mask: columns");
  return absl::OkStatus();
}

}  // namespace ringleader::kernels::sm90
