// What backward attention adds for groups of keys.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/sm90/launch/launch.h"
#include "ringleader/kernels/attention.h"

namespace ringleader::kernels::sm90 {

struct RowStats;

// Adds to dq, dk and dv of `args` what args.tiles.groups see, in any order. `*next_item` must be 0
// when it starts.
absl::Status AddGroups(const AttentionBackwardArgs<__nv_bfloat16>& args,
                       const AttentionShape& shape, const RowStats* row_stats, int32_t* next_item,
                       int multiprocessors, cudaStream_t stream);

}  // namespace ringleader::kernels::sm90
