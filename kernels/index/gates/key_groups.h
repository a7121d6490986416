// The choice of groups of 8 keys by the best pair of each, on the device: KeyGroupGateStep says
// what it is. Equal on any number of ranks, bit for bit; within the rounding of logits of the CPU
// engine's.
//
// Logits of all visible pairs are computed twice, once for each query's largest and once for the
// scores: of n local queries that see m keys each, 4 * n * m * heads * d operations of the tensor
// cores. At 131,072 tokens on one rank with 16 heads of 128 these are 7e13, more than a tenth of a
// second.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstddef>

#include "absl/status/status.h"
#include "ringleader/kernels/attention.h"
#include "ringleader/kernels/block_choice.h"

namespace ringleader::kernels::index {

// Tiles of queries are scored some at a time, so that no more memory than this is taken for scores
// unless four tiles of all heads take more: with 16 heads from 8M tokens on.
inline constexpr size_t kKeyGroupWorkspaceBytes = size_t{256} << 20;

// q: [n, heads, d], this rank's, d 64 or 128.
size_t KeyGroupWorkspaceBytes(const TokenMajor<const __nv_bfloat16>& q,
                              const KeyGroupGateStep& step);

// k: [tokens, kv_heads, d], the whole sequence's. `workspace` is aligned to 16 bytes. With several
// ranks, what the layout deals out is in chunks of a multiple of 64 tokens.
absl::Status ChooseKeyGroups(const TokenMajor<const __nv_bfloat16>& q,
                             const TokenMajor<const __nv_bfloat16>& k, const KeyGroupGateStep& step,
                             void* workspace, cudaStream_t stream);

}  // namespace ringleader::kernels::index
