#include "kernels/reference/math/fused.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "kernels/reference/math/row_math.h"

namespace ringleader::kernels::reference {
namespace {

// Sizes around vectors of every width, and a short one.
class FusedTest : public ::testing::TestWithParam<int64_t> {
 protected:
  std::vector<float> Random(int64_t count) {
    std::normal_distribution<float> normal;
    std::vector<float> values(count);
    for (float& x : values) x = normal(random_);
    return values;
  }
  static void ExpectNear(const std::vector<float>& actual, const std::vector<double>& expected) {
    for (size_t i = 0; i < expected.size(); ++i) {
      ASSERT_NEAR(actual[i], expected[i], 2e-6 * (1.0 + std::abs(expected[i]))) << i;
    }
  }

  static constexpr int64_t kRows = 5;
  const int64_t dim_ = GetParam();
  std::mt19937 random_{9};
};

TEST_P(FusedTest, RmsNorm) {
  const std::vector<float> x = Random(kRows * dim_), w = Random(dim_), dy = Random(kRows * dim_);
  std::vector<float> y(x.size()), rstd(kRows), dx(x.size()), dw(dim_, 0.5f);
  RmsNormForward({.x = x.data(),
                  .weight = w.data(),
                  .y = y.data(),
                  .rstd = rstd.data(),
                  .rows = kRows,
                  .dim = dim_});
  RmsNormBackward({.x = x.data(),
                   .weight = w.data(),
                   .rstd = rstd.data(),
                   .dy = dy.data(),
                   .dx = dx.data(),
                   .d_weight = dw.data(),
                   .rows = kRows,
                   .dim = dim_});
  std::vector<double> expected_y(y.size()), expected_dx(y.size()), expected_dw(dim_, 0.5);
  for (int64_t row = 0; row < kRows; ++row) {
    const float* xs = x.data() + row * dim_;
    const float* gs = dy.data() + row * dim_;
    double squares = 0.0, dot = 0.0;
    for (int64_t i = 0; i < dim_; ++i) squares += double{xs[i]} * xs[i];
    const double r = 1.0 / std::sqrt(squares / dim_ + 1e-6);
    for (int64_t i = 0; i < dim_; ++i) dot += double{gs[i]} * w[i] * xs[i] * r;
    for (int64_t i = 0; i < dim_; ++i) {
      expected_y[row * dim_ + i] = xs[i] * r * w[i];
      expected_dx[row * dim_ + i] = r * (double{gs[i]} * w[i] - xs[i] * r * dot / dim_);
      expected_dw[i] += double{gs[i]} * xs[i] * r;
    }
  }
  ExpectNear(y, expected_y);
  ExpectNear(dx, expected_dx);
  ExpectNear(dw, expected_dw);
}

TEST_P(FusedTest, RopeRotatesAndItsInverseRotatesBack) {
  const int64_t d = 2 * dim_;
  const std::vector<float> x = Random(kRows * d), angle = Random(kRows * dim_);
  std::vector<float> cos(angle.size()), sin(angle.size()), out(x.size());
  for (size_t i = 0; i < angle.size(); ++i) {
    cos[i] = std::cos(angle[i]);
    sin[i] = std::sin(angle[i]);
  }
  const TokenMajor<float> view{out.data(), kRows, 1, static_cast<int32_t>(d), d, d};
  RopeArgs args{.x = {x.data(), kRows, 1, static_cast<int32_t>(d), d, d},
                .out = view,
                .cos = cos.data(),
                .sin = sin.data()};
  Rope(args);
  std::vector<double> expected(x.size());
  for (int64_t t = 0; t < kRows; ++t) {
    for (int64_t i = 0; i < dim_; ++i) {
      const double a = x[t * d + i], b = x[t * d + dim_ + i];
      const double c = cos[t * dim_ + i], s = sin[t * dim_ + i];
      expected[t * d + i] = a * c - b * s;
      expected[t * d + dim_ + i] = b * c + a * s;
    }
  }
  ExpectNear(out, expected);
  args.x.data = out.data();
  args.inverse = true;
  Rope(args);
  ExpectNear(out, std::vector<double>(x.begin(), x.end()));
}

TEST_P(FusedTest, Swiglu) {
  const int64_t stride = 2 * dim_;
  std::vector<float> gate_up = Random(kRows * stride);
  gate_up[0] = -200.0f;  // silu is zero there, and its gradient
  const std::vector<float> d_out = Random(kRows * dim_);
  std::vector<float> out(d_out.size()), again(d_out.size()), gradient(gate_up.size());
  SwigluForward({.gate = gate_up.data(),
                 .up = gate_up.data() + dim_,
                 .out = out.data(),
                 .stride = stride,
                 .rows = kRows,
                 .dim = dim_});
  SwigluBackward({.gate = gate_up.data(),
                  .up = gate_up.data() + dim_,
                  .d_out = d_out.data(),
                  .d_gate = gradient.data(),
                  .d_up = gradient.data() + dim_,
                  .out = again.data(),
                  .stride = stride,
                  .rows = kRows,
                  .dim = dim_});
  std::vector<double> expected(out.size()), expected_gradient(gradient.size());
  for (int64_t row = 0; row < kRows; ++row) {
    for (int64_t i = 0; i < dim_; ++i) {
      const double g = gate_up[row * stride + i], u = gate_up[row * stride + dim_ + i];
      const double s = 1.0 / (1.0 + std::exp(-g)), d = d_out[row * dim_ + i];
      expected[row * dim_ + i] = g * s * u;
      expected_gradient[row * stride + i] = d * u * s * (1.0 + g * (1.0 - s));
      expected_gradient[row * stride + dim_ + i] = d * g * s;
    }
  }
  ExpectNear(out, expected);
  EXPECT_EQ(again, out);
  ExpectNear(gradient, expected_gradient);
}

INSTANTIATE_TEST_SUITE_P(Sizes, FusedTest, ::testing::Values(1, 7, 16, 33, 256));

}  // namespace
}  // namespace ringleader::kernels::reference
