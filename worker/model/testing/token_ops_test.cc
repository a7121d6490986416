#include "worker/model/testing/token_ops_test.h"

#include <limits>
#include <utility>

namespace ringleader::model {
namespace {

using torch::Tensor;

double Error(const Tensor& actual, const Tensor& expected) {
  const Tensor e = expected.to(torch::kDouble);
  return ((actual.to(torch::kDouble) - e).norm() / e.norm()).item<double>();
}
Tensor Wide(const Tensor& x) {
  return x.to(torch::kDouble);
}

}  // namespace

TEST_P(TokenOpsTest, NormAndItsGradient) {
  const Tensor x = Random({300, 2048}), residual = Random({300, 2048}), weight = Random({2048});
  const auto expected =
      plain_.NormForward(Wide(x), Wide(residual), Wide(weight), 1e-6, Form::kValues);
  const auto actual = fused_->NormForward(x, residual.clone(), weight, 1e-6, Form::kValues);
  EXPECT_LT(Error(actual.sum, expected.sum), GetParam().tolerance);
  EXPECT_LT(Error(actual.y.values, expected.y.values), GetParam().tolerance);
  EXPECT_LT(Error(actual.rstd, expected.rstd), GetParam().tolerance);
  EXPECT_LT(Error(fused_->NormForward(x, {}, weight, 1e-6, Form::kValues).y.values,
                  plain_.NormForward(Wide(x), {}, Wide(weight), 1e-6, Form::kValues).y.values),
            GetParam().tolerance);

  const Tensor dy = Random({300, 2048}), past = Random({300, 2048});
  const Tensor d_weight = Zeros({2048}), d_weight_expected = Zeros({2048}).to(torch::kDouble);
  for (const Tensor& d_sum : {past, Tensor()}) {
    const Tensor dx = fused_
                          ->NormBackward(dy.clone(), actual.sum, actual.rstd, weight, d_sum,
                                         d_weight, Form::kValues)
                          .values;
    const Tensor dx_expected =
        plain_
            .NormBackward(Wide(dy), Wide(actual.sum), expected.rstd, Wide(weight),
                          d_sum.defined() ? Wide(d_sum) : Tensor(), d_weight_expected,
                          Form::kValues)
            .values;
    EXPECT_LT(Error(dx, dx_expected), GetParam().tolerance);
    EXPECT_LT(Error(d_weight, d_weight_expected), GetParam().tolerance) << "added to, not set";
  }
}

TEST_P(TokenOpsTest, RotationOfPackedHeads) {
  const int64_t n = 257;
  Rotary rotary{.positions = RandomIntegers(1 << 20, n),
                .inverse_frequencies = torch::rand({64}, GetParam().device),
                .scale = 1.1};
  fused_->PrepareRotary(rotary);
  const Tensor packed = Random({n, 20, 128}), expected = packed.clone();
  const auto q = [](const Tensor& x) { return x.slice(1, 0, 16); };
  const auto k = [](const Tensor& x) { return x.slice(1, 16, 18); };
  for (const bool inverse : {false, true}) {
    fused_->Rotate(q(packed), k(packed), rotary, inverse, q(packed), k(packed));
    plain_.Rotate(q(expected), k(expected), rotary, inverse, q(expected), k(expected));
    EXPECT_LT(Error(packed, expected), GetParam().tolerance);
  }
  // Backward rotates one tensor into another of other strides.
  const Tensor dq = Random({n, 16, 128}), dk = Random({n, 2, 128});
  fused_->Rotate(dq, dk, rotary, true, q(packed), k(packed));
  plain_.Rotate(dq, dk, rotary, true, q(expected), k(expected));
  EXPECT_LT(Error(packed, expected), GetParam().tolerance);
}

namespace {

void ExpectSameRows(const ScaledRows& actual, const ScaledRows& expected, const char* of) {
  ASSERT_TRUE(actual.defined()) << of;
  EXPECT_EQ(actual.codes.scalar_type(), torch::kFloat8_e4m3fn) << of;
  EXPECT_TRUE(torch::equal(actual.codes.view(torch::kByte), expected.codes.view(torch::kByte)))
      << of;
  EXPECT_TRUE(torch::equal(actual.scales, expected.scales)) << of;
}

}  // namespace

TEST_P(TokenOpsTest, GradientsAreRotatedBackSideBySide) {
  for (const auto& [heads, kv_heads, d] : {std::tuple(16, 2, 128), std::tuple(3, 1, 64),
                                           std::tuple(40, 8, 128), std::tuple(2, 1, 256)}) {
    const int64_t n = 70, width = (heads + 2 * kv_heads) * d;
    Rotary rotary{
        .positions = torch::arange(n, torch::kInt64).mul(997).to(GetParam().device),
        .inverse_frequencies =
            torch::pow(10000.0, -torch::arange(d / 2, torch::kFloat) * 2 / d).to(GetParam().device),
        .scale = 1.25};
    fused_->PrepareRotary(rotary);
    const Tensor dq = Random({n, heads + 1, d}).slice(1, 1);  // tokens lie apart
    const Tensor dk = Random({n, kv_heads, d}), dv = Random({n, kv_heads, d});
    dq[3].zero_();
    dq[4][0][5] = std::numeric_limits<float>::quiet_NaN();
    const auto run = [&](Form form) {
      return fused_->RotateBack(dq, dk, dv, rotary, Zeros({n, width}).to(GetParam().type), form);
    };
    const Operand plain = run(Form::kValues), both = run(Form::kBoth), rows = run(Form::kRows);
    const Operand expected = plain_.RotateBack(Wide(dq), Wide(dk), Wide(dv), rotary,
                                               Wide(Zeros({n, width})), Form::kValues);
    const auto numbers = [](const Tensor& x) {
      return torch::cat({x.slice(0, 0, 4), x.slice(0, 5)});
    };
    EXPECT_LT(Error(numbers(plain.values), numbers(expected.values)), GetParam().tolerance);
    EXPECT_TRUE(torch::equal(numbers(both.values), numbers(plain.values)));
    EXPECT_TRUE(torch::equal(plain.values.slice(1, (heads + kv_heads) * d), dv.view({n, -1})));
    EXPECT_FALSE(rows.values.defined() || plain.rows.defined());
    const ScaledRows cast = plain_.CastRows(plain.values);
    for (const Operand& operand : {both, rows}) {
      EXPECT_TRUE(operand.rows.scales[4].isnan().item<bool>());
      ExpectSameRows({numbers(operand.rows.codes), numbers(operand.rows.scales)},
                     {numbers(cast.codes), numbers(cast.scales)}, "rotated back");
    }
  }
}

TEST_P(TokenOpsTest, SwiGluAndItsGradient) {
  const Tensor gate_up = Random({129, 2752}), upstream = Random({129, 1376});
  EXPECT_LT(Error(fused_->SwiGlu(gate_up, Form::kValues).values,
                  plain_.SwiGlu(Wide(gate_up), Form::kValues).values),
            GetParam().tolerance);
  const auto expected = plain_.SwiGluBackward(Wide(upstream), Wide(gate_up), Form::kValues);
  const auto actual = fused_->SwiGluBackward(upstream.clone(), gate_up.clone(), Form::kValues);
  EXPECT_LT(Error(actual.activation.values, expected.activation.values), GetParam().tolerance);
  EXPECT_LT(Error(actual.d_gate_up.values, expected.d_gate_up.values), GetParam().tolerance);
}

// Bit for bit, on every device: rows of one value alone, of large and small ones, and zeros.
TEST_P(TokenOpsTest, CastsRowsAndTurnsThem) {
  for (const int64_t width : {16, 2048, 2560, 11008}) {
    Tensor x = Random({144, width}) * torch::exp2(torch::randn({144, 1}, GetParam().device) * 20);
    x = x.to(GetParam().type);
    x[3].zero_();
    x[4] = 448.0;
    x[5] = -1e-30;
    const ScaledRows rows = plain_.CastRows(x);
    ExpectSameRows(fused_->CastRows(x), rows, "rows");
    ExpectSameRows(fused_->TurnRows(rows), plain_.TurnRows(rows), "turned");
  }
  // Less and more than a block of threads turns.
  for (const int64_t count : {16, 272}) {
    const ScaledRows rows = plain_.CastRows(Random({count, 144}));
    ExpectSameRows(fused_->TurnRows(rows), plain_.TurnRows(rows), "turned");
  }
  const Tensor wide = Random({64, 512});
  ExpectSameRows(fused_->CastRows(wide.slice(1, 128, 384)),
                 plain_.CastRows(wide.slice(1, 128, 384)), "rows that lie apart");
}

// A saturating cast would make numbers of them.
TEST_P(TokenOpsTest, RowsThatAreNotFiniteStayThat) {
  for (const double bad :
       {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    Tensor x = Random({32, 64});
    x[7][9] = bad;
    const ScaledRows rows = fused_->CastRows(x), turned = fused_->TurnRows(rows);
    EXPECT_TRUE(rows.scales[7].isnan().item<bool>());
    EXPECT_EQ(rows.scales.isnan().sum().item<int64_t>(), 1);
    EXPECT_TRUE(turned.scales.isnan().all().item<bool>());
    EXPECT_TRUE(turned.codes.to(torch::kFloat).isnan().all().item<bool>());
    const Tensor weight = Random({48, 64});
    Tensor y = Random({32, 48});
    fused_->ScaledProduct(rows, fused_->CastRows(weight), {}, y);
    EXPECT_TRUE(y[7].isnan().all().item<bool>());
    EXPECT_EQ(y.isnan().sum().item<int64_t>(), 48) << "no other row";
  }
}

TEST_P(TokenOpsTest, ScaledProductsSumInFp32) {
  for (const int64_t rows : {1, 129, 512}) {
    const Tensor x = Random({rows, 2048}), weight = Random({320, 2048}), bias = Random({320});
    const ScaledRows a = plain_.CastRows(x), b = plain_.CastRows(weight);
    for (const Tensor& added : {bias, Tensor()}) {
      Tensor y = Random({rows, 320}), expected = Wide(y).clone();
      fused_->ScaledProduct(a, b, added, y);
      plain_.ScaledProduct(a, b, added.defined() ? Wide(added) : added, expected);
      EXPECT_LT(Error(y, expected), GetParam().tolerance) << rows;
    }
  }
}

// What a step casts on its way is what a pass of its own would: the same codes, also where the
// values are not stored.
TEST_P(TokenOpsTest, StepsCastWhatTheyStore) {
  for (const auto& [hidden, inner] :
       {std::pair(2048, 11008), std::pair(512, 1376), std::pair(64, 176)}) {
    const Tensor x = Random({70, hidden}), residual = Random({70, hidden}),
                 weight = Random({hidden});
    for (const Tensor& added : {residual, Tensor()}) {
      const auto copy = [&] { return added.defined() ? added.clone() : added; };
      const auto both = fused_->NormForward(x, copy(), weight, 1e-6, Form::kBoth);
      const auto plain = fused_->NormForward(x, copy(), weight, 1e-6, Form::kValues);
      const auto rows = fused_->NormForward(x, copy(), weight, 1e-6, Form::kRows);
      EXPECT_TRUE(torch::equal(both.y.values, plain.y.values));
      EXPECT_TRUE(torch::equal(both.sum, rows.sum));
      EXPECT_TRUE(torch::equal(both.rstd, rows.rstd));
      EXPECT_FALSE(plain.y.rows.defined());
      EXPECT_FALSE(rows.y.values.defined());
      ExpectSameRows(both.y.rows, plain_.CastRows(plain.y.values), "norm");
      ExpectSameRows(rows.y.rows, both.y.rows, "norm without values");

      const Tensor dy = Random({70, hidden});
      const auto backward = [&](Form form) {
        return fused_->NormBackward(dy.clone(), both.sum, both.rstd, weight, added, Zeros({hidden}),
                                    form);
      };
      const Operand dx = backward(Form::kBoth);
      EXPECT_TRUE(torch::equal(dx.values, backward(Form::kValues).values));
      ExpectSameRows(dx.rows, plain_.CastRows(dx.values), "norm's gradient");
    }
    const Tensor gate_up = Random({70, 2 * inner}), upstream = Random({70, inner});
    const Tensor activation = fused_->SwiGlu(gate_up, Form::kValues).values;
    const Operand both = fused_->SwiGlu(gate_up, Form::kBoth);
    EXPECT_TRUE(torch::equal(both.values, activation));
    ExpectSameRows(both.rows, plain_.CastRows(activation), "swiglu");
    const Operand rows = fused_->SwiGlu(gate_up, Form::kRows);
    EXPECT_FALSE(rows.values.defined());
    ExpectSameRows(rows.rows, both.rows, "swiglu without values");
    const auto plain = fused_->SwiGluBackward(upstream.clone(), gate_up.clone(), Form::kValues);
    const auto cast = fused_->SwiGluBackward(upstream.clone(), gate_up.clone(), Form::kBoth);
    EXPECT_TRUE(torch::equal(cast.activation.values, plain.activation.values));
    ExpectSameRows(cast.activation.rows, plain_.CastRows(plain.activation.values), "activation");
    EXPECT_TRUE(torch::equal(cast.d_gate_up.values, plain.d_gate_up.values));
    ExpectSameRows(cast.d_gate_up.rows, plain_.CastRows(plain.d_gate_up.values), "gate and up");
    const auto alone = fused_->SwiGluBackward(upstream.clone(), gate_up.clone(), Form::kRows);
    EXPECT_FALSE(alone.activation.values.defined() || alone.d_gate_up.values.defined());
    ExpectSameRows(alone.activation.rows, cast.activation.rows, "activation without values");
    ExpectSameRows(alone.d_gate_up.rows, cast.d_gate_up.rows, "gate and up without values");
  }
}

TEST_P(TokenOpsTest, WeightGradientsAddUpInFp32) {
  const Tensor dy = Random({4096, 320}), x = Random({4096, 192});
  const Tensor d_weight = Zeros({320, 192});
  for (int i = 0; i < 2; ++i) fused_->AddWeightGradient(dy, x, d_weight);
  EXPECT_LT(Error(d_weight, 2 * Wide(dy).t().mm(Wide(x))), 1e-5);
}

// Rows of other sizes share the largest scale: what becomes too small for e4m3 there is rounded
// away, alike on every device. A row of zeros, whatever its scale, takes nothing from others.
TEST_P(TokenOpsTest, ScaledWeightGradientsAddUpInFp32) {
  for (const int64_t n : {1, 150, 4096}) {
    Tensor dy = Random({n, 320}) * torch::exp2(torch::randn({n, 1}, GetParam().device) * 6);
    dy = dy.to(GetParam().type);
    const Tensor x = Random({n, 192});
    dy[0].mul_(1e-12);
    if (n > 1) dy[n / 2].zero_();
    const ScaledRows a = fused_->CastRows(dy), b = fused_->CastRows(x);
    const Tensor d_weight = Zeros({320, 192}), expected = Zeros({320, 192}).to(torch::kDouble);
    for (int i = 0; i < 2; ++i) fused_->AddScaledWeightGradient(a, b, d_weight);
    for (int i = 0; i < 2; ++i) plain_.AddScaledWeightGradient(a, b, expected);
    // Hopper's tensor cores align the products that an instruction adds up to the largest, of which
    // 13 bits below the leading one are kept; here they differ by as much as tokens do.
    EXPECT_LT(Error(d_weight, expected), GetParam().device.is_cuda() ? 0x1p-11 : 1e-5) << n;
    // Roundings of 3 % each are independent, so that their sums are that far off, too.
    EXPECT_LT(Error(d_weight, 2 * Wide(dy).t().mm(Wide(x))), 0.06) << n;
    EXPECT_GT(d_weight.abs().max().item<double>(), 0.0) << n;
  }
}

TEST_P(TokenOpsTest, WeightGradientsOfRowsThatAreNotFiniteAreNot) {
  Tensor dy = Random({64, 48});
  const Tensor x = Random({64, 32});
  dy[7][9] = std::numeric_limits<double>::infinity();
  const Tensor d_weight = Zeros({48, 32});
  fused_->AddScaledWeightGradient(fused_->CastRows(dy), fused_->CastRows(x), d_weight);
  EXPECT_TRUE(d_weight.isnan().all().item<bool>());
}

TEST_P(TokenOpsTest, CrossEntropyOfPaddedRows) {
  const int64_t n = 67, vocab = 1003;
  const Tensor buffer = Random({n, 1008}, 3.0);
  const Tensor logits = buffer.slice(1, 0, vocab), before = Wide(logits).clone();
  Tensor labels = RandomIntegers(vocab, n);
  labels[5] = kIgnoreLabel;
  const Tensor expected = plain_.CrossEntropy(before, labels, /*gradient=*/true);
  const Tensor copy = buffer.clone().slice(1, 0, vocab);
  EXPECT_LT(Error(fused_->CrossEntropy(copy, labels, /*gradient=*/false), expected), 1e-3);
  EXPECT_LT(Error(fused_->CrossEntropy(logits, labels, /*gradient=*/true), expected), 1e-3);
  EXPECT_LT(Error(logits, before), GetParam().tolerance);
}

TEST_P(TokenOpsTest, EmbeddingGradientIsTheSameEveryTime) {
  const int64_t n = 20000, vocab = 50;
  const Tensor dx = Random({n, 64});
  const Tensor tokens = RandomIntegers(vocab, n);
  const Tensor expected = Zeros({vocab, 64}).to(torch::kDouble).index_add(0, tokens, Wide(dx));
  Tensor first;
  for (int i = 0; i < 5; ++i) {
    const Tensor table = Zeros({vocab, 64});
    fused_->AddEmbeddingGradient(dx, tokens, table);
    EXPECT_LT(Error(table, expected), 1e-5);
    if (i == 0) first = table;
    EXPECT_TRUE(torch::equal(table, first));
  }
}

}  // namespace ringleader::model
