#pragma once

#include <cuda_runtime_api.h>

#include "absl/status/status.h"
#include "base/status_macros.h"
#include "kernels/sm90/common/launch.h"

namespace ringleader::kernels::sm90 {

// A CTA a multiprocessor, of `threads` and `shared_bytes` of dynamic shared memory. `name` is used
// in errors.
template <typename... Params, typename... Args>
absl::Status LaunchPersistent(const char* name, void (*kernel)(Params...), int multiprocessors,
                              int threads, int shared_bytes, cudaStream_t stream,
                              const Args&... args) {
  RETURN_IF_ERROR(CudaStatus(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
      name));
  kernel<<<multiprocessors, threads, shared_bytes, stream>>>(args...);
  return CudaStatus(cudaGetLastError(), name);
}

// run.operator()<kKind>() for what `tiles` ask for.
template <typename Run>
absl::Status RunForTiles(const TileSelection& tiles, const Run& run) {
  if (tiles.tile == 128) return run.template operator()<WalkKind::kTiles128>();
  return tiles.pattern == TilePattern::kCsr ? run.template operator()<WalkKind::kLists64>()
                                            : run.template operator()<WalkKind::kTiles64>();
}

}  // namespace ringleader::kernels::sm90
