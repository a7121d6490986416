// Powers of two on the special-function unit, in which all exponentials are computed.
#pragma once

namespace ringleader::kernels::sm90::ptx {

inline constexpr float kLog2E = 1.4426950408889634f;  // e^x = 2^(x * kLog2E)
inline constexpr float kLn2 = 0.6931471805599453f;

// 2^x, without the scaling of denormals that exp2f does around it; -infinity gives 0.
__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace ringleader::kernels::sm90::ptx
