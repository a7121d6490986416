#include "kernels/ops/cast_ops.h"

#include "kernels/ops/cuda_call.h"

namespace ringleader::kernels::ops {

CastTensors EmptyCast(int64_t rows, int64_t dim, const torch::Tensor& like) {
  return {.codes = torch::empty({rows, dim}, like.options().dtype(torch::kFloat8_e4m3fn)),
          .scales = torch::empty({rows, 1}, like.options().dtype(torch::kFloat))};
}

fused::E4m3Rows View(const CastTensors& cast) {
  if (!cast.defined()) return {};
  return {.codes = static_cast<uint8_t*>(cast.codes.mutable_data_ptr()),
          .scales = cast.scales.mutable_data_ptr<float>()};
}

CastTensors CastRows(const torch::Tensor& x) {
  CheckCuda(x, torch::kBFloat16, "CastRows: x");
  TORCH_CHECK(x.dim() == 2, "CastRows: x must be a matrix, it is ", x.sizes());
  const CastTensors cast = EmptyCast(x.size(0), x.size(1), x);
  Check(fused::CastRows({.x = Bf16(x),
                         .cast = View(cast),
                         .stride = x.stride(0),
                         .rows = x.size(0),
                         .dim = x.size(1)},
                        Stream()));
  return cast;
}

CastTensors TurnRows(const CastTensors& rows) {
  const int64_t count = rows.codes.size(0), dim = rows.codes.size(1);
  TORCH_CHECK(rows.codes.is_contiguous() && rows.scales.is_contiguous(),
              "TurnRows: codes and scales must be dense");
  CastTensors turned = EmptyCast(dim, fused::PaddedRows(count), rows.codes);
  turned.scales = torch::empty({1, 1}, rows.scales.options());
  Check(fused::TurnCodes({.codes = static_cast<const uint8_t*>(rows.codes.const_data_ptr()),
                          .scales = rows.scales.const_data_ptr<float>(),
                          .turned = static_cast<uint8_t*>(turned.codes.mutable_data_ptr()),
                          .scale = turned.scales.mutable_data_ptr<float>(),
                          .rows = count,
                          .dim = dim},
                         Stream()));
  return turned;
}

}  // namespace ringleader::kernels::ops
