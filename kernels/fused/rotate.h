// Rotary position embedding with explicit positions, so that any layout of tokens over ranks works.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/fused/cast.h"
#include "ringleader/kernels/attention.h"

namespace ringleader::kernels::fused {

// With a = positions[t] * inv_freq[i] (in fp32, as the models were trained), c = scale * cos(a), s
// = scale * sin(a), and D = head_dim:  y[i] = x[i] c - x[i + D/2] s,  y[i + D/2] = x[i + D/2] c +
// x[i] s, for x = q and for x = k in one launch, which share the sines. `inverse` rotates back (s
// -> -s): the backward pass. Outputs may be the inputs' memory; head_dim is a multiple of 16 up to
// 256, strides are multiples of 8 elements.
struct RopeArgs {
  TokenMajor<const __nv_bfloat16> q = {};  // [tokens, heads, head_dim]
  TokenMajor<const __nv_bfloat16> k = {};  // [tokens, kv_heads, head_dim], or no heads: q alone
  TokenMajor<__nv_bfloat16> q_out = {};    // the shape of q
  TokenMajor<__nv_bfloat16> k_out = {};    // the shape of k
  const int64_t* positions = nullptr;      // [tokens], 0 <= position < 2^24
  const float* inv_freq = nullptr;         // [head_dim / 2]
  float scale = 1.0f;                      // attention factor of YaRN; 1 without
  bool inverse = false;
};
absl::Status Rope(const RopeArgs& args, cudaStream_t stream);

// The gradients of rotated q and k, rotated back, with v's behind them, and their cast: a token's
// row has dim = (heads + 2 kv_heads) * head_dim values, at most kMaxCastDim. The same bits as
// Rope's with `inverse`, and CastRows' of these.
struct RotateBackArgs {
  TokenMajor<const __nv_bfloat16> dq = {};  // [tokens, heads, head_dim]
  TokenMajor<const __nv_bfloat16> dk = {};  // [tokens, kv_heads, head_dim], at least one head
  TokenMajor<const __nv_bfloat16> dv = {};  // the shape of dk
  __nv_bfloat16* out = nullptr;             // [tokens, dim], dense; null: the values are not stored
  E4m3Rows cast = {};                       // must be set
  const int64_t* positions = nullptr;       // as Rope's
  const float* inv_freq = nullptr;
  float scale = 1.0f;
};
absl::Status RotateBack(const RotateBackArgs& args, cudaStream_t stream);

}  // namespace ringleader::kernels::fused
