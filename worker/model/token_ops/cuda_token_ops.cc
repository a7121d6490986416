#include "worker/model/token_ops/cuda_token_ops.h"

#include <optional>
#include <utility>

#include "kernels/fused/cross_entropy.h"
#include "kernels/fused/embedding.h"
#include "kernels/ops/cast_ops.h"
#include "kernels/ops/cuda_call.h"
#include "kernels/ops/elementwise_ops.h"

namespace ringleader::model {
namespace {

namespace fused = kernels::fused;
namespace ops = kernels::ops;
using torch::Tensor;

static_assert(kIgnoreLabel == fused::kIgnoredLabel);

// Memory for the cast of a result, where `form` asks for one.
ops::CastTensors Room(int64_t rows, int64_t dim, const Tensor& like, Form form) {
  return form == Form::kValues ? ops::CastTensors{} : ops::EmptyCast(rows, dim, like);
}

ScaledRows Rows(ops::CastTensors cast) {
  return {.codes = std::move(cast.codes), .scales = std::move(cast.scales)};
}

// Results lie in their inputs' memory where TokenOps allows it.
class CudaTokenOps : public TokenOps {
 public:
  Norm NormForward(const Tensor& x, const Tensor& residual, const Tensor& weight, double epsilon,
                   Form form) const override {
    const ops::CastTensors cast = Room(x.size(0), x.size(1), x, form);
    const ops::NormRows rows = ops::NormForward(x, residual, weight, epsilon, /*sum=*/residual,
                                                cast, /*want_y=*/form != Form::kRows);
    return {.sum = residual.defined() ? residual : x,
            .y = {.values = rows.y, .rows = Rows(cast)},
            .rstd = rows.rstd};
  }

  Operand NormBackward(const Tensor& dy, const Tensor& sum, const Tensor& rstd,
                       const Tensor& weight, const Tensor& d_sum, const Tensor& d_weight,
                       Form form) const override {
    const ops::CastTensors cast = Room(dy.size(0), dy.size(1), dy, form);
    ops::NormBackward(dy, sum, rstd, weight, d_sum, /*dx=*/dy, d_weight, cast);
    return {.values = dy, .rows = Rows(cast)};
  }

  void Rotate(const Tensor& q, const Tensor& k, const Rotary& rotary, bool inverse,
              const Tensor& q_out, const Tensor& k_out) const override {
    ops::Rotate(q, k, rotary.positions, rotary.inverse_frequencies, rotary.scale, inverse, q_out,
                k_out);
  }

  Operand RotateBack(const Tensor& dq, const Tensor& dk, const Tensor& dv, const Rotary& rotary,
                     const Tensor& room, Form form) const override {
    if (form == Form::kValues) return TokenOps::RotateBack(dq, dk, dv, rotary, room, form);
    const int64_t n = dq.size(0), width = (dq.size(1) + 2 * dk.size(1)) * dq.size(2);
    const Tensor values = form == Form::kRows ? Tensor() : room.view({n, width});
    const ops::CastTensors cast = ops::EmptyCast(n, width, dq);
    ops::RotateBack(dq, dk, dv, rotary.positions, rotary.inverse_frequencies, rotary.scale, values,
                    cast);
    return {.values = values, .rows = Rows(cast)};
  }

  Operand SwiGlu(const Tensor& gate_up, Form form) const override {
    const ops::CastTensors cast = Room(gate_up.size(0), gate_up.size(1) / 2, gate_up, form);
    const Tensor out = ops::SwiGluForward(gate_up, cast, /*want_out=*/form != Form::kRows);
    return {.values = out, .rows = Rows(cast)};
  }

  SwiGluGradient SwiGluBackward(const Tensor& d_activation, const Tensor& gate_up,
                                Form form) const override {
    const int64_t rows = gate_up.size(0), inner = d_activation.size(1);
    const ops::CastTensors cast = Room(rows, 2 * inner, gate_up, form),
                           activation_cast = Room(rows, inner, gate_up, form);
    const bool want_values = form != Form::kRows;
    const Tensor activation = want_values ? d_activation : Tensor(),
                 d_gate_up = want_values ? gate_up : Tensor();
    ops::SwiGluBackward(d_activation, gate_up, activation, d_gate_up, cast, activation_cast);
    return {.activation = {.values = activation, .rows = Rows(activation_cast)},
            .d_gate_up = {.values = d_gate_up, .rows = Rows(cast)}};
  }

  ScaledRows CastRows(const Tensor& x) const override { return Rows(ops::CastRows(x)); }
  ScaledRows TurnRows(const ScaledRows& rows) const override {
    return Rows(ops::TurnRows({.codes = rows.codes, .scales = rows.scales}));
  }

  // Sums stay in fp32 registers all the way: without fast accumulation.
  void ScaledProduct(const ScaledRows& a, const ScaledRows& b, const Tensor& bias,
                     Tensor y) const override {
    at::_scaled_mm_out(y, a.codes, b.codes.t(), a.scales,
                       b.scales.expand({b.codes.size(0), 1}).contiguous().t(),
                       bias.defined() ? std::optional<Tensor>(bias) : std::nullopt,
                       /*scale_result=*/std::nullopt, y.scalar_type(), /*use_fast_accum=*/false);
  }

  void AddWeightGradient(const Tensor& dy, const Tensor& x, const Tensor& d_weight) const override {
    Tensor sum = d_weight;
    at::addmm_out(sum, sum, dy.t(), x, torch::kFloat);
  }

  void AddScaledWeightGradient(const ScaledRows& dy, const ScaledRows& x,
                               const Tensor& d_weight) const override {
    const ScaledRows a = TurnRows(dy), b = TurnRows(x);
    d_weight.add_(at::_scaled_mm(a.codes, b.codes.t(), a.scales, b.scales, /*bias=*/std::nullopt,
                                 /*scale_result=*/std::nullopt, torch::kFloat,
                                 /*use_fast_accum=*/false));
  }

  Tensor CrossEntropy(const Tensor& logits, const Tensor& labels, bool gradient) const override {
    return ops::CrossEntropy(logits, labels, gradient);
  }

  void AddEmbeddingGradient(const Tensor& dx, const Tensor& tokens,
                            const Tensor& d_table) const override {
    ops::CheckRows(dx, "AddEmbeddingGradient: dx");
    ops::CheckCuda(d_table, torch::kFloat, "AddEmbeddingGradient: d_table");
    // Stable: a token's rows are added in the order of their places.
    const auto [sorted, order] = tokens.sort(/*stable=*/true, /*dim=*/0, /*descending=*/false);
    ops::Check(fused::EmbeddingBackward({.dx = ops::Bf16(dx),
                                         .tokens = sorted.const_data_ptr<int64_t>(),
                                         .order = order.const_data_ptr<int64_t>(),
                                         .table = d_table.mutable_data_ptr<float>(),
                                         .rows = dx.size(0),
                                         .dim = dx.size(1)},
                                        ops::Stream()));
  }
};

}  // namespace

std::unique_ptr<TokenOps> NewCudaTokenOps() {
  return std::make_unique<CudaTokenOps>();
}

}  // namespace ringleader::model
