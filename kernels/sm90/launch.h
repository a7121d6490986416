// What every attention call does before a kernel starts: checks of arguments, and their form for
// the device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/sm90/attention.h"
#include "kernels/sm90/tile_walk.cuh"
#include "ringleader/kernels/attention.h"

namespace ringleader::kernels::sm90 {

// Shapes, layouts and tiles that forward and backward share.
struct AttentionShape {
  int64_t query_tokens = 0;
  int64_t key_tokens = 0;
  int32_t heads = 0;
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
  float scale = 0;
};

// OK when the kernels can do it; otherwise what to change.
absl::Status CheckShape(const AttentionShape& shape, const ShardLayout& query_layout,
                        const ShardLayout& key_layout, const TileSelection& tiles);

// `tensor` has the dimensions given and data.
absl::Status CheckTensor(const char* name, const void* data, int64_t tokens, int32_t heads,
                         int32_t head_dim, int64_t expected_tokens, int32_t expected_heads,
                         int32_t expected_head_dim);

absl::Status CheckWorkspace(const Workspace& workspace, int64_t needed_bytes);

TileWalk MakeTileWalk(const AttentionShape& shape, const ShardLayout& query_layout,
                      const ShardLayout& key_layout, const TileSelection& tiles, bool by_column);

// Multiprocessors of the current device; an error unless it is a Hopper.
absl::StatusOr<int> MultiprocessorCount();

// `what` failed with `error`.
absl::Status CudaStatus(cudaError_t error, const char* what);

}  // namespace ringleader::kernels::sm90
