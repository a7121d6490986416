// The arithmetic of single rows, compiled once for each instruction set, like TileMath.
#pragma once

#include <cstdint>

namespace ringleader::kernels::reference {

struct RowMath {
  // y = x rstd weight; returns rstd.
  float (*rms_norm)(int64_t dim, const float* x, const float* weight, float epsilon, float* y);
  void (*rms_norm_backward)(int64_t dim, const float* x, const float* weight, float rstd,
                            const float* dy, float* dx, float* d_weight);
  // Halves a and b of a head: out_a = a c - b s, out_b = b c + a s.
  void (*rotate)(int64_t half, float sign, const float* x, const float* cos, const float* sin,
                 float* out);
  void (*swiglu)(int64_t dim, const float* gate, const float* up, float* out);
  // out may be null.
  void (*swiglu_backward)(int64_t dim, const float* gate, const float* up, const float* d_out,
                          float* d_gate, float* d_up, float* out);
};

// The functions for BestTileMath's instruction set.
const RowMath& BestRowMath();

namespace internal {
const RowMath& GenericRowMath();
#if defined(__x86_64__)
const RowMath& Avx2RowMath();
const RowMath& Avx512RowMath();
#endif
}  // namespace internal

}  // namespace ringleader::kernels::reference
