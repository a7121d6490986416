// Attention under masks that are intervals of keys, on the CPU: every mask of kernels/masks/,
// against the oracle of their slices; alone, beside lists of tiles, and dealt to ranks.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/masks/masks.h"
#include "kernels/masks/testing/slices.h"
#include "kernels/reference/attention/attention.h"
#include "kernels/reference/testing/attention_problem.h"

namespace ringleader::kernels::reference {
namespace {

using kernels::testing::CountPairs;
using kernels::testing::SlicesOf;
using testing::AttentionProblem;
using testing::ExpectNear;
using testing::Tensor;

Mask SmallMask(MaskKind kind) {
  return {.kind = kind, .window = 90, .prefix = 75, .block = 50};
}

// A document of one token, some of any length, one of several tiles.
std::vector<int32_t> Firsts(int32_t tokens) {
  std::vector<int32_t> firsts = {0, 1};
  for (const int32_t first : {40, 64, 200, 333}) {
    if (first < tokens) firsts.push_back(first);
  }
  return firsts;
}

// Lists of tiles at random, some rows without any; they are not causal.
struct RandomLists {
  std::vector<int32_t> row_offsets, columns;
  std::vector<char> listed;  // [heads, tiles, tiles]
  int64_t tiles;

  RandomLists(int64_t tokens, int heads, int tile) : tiles((tokens + tile - 1) / tile) {
    std::mt19937 random(31);
    for (int head = 0; head < heads; ++head) {
      for (int64_t a = 0; a < tiles; ++a) {
        row_offsets.push_back(static_cast<int32_t>(columns.size()));
        for (int64_t b = 0; b < tiles; ++b) {
          listed.push_back(a % 4 != 2 && random() % 2 == 0);
          if (listed.back()) columns.push_back(static_cast<int32_t>(b));
        }
      }
      row_offsets.push_back(static_cast<int32_t>(columns.size()));
    }
  }
};

struct Shape {
  int32_t tokens;
  int heads, kv_heads, d, tile;
};

class IntervalsTest : public ::testing::TestWithParam<std::tuple<MaskKind, Shape>> {};

TEST_P(IntervalsTest, EqualMaskedAttention) {
  const auto& [kind, s] = GetParam();
  const std::vector<int32_t> firsts = Firsts(s.tokens);
  const Mask mask = SmallMask(kind);
  const std::vector<KeyIntervals> rows = *IntervalsOf(mask, s.tokens, firsts);
  const std::vector<int> visible = CountPairs(SlicesOf(mask, s.tokens, firsts), s.tokens);
  const AttentionProblem problem(s.tokens, s.heads, s.kv_heads, s.d, 32);
  Engine engine(2);
  {
    SCOPED_TRACE("alone");
    const TileSelection tiles = {
        .pattern = TilePattern::kFull, .tile = s.tile, .intervals = rows.data()};
    ExpectNear(problem.Run(engine, tiles), problem.Expected([&](int, int64_t i, int64_t j) {
      return visible[i * s.tokens + j] == 1;
    }));
  }
  SCOPED_TRACE("beside lists");
  const RandomLists lists(s.tokens, s.heads, s.tile);
  const TileSelection tiles = {.pattern = TilePattern::kCsr,
                               .tile = s.tile,
                               .row_offsets = lists.row_offsets.data(),
                               .columns = lists.columns.data(),
                               .intervals = rows.data()};
  ExpectNear(problem.Run(engine, tiles), problem.Expected([&](int head, int64_t i, int64_t j) {
    return visible[i * s.tokens + j] == 1 &&
           lists.listed[(head * lists.tiles + i / s.tile) * lists.tiles + j / s.tile];
  }));
}

std::vector<MaskKind> AllKinds() {
  std::vector<MaskKind> kinds;
  for (int kind = 0; kind < kMaskKinds; ++kind) kinds.push_back(static_cast<MaskKind>(kind));
  return kinds;
}
INSTANTIATE_TEST_SUITE_P(Masks, IntervalsTest,
                         ::testing::Combine(::testing::ValuesIn(AllKinds()),
                                            ::testing::Values(Shape{451, 4, 2, 64, 64},
                                                              Shape{300, 3, 1, 128, 128},
                                                              Shape{128, 2, 2, 32, 64})),
                         [](const auto& info) {
                           return std::string(MaskName(std::get<0>(info.param))) + "_n" +
                                  std::to_string(std::get<1>(info.param).tokens);
                         });

// Any intervals: empty ones, whole rows without a key, one key.
std::vector<KeyIntervals> RandomRows(int32_t tokens, std::mt19937& random) {
  std::vector<KeyIntervals> rows(tokens);
  for (int32_t i = 0; i < tokens; ++i) {
    if (i % 7 == 3 || (i >= 128 && i < 256)) continue;  // no key; a whole tile of such queries
    int32_t bounds[4];
    for (int32_t& bound : bounds) bound = static_cast<int32_t>(random() % (tokens + 1));
    std::ranges::sort(bounds);
    if (i % 5 == 0) bounds[1] = bounds[0];
    rows[i] = {bounds[0], bounds[1], bounds[2], bounds[3]};
  }
  return rows;
}

bool Sees(const KeyIntervals& row, int64_t j) {
  return (row.begin <= j && j < row.end) || (row.second_begin <= j && j < row.second_end);
}

TEST(AnyIntervalsTest, EqualMaskedAttention) {
  std::mt19937 random(33);
  Engine engine(2);
  for (const int tile : {64, 128}) {
    const AttentionProblem problem(389, 4, 2, 64, 34);
    const std::vector<KeyIntervals> rows = RandomRows(389, random);
    const TileSelection tiles = {
        .pattern = TilePattern::kFull, .tile = tile, .intervals = rows.data()};
    ExpectNear(problem.Run(engine, tiles),
               problem.Expected([&](int, int64_t i, int64_t j) { return Sees(rows[i], j); }));
  }
}

class IntervalShardsTest : public ::testing::TestWithParam<std::tuple<LayoutKind, int>> {};

TEST_P(IntervalShardsTest, SumOfOwnersEqualsOneCall) {
  const auto [kind, ranks] = GetParam();
  const AttentionProblem whole(1024, 4, 2, 64, 35);
  const ShardLayout layout{.kind = kind, .ranks = ranks, .stripe = 128, .tokens = 1024};
  std::mt19937 random(36);
  Engine engine(2);
  for (const std::vector<KeyIntervals>& rows :
       {RandomRows(1024, random),
        *IntervalsOf(SmallMask(MaskKind::kSharedQuestion), 1024, Firsts(1024))}) {
    const TileSelection tiles = {
        .pattern = TilePattern::kFull, .tile = 64, .intervals = rows.data()};
    ExpectNear(whole.RunRing(engine, tiles, nullptr, layout), whole.Run(engine, tiles));
  }
}
INSTANTIATE_TEST_SUITE_P(Layouts, IntervalShardsTest,
                         ::testing::Combine(::testing::Values(LayoutKind::kContiguous,
                                                              LayoutKind::kZigzag,
                                                              LayoutKind::kStriped),
                                            ::testing::Values(2, 4)));

// Forward of 256 tokens; what it says and how many tiles of 64 it visits.
class IntervalCallsTest : public ::testing::Test {
 protected:
  absl::Status Forward(TileSelection tiles) {
    tiles.tile = 64;
    tiles.intervals = rows_.data();
    Engine engine(1);
    const Tensor q(256, 1, 64);
    Tensor out(256, 1, 64);
    std::vector<float> lse(256);
    return AttentionForward(engine,
                            {.q = q.view(),
                             .k = q.view(),
                             .v = q.view(),
                             .out = out.view(),
                             .lse = lse.data(),
                             .query_layout = {.tokens = 256},
                             .key_layout = {.tokens = 256},
                             .tiles = tiles,
                             .scale = 0.125f},
                            &visited_);
  }
  int64_t Visited(const Mask& mask, const std::vector<int32_t>& firsts) {
    rows_ = *IntervalsOf(mask, 256, firsts);
    EXPECT_EQ(Forward({.pattern = TilePattern::kFull}), absl::OkStatus());
    return visited_;
  }
  std::vector<KeyIntervals> rows_ = std::vector<KeyIntervals>(256);
  int64_t visited_ = 0;
};

TEST_F(IntervalCallsTest, TilesWithoutAVisiblePairAreNotVisited) {
  EXPECT_EQ(Visited({.kind = MaskKind::kFull}, {0}), 16);
  EXPECT_EQ(Visited({.kind = MaskKind::kCausal}, {0}), 10);
  EXPECT_EQ(Visited({.kind = MaskKind::kFullWindow, .window = 2}, {0}), 4 + 6);
  EXPECT_EQ(Visited({.kind = MaskKind::kCausalDocuments}, {0, 64, 128, 192}), 4);
  // The first tile is the question, the other tiles are answers.
  EXPECT_EQ(Visited({.kind = MaskKind::kSharedQuestion}, {0, 64, 128, 192}), 1 + 2 + 2 + 2);
  rows_.assign(256, {});
  ASSERT_EQ(Forward({.pattern = TilePattern::kFull}), absl::OkStatus());
  EXPECT_EQ(visited_, 0);
}

TEST_F(IntervalCallsTest, WrongOnesAreRefused) {
  const auto expect = [this](const TileSelection& tiles, const std::string& part) {
    const std::string message(Forward(tiles).message());
    EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  expect({.pattern = TilePattern::kCausal}, "intervals go with kFull");
  expect({.pattern = TilePattern::kWindow, .window = 5}, "intervals go with kFull");
  rows_[7] = {0, 5, 4, 9};
  expect({.pattern = TilePattern::kFull}, "intervals[7] are [0, 5) and [4, 9)");
  rows_[7] = {-1, 5, 6, 9};
  expect({.pattern = TilePattern::kFull}, "intervals[7]");
  rows_[7] = {0, 5, 6, 257};
  expect({.pattern = TilePattern::kFull}, "256 tokens");
  rows_[7] = {};
  const std::vector<int32_t> offsets(5), columns(1), starts(256);
  const std::vector<uint32_t> chosen(64);
  TileSelection lists = {.pattern = TilePattern::kCsr,
                         .tile = 64,
                         .row_offsets = offsets.data(),
                         .columns = columns.data(),
                         .document_starts = starts.data()};
  expect(lists, "beside document_starts or choice");
  lists.document_starts = nullptr;
  lists.choice = {.chosen = chosen.data(), .block_size = 64};
  expect(lists, "beside document_starts or choice");
}

}  // namespace
}  // namespace ringleader::kernels::reference
