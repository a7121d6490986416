#include "worker/model/testing/plain_token_ops.h"

#include <tuple>

namespace ringleader::model {
namespace {

using torch::Tensor;

// What the formulas are computed in: at least fp32.
torch::ScalarType Wide(const Tensor& x) {
  return x.scalar_type() == torch::kDouble ? torch::kDouble : torch::kFloat;
}

// Dimension i turns with i + d / 2. x: [n, heads, d]; cos, sin: [n, 1, d / 2].
void RotateHeads(const Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor& out) {
  const int64_t half = x.size(2) / 2;
  const Tensor wide = x.to(Wide(x), /*non_blocking=*/false, /*copy=*/true);
  const Tensor low = wide.slice(2, 0, half), high = wide.slice(2, half);
  out.slice(2, 0, half).copy_(low * cos - high * sin);
  out.slice(2, half).copy_(high * cos + low * sin);
}

Tensor Decoded(const ScaledRows& rows) {
  return rows.codes.to(torch::kFloat).to(torch::kDouble) * rows.scales;
}

}  // namespace

TokenOps::Norm PlainTokenOps::NormForward(const Tensor& x, const Tensor& residual,
                                          const Tensor& weight, double epsilon, Form form) const {
  Norm norm;
  norm.sum = residual.defined() ? x + residual : x;
  const Tensor wide = norm.sum.to(Wide(x));
  norm.rstd = (wide.square().mean(1, /*keepdim=*/true) + epsilon).rsqrt();
  norm.y = InForm((wide * norm.rstd * weight).to(x.scalar_type()), form);
  return norm;
}

Operand PlainTokenOps::NormBackward(const Tensor& dy, const Tensor& sum, const Tensor& rstd,
                                    const Tensor& weight, const Tensor& d_sum,
                                    const Tensor& d_weight, Form form) const {
  const Tensor normed = sum.to(Wide(sum)) * rstd, upstream = dy.to(Wide(dy));
  d_weight.add_((upstream * normed).sum(0));
  const Tensor weighted = upstream * weight;
  Tensor dx = (weighted - normed * (weighted * normed).mean(1, /*keepdim=*/true)) * rstd;
  if (d_sum.defined()) dx += d_sum;
  return InForm(dx.to(sum.scalar_type()), form);
}

void PlainTokenOps::Rotate(const Tensor& q, const Tensor& k, const Rotary& rotary, bool inverse,
                           const Tensor& q_out, const Tensor& k_out) const {
  // Angles in fp32, as models are trained and run elsewhere: fp64 would turn far positions by other
  // amounts.
  const Tensor angles =
      rotary.positions.to(torch::kFloat).unsqueeze(1) * rotary.inverse_frequencies;
  const Tensor cos = angles.cos().mul_(rotary.scale).unsqueeze(1);
  const Tensor sin = angles.sin().mul_(inverse ? -rotary.scale : rotary.scale).unsqueeze(1);
  RotateHeads(q, cos, sin, q_out);
  RotateHeads(k, cos, sin, k_out);
}

Operand PlainTokenOps::SwiGlu(const Tensor& gate_up, Form form) const {
  const auto halves = gate_up.to(Wide(gate_up)).chunk(2, 1);
  return InForm((torch::silu(halves[0]) * halves[1]).to(gate_up.scalar_type()), form);
}

TokenOps::SwiGluGradient PlainTokenOps::SwiGluBackward(const Tensor& d_activation,
                                                       const Tensor& gate_up, Form form) const {
  const auto halves = gate_up.to(Wide(gate_up)).chunk(2, 1);
  const Tensor &gate = halves[0], &up = halves[1];
  const Tensor upstream = d_activation.to(Wide(gate_up));
  const Tensor sigmoid = gate.sigmoid(), silu = gate * sigmoid;
  const Tensor d_gate = upstream * up * (sigmoid + silu - silu * sigmoid);
  return {.activation = InForm((silu * up).to(gate_up.scalar_type()), form),
          .d_gate_up =
              InForm(torch::cat({d_gate, upstream * silu}, 1).to(gate_up.scalar_type()), form)};
}

// Rounds as LibTorch does; a row's scale is the least power of two that keeps it within 448.
ScaledRows PlainTokenOps::CastRows(const Tensor& x) const {
  const Tensor wide = x.to(torch::kDouble);
  const Tensor amax = wide.abs().amax(1, /*keepdim=*/true);  // NaN where the row has one
  // amax = mantissa * power, 448 = 0.875 * 2^9. GPUs divide by a number by multiplying with its
  // inverse, which rounds: nothing here divides but by what divides exactly.
  const Tensor mantissa = std::get<0>(torch::frexp(amax));
  Tensor scales = amax / mantissa * torch::where(mantissa > 0.875, 0x1p-8, 0x1p-9);
  scales = scales.clamp_min(0x1p-126);
  scales = torch::where(amax == 0, 0x1p-126, torch::where(amax.isfinite(), scales, amax * 0 / 0));
  return {.codes = (wide / scales).to(torch::kFloat).to(torch::kFloat8_e4m3fn),
          .scales = scales.to(torch::kFloat)};
}

ScaledRows PlainTokenOps::TurnRows(const ScaledRows& rows) const {
  const Tensor scale = rows.scales.max().view({1, 1});
  const Tensor values = rows.codes.to(torch::kFloat).to(torch::kDouble) * (rows.scales / scale);
  return {.codes = values.t().to(torch::kFloat).to(torch::kFloat8_e4m3fn).contiguous(),
          .scales = scale};
}

void PlainTokenOps::ScaledProduct(const ScaledRows& a, const ScaledRows& b, const Tensor& bias,
                                  Tensor y) const {
  const Tensor product = Decoded(a).mm(Decoded(b).t());
  y.copy_(bias.defined() ? product + bias : product);
}

void PlainTokenOps::AddScaledWeightGradient(const ScaledRows& dy, const ScaledRows& x,
                                            const Tensor& d_weight) const {
  d_weight.add_(Decoded(TurnRows(dy)).mm(Decoded(TurnRows(x)).t()));
}

void PlainTokenOps::AddWeightGradient(const Tensor& dy, const Tensor& x,
                                      const Tensor& d_weight) const {
  d_weight.addmm_(dy.to(torch::kFloat).t(), x.to(torch::kFloat));
}

Tensor PlainTokenOps::CrossEntropy(const Tensor& logits, const Tensor& labels,
                                   bool gradient) const {
  const Tensor kept = labels.ne(kIgnoreLabel).unsqueeze(1);        // [n, 1]
  const Tensor index = labels.unsqueeze(1).masked_fill(~kept, 0);  // [n, 1]
  const Tensor log_p = torch::log_softmax(logits.to(Wide(logits)), 1);
  // Filled, not multiplied: a row that does not count must not spread a NaN either.
  const Tensor losses = log_p.gather(1, index).neg_().masked_fill_(~kept, 0.0).squeeze(1);
  if (gradient) {
    Tensor d_logits = log_p.exp();  // softmax - one_hot(label)
    d_logits.scatter_add_(1, index, torch::full_like(index, -1.0, d_logits.options()));
    logits.copy_(d_logits.masked_fill_(~kept, 0.0));
  }
  return losses.to(torch::kFloat);
}

void PlainTokenOps::AddEmbeddingGradient(const Tensor& dx, const Tensor& tokens,
                                         const Tensor& d_table) const {
  d_table.index_add_(0, tokens, dx.to(torch::kFloat));
}

}  // namespace ringleader::model
