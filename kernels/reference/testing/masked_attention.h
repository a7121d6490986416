// The oracle: attention under any mask, in fp64, as plainly as it can be written.
#pragma once

#include <cstdint>
#include <functional>
#include <random>
#include <vector>

#include "ringleader/kernels/attention.h"

namespace ringleader::kernels::reference::testing {

// A [tokens, heads, head_dim] tensor with its memory.
struct Tensor {
  int64_t tokens = 0;
  int heads = 0;
  int head_dim = 0;
  std::vector<float> data;

  Tensor(int64_t tokens, int heads, int head_dim)
      : tokens(tokens),
        heads(heads),
        head_dim(head_dim),
        data(static_cast<size_t>(tokens * heads * head_dim), 0.0f) {}

  TokenMajor<float> view() {
    return {data.data(), tokens, heads, head_dim, int64_t{heads} * head_dim, head_dim};
  }
  TokenMajor<const float> view() const {
    return {data.data(), tokens, heads, head_dim, int64_t{heads} * head_dim, head_dim};
  }
  float& at(int64_t token, int head, int k) { return data[(token * heads + head) * head_dim + k]; }
  float at(int64_t token, int head, int k) const {
    return data[(token * heads + head) * head_dim + k];
  }
  const float* row(int64_t token, int head) const {
    return data.data() + (token * heads + head) * head_dim;
  }
};

Tensor RandomTensor(int64_t tokens, int heads, int head_dim, std::mt19937& random);

// The rows of `whole` that a layout gives its rank.
Tensor Shard(const Tensor& whole, const ShardLayout& layout);

struct MaskedAttention {
  std::vector<double> out, lse;    // [n, heads, d], [heads, n]; lse -infinity without a key
  std::vector<double> dq, dk, dv;  // of sum(out * d_out)
};

// visible(head, query, key) by index. Without tokens in `d_out` all gradients are zero.
using Visible = std::function<bool(int, int64_t, int64_t)>;
MaskedAttention ComputeMaskedAttention(const Tensor& q, const Tensor& k, const Tensor& v,
                                       const Tensor& d_out, float scale, const Visible& visible);

// max |actual - expected| / max |expected|; infinite where an infinity or NaN does not match.
double RelativeError(const std::vector<float>& actual, const std::vector<double>& expected);

}  // namespace ringleader::kernels::reference::testing
