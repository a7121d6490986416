// MoBA's gate by query (arXiv 2502.13189) on the device: QueryGateStep says what it is. Equal on
// any number of ranks, bit for bit; scores are within 2^-16 of the CPU engine's.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstddef>

#include "absl/status/status.h"
#include "ringleader/kernels/attention.h"
#include "ringleader/kernels/block_choice.h"

namespace ringleader::kernels::index {

// q: [n, heads, d], this rank's, d 64 or 128.
size_t QueryGateWorkspaceBytes(const TokenMajor<const __nv_bfloat16>& q, int32_t kv_heads,
                               const QueryGateStep& step);
// `workspace` is aligned to 16 bytes.
absl::Status ChooseByQuery(const TokenMajor<const __nv_bfloat16>& q, int32_t kv_heads,
                           const QueryGateStep& step, void* workspace, cudaStream_t stream);

}  // namespace ringleader::kernels::index
