// What starting a kernel of the estimate and one of the block masses has in common: checks,
// parameters and the launch.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/index/estimate_kernel.cuh"

namespace ringleader::kernels::index {

// INVALID_ARGUMENT, naming `step`, unless the kernels take q: [n, heads, d] and k: [n_k, kv_heads,
// d].
inline absl::Status CheckQueriesAndKeys(const std::string& step,
                                        const TokenMajor<const __nv_bfloat16>& q,
                                        const TokenMajor<const __nv_bfloat16>& k,
                                        const ShardLayout& key_layout, int32_t tile, float scale) {
  const auto check_size = [&](int64_t value, const char* what, int64_t min, int64_t max,
                              int64_t multiple = 1) {
    return fused::CheckSize(value, absl::StrCat(step, ": ", what).c_str(), min, max, multiple);
  };
  if (q.head_dim != 64 && q.head_dim != 128) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: head_dim is %d; 64 and 128 are supported", step, q.head_dim));
  }
  if (k.head_dim != q.head_dim || k.heads < 1 || q.heads < k.heads || q.heads % k.heads != 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: q has %d heads of %d, k has %d of %d; head_dim must be one, and the heads of q a "
        "multiple of k's",
        step, q.heads, q.head_dim, k.heads, k.head_dim));
  }
  if (tile != 64 && tile != 128) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: tile is %d; 64 and 128 are supported", step, tile));
  }
  if (!(scale > 0)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: scale is %g; it must be positive", step, scale));
  }
  RETURN_IF_ERROR(check_size(key_layout.tokens, "tokens of the sequence", 1, INT32_MAX - kKeyTile));
  RETURN_IF_ERROR(check_size(k.tokens, "tokens of k (of the layout's rank)",
                             key_layout.local_tokens(), key_layout.local_tokens()));
  RETURN_IF_ERROR(check_size(q.token_stride, "q.token_stride", 0, INT64_MAX, 8));
  RETURN_IF_ERROR(check_size(q.head_stride, "q.head_stride", 0, INT64_MAX, 8));
  return fused::CheckPointer(q.data, absl::StrCat(step, ": q").c_str());
}

// Sizes and strides; pointers to what a kernel writes are the caller's to set. One block for all
// keys of a KV head: see EstimateParams::chunks.
inline EstimateParams MakeEstimateParams(const TokenMajor<const __nv_bfloat16>& q,
                                         const TokenMajor<const __nv_bfloat16>& k,
                                         const ShardLayout& key_layout, int32_t tile, float scale) {
  EstimateParams params = {};
  params.q = q.data;
  params.q_token_stride = q.token_stride;
  params.q_head_stride = q.head_stride;
  params.key_layout = key_layout;
  params.keys = static_cast<int>(k.tokens);
  params.key_tiles = static_cast<int>((k.tokens + kKeyTile - 1) / kKeyTile);
  params.key_runs = static_cast<int>(RunsOf(k.tokens));
  params.queries = static_cast<int>(q.tokens);
  params.runs = static_cast<int>((q.tokens + kRun - 1) / kRun);
  params.group = q.heads / k.heads;
  params.block_groups = (params.group * params.runs + kBlockRuns - 1) / kBlockRuns;
  params.chunks = 1;
  params.tile = tile;
  params.blocks = (key_layout.tokens + tile - 1) / tile;
  params.scale = scale;
  params.scale_log2 = scale * ptx::kLog2E;
  return params;
}

// Starts `kernel` with the shared memory of kHeadDim. `name` stands in errors.
template <int kHeadDim, typename... Params, typename... Args>
absl::Status LaunchEstimate(const char* name, void (*kernel)(Params...), int blocks,
                            cudaStream_t stream, const Args&... args) {
  constexpr int kSharedBytes = static_cast<int>(sizeof(EstimateShared<kHeadDim>));
  RETURN_IF_CUDA_ERROR(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
      name);
  kernel<<<blocks, kBlockThreads, kSharedBytes, stream>>>(args...);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), name);
  return absl::OkStatus();
}

}  // namespace ringleader::kernels::index
