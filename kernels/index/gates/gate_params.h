// What the kernels of MoBA's gate by query are told.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "ringleader/kernels/attention.h"
#include "ringleader/kernels/block_choice.h"
#include "ringleader/kernels/shard_layout.h"

namespace ringleader::kernels::index {

struct GateParams {
  TokenMajor<const __nv_bfloat16> q = {};
  // [2, kv_heads, padded_blocks, d]: of the means their bf16, then the bf16 of what that leaves.
  const __nv_bfloat16* means = nullptr;
  ShardLayout layout = {};
  const int32_t* document_starts = nullptr;  // may be null
  int kv_heads = 0;
  int tile = 0;
  int block_size = 0;
  int blocks = 0;
  int padded_blocks = 0;  // to whole 64
  int topk_blocks = 0;
  float density = 0.0f;
  const int32_t* head_halves = nullptr;  // HalvesOf
  float scale = 0.0f;
  ChoiceMove move = {};
  uint32_t* queries = nullptr;
  uint32_t* chosen = nullptr;

  // How many blocks a query keeps besides its own, `own`, that sees those from `first` on.
  __host__ __device__ int Keep(int first, int own, int halves) const {
    return KeptBefore(topk_blocks, density, halves, own - first);
  }
  // Of any head and query, at most.
  int MostKept() const { return Keep(0, blocks - 1, head_halves == nullptr ? 2 : 3); }
};

}  // namespace ringleader::kernels::index
