#include "worker/model/elementwise.h"

namespace ringleader::model {

NormResult NormForward(const torch::Tensor& x, const torch::Tensor& weight, double epsilon) {
  torch::Tensor rstd = x.square().mean(-1, /*keepdim=*/true).add_(epsilon).rsqrt_();
  return {.y = NormRecompute(x, rstd, weight), .rstd = rstd};
}

torch::Tensor NormRecompute(const torch::Tensor& x, const torch::Tensor& rstd,
                            const torch::Tensor& weight) {
  return (x * rstd).mul_(weight);
}

// With u = x rstd:  dx = rstd (dy w - u mean(dy w u)),  dw = sum over rows of dy u.
NormGradient NormBackward(const torch::Tensor& dy, const torch::Tensor& x,
                          const torch::Tensor& rstd, const torch::Tensor& weight) {
  const torch::Tensor u = x * rstd;
  const torch::Tensor dy_u = dy * u;
  const torch::Tensor mean =
      dy_u.matmul(weight.unsqueeze(1)).div_(static_cast<double>(x.size(-1)));  // [n, 1]
  torch::Tensor dx = (dy * weight).addcmul_(u, mean, -1.0).mul_(rstd);
  return {.dx = dx, .dweight = dy_u.sum(0)};
}

void Rotate(const torch::Tensor& x, const torch::Tensor& cos, const torch::Tensor& sin,
            torch::Tensor out) {
  const int64_t half = x.size(-1) / 2;
  const torch::Tensor c = cos.unsqueeze(1), s = sin.unsqueeze(1);  // [n, 1, half]
  const torch::Tensor a = x.slice(-1, 0, half), b = x.slice(-1, half);
  const torch::Tensor rotated_a = (a * c).addcmul_(b, s, -1.0);
  const torch::Tensor rotated_b = (b * c).addcmul_(a, s);
  out.slice(-1, 0, half).copy_(rotated_a);
  out.slice(-1, half).copy_(rotated_b);
}

torch::Tensor SwiGlu(const torch::Tensor& gate_up) {
  const int64_t inner = gate_up.size(-1) / 2;
  return torch::silu(gate_up.slice(-1, 0, inner)).mul_(gate_up.slice(-1, inner));
}

// d silu(g) = s (1 + g (1 - s)) = s + silu(g) (1 - s) with s = sigmoid(g).
SwiGluGradient SwiGluBackward(const torch::Tensor& dactivation, const torch::Tensor& gate_up) {
  const int64_t inner = gate_up.size(-1) / 2;
  const torch::Tensor gate = gate_up.slice(-1, 0, inner), up = gate_up.slice(-1, inner);
  const torch::Tensor s = torch::sigmoid(gate);
  const torch::Tensor silu = gate * s;
  SwiGluGradient result{.activation = silu * up, .dgate_up = torch::empty_like(gate_up)};
  torch::Tensor dgate = result.dgate_up.slice(-1, 0, inner);
  torch::Tensor dup = result.dgate_up.slice(-1, inner);
  at::mul_out(dup, dactivation, silu);
  at::addcmul_out(dgate, s, silu, 1.0 - s);
  dgate.mul_(up).mul_(dactivation);
  return result;
}

}  // namespace ringleader::model
