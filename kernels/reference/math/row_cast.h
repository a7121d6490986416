// Rows of fp32 in e4m3 with a scale each: the CPU engine's half of kernels/fused/cast.h, whose
// codes are the same. Runs on the calling thread; a row's result does not depend on how rows are
// split.
#pragma once

#include <cstdint>

namespace ringleader::kernels::reference {

struct CastRowsArgs {
  const float* x = nullptr;  // [rows, dim], rows `stride` elements apart
  uint8_t* codes = nullptr;  // [rows, dim], dense
  float* scales = nullptr;   // [rows], as E4m3ScaleOf has them
  int64_t stride = 0;
  int64_t rows = 0;
  int64_t dim = 0;
};
void CastRows(const CastRowsArgs& args);

}  // namespace ringleader::kernels::reference
