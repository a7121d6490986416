#include "worker/model/decoder/linear.h"

#include <algorithm>

#include "model_shape/precision.h"

namespace ringleader::model {
namespace {

using torch::Tensor;

int64_t Rows(const Operand& operand) {
  return operand.rows.defined() ? operand.rows.codes.size(0) : operand.values.size(0);
}

}  // namespace

Operand Linear::Read(const Tensor& values) const {
  return casts_ != nullptr ? Operand{.values = values, .rows = ops_.CastRows(values)}
                           : Operand{.values = values, .rows = {}};
}

Tensor Linear::Forward(const Operand& x) const {
  Tensor y = torch::empty({Rows(x), weight_.size(0)}, weight_.options());
  Forward(x, y);
  return y;
}

void Linear::Forward(const Operand& x, Tensor y) const {
  if (casts_ != nullptr) {
    ops_.ScaledProduct(x.rows, casts_->ForOutputs(which_), bias_, y);
  } else if (bias_.defined()) {
    at::addmm_out(y, bias_, x.values, weight_.t());
  } else {
    at::mm_out(y, x.values, weight_.t());
  }
}

Tensor Linear::InputGradient(const Operand& dy) const {
  Tensor dx = torch::empty({Rows(dy), weight_.size(1)}, weight_.options());
  InputGradient(dy, dx);
  return dx;
}

void Linear::InputGradient(const Operand& dy, Tensor dx) const {
  if (casts_ != nullptr) {
    ops_.ScaledProduct(dy.rows, casts_->ForInputGradients(which_), {}, dx);
  } else {
    at::mm_out(dx, dy.values, weight_);
  }
}

void Linear::AddWeightGradient(const Operand& dy, const Operand& x, const Tensor& d_weight) const {
  if (casts_ == nullptr) {
    ops_.AddWeightGradient(dy.values, x.values, d_weight);
    return;
  }
  const int64_t n = Rows(dy);
  for (int64_t begin = 0; begin < n; begin += kWeightGradientTokens) {
    const int64_t end = std::min(n, begin + kWeightGradientTokens);
    ops_.AddScaledWeightGradient(SliceRows(dy, begin, end).rows, SliceRows(x, begin, end).rows,
                                 d_weight);
  }
}

Operand SliceRows(const Operand& operand, int64_t begin, int64_t end) {
  const auto slice = [&](const Tensor& x) { return x.defined() ? x.slice(0, begin, end) : x; };
  return {.values = slice(operand.values),
          .rows = {.codes = slice(operand.rows.codes), .scales = slice(operand.rows.scales)}};
}

}  // namespace ringleader::model
