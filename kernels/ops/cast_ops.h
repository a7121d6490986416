// Casts of bf16 matrices to e4m3 with a scale a row (kernels/fused/cast.h), over LibTorch's
// tensors. What does not fit surfaces as c10::Error.
#pragma once

#include <torch/types.h>

#include "kernels/fused/cast.h"

namespace ringleader::kernels::ops {

struct CastTensors {
  torch::Tensor codes;   // [rows, dim] Float8_e4m3fn
  torch::Tensor scales;  // [rows, 1] fp32
  bool defined() const { return codes.defined(); }
};

// Not yet filled, on the device of `like`.
CastTensors EmptyCast(int64_t rows, int64_t dim, const torch::Tensor& like);
// As kernels take it; null where undefined.
fused::E4m3Rows View(const CastTensors& cast);

// x: [rows, dim], whose rows may lie apart.
CastTensors CastRows(const torch::Tensor& x);
// The rows of a cast, turned, with one scale for all (fused::TurnCodes): codes [dim, rows], padded
// with zeros to fused::PaddedRows, scales [1, 1].
CastTensors TurnRows(const CastTensors& rows);

}  // namespace ringleader::kernels::ops
