#include "worker/model/decoder/loss.h"

#include <gtest/gtest.h>

namespace ringleader::model {
namespace {

constexpr int64_t kIgnore = -100;

double RelativeError(const torch::Tensor& got, const torch::Tensor& want) {
  return ((got - want).norm() / want.norm()).item<double>();
}

class LossTest : public testing::Test {
 protected:
  // A vocabulary that makes a chunk 64 tokens, so that 150 tokens need three.
  LossTest() {
    torch::manual_seed(1);
    hidden_ = torch::randn({150, 8}).requires_grad_();
    head_ = (torch::randn({1 << 17, 8}) * 0.5).requires_grad_();
    labels_ = torch::randint(0, 1 << 17, {150});
    labels_.slice(0, 10, 20).fill_(kIgnore);
  }

  torch::Tensor hidden_, head_, labels_;
};

TEST_F(LossTest, EqualsCrossEntropyOverAllLogits) {
  const torch::Tensor sum = LinearCrossEntropySum(hidden_, head_, labels_, kIgnore);
  (sum / 140).backward();
  const torch::Tensor d_hidden = hidden_.grad().clone(), d_head = head_.grad().clone();
  hidden_.mutable_grad().reset();
  head_.mutable_grad().reset();

  namespace F = torch::nn::functional;
  const torch::Tensor want =
      F::cross_entropy(hidden_.matmul(head_.t()), labels_,
                       F::CrossEntropyFuncOptions().ignore_index(kIgnore).reduction(torch::kSum));
  (want / 140).backward();
  EXPECT_EQ(sum.scalar_type(), torch::kFloat64);
  EXPECT_NEAR(sum.item<double>() / want.item<double>(), 1.0, 1e-6);
  EXPECT_LE(RelativeError(d_hidden, hidden_.grad()), 1e-5);
  EXPECT_LE(RelativeError(d_head, head_.grad()), 1e-5);
  EXPECT_EQ(d_hidden.slice(0, 10, 20).abs().max().item<float>(), 0.0f);
}

TEST_F(LossTest, WithoutGradientsOnlyTheSum) {
  const double want = LinearCrossEntropySum(hidden_, head_, labels_, kIgnore).item<double>();
  torch::NoGradGuard guard;
  const torch::Tensor sum = LinearCrossEntropySum(hidden_, head_, labels_, kIgnore);
  EXPECT_FALSE(sum.requires_grad());
  EXPECT_EQ(sum.item<double>(), want);
}

TEST_F(LossTest, NoLabelsNoLossNoGradient) {
  const torch::Tensor sum =
      LinearCrossEntropySum(hidden_, head_, torch::full({150}, kIgnore), kIgnore);
  EXPECT_EQ(sum.item<double>(), 0.0);
  sum.backward();
  EXPECT_EQ(head_.grad().abs().max().item<float>(), 0.0f);
}

}  // namespace
}  // namespace ringleader::model
