// The gradient of an embedding table: rows of the upstream gradient summed by token.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"

namespace ringleader::kernels::fused {

// table[tokens[i]] += dx[order[i]] for all i, where `tokens` is in rising order, so that a token's
// rows are added by one block, in the order given: the same bits every time. dim is a multiple of
// 8; dx and table are 16-byte aligned.
struct EmbeddingBackwardArgs {
  const __nv_bfloat16* dx = nullptr;  // [rows, dim]
  const int64_t* tokens = nullptr;    // [rows], sorted, within the table
  const int64_t* order = nullptr;     // [rows], where each sorted token's row lies
  float* table = nullptr;             // [vocabulary, dim], added to
  int64_t rows = 0;
  int64_t dim = 0;
};
absl::Status EmbeddingBackward(const EmbeddingBackwardArgs& args, cudaStream_t stream);

}  // namespace ringleader::kernels::fused
