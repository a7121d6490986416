// The part of a deterministic backward that computes dQ.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/sm90/backward/attention_backward_tiles.cuh"
#include "kernels/sm90/launch/launch.h"
#include "kernels/sm90/walk/column_walk.cuh"
#include "kernels/sm90/walk/tile_walk.cuh"
#include "ringleader/kernels/attention.h"

namespace ringleader::kernels::sm90 {

// Adds to args.dq. The arguments have been checked, and AddMap has taken dq. `row_stats`: [heads,
// blocks of 64 queries]; *next_item is 0.
template <WalkKind kKind>
absl::Status AddQueryGradient(const AttentionBackwardArgs<__nv_bfloat16>& args,
                              const AttentionShape& shape, const ColumnWalk& columns,
                              const RowStats* row_stats, int32_t* next_item, int multiprocessors,
                              cudaStream_t stream);

}  // namespace ringleader::kernels::sm90
