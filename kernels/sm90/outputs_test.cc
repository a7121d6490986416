// Where results go: outputs and gradients in bf16, and nothing outside the tensors.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "kernels/sm90/testing/device_problem.h"

namespace ringleader::kernels::sm90 {
namespace {

float Rounded(float x) {
  return __bfloat162float(__float2bfloat16_rn(x));
}

std::vector<float> ToFloat(const std::vector<__nv_bfloat16>& values) {
  std::vector<float> floats;
  floats.reserve(values.size());
  for (const __nv_bfloat16 x : values) floats.push_back(__bfloat162float(x));
  return floats;
}

using RoundedGradientTest = AttentionTest;

// bf16(what was there + the sum in fp32): to the bit where the sum is, too.
TEST_P(RoundedGradientTest, RoundsOnceACall) {
  const Case& c = GetParam();
  const Problem p(c);
  const Lists lists(c);
  const QueryShard& rank = p.queries[0];
  const KeyShard& owner = p.keys[0];
  ASSERT_NO_FATAL_FAILURE(p.ForwardRing(lists));
  ASSERT_NO_FATAL_FAILURE(p.BackwardRing(lists, /*deterministic=*/true));
  const std::vector<float> dq = rank.dq.Read(), dk = owner.dk.Read(), dv = owner.dv.Read();
  const Tensor before = RandomBf16(c.tokens, c.kv_heads, c.head_dim);
  std::vector<float> expected_dk, expected_dv;
  for (size_t i = 0; i < dk.size(); ++i) {
    expected_dk.push_back(Rounded(before.data[i] + dk[i]));
    expected_dv.push_back(Rounded(before.data[i] + dv[i]));
  }
  for (const bool deterministic : {true, false}) {
    SCOPED_TRACE(deterministic ? "deterministic" : "default");
    const DeviceBuffer<__nv_bfloat16> rounded_dk = ToBf16(before), rounded_dv = ToBf16(before);
    AttentionBackwardArgs<__nv_bfloat16> args = p.BackwardArgs(rank, owner, lists.gpu);
    args.dk = args.dv = {};
    args.rounded_dk = View<__nv_bfloat16>(rounded_dk, owner.k);
    args.rounded_dv = View<__nv_bfloat16>(rounded_dv, owner.k);
    args.deterministic = deterministic;
    p.ZeroGradients();
    ASSERT_EQ(AttentionBackward(args, p.scratch(), nullptr), absl::OkStatus());
    const std::vector<float> actual_dk = ToFloat(rounded_dk.Read()),
                             actual_dv = ToFloat(rounded_dv.Read());
    if (deterministic) {
      EXPECT_EQ(rank.dq.Read(), dq);
      EXPECT_EQ(actual_dk, expected_dk);
      EXPECT_EQ(actual_dv, expected_dv);
    } else {
      // A sum that differs in its last bits rounds to another neighbour here and there.
      EXPECT_LT(RelativeNorm(actual_dk, expected_dk), 5e-4);
      EXPECT_LT(RelativeNorm(actual_dv, expected_dv), 5e-4);
    }
  }
}

std::vector<Case> RoundedCases() {
  std::vector<Case> cases;
  for (const int head_dim : {64, 128}) {
    for (const int tile : {64, 128}) {
      cases.push_back({.name = absl::StrFormat("D%dTile%d", head_dim, tile),
                       .tokens = SmallShapes() ? 300 : 1900,
                       .heads = 8,
                       .head_dim = head_dim,
                       .tile = tile,
                       .pattern = TilePattern::kToeplitz});
    }
  }
  return cases;
}
INSTANTIATE_TEST_SUITE_P(Shapes, RoundedGradientTest, ::testing::ValuesIn(RoundedCases()),
                         [](const auto& info) { return info.param.name; });

using RoundedOutputTest = AttentionTest;

// bf16(what the call leaves in fp32), to the bit; zero where a query attends to nothing.
TEST_P(RoundedOutputTest, IsTheOutputOfTheOnlyCall) {
  const Case& c = GetParam();
  Problem p(c);
  const Lists lists(c);
  int64_t empty = 0;
  for (QueryShard& rank : p.queries) {
    for (const KeyShard& owner : p.keys) {
      SCOPED_TRACE(absl::StrFormat("rank %d, owner %d", rank.layout.rank, owner.layout.rank));
      const TileSelection tiles = lists.Of(rank.layout.rank, owner.layout.rank);
      const std::vector<float> start(rank.lse.size(), kMinusInfinity);
      rank.lse.Write(start);
      ASSERT_NO_FATAL_FAILURE(p.Forward(rank, owner, tiles));
      const std::vector<float> out = rank.out.Read(), lse = rank.lse.Read();
      const DeviceBuffer<__nv_bfloat16> rounded(rank.out.size());  // NaN
      rank.lse.Write(start);
      AttentionForwardArgs<__nv_bfloat16> args = p.ForwardArgs(rank, owner, tiles);
      args.out = {};
      args.rounded_out = View<__nv_bfloat16>(rounded, rank.q);
      ASSERT_EQ(AttentionForward(args, p.scratch(), nullptr), absl::OkStatus());
      EXPECT_EQ(rank.lse.Read(), lse);
      const std::vector<float> actual = ToFloat(rounded.Read());
      std::vector<float> expected;
      for (size_t i = 0; i < out.size(); ++i) {
        const int64_t row = static_cast<int64_t>(i) / c.head_dim;  // token by token, then by head
        const bool attends = lse[row % c.heads * rank.q.tokens + row / c.heads] != kMinusInfinity;
        expected.push_back(attends ? Rounded(out[i]) : 0.0f);
        empty += attends ? 0 : 1;
      }
      EXPECT_EQ(actual, expected);
    }
  }
  if (SmallShapes()) return;
  EXPECT_EQ(empty > 0, c.ranks > 1 || c.any_intervals || c.pattern == TilePattern::kCsr) << empty;
}

std::vector<Case> RoundedOutputCases() {
  std::vector<Case> cases;
  for (const int head_dim : {64, 128}) {
    for (const int tile : {64, 128}) {
      const auto add = [&](Case c) {
        c.name += absl::StrFormat("D%dTile%d", head_dim, tile);
        c.tokens = SmallShapes() ? 300 : 1900;
        if (c.ranks > 1) c.tokens = SmallShapes() ? 512 : 2048;  // whole stripes
        c.heads = 8;
        c.head_dim = head_dim;
        c.tile = tile;
        cases.push_back(c);
      };
      add({.name = "Causal"});
      add({.name = "Diagonals", .pattern = TilePattern::kToeplitz, .documents = true});
      add({.name = "Lists", .pattern = TilePattern::kCsr, .density = 0.05});
      add({.name = "Intervals", .pattern = TilePattern::kFull, .any_intervals = true});
      add({.name = "Ring", .layout = LayoutKind::kStriped, .ranks = 2, .stripe = tile});
    }
  }
  return cases;
}
INSTANTIATE_TEST_SUITE_P(Shapes, RoundedOutputTest, ::testing::ValuesIn(RoundedOutputCases()),
                         [](const auto& info) { return info.param.name; });

// A tensor with a gap after every token, and the bytes 0xff in it.
template <typename T>
class Gapped {
 public:
  Gapped(int64_t tokens, int heads, int head_dim)
      : buffer_(tokens * (heads * head_dim + kGap)),
        view_{buffer_.data(), tokens, heads, head_dim, heads * head_dim + kGap, head_dim} {
    CheckCuda(cudaMemset2D(buffer_.data(), view_.token_stride * sizeof(T), 0,
                           (view_.token_stride - kGap) * sizeof(T), static_cast<size_t>(tokens)),
              "cudaMemset2D");
  }
  const TokenMajor<T>& view() const { return view_; }
  // Whether tokens were written, and gaps were not.
  void Check(const char* name) const {
    const std::vector<T> values = buffer_.Read();
    const auto* const bytes = reinterpret_cast<const unsigned char*>(values.data());
    const int64_t row = view_.token_stride * sizeof(T), gap = kGap * sizeof(T);
    bool written = false;
    for (int64_t i = 0; i < view_.tokens; ++i) {
      written |= std::any_of(bytes + i * row, bytes + (i + 1) * row - gap,
                             [](unsigned char b) { return b != 0; });
      ASSERT_TRUE(std::all_of(bytes + (i + 1) * row - gap, bytes + (i + 1) * row,
                              [](unsigned char b) { return b == 0xff; }))
          << name << ", after token " << i;
    }
    EXPECT_TRUE(written) << name;
  }

 private:
  static constexpr int kGap = 16;
  DeviceBuffer<T> buffer_;
  TokenMajor<T> view_;
};

TEST(OutputTest, GapsBetweenTokensStay) {
  if (!HaveGpu()) GTEST_SKIP() << "no GPU";
  for (const int tile : {64, 128}) {
    const Case c = {.name = "Gaps", .tokens = 300, .heads = 3, .kv_heads = 1, .tile = tile};
    Problem p(c);
    const Lists lists(c);
    QueryShard& rank = p.queries[0];
    const KeyShard& owner = p.keys[0];
    const Gapped<float> out(c.tokens, c.heads, c.head_dim);
    AttentionForwardArgs<__nv_bfloat16> forward = p.ForwardArgs(rank, owner, lists.gpu);
    forward.out = out.view();
    ASSERT_EQ(AttentionForward(forward, p.scratch(), nullptr), absl::OkStatus());
    out.Check("out");
    const Gapped<__nv_bfloat16> rounded_out(c.tokens, c.heads, c.head_dim);
    forward.out = {};
    forward.rounded_out = rounded_out.view();
    rank.lse.Write(std::vector<float>(rank.lse.size(), kMinusInfinity));
    ASSERT_EQ(AttentionForward(forward, p.scratch(), nullptr), absl::OkStatus());
    rounded_out.Check("rounded_out");
    CheckCuda(cudaMemset(rank.delta.data(), 0, rank.delta.Bytes()), "cudaMemset");
    for (const bool deterministic : {false, true}) {
      for (const bool rounded : {false, true}) {
        SCOPED_TRACE(
            absl::StrFormat("tile %d, deterministic %d, rounded %d", tile, deterministic, rounded));
        const Gapped<float> dq(c.tokens, c.heads, c.head_dim), dk(c.tokens, c.kv_heads, c.head_dim),
            dv(c.tokens, c.kv_heads, c.head_dim);
        const Gapped<__nv_bfloat16> rounded_dk(c.tokens, c.kv_heads, c.head_dim),
            rounded_dv(c.tokens, c.kv_heads, c.head_dim);
        AttentionBackwardArgs<__nv_bfloat16> args = p.BackwardArgs(rank, owner, lists.gpu);
        args.deterministic = deterministic;
        args.dq = dq.view();
        args.dk = args.dv = {};
        if (rounded) {
          args.rounded_dk = rounded_dk.view();
          args.rounded_dv = rounded_dv.view();
        } else {
          args.dk = dk.view();
          args.dv = dv.view();
        }
        ASSERT_EQ(AttentionBackward(args, p.scratch(), nullptr), absl::OkStatus());
        dq.Check("dq");
        if (rounded) {
          rounded_dk.Check("rounded_dk");
          rounded_dv.Check("rounded_dv");
        } else {
          dk.Check("dk");
          dv.Check("dv");
        }
      }
    }
  }
}

}  // namespace
}  // namespace ringleader::kernels::sm90
