// XAttention's choice of blocks (arXiv 2503.16428) on the device: AntidiagonalGateStep says what it
// is. Equal on any number of ranks, bit for bit; within rounding of the CPU engine's.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstddef>

#include "absl/status/status.h"
#include "ringleader/kernels/attention.h"
#include "ringleader/kernels/block_choice.h"

namespace ringleader::kernels::index {

// Groups of queries are scored some at a time, so that no more memory than this is taken unless
// 128 of them take more, which is from 48M tokens with tiles of 128 on.
inline constexpr size_t kAntidiagonalWorkspaceBytes = size_t{256} << 20;

// q: [n, heads, d], this rank's, d 64 or 128; kv_heads: of k.
size_t AntidiagonalWorkspaceBytes(const TokenMajor<const __nv_bfloat16>& q,
                                  const AntidiagonalGateStep& step);

// k: [tokens, kv_heads, d], the whole sequence's. `workspace` is aligned to 16 bytes.
absl::Status ChooseByAntidiagonals(const TokenMajor<const __nv_bfloat16>& q,
                                   const TokenMajor<const __nv_bfloat16>& k,
                                   const AntidiagonalGateStep& step, void* workspace,
                                   cudaStream_t stream);

// This rank's keys, dense: [n, kv_heads, d].
absl::Status PackKeys(const TokenMajor<const __nv_bfloat16>& k, void* packed, cudaStream_t stream);

}  // namespace ringleader::kernels::index
