// The log-sum-exp of each query over all the keys that it sees, on the device: RowLseStep says what
// it is. It is that of dense attention forward, whose kernel finds it: with the keys in place of
// the values, for one KV head at a time, and without the output.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstddef>

#include "absl/status/status.h"
#include "ringleader/kernels/attention.h"
#include "ringleader/kernels/block_choice.h"

namespace ringleader::kernels::index {

size_t RowLseWorkspaceBytes(const TokenMajor<const __nv_bfloat16>& q, int32_t kv_heads,
                            const RowLseStep& step);

// q: [n, heads, d], this rank's; k: [tokens, kv_heads, d], the whole sequence's. `workspace` is
// aligned to 256 bytes.
absl::Status RowLse(const TokenMajor<const __nv_bfloat16>& q,
                    const TokenMajor<const __nv_bfloat16>& k, const RowLseStep& step,
                    void* workspace, cudaStream_t stream);

}  // namespace ringleader::kernels::index
