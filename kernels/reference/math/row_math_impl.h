// RowMath for one instruction set: included by tile_math_*.cc.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/reference/math/row_math.h"
#include "kernels/reference/math/simd.h"

namespace ringleader::kernels::reference {
namespace {

// The last vector of a row may be short; missing lanes are zero and not stored.
inline Vec LoadUpTo(const float* p, int64_t left) {
  if (left >= kLanes) return Load(p);
  float lanes[kLanes] = {};
  std::memcpy(lanes, p, left * sizeof(float));
  return Load(lanes);
}

inline void StoreUpTo(float* p, Vec v, int64_t left) {
  if (left >= kLanes) return Store(p, v);
  float lanes[kLanes];
  Store(lanes, v);
  std::memcpy(p, lanes, left * sizeof(float));
}

inline Vec Sigmoid(Vec x) {
  // The sigmoid is zero in fp32 once the power reaches 2^126.
  const Vec power = Exp2(-Max(Splat(-126.0f), x * 1.44269504f));
  return 1.0f / (1.0f + power);
}

float RmsNorm(int64_t dim, const float* x, const float* weight, float epsilon, float* y) {
  Vec squares = {};
  for (int64_t i = 0; i < dim; i += kLanes) {
    const Vec v = LoadUpTo(x + i, dim - i);
    squares += v * v;
  }
  const float rstd = 1.0f / std::sqrt(SumOf(squares) / static_cast<float>(dim) + epsilon);
  for (int64_t i = 0; i < dim; i += kLanes) {
    StoreUpTo(y + i, LoadUpTo(x + i, dim - i) * rstd * LoadUpTo(weight + i, dim - i), dim - i);
  }
  return rstd;
}

// With u = x rstd: dx = rstd (dy w - u mean(dy w u)), dw += dy u.
void RmsNormGradient(int64_t dim, const float* x, const float* weight, float rstd, const float* dy,
                     float* dx, float* d_weight) {
  Vec dot = {};
  for (int64_t i = 0; i < dim; i += kLanes) {
    const int64_t left = dim - i;
    const Vec gradient = LoadUpTo(dy + i, left), u = LoadUpTo(x + i, left) * rstd;
    StoreUpTo(d_weight + i, LoadUpTo(d_weight + i, left) + gradient * u, left);
    dot += gradient * LoadUpTo(weight + i, left) * u;
  }
  const float mean = SumOf(dot) / static_cast<float>(dim);
  for (int64_t i = 0; i < dim; i += kLanes) {
    const int64_t left = dim - i;
    const Vec u = LoadUpTo(x + i, left) * rstd;
    StoreUpTo(dx + i, (LoadUpTo(dy + i, left) * LoadUpTo(weight + i, left) - u * mean) * rstd,
              left);
  }
}

void Rotate(int64_t half, float sign, const float* x, const float* cos, const float* sin,
            float* out) {
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t left = half - i;
    const Vec a = LoadUpTo(x + i, left), b = LoadUpTo(x + half + i, left);
    const Vec c = LoadUpTo(cos + i, left), s = LoadUpTo(sin + i, left) * sign;
    StoreUpTo(out + i, a * c - b * s, left);
    StoreUpTo(out + half + i, b * c + a * s, left);
  }
}

void Swiglu(int64_t dim, const float* gate, const float* up, float* out) {
  for (int64_t i = 0; i < dim; i += kLanes) {
    const Vec g = LoadUpTo(gate + i, dim - i);
    StoreUpTo(out + i, g * Sigmoid(g) * LoadUpTo(up + i, dim - i), dim - i);
  }
}

// d silu(g) = s (1 + g (1 - s)).
void SwigluGradient(int64_t dim, const float* gate, const float* up, const float* d_out,
                    float* d_gate, float* d_up, float* out) {
  for (int64_t i = 0; i < dim; i += kLanes) {
    const int64_t left = dim - i;
    const Vec g = LoadUpTo(gate + i, left), u = LoadUpTo(up + i, left);
    const Vec d = LoadUpTo(d_out + i, left), s = Sigmoid(g), silu = g * s;
    if (out != nullptr) StoreUpTo(out + i, silu * u, left);
    StoreUpTo(d_gate + i, d * u * (s + silu * (1.0f - s)), left);
    StoreUpTo(d_up + i, d * silu, left);
  }
}

constexpr RowMath MakeRowMath() {
  return {.rms_norm = RmsNorm,
          .rms_norm_backward = RmsNormGradient,
          .rotate = Rotate,
          .swiglu = Swiglu,
          .swiglu_backward = SwigluGradient};
}

}  // namespace
}  // namespace ringleader::kernels::reference
