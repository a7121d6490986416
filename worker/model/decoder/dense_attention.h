// Causal softmax attention on one rank, spelled out: the oracle of this folder's tests.
#pragma once

#include <torch/torch.h>

#include <cmath>
#include <limits>

#include "worker/attention/runner/layer_attention.h"

namespace ringleader::model {

class DenseAttention : public attention::LayerAttention {
 public:
  torch::Tensor Forward(int /*layer*/, const torch::Tensor& q, const torch::Tensor& k,
                        const torch::Tensor& v) override {
    const int64_t n = q.size(0), heads = q.size(1), group = heads / k.size(1);
    const auto by_head = [&](const torch::Tensor& x) {  // [n, h, d] -> [heads, n, d]
      return x.transpose(0, 1).repeat_interleave(heads / x.size(1), 0);
    };
    TORCH_CHECK(group * k.size(1) == heads);
    const torch::Tensor ahead = torch::ones({n, n}, torch::kBool).triu(1);
    const torch::Tensor logits = by_head(q)
                                     .matmul(by_head(k).transpose(1, 2))
                                     .div(std::sqrt(static_cast<double>(q.size(2))))
                                     .masked_fill(ahead, -std::numeric_limits<float>::infinity());
    return logits.softmax(-1).matmul(by_head(v)).transpose(0, 1).contiguous();
  }
};

}  // namespace ringleader::model
