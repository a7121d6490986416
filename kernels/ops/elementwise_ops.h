// The element-wise and row-wise steps of a decoder layer on the GPU, outside autograd; below them
// the same as differentiable operators. bf16 CUDA tensors, last dimension dense.
#pragma once

#include <torch/torch.h>

#include <tuple>

namespace ringleader::kernels::ops {

struct NormResult {
  torch::Tensor y;     // [n, hidden]
  torch::Tensor rstd;  // [n, 1] fp32
};
NormResult NormForward(const torch::Tensor& x, const torch::Tensor& weight, double epsilon);

struct NormGradient {
  torch::Tensor dx;       // [n, hidden]
  torch::Tensor dweight;  // [hidden] fp32
};
// `d_sum`: a gradient that reaches x past the norm and is added to dx; may be undefined.
NormGradient NormBackward(const torch::Tensor& dy, const torch::Tensor& x,
                          const torch::Tensor& rstd, const torch::Tensor& weight,
                          const torch::Tensor& d_sum = {});

// gate_up: [n, 2 inner] -> silu(gate) * up: [n, inner].
torch::Tensor SwiGluForward(const torch::Tensor& gate_up);
struct SwiGluGradient {
  torch::Tensor activation;  // [n, inner], forward's result again
  torch::Tensor dgate_up;    // [n, 2 inner]
};
SwiGluGradient SwiGluBackward(const torch::Tensor& dactivation, const torch::Tensor& gate_up);

// Rotates q: [n, heads, d] and k: [n, kv_heads, d] in place, by positions: [n] int64 and
// inv_freq: [d / 2] fp32. `inverse` rotates back: the gradient.
void RotateInPlace(const torch::Tensor& q, const torch::Tensor& k, const torch::Tensor& positions,
                   const torch::Tensor& inv_freq, double scale, bool inverse);

// Differentiable:

// y = x / rms(x) * weight; x: [n, hidden].
torch::Tensor RmsNorm(const torch::Tensor& x, const torch::Tensor& weight, double epsilon);
// (y, h): h = x + residual, y = RmsNorm(h).
std::tuple<torch::Tensor, torch::Tensor> AddRmsNorm(const torch::Tensor& x,
                                                    const torch::Tensor& residual,
                                                    const torch::Tensor& weight, double epsilon);
torch::Tensor SwiGlu(const torch::Tensor& gate_up);
// New tensors; q and k stay.
std::tuple<torch::Tensor, torch::Tensor> Rope(const torch::Tensor& q, const torch::Tensor& k,
                                              const torch::Tensor& positions,
                                              const torch::Tensor& inv_freq, double scale);

// The summed cross entropy of softmax(hidden head^T): an fp64
// scalar whose gradient is computed in the same pass, a chunk of logits at a time. hidden: [n,
// hidden_size], head: [vocab, hidden_size], labels: [n] int64. Backward may only scale it.
torch::Tensor LinearCrossEntropySum(const torch::Tensor& hidden, const torch::Tensor& head,
                                    const torch::Tensor& labels, int64_t ignore_label);

}  // namespace ringleader::kernels::ops
