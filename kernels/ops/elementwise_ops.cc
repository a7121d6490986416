#include "kernels/ops/elementwise_ops.h"

#include <torch/autograd.h>

#include <algorithm>

#include "kernels/fused/cross_entropy.h"
#include "kernels/fused/rms_norm.h"
#include "kernels/fused/rotate.h"
#include "kernels/fused/swiglu.h"
#include "kernels/ops/cuda_call.h"

namespace ringleader::kernels::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// y, rstd and, with a residual, the sum that was normalised.
struct NormOutputs {
  torch::Tensor y, rstd, sum;
};
NormOutputs NormRows(const torch::Tensor& x, const torch::Tensor& residual,
                     const torch::Tensor& weight, double epsilon) {
  CheckCuda(x, torch::kBFloat16, "RmsNorm: x");
  CheckCuda(weight, torch::kBFloat16, "RmsNorm: weight");
  TORCH_CHECK(x.dim() == 2 && x.is_contiguous(), "RmsNorm: x must be a dense [n, hidden], it is ",
              x.sizes());
  NormOutputs out = {torch::empty_like(x),
                     torch::empty({x.size(0), 1}, x.options().dtype(torch::kFloat)),
                     residual.defined() ? torch::empty_like(x) : torch::Tensor()};
  Check(fused::RmsNormForward({.x = Bf16(x),
                               .residual = residual.defined() ? Bf16(residual) : nullptr,
                               .weight = Bf16(weight),
                               .sum = residual.defined() ? MutableBf16(out.sum) : nullptr,
                               .y = MutableBf16(out.y),
                               .rstd = out.rstd.mutable_data_ptr<float>(),
                               .rows = x.size(0),
                               .dim = x.size(1),
                               .epsilon = static_cast<float>(epsilon)},
                              Stream()));
  return out;
}

class RmsNormFunction : public torch::autograd::Function<RmsNormFunction> {
 public:
  static torch::Tensor forward(AutogradContext* context, const torch::Tensor& x,
                               const torch::Tensor& weight, double epsilon) {
    const NormOutputs out = NormRows(x, {}, weight, epsilon);
    context->save_for_backward({x, weight, out.rstd});
    return out.y;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    const NormGradient d = NormBackward(gradients[0], saved[0], saved[2], saved[1]);
    return {d.dx, d.dweight.to(saved[1].scalar_type()), {}};
  }
};

class AddRmsNormFunction : public torch::autograd::Function<AddRmsNormFunction> {
 public:
  static variable_list forward(AutogradContext* context, const torch::Tensor& x,
                               const torch::Tensor& residual, const torch::Tensor& weight,
                               double epsilon) {
    CheckCuda(residual, torch::kBFloat16, "AddRmsNorm: residual");
    TORCH_CHECK(residual.sizes() == x.sizes() && residual.is_contiguous(),
                "AddRmsNorm: residual must be dense and of x's shape ", x.sizes());
    const NormOutputs out = NormRows(x, residual, weight, epsilon);
    context->save_for_backward({out.sum, weight, out.rstd});
    return {out.y, out.sum};
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    const NormGradient d = NormBackward(gradients[0], saved[0], saved[2], saved[1], gradients[1]);
    return {d.dx, d.dx, d.dweight.to(saved[1].scalar_type()), {}};
  }
};

class SwiGluFunction : public torch::autograd::Function<SwiGluFunction> {
 public:
  static torch::Tensor forward(AutogradContext* context, const torch::Tensor& gate_up) {
    context->save_for_backward({gate_up});
    return SwiGluForward(gate_up);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    return {SwiGluBackward(gradients[0].contiguous(), context->get_saved_variables()[0]).dgate_up};
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
    RotateInPlace(q_out, k_out, positions, inv_freq, scale, false);
    return {q_out, k_out};
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    const torch::Tensor dq = gradients[0].contiguous().clone(),
                        dk = gradients[1].contiguous().clone();
    RotateInPlace(dq, dk, saved[0], saved[1], context->saved_data["scale"].toDouble(), true);
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
    CheckCuda(labels, torch::kLong, "LinearCrossEntropySum: labels");
    const int64_t tokens = hidden.size(0), vocabulary = head.size(0);
    const int64_t stride = (vocabulary + 7) / 8 * 8;
    const auto floats = hidden.options().dtype(torch::kFloat);
    const torch::Tensor losses = torch::empty({tokens}, floats), one = torch::ones({1}, floats);
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
      Check(fused::CrossEntropy({.logits = MutableBf16(logits),
                                 .stride = stride,
                                 .labels = labels.const_data_ptr<int64_t>() + begin,
                                 .loss = losses.mutable_data_ptr<float>() + begin,
                                 .rows = rows,
                                 .vocabulary = vocabulary,
                                 .gradient = needs_gradient,
                                 .gradient_scale = one.const_data_ptr<float>()},
                                Stream()));
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

NormResult NormForward(const torch::Tensor& x, const torch::Tensor& weight, double epsilon) {
  const NormOutputs out = NormRows(x, {}, weight, epsilon);
  return {out.y, out.rstd};
}

NormGradient NormBackward(const torch::Tensor& dy, const torch::Tensor& x,
                          const torch::Tensor& rstd, const torch::Tensor& weight,
                          const torch::Tensor& d_sum) {
  CheckCuda(dy, torch::kBFloat16, "NormBackward: dy");
  const torch::Tensor dense = dy.contiguous();
  const torch::Tensor past = d_sum.defined() ? d_sum.contiguous() : torch::Tensor();
  NormGradient out = {torch::empty_like(x),
                      torch::zeros({x.size(1)}, x.options().dtype(torch::kFloat))};
  const torch::Tensor scratch =
      Scratch(static_cast<int64_t>(fused::RmsNormWorkspaceBytes(x.size(1))), x);
  Check(fused::RmsNormBackward({.h = Bf16(x),
                                .weight = Bf16(weight),
                                .rstd = rstd.const_data_ptr<float>(),
                                .dy = Bf16(dense),
                                .d_sum = past.defined() ? Bf16(past) : nullptr,
                                .dx = MutableBf16(out.dx),
                                .d_weight = out.dweight.mutable_data_ptr<float>(),
                                .workspace = scratch.mutable_data_ptr(),
                                .rows = x.size(0),
                                .dim = x.size(1)},
                               Stream()));
  return out;
}

torch::Tensor SwiGluForward(const torch::Tensor& gate_up) {
  CheckCuda(gate_up, torch::kBFloat16, "SwiGlu: gate_up");
  const int64_t rows = gate_up.size(0), inner = gate_up.size(1) / 2, stride = gate_up.stride(0);
  torch::Tensor out = torch::empty({rows, inner}, gate_up.options());
  Check(fused::SwigluForward({.gate = {Bf16(gate_up), stride},
                              .up = {Bf16(gate_up) + inner, stride},
                              .out = {MutableBf16(out), inner},
                              .rows = rows,
                              .dim = inner},
                             Stream()));
  return out;
}

SwiGluGradient SwiGluBackward(const torch::Tensor& dactivation, const torch::Tensor& gate_up) {
  CheckCuda(dactivation, torch::kBFloat16, "SwiGluBackward: dactivation");
  CheckCuda(gate_up, torch::kBFloat16, "SwiGluBackward: gate_up");
  const int64_t rows = gate_up.size(0), inner = gate_up.size(1) / 2, stride = gate_up.stride(0);
  SwiGluGradient out = {torch::empty({rows, inner}, gate_up.options()),
                        torch::empty({rows, 2 * inner}, gate_up.options())};
  Check(fused::SwigluBackward({.gate = {Bf16(gate_up), stride},
                               .up = {Bf16(gate_up) + inner, stride},
                               .d_out = {Bf16(dactivation), dactivation.stride(0)},
                               .d_gate = {MutableBf16(out.dgate_up), 2 * inner},
                               .d_up = {MutableBf16(out.dgate_up) + inner, 2 * inner},
                               .out = {MutableBf16(out.activation), inner},
                               .rows = rows,
                               .dim = inner},
                              Stream()));
  return out;
}

void RotateInPlace(const torch::Tensor& q, const torch::Tensor& k, const torch::Tensor& positions,
                   const torch::Tensor& inv_freq, double scale, bool inverse) {
  CheckCuda(positions, torch::kLong, "Rope: positions");
  CheckCuda(inv_freq, torch::kFloat, "Rope: inv_freq");
  Check(fused::Rope({.q = View(q),
                     .k = View(k),
                     .q_out = MutableView(q),
                     .k_out = MutableView(k),
                     .positions = positions.const_data_ptr<int64_t>(),
                     .inv_freq = inv_freq.const_data_ptr<float>(),
                     .scale = static_cast<float>(scale),
                     .inverse = inverse},
                    Stream()));
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
