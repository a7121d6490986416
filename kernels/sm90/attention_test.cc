// Hopper attention against the CPU engine. A case runs the ring of all its ranks and owners, so
// that sums over ring steps are compared with one call over the whole sequence.
#include "kernels/sm90/attention.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "kernels/sm90/testing/device_problem.h"

namespace ringleader::kernels::sm90 {
namespace {

TEST_P(AttentionTest, EqualsCpuEngine) {
  const Case& c = GetParam();
  const Problem p(c);
  const Lists lists(c);
  ASSERT_NO_FATAL_FAILURE(p.ForwardRing(lists));
  const Result expected = ReferenceRun(p, lists.host);
  for (const bool deterministic : {false, true}) {
    if (deterministic && c.groups) continue;  // refused; see arguments_test.cc
    SCOPED_TRACE(deterministic ? "deterministic" : "default");
    ASSERT_NO_FATAL_FAILURE(p.BackwardRing(lists, deterministic));
    ExpectClose(p.Collect(), expected);
  }
}

// What the sanitizers run: every kernel, as little as shows its edges.
std::vector<Case> SmallCases(int head_dim, int tile) {
  const auto with = [&](Case c) {
    c.head_dim = head_dim;
    c.tile = tile;
    return c;
  };
  return {
      with({.name = "Causal65", .tokens = 65}),
      with({.name = "Window", .tokens = 400, .pattern = TilePattern::kWindow, .window = 100}),
      with({.name = "Toeplitz",
            .tokens = 700,
            .heads = 3,
            .kv_heads = 1,
            .pattern = TilePattern::kToeplitz}),
      with({.name = "Csr", .tokens = 1000, .pattern = TilePattern::kCsr}),
      with({.name = "Chosen",
            .tokens = 1000,
            .pattern = TilePattern::kCsr,
            .documents = true,
            .chosen = true}),
      with({.name = "Documents",
            .tokens = 700,
            .pattern = TilePattern::kToeplitz,
            .documents = true}),
      with({.name = "Striped2",
            .tokens = 512,
            .pattern = TilePattern::kCsr,
            .layout = LayoutKind::kStriped,
            .ranks = 2,
            .stripe = 128}),
  };
}

std::vector<Case> ListCases(int head_dim, int tile) {
  std::vector<Case> cases;
  const auto add = [&](Case c) {
    c.head_dim = head_dim;
    c.tile = tile;
    cases.push_back(std::move(c));
  };
  for (const int64_t tokens : {1, 63, 64, 65, 1000}) {
    add({.name = absl::StrFormat("Causal%d", tokens), .tokens = tokens});
    add({.name = absl::StrFormat("Csr%d", tokens), .tokens = tokens, .pattern = TilePattern::kCsr});
  }
  add({.name = "Full", .tokens = 333, .pattern = TilePattern::kFull});
  add({.name = "Window", .tokens = 1000, .pattern = TilePattern::kWindow, .window = 300});
  add({.name = "OneTokenWindow", .tokens = 300, .pattern = TilePattern::kWindow, .window = 1});
  add({.name = "Toeplitz", .tokens = 1900, .pattern = TilePattern::kToeplitz});
  add({.name = "Diagonal", .tokens = 1000, .pattern = TilePattern::kToeplitz, .density = 0});
  const std::pair<const char*, Listed> lists[] = {{"Random", Listed::kRandom},
                                                  {"No", Listed::kNone},
                                                  {"All", Listed::kAll},
                                                  {"Single", Listed::kSingle},
                                                  {"Diagonal", Listed::kDiagonal}};
  for (const auto& [name, listed] : lists) {
    add({.name = absl::StrFormat("%sCsr", name),
         .tokens = 1900,
         .pattern = TilePattern::kCsr,
         .listed = listed});
  }
  for (const int64_t tokens : {1, 65, 1900}) {
    add({.name = absl::StrFormat("Chosen%d", tokens),
         .tokens = tokens,
         .pattern = TilePattern::kCsr,
         .listed = Listed::kAll,
         .chosen = true});
  }
  for (const auto& [heads, kv_heads] :
       {std::pair{16, 2}, {32, 8}, {28, 4}, {4, 4}, {64, 8}, {3, 1}}) {
    add({.name = absl::StrFormat("Heads%dKv%d", heads, kv_heads),
         .tokens = 400,
         .heads = heads,
         .kv_heads = kv_heads,
         .pattern = TilePattern::kToeplitz});
  }
  return cases;
}

std::vector<Case> RingCases(int head_dim, int tile) {
  std::vector<Case> cases;
  for (const LayoutKind layout :
       {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
    for (const int ranks : {2, 4, 8}) {
      const auto add = [&](const char* name, TilePattern pattern, int stripe, bool chosen = false) {
        cases.push_back({.name = absl::StrFormat("%sLayout%dRanks%d", name, layout, ranks),
                         .tokens = 2048,
                         .head_dim = head_dim,
                         .tile = tile,
                         .pattern = pattern,
                         .layout = layout,
                         .ranks = ranks,
                         .stripe = stripe,
                         .chosen = chosen});
      };
      add("Causal", TilePattern::kCausal, 128);
      add("Toeplitz", TilePattern::kToeplitz, tile);
      add("Csr", TilePattern::kCsr, 128);
      add("Chosen", TilePattern::kCsr, 128, /*chosen=*/true);
    }
  }
  return cases;
}

// Several documents in a sequence.
std::vector<Case> DocumentCases(int head_dim, int tile) {
  std::vector<Case> cases;
  const auto add = [&](const char* name, Case c) {
    c.name = absl::StrFormat("%sDocuments%s", name, c.name);
    c.head_dim = head_dim;
    c.tile = tile;
    c.documents = true;
    cases.push_back(std::move(c));
  };
  const std::pair<const char*, TilePattern> patterns[] = {{"Causal", TilePattern::kCausal},
                                                          {"Window", TilePattern::kWindow},
                                                          {"Toeplitz", TilePattern::kToeplitz},
                                                          {"Csr", TilePattern::kCsr}};
  add("Chosen", {.name = "1900", .tokens = 1900, .pattern = TilePattern::kCsr, .chosen = true});
  for (const auto& [name, pattern] : patterns) {
    add(name, {.name = "65", .tokens = 65, .pattern = pattern, .window = 50});
    add(name, {.name = "1900", .tokens = 1900, .pattern = pattern, .window = 300});
    for (const LayoutKind layout :
         {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
      add(name, {.name = absl::StrFormat("Layout%d", layout),
                 .tokens = 2048,
                 .pattern = pattern,
                 .window = 300,
                 .layout = layout,
                 .ranks = 4,
                 .stripe = tile});
    }
  }
  return cases;
}

// Masks as intervals of keys.
std::vector<Case> IntervalCases(int head_dim, int tile) {
  std::vector<Case> cases;
  const auto add = [&](Case c) {
    c.name = "Intervals" + c.name;
    c.head_dim = head_dim;
    c.tile = tile;
    cases.push_back(std::move(c));
  };
  const std::pair<const char*, TilePattern> patterns[] = {{"", TilePattern::kFull},
                                                          {"Csr", TilePattern::kCsr}};
  for (const auto& [name, pattern] : patterns) {
    for (const int64_t tokens : {1, 65, 1000}) {
      add({.name = absl::StrFormat("%s%d", name, tokens),
           .tokens = tokens,
           .pattern = pattern,
           .any_intervals = true});
    }
    if (SmallShapes()) continue;
    for (int kind = 0; kind < kMaskKinds; ++kind) {
      const auto mask = static_cast<MaskKind>(kind);
      add({.name = absl::StrFormat("%s_%s", name, MaskName(mask)),
           .tokens = 1900,
           .pattern = pattern,
           .mask = mask});
    }
    for (const LayoutKind layout :
         {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
      add({.name = absl::StrFormat("%sLayout%d", name, layout),
           .tokens = 2048,
           .pattern = pattern,
           .layout = layout,
           .ranks = 4,
           .stripe = 128,
           .mask = MaskKind::kSharedQuestion});
    }
  }
  if (SmallShapes()) return cases;
  for (const auto& [heads, kv_heads] : {std::pair{28, 4}, {64, 8}, {3, 1}, {4, 4}}) {
    add({.name = absl::StrFormat("Heads%dKv%d", heads, kv_heads),
         .tokens = 400,
         .heads = heads,
         .kv_heads = kv_heads,
         .pattern = TilePattern::kFull,
         .mask = MaskKind::kGlobalSliding});
  }
  add({.name = "Long",
       .tokens = 9000,
       .heads = 2,
       .kv_heads = 1,
       .pattern = TilePattern::kFull,
       .mask = MaskKind::kCausalBlockwise});
  return cases;
}

std::vector<Case> LongCases() {
  std::vector<Case> cases = {{.name = "Causal4096", .tokens = 4096, .heads = 2, .kv_heads = 1}};
  for (const int tile : {64, 128}) {
    cases.push_back({.name = absl::StrFormat("Toeplitz33333Tile%d", tile),
                     .tokens = 33333,
                     .heads = 2,
                     .kv_heads = 1,
                     .tile = tile,
                     .pattern = TilePattern::kToeplitz,
                     .density = 0.05});
  }
  cases.push_back({.name = "Csr33333",
                   .tokens = 33333,
                   .heads = 2,
                   .kv_heads = 1,
                   .head_dim = 64,
                   .tile = 64,
                   .pattern = TilePattern::kCsr,
                   .density = 0.02});
  return cases;
}

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const int head_dim : {64, 128}) {
    for (const int tile : {64, 128}) {
      const auto add = [&](std::vector<Case> more) {
        for (Case& c : more) {
          c.name += absl::StrFormat("D%dTile%d", head_dim, tile);
          cases.push_back(std::move(c));
        }
      };
      add(IntervalCases(head_dim, tile));
      if (SmallShapes()) {
        add(SmallCases(head_dim, tile));
      } else {
        add(ListCases(head_dim, tile));
        add(RingCases(head_dim, tile));
        add(DocumentCases(head_dim, tile));
      }
    }
  }
  if (!SmallShapes()) {
    for (Case& c : LongCases()) cases.push_back(std::move(c));
  }
  return cases;
}

// Groups of keys beside each tile's own keys.
std::vector<Case> GroupCases(int head_dim) {
  std::vector<Case> cases;
  const auto add = [&](Case c) {
    c.name = absl::StrFormat("Groups%sD%d", c.name, head_dim);
    c.head_dim = head_dim;
    c.tile = 64;
    c.pattern = TilePattern::kToeplitz;
    c.groups = true;
    cases.push_back(std::move(c));
  };
  for (const int64_t tokens : {1, 65, 1900}) {
    add({.name = absl::StrFormat("%d", tokens), .tokens = tokens});
  }
  add({.name = "Heads28Kv4", .tokens = 400, .heads = 28, .kv_heads = 4});
  add({.name = "None", .tokens = 500, .density = 0});
  add({.name = "Documents", .tokens = 1900, .documents = true});
  for (const int64_t tokens : {65, 1900}) {
    add({.name = absl::StrFormat("Pairs%d", tokens), .tokens = tokens, .heads_together = 2});
  }
  add({.name = "PairsHeads12Kv2", .tokens = 400, .heads = 12, .heads_together = 2});
  add({.name = "PairsDocuments", .tokens = 1900, .documents = true, .heads_together = 2});
  if (SmallShapes()) return cases;
  add({.name = "PairsLong",
       .tokens = 20000,
       .heads = 2,
       .kv_heads = 1,
       .density = 0.05,
       .heads_together = 2});
  add({.name = "Long", .tokens = 20000, .heads = 2, .kv_heads = 1, .density = 0.05});
  for (const LayoutKind layout :
       {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
    for (const int ranks : {2, 4}) {
      for (const bool documents : {false, true}) {
        for (const int together : {1, 2}) {
          add({.name = absl::StrFormat("%s%sLayout%dRanks%d", together == 2 ? "Pairs" : "",
                                       documents ? "Documents" : "", layout, ranks),
               .tokens = 2048,
               .layout = layout,
               .ranks = ranks,
               .stripe = 128,
               .documents = documents,
               .heads_together = together});
        }
      }
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Groups64, AttentionTest, ::testing::ValuesIn(GroupCases(64)),
                         [](const auto& info) { return info.param.name; });
INSTANTIATE_TEST_SUITE_P(Groups128, AttentionTest, ::testing::ValuesIn(GroupCases(128)),
                         [](const auto& info) { return info.param.name; });
INSTANTIATE_TEST_SUITE_P(Shapes, AttentionTest, ::testing::ValuesIn(Cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace ringleader::kernels::sm90
