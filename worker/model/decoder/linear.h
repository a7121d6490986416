// The products of a linear layer y = x W^T + b: y, dx = dy W and dW = dy^T x. Without casts of the
// weight they read the model's type, with them e4m3.
#pragma once

#include "worker/model/decoder/weight_casts.h"
#include "worker/model/token_ops/token_ops.h"

namespace ringleader::model {

class Linear {
 public:
  // bias may be undefined; casts may be null, or has those of `which`. All outlive this.
  Linear(const TokenOps& ops, const torch::Tensor& weight, const torch::Tensor& bias,
         LayerCasts* casts, Weight which)
      : ops_(ops), weight_(weight), bias_(bias), casts_(casts), which_(which) {}

  // The form in which products read their operand, and that with the values beside it, for what
  // else reads them.
  Form read() const { return casts_ != nullptr ? Form::kRows : Form::kValues; }
  Form read_twice() const { return casts_ != nullptr ? Form::kBoth : Form::kValues; }
  // `values`, which no step has cast on its way, in that form.
  Operand Read(const torch::Tensor& values) const;

  // [n, in] -> [n, out].
  torch::Tensor Forward(const Operand& x) const;
  // The same bits, into y.
  void Forward(const Operand& x, torch::Tensor y) const;
  // [n, out] -> [n, in].
  torch::Tensor InputGradient(const Operand& dy) const;
  void InputGradient(const Operand& dy, torch::Tensor dx) const;
  // dW: [out, in] fp32 += dy^T x; with casts kWeightGradientTokens at a time.
  void AddWeightGradient(const Operand& dy, const Operand& x, const torch::Tensor& d_weight) const;

  // No product follows for a while: what the casts of the weight take is free for others.
  void Done() const {
    if (casts_ != nullptr) casts_->Done(which_);
  }

 private:
  const TokenOps& ops_;
  const torch::Tensor& weight_;  // [out, in]
  const torch::Tensor& bias_;    // [out]
  LayerCasts* const casts_;
  const Weight which_;
};

// Rows [begin, end) of either form.
Operand SliceRows(const Operand& operand, int64_t begin, int64_t end);

}  // namespace ringleader::model
