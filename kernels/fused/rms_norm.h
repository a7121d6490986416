// RMSNorm over the last dimension, with the residual addition before it fused in. bf16 in and out,
// fp32 inside.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "kernels/fused/cast.h"

namespace ringleader::kernels::fused {

inline constexpr int64_t kMaxNormDim = 8192;

// h = x + residual (x when residual is null);  y = h * rstd * weight,  rstd = 1 / sqrt(mean(h^2) +
// epsilon). All tensors dense and 16-byte aligned; dim a multiple of 8, at most kMaxNormDim.
// Outputs may alias inputs. `cast` receives y, as rounded to bf16.
struct RmsNormForwardArgs {
  const __nv_bfloat16* x = nullptr;         // [rows, dim]
  const __nv_bfloat16* residual = nullptr;  // [rows, dim] or null
  const __nv_bfloat16* weight = nullptr;    // [dim]
  __nv_bfloat16* sum = nullptr;             // [rows, dim], h; null exactly when residual is
  __nv_bfloat16* y = nullptr;               // [rows, dim]; may be null where cast is set
  E4m3Rows cast = {};
  float* rstd = nullptr;  // [rows]
  int64_t rows = 0;
  int64_t dim = 0;
  float epsilon = 1e-6f;
};
absl::Status RmsNormForward(const RmsNormForwardArgs& args, cudaStream_t stream);

// dx, which is the gradient of x and of residual alike, and d_weight += (deterministic). `cast`
// receives dx, as rounded to bf16.
struct RmsNormBackwardArgs {
  const __nv_bfloat16* h = nullptr;       // [rows, dim], what was normalised
  const __nv_bfloat16* weight = nullptr;  // [dim]
  const float* rstd = nullptr;            // [rows]
  const __nv_bfloat16* dy = nullptr;      // [rows, dim]
  const __nv_bfloat16* d_sum =
      nullptr;                  // [rows, dim], gradient that reaches h past the norm; or null
  __nv_bfloat16* dx = nullptr;  // [rows, dim]; may alias dy or d_sum
  E4m3Rows cast = {};
  float* d_weight = nullptr;  // [dim], added to
  void* workspace = nullptr;  // RmsNormWorkspaceBytes(dim) bytes
  int64_t rows = 0;
  int64_t dim = 0;
};
size_t RmsNormWorkspaceBytes(int64_t dim);
absl::Status RmsNormBackward(const RmsNormBackwardArgs& args, cudaStream_t stream);

}  // namespace ringleader::kernels::fused
