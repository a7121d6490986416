#include "worker/model/elementwise.h"

#include <algorithm>

namespace ringleader::model {
namespace {

// Elements of one operand that stay in a core's second-level cache together with a handful of
// others.
constexpr int64_t kCacheElements = 32 << 10;

}  // namespace

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

// d silu(g) = s (1 + g (1 - s)) = s + silu(g) - s silu(g) with s = sigmoid(g).
SwiGluGradient SwiGluBackward(const torch::Tensor& dactivation, const torch::Tensor& gate_up) {
  const int64_t rows = gate_up.size(0), inner = gate_up.size(1) / 2;
  SwiGluGradient result{.activation = torch::empty_like(dactivation),
                        .dgate_up = torch::empty_like(gate_up)};
  // Five passes over the same numbers: a block of rows at a time, so that all but the first find
  // them in cache.
  const int64_t block = std::max<int64_t>(kCacheElements / inner, 1);
  for (int64_t begin = 0; begin < rows; begin += block) {
    const int64_t end = std::min(begin + block, rows);
    const auto part = [&](const torch::Tensor& x, int64_t column) {
      return x.slice(0, begin, end).slice(1, column, column + inner);
    };
    const torch::Tensor gate = part(gate_up, 0), up = part(gate_up, inner);
    const torch::Tensor dy = part(dactivation, 0);
    torch::Tensor activation = part(result.activation, 0);
    torch::Tensor dgate = part(result.dgate_up, 0), dup = part(result.dgate_up, inner);
    torch::Tensor s = torch::sigmoid(gate);
    const torch::Tensor silu = gate * s;
    at::mul_out(activation, silu, up);
    at::mul_out(dup, silu, dy);
    at::mul_out(dgate, dy, up);
    dgate.mul_(torch::addcmul(s, s, silu, -1.0).add_(silu));
  }
  return result;
}

}  // namespace ringleader::model
