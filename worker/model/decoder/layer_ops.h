// The two token-wise halves of a decoder layer, before and after attention, each as one autograd
// function.
//
// One function per half instead of a graph of small ops: backward chooses what it recomputes, and
// products over packed weights (q, k, v; gate, up) stay one GEMM each.
#pragma once

#include <torch/torch.h>

#include <tuple>

#include "worker/model/decoder/decoder.h"

namespace ringleader::model {

// y = x / rms(x) * weight over the last dimension; x: [n, hidden].
torch::Tensor RmsNorm(const torch::Tensor& x, const torch::Tensor& weight, double epsilon);

struct RotaryTables {
  torch::Tensor cos, sin;  // [n, head_dim / 2], attention factor included
};

// x: [n, hidden] -> q: [n, heads, d], k and v: [n, kv_heads, d]; q and k rotated. The three share
// one buffer, with token stride (heads + 2 kv_heads) d.
std::tuple<torch::Tensor, torch::Tensor, torch::Tensor> ProjectQkv(const torch::Tensor& x,
                                                                   const LayerParameters& layer,
                                                                   const RotaryTables& rotary,
                                                                   const ModelConfig& config,
                                                                   Recompute recompute);

// x: [n, hidden], the layer's input; attention: [n, heads, d]. Returns the layer's output [n,
// hidden]: h = x + attention Wo;  h + swiglu(norm(h) Wgate, norm(h) Wup) Wdown.
torch::Tensor OutputAndMlp(const torch::Tensor& x, const torch::Tensor& attention,
                           const LayerParameters& layer, const ModelConfig& config,
                           Recompute recompute);

}  // namespace ringleader::model
