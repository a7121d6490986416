// The loss over chunks of logits against cross entropy over all of them.
#include <gtest/gtest.h>
#include <torch/nn.h>

#include "worker/model/decoder/layer_passes.h"
#include "worker/model/token_ops/cpu_token_ops.h"

namespace ringleader::model {
namespace {

using torch::Tensor;

constexpr int64_t kChunkTokens = 64;

double RelativeError(const Tensor& got, const Tensor& want) {
  return ((got - want).norm() / want.norm()).item<double>();
}

Tensor Sum(const TokenScores& scores) {
  return scores.losses.sum(torch::kDouble);
}

// 150 tokens need three chunks.
class LossTest : public testing::Test {
 protected:
  LossTest() {
    torch::manual_seed(1);
    hidden_ = torch::randn({150, 8});
    head_ = torch::randn({1 << 17, 8}) * 0.5;
    labels_ = torch::randint(0, 1 << 17, {150});
    labels_.slice(0, 10, 20).fill_(kIgnoreLabel);
  }

  const std::unique_ptr<TokenOps> ops_ = NewCpuTokenOps(/*threads=*/2);
  Tensor hidden_, head_, labels_;
};

TEST_F(LossTest, EqualsCrossEntropyOverAllLogits) {
  const Tensor d_head = torch::zeros_like(head_), d_hidden = hidden_.clone();
  const Tensor sum = Sum(LossPass(*ops_, d_hidden, head_, labels_, d_head, kChunkTokens));

  const Tensor hidden = hidden_.clone().requires_grad_(), head = head_.clone().requires_grad_();
  namespace F = torch::nn::functional;
  const Tensor want = F::cross_entropy(
      hidden.matmul(head.t()), labels_,
      F::CrossEntropyFuncOptions().ignore_index(kIgnoreLabel).reduction(torch::kSum));
  want.backward();
  EXPECT_NEAR(sum.item<double>() / want.item<double>(), 1.0, 1e-6);
  EXPECT_LE(RelativeError(d_hidden, hidden.grad()), 1e-5);
  EXPECT_LE(RelativeError(d_head, head.grad()), 1e-5);
  EXPECT_EQ(d_hidden.slice(0, 10, 20).abs().max().item<float>(), 0.0f);
}

TEST_F(LossTest, WithoutGradientsTheSameLosses) {
  const Tensor losses = LossPass(*ops_, hidden_.clone(), head_, labels_, {}, kChunkTokens).losses;
  const Tensor hidden = hidden_.clone();
  const Tensor want =
      LossPass(*ops_, hidden, head_, labels_, torch::zeros_like(head_), kChunkTokens).losses;
  EXPECT_TRUE(torch::equal(losses, want));
  const Tensor untouched = hidden_.clone();
  LossPass(*ops_, untouched, head_, labels_, {}, kChunkTokens);
  EXPECT_TRUE(torch::equal(untouched, hidden_));
}

TEST_F(LossTest, RightIsTheLabelWithTheLargestLogitAlone) {
  const Tensor best = hidden_.matmul(head_.t()).argmax(1);
  const Tensor labels = torch::where(torch::arange(150).remainder(3).eq(0), labels_, best);
  labels.slice(0, 10, 20).fill_(kIgnoreLabel);
  const Tensor right = LossPass(*ops_, hidden_, head_, labels, {}, kChunkTokens).right;
  EXPECT_TRUE(torch::equal(right, labels.eq(best)));
  EXPECT_GT(right.sum().item<int64_t>(), 80);

  // Two equal rows of the head: neither is larger than the other.
  const Tensor twins = head_.clone();
  const Tensor twin = (best + 1).remainder(head_.size(0));
  twins.index_copy_(0, twin.slice(0, 0, 1), head_.index_select(0, best.slice(0, 0, 1)));
  const Tensor tied =
      LossPass(*ops_, hidden_.slice(0, 0, 1), twins, best.slice(0, 0, 1), {}, 1).right;
  EXPECT_FALSE(tied.item<bool>());
  const Tensor nan = torch::full({1, 8}, NAN);
  EXPECT_FALSE(LossPass(*ops_, nan, head_, best.slice(0, 0, 1), {}, 1).right.item<bool>());
}

TEST_F(LossTest, NoLabelsNoLossNoGradient) {
  const Tensor d_head = torch::zeros_like(head_);
  const Tensor sum =
      Sum(LossPass(*ops_, hidden_, head_, torch::full({150}, kIgnoreLabel), d_head, kChunkTokens));
  EXPECT_EQ(sum.item<double>(), 0.0);
  EXPECT_EQ(d_head.abs().max().item<float>(), 0.0f);
}

}  // namespace
}  // namespace ringleader::model
