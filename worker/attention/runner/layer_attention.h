// What a decoder layer calls for attention: the seam between worker/model and worker/attention.
#pragma once

#include <torch/types.h>

namespace ringleader::attention {

// Attention of this rank's tokens to the whole sequence, differentiable. Implementations know
// layout, ring and pattern; errors of the ring surface as c10::Error and end the step.
class LayerAttention {
 public:
  virtual ~LayerAttention() = default;
  // q: [n, heads, d], k and v: [n, kv_heads, d], rotary embedding applied, n local tokens. Returns
  // [n, heads, d].
  virtual torch::Tensor Forward(int layer, const torch::Tensor& q, const torch::Tensor& k,
                                const torch::Tensor& v) = 0;
};

}  // namespace ringleader::attention
