// Vectors of one instruction set: included by the sources that are compiled once for each.
// Everything has internal linkage and no template of the standard library is used, so that no
// function compiled for a newer processor can be linked in place of an older one's.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace ringleader::kernels::reference {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4)));
typedef float UnalignedVec __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

inline Vec Load(const float* p) {
  return *reinterpret_cast<const UnalignedVec*>(p);
}
inline void Store(float* p, Vec v) {
  *reinterpret_cast<UnalignedVec*>(p) = v;
}
inline Vec Splat(float x) {
#if defined(__AVX512F__)
  return _mm512_set1_ps(x);
#elif defined(__AVX2__)
  return _mm256_set1_ps(x);
#else
  return Vec{x, x, x, x};
#endif
}

inline Vec Max(Vec a, Vec b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

inline float Max(float a, float b) {
  return a > b ? a : b;
}

inline float MaxOf(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(v);
#else
  float lanes[kLanes];
  Store(lanes, v);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] = Max(lanes[i], lanes[i + width]);
  }
  return lanes[0];
#endif
}

inline float SumOf(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(v);
#else
  float lanes[kLanes];
  Store(lanes, v);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
#endif
}

// 2^x, relative error under 2e-7; 0 below 2^-126, -infinity included; NaN stays NaN. x < 128.
inline Vec Exp2(Vec x) {
  // Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
  constexpr float kMagic = 12582912.0f;
  x = Max(Splat(-127.0f), x);  // of two operands the second wins if one is NaN
  const Vec shifted = x + kMagic;
  const Vec f = x - (shifted - kMagic);  // in [-0.5, 0.5]
  // Interpolates 2^f at the Chebyshev nodes of the interval; exact at 0.
  Vec p = Splat(1.545316294e-4f);
  p = p * f + 1.339086336e-3f;
  p = p * f + 9.618082557e-3f;
  p = p * f + 5.550357114e-2f;
  p = p * f + 2.402265076e-1f;
  p = p * f + 6.931471880e-1f;
  p = p * f + 1.0f;
  const IntVec exponent = ((IntVec)shifted + 127) << 23;
  return p * (Vec)exponent;
}

}  // namespace
}  // namespace ringleader::kernels::reference
