// Matrices of bf16 in e4m3 with a scale a row, as the kernels' E4m3ScaleOf has it: passes of their
// own, for what no kernel of this folder produces. The CPU engine's half, with the same codes, is
// kernels/reference/math/fused.h.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"

namespace ringleader::kernels::fused {

// Where a kernel puts the cast of the rows that it produces. Null: it does not cast.
struct E4m3Rows {
  uint8_t* codes = nullptr;  // [rows, dim], dense, 16-byte aligned
  float* scales = nullptr;   // [rows]
};

// INVALID_ARGUMENT naming `name` unless both are set and 16-byte aligned, or neither is set.
absl::Status CheckCast(const E4m3Rows& cast, const char* name);

// The longest row, which a block holds in registers.
inline constexpr int64_t kMaxCastDim = 32768;

// dim a multiple of 8, at most kMaxCastDim; x 16-byte aligned, rows `stride` apart, a multiple
// of 8.
struct CastRowsArgs {
  const __nv_bfloat16* x = nullptr;  // [rows, dim]
  E4m3Rows cast = {};
  int64_t stride = 0;
  int64_t rows = 0;
  int64_t dim = 0;
};
absl::Status CastRows(const CastRowsArgs& args, cudaStream_t stream);

// A cast turned, with one scale for all of it, the largest of its rows' (E4m3ScaleOf): turned[j, i]
// is the code nearest to codes[i, j] * scales[i] / *scale, ties to even. Both are powers of two, so
// that a code changes only where it becomes smaller than e4m3 has bits for. dim a multiple of 16.
// Rows from `rows` up to PaddedRows are zeros.
struct TurnCodesArgs {
  const uint8_t* codes = nullptr;  // [rows, dim], dense, 16-byte aligned
  const float* scales = nullptr;   // [rows]
  uint8_t* turned = nullptr;       // [dim, PaddedRows(rows)], dense, 16-byte aligned
  float* scale = nullptr;          // [1]
  int64_t rows = 0;
  int64_t dim = 0;
};
// Rows are padded to what the tensor cores sum over at once.
inline int64_t PaddedRows(int64_t rows) {
  return (rows + 15) / 16 * 16;
}
absl::Status TurnCodes(const TurnCodesArgs& args, cudaStream_t stream);

}  // namespace ringleader::kernels::fused
