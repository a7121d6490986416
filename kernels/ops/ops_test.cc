// The differentiable operators against the same formulas in double precision under LibTorch's own
// autograd.
#include <gtest/gtest.h>
#include <torch/autograd.h>

#include <cmath>

#include "kernels/ops/attention_ops.h"
#include "kernels/ops/cuda_call.h"
#include "kernels/ops/elementwise_ops.h"

namespace ringleader::kernels::ops {
namespace {

class OpsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
      GTEST_SKIP() << "no GPU on this machine";
    }
    ASSERT_EQ(LoadTorchCuda(), absl::OkStatus());
  }
};

torch::Tensor Leaf(at::IntArrayRef sizes, double scale = 1.0) {
  return (torch::randn(sizes, torch::kCUDA) * scale).to(torch::kBFloat16).requires_grad_();
}
torch::Tensor DoubleLeaf(const torch::Tensor& x) {
  return x.detach().to(torch::kDouble).requires_grad_();
}
double RelativeError(const torch::Tensor& actual, const torch::Tensor& expected) {
  const torch::Tensor e = expected.detach().to(torch::kDouble);
  return ((actual.detach().to(torch::kDouble) - e).norm() / e.norm()).item<double>();
}

constexpr double kTolerance = 6e-3;  // bf16 in and out

// Gradients of `actual` and `expected`, given random upstream ones, agree.
void ExpectGradients(const std::vector<torch::Tensor>& actual,
                     const std::vector<torch::Tensor>& expected,
                     const std::vector<torch::Tensor>& leaves,
                     const std::vector<torch::Tensor>& double_leaves,
                     double tolerance = kTolerance) {
  std::vector<torch::Tensor> upstream, double_upstream;
  for (size_t i = 0; i < actual.size(); ++i) {
    EXPECT_LT(RelativeError(actual[i], expected[i]), tolerance) << "output " << i;
    upstream.push_back(torch::randn_like(actual[i]));
    double_upstream.push_back(upstream.back().to(torch::kDouble));
  }
  torch::autograd::backward(actual, upstream);
  torch::autograd::backward(expected, double_upstream);
  for (size_t i = 0; i < leaves.size(); ++i) {
    EXPECT_LT(RelativeError(leaves[i].grad(), double_leaves[i].grad()), tolerance) << "leaf " << i;
  }
}

torch::Tensor DoubleNorm(const torch::Tensor& x, const torch::Tensor& weight) {
  return x * (x.pow(2).mean(-1, true) + 1e-5).rsqrt() * weight;
}

TEST_F(OpsTest, RmsNorm) {
  const torch::Tensor x = Leaf({300, 896}), w = Leaf({896});
  const torch::Tensor dx = DoubleLeaf(x), dw = DoubleLeaf(w);
  ExpectGradients({RmsNorm(x, w, 1e-5)}, {DoubleNorm(dx, dw)}, {x, w}, {dx, dw});
}

TEST_F(OpsTest, AddRmsNorm) {
  const torch::Tensor x = Leaf({257, 2048}), r = Leaf({257, 2048}), w = Leaf({2048});
  const torch::Tensor dx = DoubleLeaf(x), dr = DoubleLeaf(r), dw = DoubleLeaf(w);
  const auto [y, sum] = AddRmsNorm(x, r, w, 1e-5);
  ExpectGradients({y, sum}, {DoubleNorm(dx + dr, dw), dx + dr}, {x, r, w}, {dx, dr, dw});
}

TEST_F(OpsTest, SwiGlu) {
  const torch::Tensor x = Leaf({129, 9728}), dx = DoubleLeaf(x);
  const auto halves = dx.chunk(2, 1);
  ExpectGradients({SwiGlu(x)}, {torch::silu(halves[0]) * halves[1]}, {x}, {dx});
}

TEST_F(OpsTest, Rope) {
  const int64_t n = 333, d = 128;
  const torch::Tensor q = Leaf({n, 8, d}), k = Leaf({n, 2, d});
  const torch::Tensor dq = DoubleLeaf(q), dk = DoubleLeaf(k);
  const torch::Tensor positions = torch::arange(n, torch::kCUDA) * 1000;
  const torch::Tensor inv_freq =
      torch::pow(1e6, -torch::arange(0, d, 2, torch::kCUDA).to(torch::kFloat) / d);
  const torch::Tensor angle =
      (positions.to(torch::kFloat).unsqueeze(1) * inv_freq).to(torch::kDouble).unsqueeze(1);
  const auto rotate = [&](const torch::Tensor& x) {
    const auto h = x.chunk(2, -1);
    const torch::Tensor c = angle.cos(), s = angle.sin();
    return torch::cat({h[0] * c - h[1] * s, h[1] * c + h[0] * s}, -1);
  };
  const auto [rq, rk] = ops::Rope(q, k, positions, inv_freq, 1.0);
  ExpectGradients({rq, rk}, {rotate(dq), rotate(dk)}, {q, k}, {dq, dk});
}

TEST_F(OpsTest, LinearCrossEntropy) {
  const int64_t n = 4500, vocabulary = 1003;
  const torch::Tensor hidden = Leaf({n, 256}), head = Leaf({vocabulary, 256}, 0.1);
  const torch::Tensor dh = DoubleLeaf(hidden), dw = DoubleLeaf(head);
  torch::Tensor labels =
      torch::randint(vocabulary, {n}, torch::dtype(torch::kLong).device(torch::kCUDA));
  labels.slice(0, 100, 200).fill_(-7);
  const torch::Tensor loss = LinearCrossEntropySum(hidden, head, labels, -7) / n;
  const torch::Tensor expected =
      at::cross_entropy_loss(dh.matmul(dw.t()), labels, {}, at::Reduction::Sum, -7) / n;
  EXPECT_LT(RelativeError(loss, expected), 1e-3);
  loss.backward();
  expected.backward();
  EXPECT_LT(RelativeError(hidden.grad(), dh.grad()), 2 * kTolerance);
  EXPECT_LT(RelativeError(head.grad(), dw.grad()), 2 * kTolerance);
  EXPECT_EQ(hidden.grad().slice(0, 100, 200).abs().max().item<float>(), 0.0f);
}

// Softmax attention in double with a mask [heads, n, n] of what is visible.
torch::Tensor MaskedAttention(const torch::Tensor& q, const torch::Tensor& k,
                              const torch::Tensor& v, const torch::Tensor& mask, double scale) {
  const int64_t group = q.size(1) / k.size(1);
  const torch::Tensor kk = k.repeat_interleave(group, 1).transpose(0, 1),
                      vv = v.repeat_interleave(group, 1).transpose(0, 1);
  torch::Tensor logits = q.transpose(0, 1).matmul(kk.transpose(1, 2)) * scale;
  logits = logits.masked_fill(mask.logical_not(), -INFINITY);
  return logits.softmax(-1).matmul(vv).transpose(0, 1);
}

// One sequence, [n, heads, d], as the operators take it and back.
torch::Tensor Batch(const torch::Tensor& x) {
  return x.transpose(0, 1).unsqueeze(0);
}
torch::Tensor Attend(const torch::Tensor& q, const torch::Tensor& k, const torch::Tensor& v,
                     const Visited& visited, double scale) {
  return std::get<0>(
             Attention(Batch(q), Batch(k), Batch(v), visited, scale, /*deterministic=*/false))[0]
      .transpose(0, 1);
}

TEST_F(OpsTest, CausalAttention) {
  const int64_t n = 1000, d = 128;
  const double scale = 1 / std::sqrt(128.0);
  const torch::Tensor q = Leaf({n, 8, d}), k = Leaf({n, 2, d}), v = Leaf({n, 2, d});
  const torch::Tensor dq = DoubleLeaf(q), dk = DoubleLeaf(k), dv = DoubleLeaf(v);
  const torch::Tensor mask = torch::ones({n, n}, torch::kCUDA).tril().to(torch::kBool).unsqueeze(0);
  ExpectGradients({Attend(q, k, v, {.pattern = TilePattern::kCausal, .tile = 128}, scale)},
                  {MaskedAttention(dq, dk, dv, mask, scale)}, {q, k, v}, {dq, dk, dv}, 2e-2);
}

TEST_F(OpsTest, VerticalSlashAttentionSeesWhatItsIndexSays) {
  const int64_t n = 2048, d = 128, heads = 4, tile = 128;
  const double scale = 1 / std::sqrt(128.0);
  const torch::Tensor q = Leaf({n, heads, d}, 2.0), k = Leaf({n, 2, d}), v = Leaf({n, 2, d});
  const torch::Tensor dq = DoubleLeaf(q), dk = DoubleLeaf(k), dv = DoubleLeaf(v);
  const VerticalSlashChoice index = ChooseVerticalSlash(
      Batch(q.detach()), Batch(k.detach()),
      torch::arange(n - 64, n, torch::device(torch::kCUDA).dtype(torch::kLong)),
      /*starts=*/std::nullopt, scale,
      {.max_columns = 128, .column_mass = 0.3, .diagonal_mass = 0.4, .max_diagonals = 6});
  // The mask from the lists alone.
  const auto positions = index.column_positions[0].cpu(), counts = index.column_counts[0].cpu(),
             bits = index.diagonals[0].cpu();
  torch::Tensor mask = torch::zeros({heads, n, n}, torch::kBool);
  int64_t tiles = 0;
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t delta = 0; delta < n / tile; ++delta) {
      if ((bits[h][delta / 64].item<int64_t>() >> (delta % 64) & 1) == 0) continue;
      for (int64_t a = delta; a < n / tile; ++a) {
        ++tiles;
        mask[h]
            .slice(0, a * tile, (a + 1) * tile)
            .slice(1, (a - delta) * tile, (a - delta + 1) * tile)
            .fill_(true);
      }
    }
    for (int64_t c = 0; c < counts[h].item<int32_t>(); ++c) {
      mask[h].select(1, positions[h][c].item<int64_t>()).fill_(true);
    }
  }
  EXPECT_EQ(index.visited.item<int64_t>(), tiles);
  EXPECT_LT(tiles, heads * (n / tile) * (n / tile + 1) / 2);
  mask = mask.logical_and(torch::ones({n, n}).tril().to(torch::kBool)).to(torch::kCUDA);
  const torch::Tensor lists[] = {index.diagonals, index.column_positions, index.column_counts};
  ExpectGradients({Attend(q, k, v, {.pattern = TilePattern::kToeplitz, .lists = lists}, scale)},
                  {MaskedAttention(dq, dk, dv, mask, scale)}, {q, k, v}, {dq, dk, dv}, 2e-2);
}

TEST_F(OpsTest, ErrorsNameTheTensor) {
  const torch::Tensor x = torch::randn({4, 16}, torch::kCUDA);
  try {
    RmsNorm(x, x[0], 1e-5);
    FAIL() << "fp32 must be refused";
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find("RmsNorm: x must be a CUDA tensor of BFloat16"),
              std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace ringleader::kernels::ops
