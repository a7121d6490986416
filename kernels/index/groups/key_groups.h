// The choice of groups of 8 keys by the best pair of each, on the device: KeyGroupGateStep says
// what it is. Equal on any number of ranks, bit for bit. The tensor cores sum products in e4m3 to
// half precision (WgmmaE4m3), so that groups may come in another order than with the CPU engine
// where their scores lie that close.
//
// Products of all visible pairs are computed once for the scores and, of the pairs that references
// are made of, once more: of n local queries that see m keys each, 2 * n * m * heads * 64
// operations of the tensor cores in e4m3, and as many or a kSampleEvery-th. At 131,072 tokens on
// one rank with 16 heads the scores take 1.8e13, 9 ms of an H200. Tiles of 16 queries are padded to
// 64 rows, which are multiplied, too.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "absl/status/status.h"
#include "ringleader/kernels/block_choice.h"

namespace ringleader::kernels::index {

// Tiles of queries are scored some at a time, so that no more memory than this is taken for scores
// unless six tiles of all heads take more: with 16 heads from 11M tokens on.
inline constexpr size_t kKeyGroupWorkspaceBytes = size_t{256} << 20;

size_t KeyGroupWorkspaceBytes(int heads, int kv_heads, const KeyGroupGateStep& step);

// `workspace` is aligned to 16 bytes. With several ranks, what the layout deals out is in chunks of
// a multiple of 64 tokens.
absl::Status ChooseKeyGroups(int heads, int kv_heads, const KeyGroupGateStep& step, void* workspace,
                             cudaStream_t stream);

}  // namespace ringleader::kernels::index
