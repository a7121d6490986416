// Which scale a row gets whose values are cast to e4m3 (OCP FP8: 1 sign, 4 exponent and 3 mantissa
// bits, largest value 448, no infinity): the rule that the CPU engine and the GPU share, in integer
// arithmetic, so that both choose the same bits.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define RINGLEADER_E4M3_INLINE __host__ __device__ __forceinline__
#else
#define RINGLEADER_E4M3_INLINE inline
#endif

namespace ringleader::kernels {

inline constexpr uint8_t kE4m3Nan = 0x7f;  // a code that is no number

// value ~ code * scale; code = the e4m3 value nearest to value * inverse, ties to even.
struct E4m3Scale {
  float scale = 1.0f, inverse = 1.0f;
};

// amax_bits: the bits of the row's largest magnitude. Magnitudes are compared as integers, which
// orders infinity above all numbers and NaN above infinity, so that neither gets lost.
//
// The scale is the least power of two with which the row fits, so that scaling rounds nothing and a
// cast value is a bf16 number too. A row of zeros has the least scale of all, so that it has no say
// where rows share the largest of theirs. A row with an infinity or a NaN has scale NaN, which is
// larger than all, and so have all its codes: products with it are NaN wherever those in bf16 would
// be NaN or infinite, instead of what saturation would make of them.
RINGLEADER_E4M3_INLINE E4m3Scale E4m3ScaleOf(uint32_t amax_bits) {
  constexpr uint32_t kExponent = 0x7f800000, kQuietNan = 0x7fc00000, kLargestMantissa = 0x600000;
  uint32_t scale_bits = kQuietNan, inverse_bits = kQuietNan;
  if (amax_bits < kExponent) {
    // 448 = 1.75 * 2^8. Exponents stay where both scale and inverse are normal numbers.
    const bool exceeds = (amax_bits & 0x7fffff) > kLargestMantissa;
    int32_t exponent = static_cast<int32_t>(amax_bits >> 23) - 8 + (exceeds ? 1 : 0);
    if (exponent < 1) exponent = 1;
    scale_bits = static_cast<uint32_t>(exponent) << 23;
    inverse_bits = static_cast<uint32_t>(254 - exponent) << 23;
  }
  E4m3Scale result;
  memcpy(&result.scale, &scale_bits, sizeof(float));
  memcpy(&result.inverse, &inverse_bits, sizeof(float));
  return result;
}

}  // namespace ringleader::kernels

#undef RINGLEADER_E4M3_INLINE
