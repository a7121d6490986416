// Hopper attention against the CPU engine. A case runs the ring of all its ranks and owners, so
// that sums over ring steps are compared with one call over the whole sequence.
#include "kernels/sm90/attention.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "kernels/sm90/testing/attention_problem.h"

namespace ringleader::kernels::sm90 {
namespace {

TEST_P(AttentionTest, EqualsCpuEngine) {
  const Case& c = GetParam();
  const Problem p(c);
  const Lists lists(c);
  for (const QueryShard& rank : p.queries) {
    for (const KeyShard& owner : p.keys) ASSERT_NO_FATAL_FAILURE(p.Forward(rank, owner, lists.gpu));
    p.ComputeDelta(rank);
  }
  for (const QueryShard& rank : p.queries) {
    for (const KeyShard& owner : p.keys) {
      ASSERT_NO_FATAL_FAILURE(p.Backward(rank, owner, lists.gpu));
    }
  }
  ExpectClose(p.Collect(), ReferenceRun(p, lists.host));
}

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const int head_dim : {64, 128}) {
    for (const int tile : {64, 128}) {
      const std::string suffix = absl::StrFormat("D%dTile%d", head_dim, tile);
      const auto add = [&](Case c) {
        c.name += suffix;
        c.head_dim = head_dim;
        c.tile = tile;
        cases.push_back(std::move(c));
      };
      for (const int64_t tokens : {1, 63, 64, 65, 1000}) {
        add({.name = absl::StrFormat("Causal%d", tokens), .tokens = tokens});
      }
      add({.name = "Full", .tokens = 333, .pattern = TilePattern::kFull});
      add({.name = "Window", .tokens = 1000, .pattern = TilePattern::kWindow, .window = 300});
      add({.name = "OneTokenWindow", .tokens = 300, .pattern = TilePattern::kWindow, .window = 1});
      add({.name = "Toeplitz", .tokens = 1900, .pattern = TilePattern::kToeplitz});
      add({.name = "Diagonal", .tokens = 1000, .pattern = TilePattern::kToeplitz, .density = 0});
      add({.name = "Csr", .tokens = 1900, .pattern = TilePattern::kCsr});
      add({.name = "EmptyCsr", .tokens = 500, .pattern = TilePattern::kCsr, .density = 0});
      for (const LayoutKind layout :
           {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
        for (const int ranks : {2, 4}) {
          const std::string name = absl::StrFormat("Layout%dRanks%d", layout, ranks);
          add({.name = "Causal" + name,
               .tokens = 2048,
               .layout = layout,
               .ranks = ranks,
               .stripe = 128});
          add({.name = "Toeplitz" + name,
               .tokens = 2048,
               .pattern = TilePattern::kToeplitz,
               .layout = layout,
               .ranks = ranks,
               .stripe = tile});
        }
      }
      for (const auto& [heads, kv_heads] : {std::pair{16, 2}, {28, 4}, {4, 4}, {64, 8}, {3, 1}}) {
        add({.name = absl::StrFormat("Heads%dKv%d", heads, kv_heads),
             .tokens = 400,
             .heads = heads,
             .kv_heads = kv_heads,
             .pattern = TilePattern::kToeplitz});
      }
    }
  }
  if (fused::SmallShapes()) return cases;
  cases.push_back({.name = "Toeplitz33333",
                   .tokens = 33333,
                   .heads = 2,
                   .kv_heads = 1,
                   .pattern = TilePattern::kToeplitz,
                   .density = 0.05});
  cases.push_back({.name = "Csr33333",
                   .tokens = 33333,
                   .heads = 2,
                   .kv_heads = 1,
                   .head_dim = 64,
                   .tile = 64,
                   .pattern = TilePattern::kCsr,
                   .density = 0.02});
  cases.push_back({.name = "Causal4096", .tokens = 4096, .heads = 2, .kv_heads = 1});
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Shapes, AttentionTest, ::testing::ValuesIn(Cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace ringleader::kernels::sm90
