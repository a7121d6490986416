// TokenOps by the fused passes of kernels/reference, in fp32 on the CPU, rows split among threads.
// Results do not depend on the number of threads.
#pragma once

#include "kernels/reference/math/thread_pool.h"
#include "worker/model/decoder/token_ops.h"

namespace ringleader::model {

// Matrix products and what else LibTorch computes run on LibTorch's threads instead.
class CpuTokenOps : public TokenOps {
 public:
  explicit CpuTokenOps(int threads) : pool_(threads) {}

  Norm NormForward(const torch::Tensor& x, const torch::Tensor& residual,
                   const torch::Tensor& weight, double epsilon) const override;
  torch::Tensor NormBackward(const torch::Tensor& dy, const torch::Tensor& sum,
                             const torch::Tensor& rstd, const torch::Tensor& weight,
                             const torch::Tensor& d_sum,
                             const torch::Tensor& d_weight) const override;
  void PrepareRotary(Rotary& rotary) const override;
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

 private:
  mutable kernels::reference::ThreadPool pool_;
};

}  // namespace ringleader::model
