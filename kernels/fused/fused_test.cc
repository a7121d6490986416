// The fused kernels against double-precision references on fresh random inputs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "kernels/fused/adamw_update.h"
#include "kernels/fused/cross_entropy.h"
#include "kernels/fused/rms_norm.h"
#include "kernels/fused/rotate.h"
#include "kernels/fused/swiglu.h"
#include "kernels/testing/device_buffer.h"
#include "kernels/testing/gpu_test.h"

namespace ringleader::kernels::fused {
namespace {

using Bf16 = __nv_bfloat16;
using ::testing::HasSubstr;

using FusedTest = GpuTest;

double Double(float x) {
  return x;
}
double Double(Bf16 x) {
  return __bfloat162float(x);
}

// ||actual - expected|| / ||expected||; NaN anywhere makes it NaN, which no bound passes.
template <typename T>
double RelativeError(const std::vector<T>& actual, const std::vector<double>& expected) {
  EXPECT_EQ(actual.size(), expected.size());
  double error = 0, norm = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    error += std::pow(Double(actual[i]) - expected[i], 2);
    norm += expected[i] * expected[i];
  }
  return std::sqrt(error / (norm > 0 ? norm : 1));
}

// Rounding to bf16 moves a value by 2^-8 of itself at most.
constexpr double kBf16Tolerance = 0x1p-8;

struct NormShape {
  int64_t rows, dim;
  bool residual;
};

class RmsNormTest : public FusedTest, public ::testing::WithParamInterface<NormShape> {};

TEST_P(RmsNormTest, MatchesDoubleForwardAndBackward) {
  const auto [rows, dim, residual] = GetParam();
  const float epsilon = 1e-5f;
  const auto x = Normal(rows * dim), r = Normal(rows * dim), w = Normal(dim, 0.3, 1.0),
             dy = Normal(rows * dim), d_sum = Normal(rows * dim);
  const auto dw_before = NormalFloat(dim);
  DeviceBuffer<Bf16> gx(x), gr(r), gw(w), gdy(dy), gd_sum(d_sum), gsum(rows * dim), gy(rows * dim),
      gdx(rows * dim);
  DeviceBuffer<float> grstd(rows), gdw(dw_before);
  DeviceBuffer<char> workspace(static_cast<int64_t>(RmsNormWorkspaceBytes(dim)));
  ASSERT_TRUE(RmsNormForward({.x = gx.data(),
                              .residual = residual ? gr.data() : nullptr,
                              .weight = gw.data(),
                              .sum = residual ? gsum.data() : nullptr,
                              .y = gy.data(),
                              .rstd = grstd.data(),
                              .rows = rows,
                              .dim = dim,
                              .epsilon = epsilon},
                             nullptr)
                  .ok());
  ASSERT_TRUE(RmsNormBackward({.h = residual ? gsum.data() : gx.data(),
                               .weight = gw.data(),
                               .rstd = grstd.data(),
                               .dy = gdy.data(),
                               .d_sum = residual ? gd_sum.data() : nullptr,
                               .dx = gdx.data(),
                               .d_weight = gdw.data(),
                               .workspace = workspace.data(),
                               .rows = rows,
                               .dim = dim},
                              nullptr)
                  .ok());

  std::vector<double> y(x.size()), dx(x.size()), dw(dw_before.begin(), dw_before.end());
  for (int64_t row = 0; row < rows; ++row) {
    std::vector<double> h(dim);
    double squares = 0, dot = 0;
    for (int64_t c = 0; c < dim; ++c) {
      const int64_t i = row * dim + c;
      h[c] = residual ? Double(__float2bfloat16_rn(static_cast<float>(Double(x[i]) + Double(r[i]))))
                      : Double(x[i]);
      squares += h[c] * h[c];
    }
    const double rstd = 1 / std::sqrt(squares / dim + epsilon);
    for (int64_t c = 0; c < dim; ++c) dot += Double(dy[row * dim + c]) * Double(w[c]) * h[c] * rstd;
    for (int64_t c = 0; c < dim; ++c) {
      const int64_t i = row * dim + c;
      y[i] = h[c] * rstd * Double(w[c]);
      dw[c] += Double(dy[i]) * h[c] * rstd;
      dx[i] = rstd * (Double(dy[i]) * Double(w[c]) - h[c] * rstd * dot / dim) +
              (residual ? Double(d_sum[i]) : 0);
    }
  }
  EXPECT_LT(RelativeError(gy.Read(), y), kBf16Tolerance);
  EXPECT_LT(RelativeError(gdx.Read(), dx), kBf16Tolerance);
  EXPECT_LT(RelativeError(gdw.Read(), dw), 1e-5);
}

INSTANTIATE_TEST_SUITE_P(Shapes, RmsNormTest,
                         ::testing::Values(NormShape{1, 8, false}, NormShape{3, 64, true},
                                           NormShape{1000, 896, true}, NormShape{777, 2048, false},
                                           NormShape{2049, 2048, true}, NormShape{700, 3584, true},
                                           NormShape{129, 8192, false},
                                           NormShape{800, 5120, true}));

struct RopeShape {
  int64_t tokens;
  int32_t heads, kv_heads, head_dim;
  int64_t first_position;
};

class RopeTest : public FusedTest, public ::testing::WithParamInterface<RopeShape> {};

TEST_P(RopeTest, MatchesDoubleAndInverts) {
  const auto [tokens, heads, kv_heads, dim, first] = GetParam();
  // q and k are slices of one projection's output, as a model has them; the rest of it must stay as
  // it is.
  const int64_t width = int64_t{heads + 2 * kv_heads} * dim,
                rotated = int64_t{heads + kv_heads} * dim;
  const auto x = Normal(tokens * width);
  std::vector<int64_t> positions(tokens);
  for (int64_t t = 0; t < tokens; ++t) positions[t] = first + 7 * t;
  std::vector<float> inv_freq(dim / 2);
  for (int i = 0; i < dim / 2; ++i) inv_freq[i] = std::pow(1e6f, -2.0f * i / dim);
  DeviceBuffer<Bf16> in_place(x);
  DeviceBuffer<int64_t> gpu_positions(positions);
  DeviceBuffer<float> gpu_freq(inv_freq);
  const Bf16* in = in_place.data();
  Bf16* out = in_place.data();
  const float scale = 1.25f;
  RopeArgs args = {.q = {in, tokens, heads, dim, width, dim},
                   .k = {in + int64_t{heads} * dim, tokens, kv_heads, dim, width, dim},
                   .q_out = {out, tokens, heads, dim, width, dim},
                   .k_out = {out + int64_t{heads} * dim, tokens, kv_heads, dim, width, dim},
                   .positions = gpu_positions.data(),
                   .inv_freq = gpu_freq.data(),
                   .scale = scale};
  ASSERT_TRUE(Rope(args, nullptr).ok());
  const std::vector<Bf16> actual = in_place.Read();
  args.scale = 1 / scale;
  args.inverse = true;
  ASSERT_TRUE(Rope(args, nullptr).ok());

  std::vector<double> expected(x.size()), back(x.size());
  for (size_t i = 0; i < x.size(); ++i) expected[i] = back[i] = Double(x[i]);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t at = t * width; at < t * width + rotated; at += dim) {
      for (int i = 0; i < dim / 2; ++i) {
        const int64_t a = at + i, b = a + dim / 2;
        const double angle = static_cast<float>(positions[t]) * inv_freq[i];
        expected[a] = scale * (Double(x[a]) * std::cos(angle) - Double(x[b]) * std::sin(angle));
        expected[b] = scale * (Double(x[b]) * std::cos(angle) + Double(x[a]) * std::sin(angle));
      }
    }
  }
  EXPECT_LT(RelativeError(actual, expected), kBf16Tolerance);
  EXPECT_LT(RelativeError(in_place.Read(), back), 2 * kBf16Tolerance);
}

INSTANTIATE_TEST_SUITE_P(Shapes, RopeTest,
                         ::testing::Values(RopeShape{1, 1, 0, 16, 0},
                                           RopeShape{1000, 16, 2, 128, 0},
                                           RopeShape{333, 2, 2, 128, 1'000'000},
                                           RopeShape{63, 28, 4, 64, 12345},
                                           RopeShape{5, 1, 1, 256, 500'000}));

struct SwigluShape {
  int64_t rows, dim;
  bool fused_gate_up;  // gate and up are halves of one matrix
};

class SwigluTest : public FusedTest, public ::testing::WithParamInterface<SwigluShape> {};

TEST_P(SwigluTest, MatchesDoubleForwardAndBackward) {
  const int64_t rows = GetParam().rows, dim = GetParam().dim;
  const bool together = GetParam().fused_gate_up;
  const int64_t stride = together ? 2 * dim : dim;
  const auto gate_up = Normal(rows * 2 * dim, 2.0), d_out = Normal(rows * dim);
  DeviceBuffer<Bf16> in(gate_up), gd_out(d_out), gout(rows * dim), gagain(rows * dim),
      d_in(rows * 2 * dim);
  const auto matrix = [&](auto* base, bool up) {
    return RowMatrix<std::remove_pointer_t<decltype(base)>>{
        base + (up ? (together ? dim : rows * dim) : 0), stride};
  };
  const Bf16* const_in = in.data();
  ASSERT_TRUE(SwigluForward({.gate = matrix(const_in, false),
                             .up = matrix(const_in, true),
                             .out = {gout.data(), dim},
                             .rows = rows,
                             .dim = dim},
                            nullptr)
                  .ok());
  ASSERT_TRUE(SwigluBackward({.gate = matrix(const_in, false),
                              .up = matrix(const_in, true),
                              .d_out = {gd_out.data(), dim},
                              .d_gate = matrix(d_in.data(), false),
                              .d_up = matrix(d_in.data(), true),
                              .out = {gagain.data(), dim},
                              .rows = rows,
                              .dim = dim},
                             nullptr)
                  .ok());
  std::vector<double> out(rows * dim), d(rows * 2 * dim);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t c = 0; c < dim; ++c) {
      const int64_t g = row * stride + c, u = g + (together ? dim : rows * dim);
      const double gate = Double(gate_up[g]), up = Double(gate_up[u]),
                   sigmoid = 1 / (1 + std::exp(-gate));
      const double gradient = Double(d_out[row * dim + c]);
      out[row * dim + c] = gate * sigmoid * up;
      d[g] = gradient * up * sigmoid * (1 + gate * (1 - sigmoid));
      d[u] = gradient * gate * sigmoid;
    }
  }
  EXPECT_LT(RelativeError(gout.Read(), out), kBf16Tolerance);
  EXPECT_LT(RelativeError(gagain.Read(), out), kBf16Tolerance);
  EXPECT_LT(RelativeError(d_in.Read(), d), kBf16Tolerance);
}

INSTANTIATE_TEST_SUITE_P(Shapes, SwigluTest,
                         ::testing::Values(SwigluShape{1, 8, false}, SwigluShape{100, 11008, false},
                                           SwigluShape{77, 4864, true},
                                           SwigluShape{3, 18944, true}));

struct EntropyShape {
  int64_t rows, vocabulary, stride;
};

class CrossEntropyTest : public FusedTest, public ::testing::WithParamInterface<EntropyShape> {};

TEST_P(CrossEntropyTest, MatchesDouble) {
  const auto [rows, vocabulary, stride] = GetParam();
  if (SmallShapes() && rows * stride > 10'000'000) GTEST_SKIP() << "large";
  const auto logits = Normal(rows * stride, 3.0);
  std::vector<int64_t> labels(rows);
  for (int64_t& label : labels) label = static_cast<int64_t>(random_() % vocabulary);
  if (rows > 2) labels[1] = kIgnoredLabel;
  const float scale = 0.25f;
  DeviceBuffer<Bf16> glogits(logits);
  DeviceBuffer<int64_t> glabels(labels);
  DeviceBuffer<float> gloss(rows), gscale(std::vector<float>{scale});
  CrossEntropyArgs args = {.logits = glogits.data(),
                           .stride = stride,
                           .labels = glabels.data(),
                           .loss = gloss.data(),
                           .rows = rows,
                           .vocabulary = vocabulary,
                           .gradient = false,
                           .gradient_scale = gscale.data()};
  ASSERT_TRUE(CrossEntropy(args, nullptr).ok());
  const std::vector<float> loss_only = gloss.Read();
  args.gradient = true;
  ASSERT_TRUE(CrossEntropy(args, nullptr).ok());

  std::vector<double> loss(rows), d(rows * stride);
  for (int64_t row = 0; row < rows; ++row) {
    if (labels[row] == kIgnoredLabel) continue;
    double sum = 0;
    for (int64_t c = 0; c < vocabulary; ++c) sum += std::exp(Double(logits[row * stride + c]));
    loss[row] = std::log(sum) - Double(logits[row * stride + labels[row]]);
    for (int64_t c = 0; c < vocabulary; ++c) {
      const double p = std::exp(Double(logits[row * stride + c])) / sum;
      d[row * stride + c] = scale * (p - (c == labels[row]));
    }
  }
  const std::vector<float> actual_loss = gloss.Read();
  for (int64_t row = 0; row < rows; ++row)
    EXPECT_NEAR(actual_loss[row], loss[row], 1e-5 * (1 + loss[row])) << row;
  EXPECT_EQ(actual_loss, loss_only);
  EXPECT_LT(RelativeError(glogits.Read(), d), kBf16Tolerance);
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, CrossEntropyTest,
    ::testing::Values(EntropyShape{1, 1, 8}, EntropyShape{5, 257, 264},
                      EntropyShape{300, 32000, 32000}, EntropyShape{600, 4095, 4096},
                      EntropyShape{40, 50257, 50264}, EntropyShape{65, 128256, 128256},
                      EntropyShape{130, 151936, 151936}, EntropyShape{70, 200019, 200064},
                      EntropyShape{4, 262144, 262144}));

// A maximum that keeps growing along the row, columns masked away, and what is no number.
TEST_F(FusedTest, CrossEntropyOfExtremeLogits) {
  for (const int64_t columns : {int64_t{8000}, int64_t{140000}}) {
    std::vector<Bf16> logits(4 * columns);
    for (int64_t c = 0; c < columns; ++c) {
      const double ramp = 10000.0 * static_cast<double>(c) / static_cast<double>(columns) - 5000.0;
      const auto set = [&](int row, double x) {
        logits[row * columns + c] = __float2bfloat16_rn(static_cast<float>(x));
      };
      set(0, ramp);
      set(1, -ramp);
      set(2, c < columns / 2 ? -INFINITY : 1e-3 * ramp - 3e3);
      set(3, c == columns - 3 ? NAN : 1.0);
    }
    std::vector<double> loss(3), d(3 * columns);
    const std::vector<int64_t> labels = {0, columns - 1, columns - 7, 5};
    for (int row = 0; row < 3; ++row) {
      const auto at = [&](int64_t c) { return Double(logits[row * columns + c]); };
      double top = -INFINITY, sum = 0;
      for (int64_t c = 0; c < columns; ++c) top = std::max(top, at(c));
      for (int64_t c = 0; c < columns; ++c) sum += std::exp(at(c) - top);
      loss[row] = std::log(sum) + top - at(labels[row]);
      for (int64_t c = 0; c < columns; ++c)
        d[row * columns + c] = std::exp(at(c) - top) / sum - (c == labels[row]);
    }
    DeviceBuffer<Bf16> glogits(logits);
    DeviceBuffer<int64_t> glabels(labels);
    DeviceBuffer<float> gloss(4), scale(std::vector<float>{1.0f});
    ASSERT_TRUE(CrossEntropy({.logits = glogits.data(),
                              .stride = columns,
                              .labels = glabels.data(),
                              .loss = gloss.data(),
                              .rows = 4,
                              .vocabulary = columns,
                              .gradient_scale = scale.data()},
                             nullptr)
                    .ok());
    const std::vector<float> got = gloss.Read();
    EXPECT_NEAR(got[0], loss[0], 1e-2);
    EXPECT_NEAR(got[1], loss[1], 1e-2);
    EXPECT_NEAR(got[2], loss[2], 1e-2);
    EXPECT_TRUE(std::isnan(got[3]));
    auto gradient = glogits.Read();
    EXPECT_TRUE(std::isnan(Double(gradient[3 * columns])));
    gradient.resize(3 * columns);
    EXPECT_LT(RelativeError(gradient, d), kBf16Tolerance);
  }
}

TEST_F(FusedTest, CrossEntropyOfABadLabelIsNan) {
  DeviceBuffer<Bf16> logits(Normal(16));
  DeviceBuffer<int64_t> labels(std::vector<int64_t>{16, -1});
  DeviceBuffer<float> loss(2), scale(std::vector<float>{1.0f});
  ASSERT_TRUE(CrossEntropy({.logits = logits.data(),
                            .stride = 8,
                            .labels = labels.data(),
                            .loss = loss.data(),
                            .rows = 2,
                            .vocabulary = 8,
                            .gradient_scale = scale.data()},
                           nullptr)
                  .ok());
  EXPECT_TRUE(std::isnan(loss.Read()[0]) && std::isnan(loss.Read()[1]));
}

TEST_F(FusedTest, AdamwMatchesDoubleOverThreeSteps) {
  const int64_t count = 100'003;
  std::vector<float> w = NormalFloat(count), zeros(count, 0.0f);
  DeviceBuffer<float> master(w), m(zeros), v(zeros), scale(std::vector<float>{0.5f});
  DeviceBuffer<Bf16> parameter(count);
  std::vector<double> dw(w.begin(), w.end()), dm(count), dv(count);
  for (int step = 1; step <= 3; ++step) {
    const std::vector<float> g = NormalFloat(count);
    DeviceBuffer<float> gradient(g);
    ASSERT_TRUE(AdamwStep({.master = master.data(),
                           .m = m.data(),
                           .v = v.data(),
                           .gradient = gradient.data(),
                           .parameter = parameter.data(),
                           .gradient_scale = scale.data(),
                           .count = count,
                           .step = step,
                           .learning_rate = 0.01f,
                           .beta1 = 0.9f,
                           .beta2 = 0.95f,
                           .weight_decay = 0.1f},
                          nullptr)
                    .ok());
    for (int64_t i = 0; i < count; ++i) {
      const double x = 0.5 * g[i];
      dm[i] = 0.9 * dm[i] + 0.1 * x;
      dv[i] = 0.95 * dv[i] + 0.05 * x * x;
      dw[i] -= 0.01 * (dm[i] / (1 - std::pow(0.9, step)) /
                           (std::sqrt(dv[i] / (1 - std::pow(0.95, step))) + 1e-8) +
                       0.1 * dw[i]);
    }
  }
  EXPECT_LT(RelativeError(master.Read(), dw), 1e-6);
  EXPECT_LT(RelativeError(m.Read(), dm), 1e-6);
  EXPECT_LT(RelativeError(v.Read(), dv), 1e-6);
  EXPECT_LT(RelativeError(parameter.Read(), dw), kBf16Tolerance);
}

TEST_F(FusedTest, AdamwSkipsAStepThatIsNotFinite) {
  const std::vector<float> values = NormalFloat(1000);
  DeviceBuffer<float> master(values), m(values), v(values), gradient(values),
      scale(1);  // 0xff is NaN
  DeviceBuffer<Bf16> parameter(Normal(1000));
  const auto before = parameter.Read();
  ASSERT_TRUE(AdamwStep({.master = master.data(),
                         .m = m.data(),
                         .v = v.data(),
                         .gradient = gradient.data(),
                         .parameter = parameter.data(),
                         .gradient_scale = scale.data(),
                         .count = 1000,
                         .learning_rate = 1.0f},
                        nullptr)
                  .ok());
  EXPECT_EQ(master.Read(), values);
  EXPECT_EQ(m.Read(), values);
  EXPECT_EQ(v.Read(), values);
  for (size_t i = 0; i < before.size(); ++i)
    EXPECT_EQ(Double(parameter.Read()[i]), Double(before[i])) << i;
}

TEST_F(FusedTest, SquaredNorm) {
  DeviceBuffer<char> workspace(static_cast<int64_t>(SquaredNormWorkspaceBytes()));
  DeviceBuffer<float> norm(1);
  for (const int64_t count : {0, 1, 1023, 4'000'001}) {
    const std::vector<float> values = NormalFloat(count);
    DeviceBuffer<float> device(values);
    double expected = 0;
    for (const float x : values) expected += static_cast<double>(x) * x;
    ASSERT_TRUE(SquaredNorm(device.data(), count, norm.data(), workspace.data(), nullptr).ok());
    EXPECT_NEAR(norm.Read()[0], expected, 1e-5 * expected) << count;
  }
}

// These need no GPU: arguments are checked before anything is launched.
TEST(FusedArgumentsTest, ErrorsNameTheArgumentAndWhatIsAllowed) {
  alignas(16) static Bf16 memory[64];
  static float floats[8];
  EXPECT_THAT(RmsNormForward({.rows = 1, .dim = 12}, nullptr).message(),
              HasSubstr("dim is 12; allowed are multiples of 8 from 8 to 8192"));
  EXPECT_THAT(RmsNormForward({.x = memory + 1, .rows = 1, .dim = 8}, nullptr).message(),
              HasSubstr("x ("));
  EXPECT_THAT(RmsNormForward({.x = memory,
                              .residual = memory,
                              .weight = memory,
                              .y = memory,
                              .rstd = floats,
                              .rows = 1,
                              .dim = 8},
                             nullptr)
                  .message(),
              HasSubstr("residual and sum go together"));
  EXPECT_THAT(CrossEntropy({.stride = 262152, .rows = 1, .vocabulary = 262145}, nullptr).message(),
              HasSubstr("vocabulary is 262145"));
  EXPECT_THAT(SwigluForward({.rows = 1, .dim = 8}, nullptr).message(), HasSubstr("gate is null"));
  EXPECT_THAT(AdamwStep({.count = 8, .step = 0}, nullptr).message(), HasSubstr("step is 0"));
  RopeArgs rope;
  rope.q.head_dim = 24;
  EXPECT_THAT(Rope(rope, nullptr).message(),
              HasSubstr("head_dim is 24; allowed are multiples of 16 from 16 to 256"));
}

}  // namespace
}  // namespace ringleader::kernels::fused
