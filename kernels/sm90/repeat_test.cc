// The same calls many times.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_format.h"
#include "kernels/sm90/testing/device_problem.h"

namespace ringleader::kernels::sm90 {
namespace {

using RepeatTest = AttentionTest;

// By default the order of sums varies from run to run, and with it the last bits of gradients;
// nothing else.
TEST_P(RepeatTest, NoOutlierIn1000Runs) {
  const Lists lists(GetParam());
  const Problem p(GetParam());
  const QueryShard& rank = p.queries[0];
  const KeyShard& owner = p.keys[0];
  const std::vector<float> no_lse(rank.lse.size(), kMinusInfinity);
  std::vector<float> first_out, first_lse, first_dq, first_dk, first_dv;
  for (int run = 0; run < (SmallShapes() ? 3 : 1000); ++run) {
    CheckCuda(cudaMemset(rank.out.data(), 0xff, rank.out.Bytes()), "cudaMemset");
    p.ZeroGradients();
    CheckCuda(cudaMemcpy(rank.lse.data(), no_lse.data(), rank.lse.Bytes(), cudaMemcpyHostToDevice),
              "cudaMemcpy");
    ASSERT_NO_FATAL_FAILURE(p.Forward(rank, owner, lists.gpu));
    if (run == 0) p.ComputeDelta(rank);
    ASSERT_NO_FATAL_FAILURE(p.Backward(rank, owner, lists.gpu));
    const std::vector<float> out = rank.out.Read(), lse = rank.lse.Read(), dq = rank.dq.Read(),
                             dk = owner.dk.Read(), dv = owner.dv.Read();
    if (run == 0) {
      first_out = out, first_lse = lse, first_dq = dq, first_dk = dk, first_dv = dv;
      continue;
    }
    ASSERT_TRUE(SameBits(out, first_out)) << "run " << run;
    ASSERT_TRUE(SameBits(lse, first_lse)) << "run " << run;
    ASSERT_LT(RelativeNorm(dq, first_dq), 1e-5) << "run " << run;
    ASSERT_LT(RelativeNorm(dk, first_dk), 1e-5) << "run " << run;
    ASSERT_LT(RelativeNorm(dv, first_dv), 1e-5) << "run " << run;
  }
}

// Several work items a block of keys, so that dk and dv are sums, too. The second shape has
// consumers that walk apart.
INSTANTIATE_TEST_SUITE_P(Shapes, RepeatTest,
                         ::testing::Values(Case{.name = "Toeplitz",
                                                .tokens = 1000,
                                                .heads = 8,
                                                .kv_heads = 1,
                                                .pattern = TilePattern::kToeplitz},
                                           Case{.name = "CsrTile64",
                                                .tokens = 1000,
                                                .heads = 8,
                                                .kv_heads = 1,
                                                .tile = 64,
                                                .pattern = TilePattern::kCsr}),
                         [](const auto& info) { return info.param.name; });

// Forward adds nothing in an order of arrival: its bits never vary. Many items a multiprocessor,
// each of few tiles, so that their beginnings and ends meet in every way.
using ForwardRepeatTest = AttentionTest;

TEST_P(ForwardRepeatTest, SameBitsIn2000Runs) {
  const Lists lists(GetParam());
  const Problem p(GetParam());
  const QueryShard& rank = p.queries[0];
  const DeviceBuffer<float> no_lse(std::vector<float>(rank.lse.size(), kMinusInfinity));
  std::vector<float> first_out, first_lse;
  for (int run = 0; run < (SmallShapes() ? 3 : 2000); ++run) {
    CheckCuda(cudaMemset(rank.out.data(), 0xff, rank.out.Bytes()), "cudaMemset");
    CheckCuda(cudaMemcpy(rank.lse.data(), no_lse.data(), no_lse.Bytes(), cudaMemcpyDeviceToDevice),
              "cudaMemcpy");
    ASSERT_NO_FATAL_FAILURE(p.Forward(rank, p.keys[0], lists.gpu));
    const std::vector<float> lse = rank.lse.Read();
    if (run == 0) first_lse = lse;
    for (size_t i = 0; i < lse.size(); ++i) {
      ASSERT_TRUE(lse[i] == first_lse[i])
          << "run " << run << ", head " << i / p.q.tokens << ", row " << i % p.q.tokens << ": "
          << lse[i] << " instead of " << first_lse[i];
    }
    if (run % 20 != 0) continue;
    const std::vector<float> out = rank.out.Read();
    if (run == 0) first_out = out;
    ASSERT_TRUE(SameBits(out, first_out)) << "run " << run;
  }
}

std::vector<Case> ForwardRepeatCases() {
  std::vector<Case> cases;
  for (const int head_dim : {64, 128}) {
    for (const auto& [name, tile, pattern] : {std::tuple{"Csr", 64, TilePattern::kCsr},
                                              {"Toeplitz", 64, TilePattern::kToeplitz},
                                              {"Csr", 128, TilePattern::kCsr},
                                              {"Toeplitz", 128, TilePattern::kToeplitz}}) {
      cases.push_back({.name = absl::StrFormat("%sD%dTile%d", name, head_dim, tile),
                       .tokens = 1000,
                       .heads = 64,
                       .kv_heads = 8,
                       .head_dim = head_dim,
                       .tile = tile,
                       .pattern = pattern});
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Shapes, ForwardRepeatTest, ::testing::ValuesIn(ForwardRepeatCases()),
                         [](const auto& info) { return info.param.name; });

using DeterministicTest = AttentionTest;

TEST_P(DeterministicTest, SameBitsIn20Runs) {
  const Case& c = GetParam();
  const Lists lists(c);
  const Problem p(c);
  ASSERT_NO_FATAL_FAILURE(p.ForwardRing(lists));
  std::vector<std::vector<float>> first;
  for (int run = 0; run < (SmallShapes() ? 2 : 20); ++run) {
    ASSERT_NO_FATAL_FAILURE(p.BackwardRing(lists, /*deterministic=*/true));
    ASSERT_NO_FATAL_FAILURE(AssertSameBits(p.Gradients(), run, first));
  }
}

std::vector<Case> DeterministicCases() {
  std::vector<Case> cases;
  for (const int head_dim : {64, 128}) {
    for (const int tile : {64, 128}) {
      const auto add = [&](Case c) {
        c.name += absl::StrFormat("D%dTile%d", head_dim, tile);
        c.tokens = SmallShapes() ? 512 : 2048;
        c.heads = 8;
        c.head_dim = head_dim;
        c.tile = tile;
        cases.push_back(std::move(c));
      };
      add({.name = "Toeplitz", .pattern = TilePattern::kToeplitz});
      if (SmallShapes()) continue;
      add({.name = "Full", .pattern = TilePattern::kFull});
      add({.name = "Causal"});
      add({.name = "Window", .pattern = TilePattern::kWindow, .window = 700});
      add({.name = "Csr", .pattern = TilePattern::kCsr});
      for (const LayoutKind layout :
           {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
        add({.name = absl::StrFormat("Layout%d", layout),
             .pattern = TilePattern::kToeplitz,
             .layout = layout,
             .ranks = 4,
             .stripe = tile});
      }
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Shapes, DeterministicTest, ::testing::ValuesIn(DeterministicCases()),
                         [](const auto& info) { return info.param.name; });

// Lists of so many queries and keys that calls walk them in parts (list_parts.cuh), triangles where
// memory is not fast (PartsOf in attention_backward.cu). The deterministic one, which the tests of
// short sequences compare with the definition, walks them whole.
using PartsTest = AttentionTest;

TEST_P(PartsTest, AddUpToTheWhole) {
  const Lists lists(GetParam());
  const Problem p(GetParam());
  ASSERT_NO_FATAL_FAILURE(p.ForwardRing(lists));
  ASSERT_NO_FATAL_FAILURE(p.BackwardRing(lists, /*deterministic=*/true));
  const std::vector<std::vector<float>> whole = p.Gradients();
  ASSERT_NO_FATAL_FAILURE(p.BackwardRing(lists, /*deterministic=*/false));
  const std::vector<std::vector<float>> in_parts = p.Gradients();
  // Tensor cores cut a sum after 23 bits, once for the products of 16 queries or keys: the more,
  // the longer the sum in registers is. A tile left out, or twice, is a thousand times that.
  const double cut = std::ldexp(static_cast<double>(GetParam().tokens) / 16, -23);
  for (size_t i = 0; i < whole.size(); ++i) {
    EXPECT_LT(RelativeNorm(in_parts[i], whole[i]), cut) << i;
  }
}

// To the bit what two calls leave whose lists are of one half of the keys each; a call that walks
// its lists whole rounds otherwise. The same, rounded, where the output is.
using ForwardPartsTest = AttentionTest;
TEST_P(ForwardPartsTest, AreMerged) {
  const Case& c = GetParam();
  const Lists lists(c);
  Problem p(c);
  QueryShard& rank = p.queries[0];
  const KeyShard& owner = p.keys[0];
  const std::vector<float> start(rank.lse.size(), kMinusInfinity);
  TileSelection tiles = lists.Of(0, 0);
  ASSERT_NO_FATAL_FAILURE(p.Forward(rank, owner, tiles));
  const std::vector<float> out = rank.out.Read(), lse = rank.lse.Read();

  const DeviceBuffer<__nv_bfloat16> rounded(rank.out.size());  // NaN
  rank.lse.Write(start);
  AttentionForwardArgs<__nv_bfloat16> args = p.ForwardArgs(rank, owner, tiles);
  args.out = {};
  args.rounded_out = View<__nv_bfloat16>(rounded, rank.q);
  const DeviceBuffer<char> workspace(ForwardWorkspaceBytes(args));
  ASSERT_EQ(AttentionForward(args, {workspace.data(), workspace.size()}, nullptr),
            absl::OkStatus());
  EXPECT_EQ(rank.lse.Read(), lse);
  const std::vector<__nv_bfloat16> actual = rounded.Read();
  int64_t wrong = 0;
  for (size_t i = 0; i < out.size(); ++i) {
    const int64_t row = static_cast<int64_t>(i) / c.head_dim;
    const bool attends = lse[row % c.heads * c.tokens + row / c.heads] != kMinusInfinity;
    const float expected = attends ? __bfloat162float(__float2bfloat16_rn(out[i])) : 0.0f;
    wrong += __bfloat162float(actual[i]) == expected ? 0 : 1;
  }
  EXPECT_EQ(wrong, 0);

  rank.lse.Write(start);
  const int64_t blocks = (c.tokens + c.tile - 1) / c.tile;
  for (const bool late : {false, true}) {
    std::vector<int32_t> offsets, columns;
    for (int64_t head = 0; head < c.heads; ++head) {
      const int32_t* const of_head = lists.host.row_offsets + head * (blocks + 1);
      offsets.push_back(static_cast<int32_t>(columns.size()));
      for (int64_t row = 0; row < blocks; ++row) {
        for (int32_t i = of_head[row]; i < of_head[row + 1]; ++i) {
          const int32_t column = lists.host.columns[i];
          if ((column >= (blocks + 1) / 2) == late) columns.push_back(column);
        }
        offsets.push_back(static_cast<int32_t>(columns.size()));
      }
    }
    const DeviceBuffer<int32_t> gpu_offsets(offsets), gpu_columns(columns);
    tiles.row_offsets = gpu_offsets.data();
    tiles.columns = gpu_columns.data();
    ASSERT_NO_FATAL_FAILURE(p.Forward(rank, owner, tiles));
    CheckCuda(cudaDeviceSynchronize(), "forward");  // before its lists go
  }
  EXPECT_EQ(rank.lse.Read(), lse);
  EXPECT_TRUE(SameBits(rank.out.Read(), out));
}

std::vector<Case> PartsCases() {
  std::vector<Case> cases;
  for (const int tile : {64, 128}) {
    const auto add = [&](Case c) {
      c.name += absl::StrFormat("Tile%d", tile);
      c.tokens = SmallShapes() ? 26624 : 66000 / c.ranks / 256 * 256 * c.ranks + (c.ranks == 1);
      c.heads = 2, c.kv_heads = 1, c.tile = tile;
      c.pattern = TilePattern::kCsr;
      cases.push_back(std::move(c));
    };
    add({.name = "Csr"});
    if (SmallShapes()) continue;
    add({.name = "All", .listed = Listed::kAll});  // so the first queries of every head
    add({.name = "Documents", .documents = true});
    add({.name = "Intervals", .mask = MaskKind::kGlobalSliding});
    add({.name = "Chosen", .chosen = true});
    add({.name = "Striped", .layout = LayoutKind::kStriped, .ranks = 2, .stripe = 128});
    // Others' keys come in parts also where memory is fast, which has a triangle's lists whole.
    add({.name = "Zigzag", .layout = LayoutKind::kZigzag, .ranks = 2});
    add({.name = "Contiguous", .layout = LayoutKind::kContiguous, .ranks = 2});
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Shapes, PartsTest, ::testing::ValuesIn(PartsCases()),
                         [](const auto& info) { return info.param.name; });

// Of several ranks' keys each is one part.
std::vector<Case> ForwardPartsCases() {
  std::vector<Case> cases = PartsCases();
  std::erase_if(cases, [](const Case& c) { return c.ranks > 1; });
  return cases;
}
INSTANTIATE_TEST_SUITE_P(Shapes, ForwardPartsTest, ::testing::ValuesIn(ForwardPartsCases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace ringleader::kernels::sm90
