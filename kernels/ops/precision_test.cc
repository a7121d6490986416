// Errors of the attention operator, against fp64 under LibTorch's autograd, beside those of
// PyTorch's own dense attention in bf16 with the same mask: at most twice as large, for the output,
// its log-sum-exp and all gradients.
#include <gtest/gtest.h>
#include <torch/autograd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "kernels/ops/attention_ops.h"
#include "kernels/ops/cuda_call.h"
#include "kernels/sm90/attention.h"

namespace ringleader::kernels::ops {
namespace {

using torch::Tensor;

enum class Kept {
  kAll,
  kDiagonal,
  kRandom,
  kToeplitz
};  // of the causal tiles; the diagonal always

struct PrecisionCase {
  std::string name;
  int64_t tokens;
  int64_t heads, kv_heads, head_dim;
  int tile;
  Kept kept;
  double density = 0.3;
};
void PrintTo(const PrecisionCase& c, std::ostream* out) {
  *out << c.name;
}

// Tiles [heads, blocks, blocks] of a case: bool, on the GPU.
Tensor KeptTiles(const PrecisionCase& c) {
  const int64_t blocks = (c.tokens + c.tile - 1) / c.tile;
  const auto booleans = torch::dtype(torch::kBool).device(torch::kCUDA);
  const Tensor diagonal = torch::eye(blocks, torch::kCUDA).to(torch::kBool).unsqueeze(0);
  const Tensor causal = torch::ones({blocks, blocks}, booleans).tril().unsqueeze(0);
  Tensor kept = torch::zeros({c.heads, blocks, blocks}, booleans);
  if (c.kept == Kept::kAll) kept.fill_(true);
  if (c.kept == Kept::kRandom) {
    kept = torch::rand({c.heads, blocks, blocks}, torch::kCUDA) < c.density;
  }
  if (c.kept == Kept::kToeplitz) {
    const Tensor set = torch::rand({c.heads, blocks}, torch::kCUDA) < c.density;
    const Tensor blocks_of = torch::arange(blocks, torch::kCUDA);
    const Tensor delta = (blocks_of.unsqueeze(1) - blocks_of.unsqueeze(0)).clamp_min(0);
    kept = set.index_select(1, delta.flatten()).view({c.heads, blocks, blocks});
  }
  return kept.logical_or(diagonal).logical_and(causal);
}

// kCsr's offsets and lists by line of `kept`.
std::pair<Tensor, Tensor> ListsOf(const Tensor& kept) {
  const int64_t heads = kept.size(0), lines = kept.size(1);
  const Tensor offsets =
      torch::zeros({heads, lines + 1}, torch::dtype(torch::kInt).device(kept.device()));
  const Tensor counts = kept.sum(-1);
  const Tensor ends = counts.flatten().cumsum(0).view({heads, lines}).to(torch::kInt);
  offsets.slice(1, 1).copy_(ends);
  offsets.slice(0, 1).select(1, 0).copy_(ends.slice(0, 0, heads - 1).select(1, lines - 1));
  return {offsets, kept.nonzero().select(1, 2).to(torch::kInt).contiguous()};
}

// [heads, n, n] of what is visible.
Tensor MaskOf(const PrecisionCase& c, const Tensor& kept, int64_t head) {
  const Tensor block = torch::arange(c.tokens, torch::kCUDA).div(c.tile, "floor");
  return kept[head].index_select(0, block).index_select(1, block).tril_();
}

struct Attention {
  Tensor out, lse, dq, dk, dv;
};

// Root mean square.
double Error(const Tensor& actual, const Tensor& expected) {
  return (actual.to(torch::kDouble) - expected).square().mean().sqrt().item<double>();
}

class PrecisionTest : public ::testing::TestWithParam<PrecisionCase> {
 protected:
  void SetUp() override {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
      GTEST_SKIP() << "no GPU on this machine";
    }
    ASSERT_EQ(LoadTorchCuda(), absl::OkStatus());
    const unsigned seed = std::random_device{}();
    RecordProperty("seed", static_cast<int>(seed));
    torch::manual_seed(seed);
  }
};

// Head by head, so that [n, n] matrices fit: k's and v's gradients sum over a group.
template <typename HeadAttention>
Attention ByHead(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& d_out,
                 torch::ScalarType type, const HeadAttention& attention) {
  const int64_t heads = q.size(1), group = heads / k.size(1);
  const auto sums = q.options().dtype(torch::kDouble);
  Attention all = {torch::empty(q.sizes(), sums), torch::empty({heads, q.size(0)}, sums),
                   torch::empty(q.sizes(), sums), torch::zeros(k.sizes(), sums),
                   torch::zeros(v.sizes(), sums)};
  for (int64_t h = 0; h < heads; ++h) {
    const auto leaf = [&](const Tensor& x, int64_t head) {
      return x.select(1, head).detach().to(type).clone().requires_grad_();
    };
    const Tensor qh = leaf(q, h), kh = leaf(k, h / group), vh = leaf(v, h / group);
    const auto [out, lse] = attention(h, qh, kh, vh);
    const auto gradients =
        torch::autograd::grad({out}, {qh, kh, vh}, {d_out.select(1, h).to(type)});
    all.out.select(1, h).copy_(out.detach());
    all.lse[h].copy_(lse.detach());
    all.dq.select(1, h).copy_(gradients[0]);
    all.dk.select(1, h / group).add_(gradients[1]);
    all.dv.select(1, h / group).add_(gradients[2]);
  }
  // Gradients come in the type of the leaves.
  all.dk = all.dk.to(type).to(torch::kDouble);
  all.dv = all.dv.to(type).to(torch::kDouble);
  return all;
}

TEST_P(PrecisionTest, AtMostTwiceTheErrorOfDenseBf16) {
  const PrecisionCase& c = GetParam();
  const double scale = 1 / std::sqrt(static_cast<double>(c.head_dim));
  const auto random = [&](int64_t heads) {
    return torch::randn({c.tokens, heads, c.head_dim}, torch::kCUDA).to(torch::kBFloat16);
  };
  const Tensor q = random(c.heads).requires_grad_(), k = random(c.kv_heads).requires_grad_(),
               v = random(c.kv_heads).requires_grad_(), d_out = random(c.heads);
  const Tensor kept = KeptTiles(c);
  const auto [row_offsets, columns] = ListsOf(kept);
  const auto [column_offsets, rows] = ListsOf(kept.transpose(1, 2).contiguous());
  const TileSelection tiles = {.pattern = TilePattern::kCsr,
                               .tile = c.tile,
                               .row_offsets = row_offsets.const_data_ptr<int32_t>(),
                               .columns = columns.const_data_ptr<int32_t>(),
                               .column_offsets = column_offsets.const_data_ptr<int32_t>(),
                               .rows = rows.const_data_ptr<int32_t>()};

  const Attention exact = ByHead(
      q, k, v, d_out, torch::kDouble,
      [&](int64_t h, const Tensor& qh, const Tensor& kh, const Tensor& vh) {
        const Tensor logits =
            (qh.matmul(kh.t()) * scale).masked_fill(MaskOf(c, kept, h).logical_not(), -INFINITY);
        return std::pair{logits.softmax(-1).matmul(vh), logits.detach().logsumexp(-1)};
      });
  const Attention dense =
      ByHead(q, k, v, d_out, torch::kBFloat16,
             [&](int64_t h, const Tensor& qh, const Tensor& kh, const Tensor& vh) {
               const auto batch = [](const Tensor& x) { return x.unsqueeze(0).unsqueeze(0); };
               const Tensor mask = MaskOf(c, kept, h);
               const Tensor out =
                   at::scaled_dot_product_attention(batch(qh), batch(kh), batch(vh), batch(mask));
               const Tensor logits = (qh.detach().matmul(kh.detach().t()) * scale)
                                         .masked_fill(mask.logical_not(), -INFINITY);
               return std::pair{out[0][0], logits.logsumexp(-1)};
             });

  // dQ and dK of a single token are zero; what is left of them is rounding in fp32.
  const double slack = c.tokens == 1 ? 1e-5 : 0;
  for (const bool deterministic : {false, true}) {
    const Tensor lists[] = {row_offsets.unsqueeze(0), columns, column_offsets.unsqueeze(0), rows};
    const auto batch = [](const Tensor& x) { return x.transpose(0, 1).unsqueeze(0); };
    const Tensor out = std::get<0>(ops::Attention(
        batch(q), batch(k), batch(v),
        {.pattern = TilePattern::kCsr, .lists = lists, .tile = c.tile}, scale, deterministic))[0]
                           .transpose(0, 1);
    const auto gradients = torch::autograd::grad({out}, {q, k, v}, {d_out});
    const auto compare = [&](const char* name, const Tensor& actual, const Tensor& of_dense,
                             const Tensor& expected) {
      const double error = Error(actual.detach(), expected),
                   bound = 2 * Error(of_dense, expected) + slack;
      EXPECT_LE(error, bound) << name;
      RecordProperty(absl::StrFormat("%s%s", name, deterministic ? "_deterministic" : ""),
                     absl::StrFormat("%.2e of %.2e", error, bound));
    };
    compare("out", out, dense.out, exact.out);
    compare("dq", gradients[0], dense.dq, exact.dq);
    compare("dk", gradients[1], dense.dk, exact.dk);
    compare("dv", gradients[2], dense.dv, exact.dv);
  }
  const auto floats = q.options().dtype(torch::kFloat).requires_grad(false);
  const Tensor out = torch::zeros(q.sizes(), floats),
               lse = torch::full({c.heads, c.tokens}, -INFINITY, floats);
  const AttentionForwardArgs<__nv_bfloat16> args = {.q = View(q.detach()),
                                                    .k = View(k.detach()),
                                                    .v = View(v.detach()),
                                                    .out = FloatView(out),
                                                    .lse = lse.mutable_data_ptr<float>(),
                                                    .query_layout = {.tokens = c.tokens},
                                                    .key_layout = {.tokens = c.tokens},
                                                    .tiles = tiles,
                                                    .scale = static_cast<float>(scale)};
  const int64_t bytes = sm90::ForwardWorkspaceBytes(args);
  const Tensor scratch = Scratch(bytes, q);
  Check(sm90::AttentionForward(args, {scratch.mutable_data_ptr(), bytes}, Stream()));
  EXPECT_LE(Error(lse, exact.lse), 2 * Error(dense.lse, exact.lse) + slack) << "lse";
}

std::vector<PrecisionCase> Cases() {
  std::vector<PrecisionCase> cases;
  const bool small = std::getenv("RINGLEADER_SMALL_SHAPES") != nullptr;
  const std::pair<const char*, Kept> lists[] = {{"All", Kept::kAll},
                                                {"Diagonal", Kept::kDiagonal},
                                                {"Random", Kept::kRandom},
                                                {"Toeplitz", Kept::kToeplitz}};
  for (const int64_t head_dim : {64, 128}) {
    for (const int tile : {64, 128}) {
      const std::string suffix = absl::StrFormat("D%dTile%d", head_dim, tile);
      for (const int64_t tokens : {1, 63, 64, 65, 1000, 4096}) {
        if (small && tokens > 100) continue;
        for (const auto& [name, kept] : lists) {
          cases.push_back({absl::StrFormat("%s%d%s", name, tokens, suffix), tokens, 4, 2, head_dim,
                           tile, kept});
        }
      }
      if (small) continue;
      for (const auto& [heads, kv_heads] : {std::pair{16, 2}, {32, 8}, {28, 4}, {4, 4}, {64, 8}}) {
        cases.push_back({absl::StrFormat("Heads%dKv%d%s", heads, kv_heads, suffix), 1000, heads,
                         kv_heads, head_dim, tile, Kept::kRandom});
      }
    }
  }
  if (small) return cases;
  for (const auto& [name, kept] : lists) {
    cases.push_back({absl::StrFormat("%s33333", name), 33333, 2, 1, 128, 128, kept, 0.1});
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Shapes, PrecisionTest, ::testing::ValuesIn(Cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace ringleader::kernels::ops
