// Starting the attention kernels.
#pragma once

#include <cuda_runtime_api.h>

#include "absl/status/status.h"
#include "base/status_macros.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/sm90/walk/tile_walk.cuh"

namespace ringleader::kernels::sm90 {

// Starts one CTA of `threads` on each multiprocessor, with `shared_bytes` of dynamic shared memory.
// `name` stands in errors.
template <typename... Params, typename... Args>
absl::Status LaunchPersistent(const char* name, void (*kernel)(Params...), int multiprocessors,
                              int threads, int shared_bytes, cudaStream_t stream,
                              const Args&... args) {
  RETURN_IF_CUDA_ERROR(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
      name);
  kernel<<<multiprocessors, threads, shared_bytes, stream>>>(args...);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), name);
  return absl::OkStatus();
}

// Calls run.operator()<kKind>() with the kind of walk that fits `tiles`.
template <typename Run>
absl::Status RunForTiles(const TileSelection& tiles, const Run& run) {
  if (tiles.intervals != nullptr) {
    return tiles.tile == 128 ? run.template operator()<WalkKind::kIntervals128>()
                             : run.template operator()<WalkKind::kIntervals64>();
  }
  if (tiles.choice.chosen != nullptr) {
    return tiles.tile == 128 ? run.template operator()<WalkKind::kChosen128>()
                             : run.template operator()<WalkKind::kChosen64>();
  }
  if (tiles.tile == 128) return run.template operator()<WalkKind::kTiles128>();
  return tiles.pattern == TilePattern::kCsr ? run.template operator()<WalkKind::kLists64>()
                                            : run.template operator()<WalkKind::kTiles64>();
}

}  // namespace ringleader::kernels::sm90
