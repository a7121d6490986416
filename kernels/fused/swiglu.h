// SwiGLU: out = silu(gate) * up, the non-linearity of a gated feed-forward layer. bf16 in and out,
// fp32 inside.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/fused/cast.h"

namespace ringleader::kernels::fused {

// A [rows, dim] matrix with dense rows, `stride` elements apart: gate and up may be halves of one
// GEMM's output. Pointers 16-byte aligned; dim and strides multiples of 8.
template <typename T>
struct RowMatrix {
  T* data = nullptr;
  int64_t stride = 0;
};

// `cast` receives out, as rounded to bf16; then out may be null, and dim is at most kMaxCastDim.
struct SwigluForwardArgs {
  RowMatrix<const __nv_bfloat16> gate = {}, up = {};
  RowMatrix<__nv_bfloat16> out = {};
  E4m3Rows cast = {};
  int64_t rows = 0;
  int64_t dim = 0;
};
absl::Status SwigluForward(const SwigluForwardArgs& args, cudaStream_t stream);

// `out` receives the forward result again: it is not saved between the passes, and the
// down projection's weight gradient needs it at this very point. d_gate and d_up may alias gate and
// up, or d_out. `cast` receives rows of d_gate and, after it, d_up, as rounded to bf16: [rows, 2
// dim] with one scale for both, and `out_cast` those of out; both or none, and then dim is at most
// kMaxCastDim, and d_gate, d_up and out may be null, all three.
struct SwigluBackwardArgs {
  RowMatrix<const __nv_bfloat16> gate = {}, up = {}, d_out = {};
  RowMatrix<__nv_bfloat16> d_gate = {}, d_up = {};
  RowMatrix<__nv_bfloat16> out = {};
  E4m3Rows cast = {}, out_cast = {};
  int64_t rows = 0;
  int64_t dim = 0;
};
absl::Status SwigluBackward(const SwigluBackwardArgs& args, cudaStream_t stream);

}  // namespace ringleader::kernels::fused
