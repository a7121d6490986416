// Gradients in bf16: fp32 sums of a call, added to what is there and rounded once.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include "absl/status/status.h"
#include "ringleader/kernels/attention.h"

namespace ringleader::kernels::sm90 {

// One of two gradients that go through a kernel together.
template <typename T>
struct KeyValuePair {
  T k, v;
};

// target += sums, [tokens, kv_heads, d] each; the sums are dense. The targets pass CheckVectors and
// have the same shape.
absl::Status AddRounded(const KeyValuePair<const float*>& sums,
                        const KeyValuePair<TokenMajor<__nv_bfloat16>>& target, cudaStream_t stream);

}  // namespace ringleader::kernels::sm90
