// The element-wise and row-wise steps of a decoder layer with their gradients, outside autograd:
// kernels/reference on tensors, rows split among LibTorch's threads. fp32 on CPU. Results do not
// depend on the number of threads.
#pragma once

#include <torch/torch.h>

namespace ringleader::model {

struct NormResult {
  torch::Tensor y;     // [n, hidden]
  torch::Tensor rstd;  // [n, 1], 1 / rms(x)
};
NormResult NormForward(const torch::Tensor& x, const torch::Tensor& weight, double epsilon);

// The normalised rows again, from what forward kept.
torch::Tensor NormRecompute(const torch::Tensor& x, const torch::Tensor& rstd,
                            const torch::Tensor& weight);

struct NormGradient {
  torch::Tensor dx;       // [n, hidden]
  torch::Tensor dweight;  // [hidden]
};
NormGradient NormBackward(const torch::Tensor& dy, const torch::Tensor& x,
                          const torch::Tensor& rstd, const torch::Tensor& weight);

// Rotates x: [n, heads, d], dimension i with i + d / 2, into out (same shape; may be x itself).
// cos, sin: [n, d / 2]. The gradient is the `inverse` rotation.
void Rotate(const torch::Tensor& x, const torch::Tensor& cos, const torch::Tensor& sin,
            bool inverse, torch::Tensor out);

// gate_up: [n, 2 inner] -> silu(gate) * up: [n, inner].
torch::Tensor SwiGlu(const torch::Tensor& gate_up);

struct SwiGluGradient {
  torch::Tensor activation;  // [n, inner], forward's result again
  torch::Tensor dgate_up;    // [n, 2 inner]
};
SwiGluGradient SwiGluBackward(const torch::Tensor& dactivation, const torch::Tensor& gate_up);

}  // namespace ringleader::model
