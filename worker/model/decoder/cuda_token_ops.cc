#include "worker/model/decoder/cuda_token_ops.h"

#include "kernels/fused/cross_entropy.h"
#include "kernels/fused/embedding.h"
#include "kernels/ops/cuda_call.h"
#include "kernels/ops/elementwise_ops.h"

namespace ringleader::model {
namespace {

namespace fused = kernels::fused;
namespace ops = kernels::ops;
using torch::Tensor;

static_assert(kIgnoreLabel == fused::kIgnoredLabel);

// Results lie in their inputs' memory where TokenOps allows it.
class CudaTokenOps : public TokenOps {
 public:
  Norm NormForward(const Tensor& x, const Tensor& residual, const Tensor& weight,
                   double epsilon) const override {
    const ops::NormRows rows = ops::NormForward(x, residual, weight, epsilon, /*sum=*/residual);
    return {.sum = residual.defined() ? residual : x, .y = rows.y, .rstd = rows.rstd};
  }

  Tensor NormBackward(const Tensor& dy, const Tensor& sum, const Tensor& rstd, const Tensor& weight,
                      const Tensor& d_sum, const Tensor& d_weight) const override {
    ops::NormBackward(dy, sum, rstd, weight, d_sum, /*dx=*/dy, d_weight);
    return dy;
  }

  void Rotate(const Tensor& q, const Tensor& k, const Rotary& rotary, bool inverse,
              const Tensor& q_out, const Tensor& k_out) const override {
    ops::Rotate(q, k, rotary.positions, rotary.inverse_frequencies, rotary.scale, inverse, q_out,
                k_out);
  }

  Tensor SwiGlu(const Tensor& gate_up) const override { return ops::SwiGluForward(gate_up); }

  SwiGluGradient SwiGluBackward(const Tensor& d_activation, const Tensor& gate_up) const override {
    ops::SwiGluBackward(d_activation, gate_up, /*activation=*/d_activation, /*d_gate_up=*/gate_up);
    return {.activation = d_activation, .d_gate_up = gate_up};
  }

  void AddWeightGradient(const Tensor& dy, const Tensor& x, const Tensor& d_weight) const override {
    Tensor sum = d_weight;
    at::addmm_out(sum, sum, dy.t(), x, torch::kFloat);
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
