// Casts to e4m3 against the format's definition: the nearest of its 256 values, searched one by
// one.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "kernels/reference/math/fused.h"

namespace ringleader::kernels::reference {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// By OCP's table: exponent bias 7, subnormals, S.1111.111 is NaN.
double Decode(uint8_t code) {
  const int exponent = (code >> 3) & 15, mantissa = code & 7;
  const double sign = (code & 0x80) != 0 ? -1.0 : 1.0;
  if (exponent == 15 && mantissa == 7) return kNan;
  if (exponent == 0) return sign * std::ldexp(mantissa, -9);
  return sign * std::ldexp(8 + mantissa, exponent - 10);
}

// The code with the nearest value; of two as near, the one whose last bit is 0.
uint8_t Nearest(double value) {
  int best = -1;
  for (int code = 0; code < 256; ++code) {
    const double decoded = Decode(static_cast<uint8_t>(code));
    if (std::isnan(decoded) || std::signbit(decoded) != std::signbit(value)) continue;
    const double distance = std::abs(decoded - value);
    const double least =
        best < 0 ? kInfinity : std::abs(Decode(static_cast<uint8_t>(best)) - value);
    if (distance < least || (distance == least && code % 2 == 0)) best = code;
  }
  return static_cast<uint8_t>(best);
}

struct Cast {
  std::vector<uint8_t> codes;
  float scale = 0.0f;
};

Cast CastRow(const std::vector<float>& row) {
  Cast cast{.codes = std::vector<uint8_t>(row.size())};
  CastRows({.x = row.data(),
            .codes = cast.codes.data(),
            .scales = &cast.scale,
            .stride = static_cast<int64_t>(row.size()),
            .rows = 1,
            .dim = static_cast<int64_t>(row.size())});
  return cast;
}

TEST(CastTest, EveryCodeComesBack) {
  std::vector<float> row;
  std::vector<uint8_t> codes;
  for (int code = 0; code < 256; ++code) {
    const double value = Decode(static_cast<uint8_t>(code));
    if (std::isnan(value)) continue;
    row.push_back(static_cast<float>(value));
    codes.push_back(static_cast<uint8_t>(code));
  }
  ASSERT_EQ(row.size(), 254u);
  const Cast cast = CastRow(row);
  EXPECT_EQ(cast.scale, 1.0f) << "448 is the largest";
  EXPECT_EQ(cast.codes, codes);
}

// Between neighbours, at their middle and a little to either side of it.
TEST(CastTest, RoundsToTheNearestAndTiesToEven) {
  std::vector<float> row = {448.0f};
  for (int code = 0; code < 0x7e; ++code) {
    const double low = Decode(static_cast<uint8_t>(code)),
                 high = Decode(static_cast<uint8_t>(code + 1));
    const auto middle = static_cast<float>((low + high) / 2);
    for (const float value : {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, 1e9f)}) {
      row.push_back(value);
      row.push_back(-value);
    }
  }
  const Cast cast = CastRow(row);
  ASSERT_EQ(cast.scale, 1.0f);
  for (size_t i = 0; i < row.size(); ++i) EXPECT_EQ(cast.codes[i], Nearest(row[i])) << row[i];
}

TEST(CastTest, TheScaleIsTheLeastPowerOfTwoThatHoldsTheRow) {
  std::mt19937 random(std::random_device{}());
  std::uniform_real_distribution<float> mantissa(1.0f, 2.0f);
  for (int exponent = -110; exponent < 128; ++exponent) {
    const float largest = std::ldexp(mantissa(random), exponent);
    const std::vector<float> row = {largest, -largest / 3, largest / 1000, 0.0f, -0.0f};
    const Cast cast = CastRow(row);
    int power = 0;
    EXPECT_EQ(std::frexp(cast.scale, &power), 0.5f) << "a power of two";
    EXPECT_LE(largest / cast.scale, 448.0f);
    EXPECT_GT(largest / cast.scale, 224.0f);
    for (size_t i = 0; i < row.size(); ++i) {
      EXPECT_EQ(cast.codes[i], Nearest(static_cast<double>(row[i]) / cast.scale)) << row[i];
    }
  }
  for (const float at_the_edge : {448.0f, 1.75f, 0x1.cp-100f}) {
    EXPECT_EQ(at_the_edge / CastRow({at_the_edge}).scale, 448.0f);
    const float above = std::nextafter(at_the_edge, 1e30f);
    EXPECT_LE(above / CastRow({above}).scale, 225.0f) << "nothing saturates";
  }
}

TEST(CastTest, ZerosHaveTheLeastScaleAndTheLeastValuesAFiniteOne) {
  const Cast zeros = CastRow({0.0f, -0.0f});
  EXPECT_EQ(zeros.scale, 0x1p-126f);
  EXPECT_EQ(zeros.codes, (std::vector<uint8_t>{0x00, 0x80}));
  for (const float least : {0x1p-149f, 0x1p-126f, 0x1.8p-120f}) {
    const Cast cast = CastRow({least, -least});
    EXPECT_TRUE(std::isnormal(cast.scale)) << least;
    EXPECT_EQ(cast.codes[0], Nearest(static_cast<double>(least) / cast.scale));
  }
}

TEST(CastTest, ARowThatIsNotFiniteIsNanAltogether) {
  for (const float bad : {kInfinity, -kInfinity, kNan, -kNan}) {
    const Cast cast = CastRow({1.0f, bad, 0.0f});
    EXPECT_TRUE(std::isnan(cast.scale)) << bad;
    for (const uint8_t code : cast.codes) EXPECT_TRUE(std::isnan(Decode(code))) << bad;
  }
  const Cast largest = CastRow({std::numeric_limits<float>::max()});
  EXPECT_EQ(Decode(largest.codes[0]) * largest.scale, 0x1p128) << "rounded up, and still a number";
}

TEST(CastTest, RowsMayLieApart) {
  const std::vector<float> x = {1.0f, 2.0f, 99.0f, 4.0f, 8.0f, 99.0f};
  std::vector<uint8_t> codes(4);
  std::vector<float> scales(2);
  CastRows({.x = x.data(),
            .codes = codes.data(),
            .scales = scales.data(),
            .stride = 3,
            .rows = 2,
            .dim = 2});
  for (int row = 0; row < 2; ++row) {
    for (int i = 0; i < 2; ++i) EXPECT_EQ(Decode(codes[row * 2 + i]) * scales[row], x[row * 3 + i]);
  }
}

TEST(E4m3Test, CodesAreTheNearestValues) {
  std::vector<float> values;
  for (int code = 0; code < 0x7f; ++code) values.push_back(FromE4m3(static_cast<uint8_t>(code)));
  ASSERT_TRUE(std::ranges::is_sorted(values));
  EXPECT_EQ(values[0], 0.0f);
  EXPECT_EQ(values[1], 0x1p-9f);
  EXPECT_EQ(values[8], 0x1p-6f);
  EXPECT_EQ(values[0x38], 1.0f);
  EXPECT_EQ(values[0x7e], 448.0f);
  for (int code = 0; code < 0x7e; ++code) {
    const float low = values[code], middle = 0.5f * (low + values[code + 1]);
    EXPECT_EQ(ToE4m3(low), code);
    EXPECT_EQ(ToE4m3(-low), code | 0x80);
    EXPECT_EQ(ToE4m3(std::nextafter(middle, 0.0f)), code);
    EXPECT_EQ(ToE4m3(middle), code + code % 2);
    EXPECT_EQ(ToE4m3(std::nextafter(middle, 1000.0f)), code + 1);
    EXPECT_EQ(FromE4m3(static_cast<uint8_t>(code | 0x80)), -low);
  }
  EXPECT_EQ(ToE4m3(448.0f), 0x7e);
  EXPECT_EQ(ToE4m3(1e9f), 0x7e);
  EXPECT_EQ(ToE4m3(-INFINITY), 0xfe);
  EXPECT_EQ(ToE4m3(NAN), 0x7f);
  EXPECT_TRUE(std::isnan(FromE4m3(0x7f)) && std::isnan(FromE4m3(0xff)));
}

}  // namespace
}  // namespace ringleader::kernels::reference
