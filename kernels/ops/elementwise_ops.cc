#include "kernels/ops/elementwise_ops.h"

#include <torch/autograd.h>

#include <algorithm>
#include <utility>

#include "kernels/fused/cross_entropy.h"
#include "kernels/fused/rms_norm.h"
#include "kernels/fused/rotate.h"
#include "kernels/fused/swiglu.h"
#include "kernels/ops/cuda_call.h"

namespace ringleader::kernels::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The gradients of a norm's input and of its weight, in the weight's type.
std::pair<torch::Tensor, torch::Tensor> NormGradients(const variable_list& saved,
                                                      const torch::Tensor& dy,
                                                      const torch::Tensor& d_sum) {
  const torch::Tensor &sum = saved[0], &weight = saved[1], &rstd = saved[2];
  const torch::Tensor dx = torch::empty_like(sum);
  const torch::Tensor d_weight = torch::zeros(weight.sizes(), rstd.options());
  NormBackward(dy.contiguous(), sum, rstd, weight,
               d_sum.defined() ? d_sum.contiguous() : torch::Tensor(), dx, d_weight);
  return {dx, d_weight.to(weight.scalar_type())};
}

class RmsNormFunction : public torch::autograd::Function<RmsNormFunction> {
 public:
  static torch::Tensor forward(AutogradContext* context, const torch::Tensor& x,
                               const torch::Tensor& weight, double epsilon) {
    const NormRows out = NormForward(x, {}, weight, epsilon, {});
    context->save_for_backward({x, weight, out.rstd});
    return out.y;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto [dx, d_weight] = NormGradients(context->get_saved_variables(), gradients[0], {});
    return {dx, d_weight, {}};
  }
};

class AddRmsNormFunction : public torch::autograd::Function<AddRmsNormFunction> {
 public:
  static variable_list forward(AutogradContext* context, const torch::Tensor& x,
                               const torch::Tensor& residual, const torch::Tensor& weight,
                               double epsilon) {
    const torch::Tensor sum = torch::empty_like(x);
    const NormRows out = NormForward(x, residual, weight, epsilon, sum);
    context->save_for_backward({sum, weight, out.rstd});
    return {out.y, sum};
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto [dx, d_weight] =
        NormGradients(context->get_saved_variables(), gradients[0], gradients[1]);
    return {dx, dx, d_weight, {}};
  }
};

class SwiGluFunction : public torch::autograd::Function<SwiGluFunction> {
 public:
  static torch::Tensor forward(AutogradContext* context, const torch::Tensor& gate_up) {
    context->save_for_backward({gate_up});
    return SwiGluForward(gate_up);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const torch::Tensor d_activation = gradients[0].contiguous();
    const torch::Tensor gate_up = context->get_saved_variables()[0];
    const torch::Tensor d_gate_up = torch::empty(gate_up.sizes(), gate_up.options());
    SwiGluBackward(d_activation, gate_up, torch::empty_like(d_activation), d_gate_up);
    return {d_gate_up};
  }
};

class RopeFunction : public torch::autograd::Function<RopeFunction> {
 public:
  static variable_list forward(AutogradContext* context, const torch::Tensor& q,
                               const torch::Tensor& k, const torch::Tensor& positions,
                               const torch::Tensor& inv_freq, double scale) {
    context->save_for_backward({positions, inv_freq});
    context->saved_data["scale"] = scale;
    const torch::Tensor q_out = q.contiguous().clone(), k_out = k.contiguous().clone();
    Rotate(q_out, k_out, positions, inv_freq, scale, /*inverse=*/false, q_out, k_out);
    return {q_out, k_out};
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    const torch::Tensor dq = gradients[0].contiguous().clone(),
                        dk = gradients[1].contiguous().clone();
    Rotate(dq, dk, saved[0], saved[1], context->saved_data["scale"].toDouble(), /*inverse=*/true,
           dq, dk);
    return {dq, dk, {}, {}, {}};
  }
};

// Enough rows for efficient products; 600 MB of logits for a vocabulary of 150,000.
constexpr int64_t kChunkRows = 2048;

class LinearCrossEntropy : public torch::autograd::Function<LinearCrossEntropy> {
 public:
  static torch::Tensor forward(AutogradContext* context, const torch::Tensor& hidden,
                               const torch::Tensor& head, const torch::Tensor& labels,
                               bool needs_gradient) {
    CheckCuda(hidden, torch::kBFloat16, "LinearCrossEntropySum: hidden");
    CheckCuda(head, torch::kBFloat16, "LinearCrossEntropySum: head");
    const int64_t tokens = hidden.size(0), vocabulary = head.size(0);
    const int64_t stride = (vocabulary + 7) / 8 * 8;
    const auto floats = hidden.options().dtype(torch::kFloat);
    const torch::Tensor losses = torch::empty({tokens}, floats);
    const torch::Tensor buffer =
        torch::empty({std::min(tokens, kChunkRows), stride}, hidden.options());
    torch::Tensor d_hidden, d_head;
    if (needs_gradient) {
      d_hidden = torch::empty_like(hidden);
      d_head = torch::zeros(head.sizes(), floats);
    }
    for (int64_t begin = 0; begin < tokens; begin += kChunkRows) {
      const int64_t rows = std::min(kChunkRows, tokens - begin);
      const torch::Tensor chunk = hidden.slice(0, begin, begin + rows);
      torch::Tensor logits = buffer.slice(0, 0, rows).slice(1, 0, vocabulary);
      at::mm_out(logits, chunk, head.t());
      losses.slice(0, begin, begin + rows)
          .copy_(CrossEntropy(logits, labels.slice(0, begin, begin + rows), needs_gradient));
      if (needs_gradient) {
        torch::Tensor d_rows = d_hidden.slice(0, begin, begin + rows);
        at::mm_out(d_rows, logits, head);
        // Summed over chunks in fp32: thousands of chunks would drown in bf16.
        at::addmm_out(d_head, d_head, logits.t(), chunk, torch::kFloat);
      }
    }
    context->save_for_backward({d_hidden, d_head});
    return losses.sum(torch::kDouble);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    const torch::Tensor scale = gradients[0].to(torch::kFloat);
    return {(saved[0] * scale).to(saved[0].scalar_type()),
            (saved[1] * scale).to(saved[0].scalar_type()),
            {},
            {}};
  }
};

}  // namespace

NormRows NormForward(const torch::Tensor& x, const torch::Tensor& residual,
                     const torch::Tensor& weight, double epsilon, const torch::Tensor& sum,
                     const CastTensors& cast, bool want_y) {
  CheckRows(x, "RmsNorm: x");
  CheckCuda(weight, torch::kBFloat16, "RmsNorm: weight");
  if (residual.defined()) {
    CheckRows(residual, "RmsNorm: residual");
    TORCH_CHECK(residual.sizes() == x.sizes(), "RmsNorm: residual must be ", x.sizes());
  }
  NormRows out = {want_y ? torch::empty_like(x) : torch::Tensor(),
                  torch::empty({x.size(0), 1}, x.options().dtype(torch::kFloat))};
  Check(fused::RmsNormForward({.x = Bf16(x),
                               .residual = residual.defined() ? Bf16(residual) : nullptr,
                               .weight = Bf16(weight),
                               .sum = residual.defined() ? MutableBf16(sum) : nullptr,
                               .y = want_y ? MutableBf16(out.y) : nullptr,
                               .cast = View(cast),
                               .rstd = out.rstd.mutable_data_ptr<float>(),
                               .rows = x.size(0),
                               .dim = x.size(1),
                               .epsilon = static_cast<float>(epsilon)},
                              Stream()));
  return out;
}

void NormBackward(const torch::Tensor& dy, const torch::Tensor& sum, const torch::Tensor& rstd,
                  const torch::Tensor& weight, const torch::Tensor& d_sum, const torch::Tensor& dx,
                  const torch::Tensor& d_weight, const CastTensors& cast) {
  CheckRows(dy, "NormBackward: dy");
  CheckRows(sum, "NormBackward: sum");
  CheckCuda(d_weight, torch::kFloat, "NormBackward: d_weight");
  const torch::Tensor scratch =
      Scratch(static_cast<int64_t>(fused::RmsNormWorkspaceBytes(sum.size(1))), sum);
  Check(fused::RmsNormBackward({.h = Bf16(sum),
                                .weight = Bf16(weight),
                                .rstd = rstd.const_data_ptr<float>(),
                                .dy = Bf16(dy),
                                .d_sum = d_sum.defined() ? Bf16(d_sum) : nullptr,
                                .dx = MutableBf16(dx),
                                .cast = View(cast),
                                .d_weight = d_weight.mutable_data_ptr<float>(),
                                .workspace = scratch.mutable_data_ptr(),
                                .rows = sum.size(0),
                                .dim = sum.size(1)},
                               Stream()));
}

torch::Tensor SwiGluForward(const torch::Tensor& gate_up, const CastTensors& cast, bool want_out) {
  CheckCuda(gate_up, torch::kBFloat16, "SwiGlu: gate_up");
  const int64_t rows = gate_up.size(0), inner = gate_up.size(1) / 2, stride = gate_up.stride(0);
  torch::Tensor out;
  if (want_out) out = torch::empty({rows, inner}, gate_up.options());
  Check(fused::SwigluForward({.gate = {Bf16(gate_up), stride},
                              .up = {Bf16(gate_up) + inner, stride},
                              .out = {want_out ? MutableBf16(out) : nullptr, inner},
                              .cast = View(cast),
                              .rows = rows,
                              .dim = inner},
                             Stream()));
  return out;
}

void SwiGluBackward(const torch::Tensor& d_activation, const torch::Tensor& gate_up,
                    const torch::Tensor& activation, const torch::Tensor& d_gate_up,
                    const CastTensors& cast, const CastTensors& activation_cast) {
  CheckRows(d_activation, "SwiGluBackward: d_activation");
  CheckCuda(gate_up, torch::kBFloat16, "SwiGluBackward: gate_up");
  const bool want_values = activation.defined() || d_gate_up.defined() || !cast.codes.defined();
  if (want_values) {
    CheckRows(activation, "SwiGluBackward: activation");
    CheckRows(d_gate_up, "SwiGluBackward: d_gate_up");
  }
  const int64_t inner = d_activation.size(1), stride = gate_up.stride(0);
  Check(fused::SwigluBackward(
      {.gate = {Bf16(gate_up), stride},
       .up = {Bf16(gate_up) + inner, stride},
       .d_out = {Bf16(d_activation), inner},
       .d_gate = {want_values ? MutableBf16(d_gate_up) : nullptr, 2 * inner},
       .d_up = {want_values ? MutableBf16(d_gate_up) + inner : nullptr, 2 * inner},
       .out = {want_values ? MutableBf16(activation) : nullptr, inner},
       .cast = View(cast),
       .out_cast = View(activation_cast),
       .rows = gate_up.size(0),
       .dim = inner},
      Stream()));
}

void Rotate(const torch::Tensor& q, const torch::Tensor& k, const torch::Tensor& positions,
            const torch::Tensor& inv_freq, double scale, bool inverse, const torch::Tensor& q_out,
            const torch::Tensor& k_out) {
  CheckCuda(positions, torch::kLong, "Rotate: positions");
  CheckCuda(inv_freq, torch::kFloat, "Rotate: inv_freq");
  Check(fused::Rope({.q = View(q),
                     .k = View(k),
                     .q_out = MutableView(q_out),
                     .k_out = MutableView(k_out),
                     .positions = positions.const_data_ptr<int64_t>(),
                     .inv_freq = inv_freq.const_data_ptr<float>(),
                     .scale = static_cast<float>(scale),
                     .inverse = inverse},
                    Stream()));
}

void RotateBack(const torch::Tensor& dq, const torch::Tensor& dk, const torch::Tensor& dv,
                const torch::Tensor& positions, const torch::Tensor& inv_freq, double scale,
                const torch::Tensor& out, const CastTensors& cast) {
  CheckCuda(positions, torch::kLong, "RotateBack: positions");
  CheckCuda(inv_freq, torch::kFloat, "RotateBack: inv_freq");
  const int64_t n = dq.size(0), width = (dq.size(1) + 2 * dk.size(1)) * dq.size(2);
  TORCH_CHECK(positions.is_contiguous() && positions.numel() == n && inv_freq.is_contiguous() &&
                  2 * inv_freq.numel() == dq.size(2),
              "RotateBack: ", n, " tokens of head_dim ", dq.size(2), " have ", positions.numel(),
              " positions and ", inv_freq.numel(), " frequencies");
  TORCH_CHECK(cast.codes.is_contiguous() && cast.codes.size(0) == n && cast.codes.size(1) == width,
              "RotateBack: the cast must be [", n, ", ", width, "], it is ", cast.codes.sizes());
  if (out.defined()) {
    CheckCuda(out, torch::kBFloat16, "RotateBack: out");
    TORCH_CHECK(out.is_contiguous() && out.numel() == n * width, "RotateBack: out must hold [", n,
                ", ", width, "], it is ", out.sizes());
  }
  Check(fused::RotateBack({.dq = View(dq),
                           .dk = View(dk),
                           .dv = View(dv),
                           .out = out.defined() ? MutableBf16(out) : nullptr,
                           .cast = View(cast),
                           .positions = positions.const_data_ptr<int64_t>(),
                           .inv_freq = inv_freq.const_data_ptr<float>(),
                           .scale = static_cast<float>(scale)},
                          Stream()));
}

torch::Tensor CrossEntropy(const torch::Tensor& logits, const torch::Tensor& labels,
                           bool gradient) {
  CheckCuda(logits, torch::kBFloat16, "CrossEntropy: logits");
  CheckCuda(labels, torch::kLong, "CrossEntropy: labels");
  const auto floats = logits.options().dtype(torch::kFloat);
  torch::Tensor losses = torch::empty({logits.size(0)}, floats);
  const torch::Tensor one = torch::ones({1}, floats);
  Check(fused::CrossEntropy({.logits = MutableBf16(logits),
                             .stride = logits.stride(0),
                             .labels = labels.const_data_ptr<int64_t>(),
                             .loss = losses.mutable_data_ptr<float>(),
                             .rows = logits.size(0),
                             .vocabulary = logits.size(1),
                             .gradient = gradient,
                             .gradient_scale = one.const_data_ptr<float>()},
                            Stream()));
  return losses;
}

torch::Tensor RmsNorm(const torch::Tensor& x, const torch::Tensor& weight, double epsilon) {
  return RmsNormFunction::apply(x, weight, epsilon);
}

std::tuple<torch::Tensor, torch::Tensor> AddRmsNorm(const torch::Tensor& x,
                                                    const torch::Tensor& residual,
                                                    const torch::Tensor& weight, double epsilon) {
  const variable_list out = AddRmsNormFunction::apply(x, residual, weight, epsilon);
  return {out[0], out[1]};
}

torch::Tensor SwiGlu(const torch::Tensor& gate_up) {
  return SwiGluFunction::apply(gate_up);
}

std::tuple<torch::Tensor, torch::Tensor> Rope(const torch::Tensor& q, const torch::Tensor& k,
                                              const torch::Tensor& positions,
                                              const torch::Tensor& inv_freq, double scale) {
  const variable_list out = RopeFunction::apply(q, k, positions, inv_freq, scale);
  return {out[0], out[1]};
}

torch::Tensor LinearCrossEntropySum(const torch::Tensor& hidden, const torch::Tensor& head,
                                    const torch::Tensor& labels, int64_t ignore_label) {
  const bool needs_gradient =
      torch::GradMode::is_enabled() && (hidden.requires_grad() || head.requires_grad());
  const torch::Tensor kept =
      ignore_label == fused::kIgnoredLabel
          ? labels.contiguous()
          : labels.masked_fill(labels.eq(ignore_label), fused::kIgnoredLabel);
  return LinearCrossEntropy::apply(hidden.contiguous(), head.contiguous(), kept, needs_gradient);
}

}  // namespace ringleader::kernels::ops
