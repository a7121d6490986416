#include "kernels/reference/math/row_cast.h"

#include <algorithm>
#include <bit>

#include "ringleader/kernels/e4m3.h"

namespace ringleader::kernels::reference {
namespace {

// The nearest e4m3 value, ties to even. |x| <= 448 or x is NaN.
uint8_t ToE4m3(float x) {
  constexpr uint32_t kSign = 0x80000000, kInfinity = 0x7f800000;
  constexpr uint8_t kNan = 0x7f;
  const uint32_t bits = std::bit_cast<uint32_t>(x), magnitude = bits & ~kSign;
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
  return magnitude > kInfinity ? kNan : code | sign;
}

}  // namespace

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
