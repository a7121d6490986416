#include "worker/model/testing/token_ops_test.h"

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
  const auto expected = plain_.NormForward(Wide(x), Wide(residual), Wide(weight), 1e-6);
  const auto actual = fused_->NormForward(x, residual.clone(), weight, 1e-6);
  EXPECT_LT(Error(actual.sum, expected.sum), GetParam().tolerance);
  EXPECT_LT(Error(actual.y, expected.y), GetParam().tolerance);
  EXPECT_LT(Error(actual.rstd, expected.rstd), GetParam().tolerance);
  EXPECT_LT(Error(fused_->NormForward(x, {}, weight, 1e-6).y,
                  plain_.NormForward(Wide(x), {}, Wide(weight), 1e-6).y),
            GetParam().tolerance);

  const Tensor dy = Random({300, 2048}), past = Random({300, 2048});
  const Tensor d_weight = Zeros({2048}), d_weight_expected = Zeros({2048}).to(torch::kDouble);
  for (const Tensor& d_sum : {past, Tensor()}) {
    const Tensor dx =
        fused_->NormBackward(dy.clone(), actual.sum, actual.rstd, weight, d_sum, d_weight);
    const Tensor dx_expected =
        plain_.NormBackward(Wide(dy), Wide(actual.sum), expected.rstd, Wide(weight),
                            d_sum.defined() ? Wide(d_sum) : Tensor(), d_weight_expected);
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

TEST_P(TokenOpsTest, SwiGluAndItsGradient) {
  const Tensor gate_up = Random({129, 2752}), upstream = Random({129, 1376});
  EXPECT_LT(Error(fused_->SwiGlu(gate_up), plain_.SwiGlu(Wide(gate_up))), GetParam().tolerance);
  const auto expected = plain_.SwiGluBackward(Wide(upstream), Wide(gate_up));
  const auto actual = fused_->SwiGluBackward(upstream.clone(), gate_up.clone());
  EXPECT_LT(Error(actual.activation, expected.activation), GetParam().tolerance);
  EXPECT_LT(Error(actual.d_gate_up, expected.d_gate_up), GetParam().tolerance);
}

TEST_P(TokenOpsTest, WeightGradientsAddUpInFp32) {
  const Tensor dy = Random({4096, 320}), x = Random({4096, 192});
  const Tensor d_weight = Zeros({320, 192});
  for (int i = 0; i < 2; ++i) fused_->AddWeightGradient(dy, x, d_weight);
  EXPECT_LT(Error(d_weight, 2 * Wide(dy).t().mm(Wide(x))), 1e-5);
}

TEST_P(TokenOpsTest, CrossEntropyOfPaddedRows) {
  const int64_t n = 67, vocab = 1003;
  const Tensor buffer = Random({n, 1008}, 3.0);
  const Tensor logits = buffer.slice(1, 0, vocab), before = Wide(logits).clone();
  Tensor labels = RandomIntegers(vocab, n);
  labels[5] = kIgnoreLabel;
  const Tensor expected = plain_.CrossEntropy(before, labels, /*gradient=*/true);
  EXPECT_LT(Error(fused_->CrossEntropy(logits, labels, /*gradient=*/false), expected), 1e-3);
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
