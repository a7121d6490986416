#include "base/status_macros.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/index/gates/blocks.h"

namespace ringleader::kernels::index {
namespace {

constexpr int kThreads = 256;

// A thread makes a word of all heads.
__global__ void KeepFixedBlocksKernel(FixedBlocksStep step, int64_t tiles, int32_t words) {
  const int64_t place = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (place >= tiles * words) return;
  const uint32_t bits = step.Word(place / words, static_cast<int32_t>(place % words));
  for (int32_t head = 0; head < step.heads; ++head) {
    step.chosen[head * tiles * words + place] = bits;
  }
}

}  // namespace

absl::Status KeepFixedBlocks(const FixedBlocksStep& step, cudaStream_t stream) {
  const ShardLayout& layout = step.query_layout;
  const int64_t tiles = (layout.local_tokens() + step.tile - 1) / step.tile;
  const int32_t words =
      BlockWords(static_cast<int32_t>((layout.tokens + step.tile - 1) / step.tile));
  if (tiles == 0) return absl::OkStatus();
  const auto grid = static_cast<unsigned>((tiles * words + kThreads - 1) / kThreads);
  KeepFixedBlocksKernel<<<grid, kThreads, 0, stream>>>(step, tiles, words);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "KeepFixedBlocks");
  return absl::OkStatus();
}

}  // namespace ringleader::kernels::index
