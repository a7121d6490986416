// Cuts a call's lists of tiles into parts before its kernel starts (walk/list_parts.cuh).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/sm90/backward/attention_backward_tiles.cuh"
#include "kernels/sm90/walk/list_parts.cuh"

namespace ringleader::kernels::sm90 {

// Makes *params, of whole lists and items of one head, walk parts of them. memory:
// ListPartsMemory's, which this fills.
absl::Status SplitLists(const ListParts& parts, int32_t* memory, BackwardParams* params,
                        cudaStream_t stream);

}  // namespace ringleader::kernels::sm90
