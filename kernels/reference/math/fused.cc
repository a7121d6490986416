#include "kernels/reference/math/fused.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "kernels/reference/math/row_math.h"
#include "kernels/reference/math/tile_math.h"
#include "ringleader/kernels/e4m3.h"

namespace ringleader::kernels::reference {
uint8_t ToE4m3(float x) {
  constexpr uint32_t kSign = 0x80000000, kInfinity = 0x7f800000;
  constexpr uint8_t kNan = 0x7f;
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t magnitude = std::min(bits & ~kSign, std::bit_cast<uint32_t>(448.0f));
  const auto sign = static_cast<uint8_t>((bits & kSign) >> 24);
  // From 2^-6 on: drops 20 of 23 mantissa bits, and moves the exponent's bias from 127 to 7.
  const uint32_t odd = (magnitude >> 20) & 1;
  const uint32_t normal = ((magnitude + 0x7ffff + odd) >> 20) - ((127 - 7) << 3);
  // Below, values lie 2^-9 apart. The sum's last bit is worth as much, so that adding rounds.
  constexpr float kAligned = 0x1p14f;
  const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + kAligned) -
                             std::bit_cast<uint32_t>(kAligned);
  constexpr uint32_t kLeastNormal = (127 - 6) << 23;
  const auto code = static_cast<uint8_t>(magnitude < kLeastNormal ? subnormal : normal);
  return (bits & ~kSign) > kInfinity ? kNan : code | sign;
}

float FromE4m3(uint8_t code) {
  const int magnitude = code & 0x7f, exponent = magnitude >> 3, mantissa = code & 7;
  if (magnitude == 0x7f) return std::numeric_limits<float>::quiet_NaN();
  // The last bit is worth 2^-9 for subnormals and the first normals.
  const float value = std::ldexp(static_cast<float>(exponent == 0 ? mantissa : 8 + mantissa),
                                 std::max(exponent, 1) - 10);
  return (code & 0x80) != 0 ? -value : value;
}

const RowMath& BestRowMath() {
#if defined(__x86_64__)
  if (&BestTileMath() == &internal::Avx512TileMath()) return internal::Avx512RowMath();
  if (&BestTileMath() == &internal::Avx2TileMath()) return internal::Avx2RowMath();
#endif
  return internal::GenericRowMath();
}

void RmsNormForward(const RmsNormForwardArgs& args) {
  const RowMath& math = BestRowMath();
  for (int64_t row = 0; row < args.rows; ++row) {
    args.rstd[row] = math.rms_norm(args.dim, args.x + row * args.dim, args.weight, args.epsilon,
                                   args.y + row * args.dim);
  }
}

void RmsNormBackward(const RmsNormBackwardArgs& args) {
  const RowMath& math = BestRowMath();
  for (int64_t row = 0; row < args.rows; ++row) {
    const int64_t begin = row * args.dim;
    math.rms_norm_backward(args.dim, args.x + begin, args.weight, args.rstd[row], args.dy + begin,
                           args.dx + begin, args.d_weight);
  }
}

void Rope(const RopeArgs& args) {
  const RowMath& math = BestRowMath();
  const int64_t half = args.x.head_dim / 2;
  for (int64_t t = 0; t < args.x.tokens; ++t) {
    for (int head = 0; head < args.x.heads; ++head) {
      math.rotate(half, args.inverse ? -1.0f : 1.0f,
                  args.x.data + t * args.x.token_stride + head * args.x.head_stride,
                  args.cos + t * half, args.sin + t * half,
                  args.out.data + t * args.out.token_stride + head * args.out.head_stride);
    }
  }
}

void SwigluForward(const SwigluForwardArgs& args) {
  const RowMath& math = BestRowMath();
  for (int64_t row = 0; row < args.rows; ++row) {
    math.swiglu(args.dim, args.gate + row * args.stride, args.up + row * args.stride,
                args.out + row * args.dim);
  }
}

void SwigluBackward(const SwigluBackwardArgs& args) {
  const RowMath& math = BestRowMath();
  for (int64_t row = 0; row < args.rows; ++row) {
    const int64_t wide = row * args.stride, dense = row * args.dim;
    math.swiglu_backward(args.dim, args.gate + wide, args.up + wide, args.d_out + dense,
                         args.d_gate + wide, args.d_up + wide,
                         args.out == nullptr ? nullptr : args.out + dense);
  }
}

void EmbeddingBackward(const EmbeddingBackwardArgs& args) {
  for (int64_t row = 0; row < args.rows; ++row) {
    const float* const from = args.dx + row * args.stride;
    float* const to = args.table + args.tokens[row] * args.stride;
    for (int64_t i = 0; i < args.dim; ++i) to[i] += from[i];
  }
}

void CastRows(const CastRowsArgs& args) {
  for (int64_t row = 0; row < args.rows; ++row) {
    const float* const x = args.x + row * args.stride;
    uint8_t* const codes = args.codes + row * args.dim;
    uint32_t amax = 0;
    for (int64_t i = 0; i < args.dim; ++i) {
      amax = std::max(amax, std::bit_cast<uint32_t>(x[i]) & 0x7fffffffu);
    }
    const E4m3Scale scale = E4m3ScaleOf(amax);
    args.scales[row] = scale.scale;
    for (int64_t i = 0; i < args.dim; ++i) codes[i] = ToE4m3(x[i] * scale.inverse);
  }
}

}  // namespace ringleader::kernels::reference
