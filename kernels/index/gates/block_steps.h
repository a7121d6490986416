// Any step of a choice of blocks, tiles or groups of keys, on the device: block_choice.h says what
// each is.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstddef>

#include "absl/status/status.h"
#include "ringleader/kernels/attention.h"
#include "ringleader/kernels/block_choice.h"

namespace ringleader::kernels::index {

// Takes one step, in BlockStepWorkspaceBytes(...) bytes, aligned to 16. q and k: [n, heads, d] and
// [n, kv_heads, d], this rank's.
size_t BlockStepWorkspaceBytes(const TokenMajor<const __nv_bfloat16>& q,
                               const TokenMajor<const __nv_bfloat16>& k, const BlockStep& step);
absl::Status RunBlockStep(const TokenMajor<const __nv_bfloat16>& q,
                          const TokenMajor<const __nv_bfloat16>& k, const BlockStep& step,
                          void* workspace, cudaStream_t stream);

}  // namespace ringleader::kernels::index
