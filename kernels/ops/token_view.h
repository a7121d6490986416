// A tensor as the kernels of all engines take it.
#pragma once

#include <torch/types.h>

#include "ringleader/kernels/attention.h"

namespace ringleader::kernels::ops {

// x: [tokens, heads, head_dim], whose elements from `data` on have the type T.
template <typename T>
TokenMajor<T> TokenView(const torch::Tensor& x, T* data) {
  TORCH_CHECK(x.dim() == 3, "expected [tokens, heads, head_dim], got ", x.sizes());
  return {.data = data,
          .tokens = x.size(0),
          .heads = static_cast<int32_t>(x.size(1)),
          .head_dim = static_cast<int32_t>(x.size(2)),
          .token_stride = x.stride(0),
          .head_stride = x.stride(1)};
}

}  // namespace ringleader::kernels::ops
