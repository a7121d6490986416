// TokenOps by LibTorch's own operators, on any device and in any type: what the fused passes are
// tested against. The gradient of the embedding has the same bits every time on the CPU alone.
#pragma once

#include "worker/model/token_ops/token_ops.h"

namespace ringleader::model {

class PlainTokenOps : public TokenOps {
 public:
  Norm NormForward(const torch::Tensor& x, const torch::Tensor& residual,
                   const torch::Tensor& weight, double epsilon, Form form) const override;
  Operand NormBackward(const torch::Tensor& dy, const torch::Tensor& sum, const torch::Tensor& rstd,
                       const torch::Tensor& weight, const torch::Tensor& d_sum,
                       const torch::Tensor& d_weight, Form form) const override;
  void Rotate(const torch::Tensor& q, const torch::Tensor& k, const Rotary& rotary, bool inverse,
              const torch::Tensor& q_out, const torch::Tensor& k_out) const override;
  Operand SwiGlu(const torch::Tensor& gate_up, Form form) const override;
  SwiGluGradient SwiGluBackward(const torch::Tensor& d_activation, const torch::Tensor& gate_up,
                                Form form) const override;
  ScaledRows CastRows(const torch::Tensor& x) const override;
  ScaledRows TurnRows(const ScaledRows& rows) const override;
  void ScaledProduct(const ScaledRows& a, const ScaledRows& b, const torch::Tensor& bias,
                     torch::Tensor y) const override;
  void AddScaledWeightGradient(const ScaledRows& dy, const ScaledRows& x,
                               const torch::Tensor& d_weight) const override;
  void AddWeightGradient(const torch::Tensor& dy, const torch::Tensor& x,
                         const torch::Tensor& d_weight) const override;
  torch::Tensor CrossEntropy(const torch::Tensor& logits, const torch::Tensor& labels,
                             bool gradient) const override;
  void AddEmbeddingGradient(const torch::Tensor& dx, const torch::Tensor& tokens,
                            const torch::Tensor& d_table) const override;
};

}  // namespace ringleader::model
