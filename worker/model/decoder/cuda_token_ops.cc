#include "worker/model/decoder/cuda_token_ops.h"

#include "kernels/fused/cross_entropy.h"
#include "kernels/fused/embedding.h"
#include "kernels/fused/rms_norm.h"
#include "kernels/fused/rotate.h"
#include "kernels/fused/swiglu.h"
#include "kernels/ops/cuda_call.h"
#include "kernels/ops/elementwise_ops.h"

namespace ringleader::model {
namespace {

namespace fused = kernels::fused;
namespace ops = kernels::ops;
using ops::Bf16;
using ops::MutableBf16;
using torch::Tensor;

static_assert(kIgnoreLabel == fused::kIgnoredLabel);

void CheckRows(const Tensor& x, const char* name) {
  ops::CheckCuda(x, torch::kBFloat16, name);
  TORCH_CHECK(x.dim() == 2 && x.is_contiguous(), name, " must be a dense matrix, it is ", x.sizes(),
              " with strides ", x.strides());
}

}  // namespace

TokenOps::Norm CudaTokenOps::NormForward(const Tensor& x, const Tensor& residual,
                                         const Tensor& weight, double epsilon) const {
  CheckRows(x, "NormForward: x");
  ops::CheckCuda(weight, torch::kBFloat16, "NormForward: weight");
  if (residual.defined()) {
    CheckRows(residual, "NormForward: residual");
    TORCH_CHECK(residual.sizes() == x.sizes(), "NormForward: residual must be ", x.sizes());
  }
  Norm norm = {.sum = residual.defined() ? residual : x,
               .y = torch::empty_like(x),
               .rstd = torch::empty({x.size(0), 1}, x.options().dtype(torch::kFloat))};
  ops::Check(fused::RmsNormForward({.x = Bf16(x),
                                    .residual = residual.defined() ? Bf16(residual) : nullptr,
                                    .weight = Bf16(weight),
                                    .sum = residual.defined() ? MutableBf16(norm.sum) : nullptr,
                                    .y = MutableBf16(norm.y),
                                    .rstd = norm.rstd.mutable_data_ptr<float>(),
                                    .rows = x.size(0),
                                    .dim = x.size(1),
                                    .epsilon = static_cast<float>(epsilon)},
                                   ops::Stream()));
  return norm;
}

Tensor CudaTokenOps::NormBackward(const Tensor& dy, const Tensor& sum, const Tensor& rstd,
                                  const Tensor& weight, const Tensor& d_sum,
                                  const Tensor& d_weight) const {
  CheckRows(dy, "NormBackward: dy");
  CheckRows(sum, "NormBackward: sum");
  if (d_sum.defined()) CheckRows(d_sum, "NormBackward: d_sum");
  ops::CheckCuda(d_weight, torch::kFloat, "NormBackward: d_weight");
  const Tensor scratch =
      ops::Scratch(static_cast<int64_t>(fused::RmsNormWorkspaceBytes(sum.size(1))), sum);
  ops::Check(fused::RmsNormBackward({.h = Bf16(sum),
                                     .weight = Bf16(weight),
                                     .rstd = rstd.const_data_ptr<float>(),
                                     .dy = Bf16(dy),
                                     .d_sum = d_sum.defined() ? Bf16(d_sum) : nullptr,
                                     .dx = MutableBf16(dy),
                                     .d_weight = d_weight.mutable_data_ptr<float>(),
                                     .workspace = scratch.mutable_data_ptr(),
                                     .rows = sum.size(0),
                                     .dim = sum.size(1)},
                                    ops::Stream()));
  return dy;
}

void CudaTokenOps::Rotate(const Tensor& q, const Tensor& k, const Rotary& rotary, bool inverse,
                          const Tensor& q_out, const Tensor& k_out) const {
  ops::CheckCuda(rotary.positions, torch::kLong, "Rotate: positions");
  ops::CheckCuda(rotary.inverse_frequencies, torch::kFloat, "Rotate: inverse_frequencies");
  ops::Check(fused::Rope({.q = ops::View(q),
                          .k = ops::View(k),
                          .q_out = ops::MutableView(q_out),
                          .k_out = ops::MutableView(k_out),
                          .positions = rotary.positions.const_data_ptr<int64_t>(),
                          .inv_freq = rotary.inverse_frequencies.const_data_ptr<float>(),
                          .scale = static_cast<float>(rotary.scale),
                          .inverse = inverse},
                         ops::Stream()));
}

Tensor CudaTokenOps::SwiGlu(const Tensor& gate_up) const {
  return ops::SwiGluForward(gate_up);
}

TokenOps::SwiGluGradient CudaTokenOps::SwiGluBackward(const Tensor& d_activation,
                                                      const Tensor& gate_up) const {
  CheckRows(d_activation, "SwiGluBackward: d_activation");
  CheckRows(gate_up, "SwiGluBackward: gate_up");
  const int64_t inner = d_activation.size(1);
  // In place: every element is read before its results are written.
  ops::Check(fused::SwigluBackward({.gate = {Bf16(gate_up), 2 * inner},
                                    .up = {Bf16(gate_up) + inner, 2 * inner},
                                    .d_out = {Bf16(d_activation), inner},
                                    .d_gate = {MutableBf16(gate_up), 2 * inner},
                                    .d_up = {MutableBf16(gate_up) + inner, 2 * inner},
                                    .out = {MutableBf16(d_activation), inner},
                                    .rows = gate_up.size(0),
                                    .dim = inner},
                                   ops::Stream()));
  return {.activation = d_activation, .d_gate_up = gate_up};
}

void CudaTokenOps::AddWeightGradient(const Tensor& dy, const Tensor& x,
                                     const Tensor& d_weight) const {
  Tensor sum = d_weight;
  at::addmm_out(sum, sum, dy.t(), x, torch::kFloat);
}

Tensor CudaTokenOps::CrossEntropy(const Tensor& logits, const Tensor& labels, bool gradient) const {
  ops::CheckCuda(logits, torch::kBFloat16, "CrossEntropy: logits");
  ops::CheckCuda(labels, torch::kLong, "CrossEntropy: labels");
  const auto floats = logits.options().dtype(torch::kFloat);
  Tensor losses = torch::empty({logits.size(0)}, floats);
  const Tensor one = torch::ones({1}, floats);
  ops::Check(fused::CrossEntropy({.logits = MutableBf16(logits),
                                  .stride = logits.stride(0),
                                  .labels = labels.const_data_ptr<int64_t>(),
                                  .loss = losses.mutable_data_ptr<float>(),
                                  .rows = logits.size(0),
                                  .vocabulary = logits.size(1),
                                  .gradient = gradient,
                                  .gradient_scale = one.const_data_ptr<float>()},
                                 ops::Stream()));
  return losses;
}

void CudaTokenOps::AddEmbeddingGradient(const Tensor& dx, const Tensor& tokens,
                                        const Tensor& d_table) const {
  CheckRows(dx, "AddEmbeddingGradient: dx");
  ops::CheckCuda(d_table, torch::kFloat, "AddEmbeddingGradient: d_table");
  // Stable: a token's rows are added in the order of their places.
  const auto [sorted, order] = tokens.sort(/*stable=*/true, /*dim=*/0, /*descending=*/false);
  ops::Check(fused::EmbeddingBackward({.dx = Bf16(dx),
                                       .tokens = sorted.const_data_ptr<int64_t>(),
                                       .order = order.const_data_ptr<int64_t>(),
                                       .table = d_table.mutable_data_ptr<float>(),
                                       .rows = dx.size(0),
                                       .dim = dx.size(1)},
                                      ops::Stream()));
}

}  // namespace ringleader::model
