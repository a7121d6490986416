// The mask memory of a call (walk/mask_memory.cuh), which its kernels read instead of
// TileSelection::intervals.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/sm90/launch/launch.h"
#include "ringleader/kernels/attention.h"

namespace ringleader::kernels::sm90 {

// A multiple of 256; 0 without intervals.
int64_t MaskBytes(const AttentionShape& shape, const TileSelection& tiles);

// Fills `memory`, which is aligned to 256 bytes, for walks along rows and, with by_column, along
// columns. The arguments have been checked.
absl::Status PrepareMask(const AttentionShape& shape, const ShardLayout& query_layout,
                         const ShardLayout& key_layout, const TileSelection& tiles, bool by_column,
                         void* memory, cudaStream_t stream);

}  // namespace ringleader::kernels::sm90
