// TokenOps by LibTorch's own operators, on any device and in any type: what the fused passes are
// tested against. The gradient of the embedding has the same bits every time on the CPU alone.
#pragma once

#include "worker/model/decoder/token_ops.h"

namespace ringleader::model {

class PlainTokenOps : public TokenOps {
 public:
  Norm NormForward(const torch::Tensor& x, const torch::Tensor& residual,
                   const torch::Tensor& weight, double epsilon) const override;
  torch::Tensor NormBackward(const torch::Tensor& dy, const torch::Tensor& sum,
                             const torch::Tensor& rstd, const torch::Tensor& weight,
                             const torch::Tensor& d_sum,
                             const torch::Tensor& d_weight) const override;
  void Rotate(const torch::Tensor& q, const torch::Tensor& k, const Rotary& rotary, bool inverse,
              const torch::Tensor& q_out, const torch::Tensor& k_out) const override;
  torch::Tensor SwiGlu(const torch::Tensor& gate_up) const override;
  SwiGluGradient SwiGluBackward(const torch::Tensor& d_activation,
                                const torch::Tensor& gate_up) const override;
  void AddWeightGradient(const torch::Tensor& dy, const torch::Tensor& x,
                         const torch::Tensor& d_weight) const override;
  torch::Tensor CrossEntropy(const torch::Tensor& logits, const torch::Tensor& labels,
                             bool gradient) const override;
  void AddEmbeddingGradient(const torch::Tensor& dx, const torch::Tensor& tokens,
                            const torch::Tensor& d_table) const override;
};

}  // namespace ringleader::model
