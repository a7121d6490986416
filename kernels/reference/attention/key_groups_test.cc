// Attention to groups of keys beside the tiles of a pattern, against the fp64 oracle.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/reference/attention/attention.h"
#include "kernels/reference/testing/attention_problem.h"
#include "kernels/reference/testing/packed_documents.h"
#include "kernels/reference/tiles/tile_lists.h"

namespace ringleader::kernels::reference {
namespace {

using testing::ExpectNear;
using Problem = testing::AttentionProblem;
using Result = testing::AttentionResult;
using testing::Tensor;

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

// Random groups before each tile of a sequence; a third of the rows has none.
struct RandomGroups {
  int heads;
  int64_t tiles;
  std::set<std::tuple<int, int64_t, int64_t>> kept;  // (head, tile, group of the sequence)

  RandomGroups(int heads, int64_t tokens, int seed)
      : heads(heads), tiles(TileCount(tokens, kGroupTile)) {
    std::mt19937 random(seed);
    for (int head = 0; head < heads; ++head) {
      for (int64_t a = 0; a < tiles; ++a) {
        const bool is_empty = random() % 3 == 0;
        for (int64_t g = 0; g < a * kGroupTile / kGroupKeys; ++g) {
          if (!is_empty && random() % 4 == 0) kept.insert({head, a, g});
        }
      }
    }
  }
  bool Sees(int head, int64_t i, int64_t j) const {
    if (j > i) return false;
    return i / kGroupTile == j / kGroupTile ||
           kept.contains({head, i / kGroupTile, j / kGroupKeys});
  }
};

// A rank's lists, by owner.
struct Lists {
  int32_t capacity = 0;
  std::vector<int32_t> groups, bounds;
  int64_t rows = 0;

  Lists(const RandomGroups& random, const ShardLayout& layout) {
    const int64_t tiles = TileCount(layout.local_tokens(), kGroupTile);
    rows = random.heads * tiles;
    capacity = static_cast<int32_t>(random.tiles * kGroupTile / kGroupKeys);
    groups.resize(rows * capacity, -1);
    bounds.resize((layout.ranks + 1) * rows, 0);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t a = layout.Position(row % tiles * kGroupTile) / kGroupTile;
      int32_t place = 0;
      for (int owner = 0; owner < layout.ranks; ++owner) {
        bounds[owner * rows + row] = place;
        for (int64_t g = 0; g < a * kGroupTile / kGroupKeys; ++g) {
          const bool is_kept = random.kept.contains({static_cast<int>(row / tiles), a, g});
          if (!is_kept || layout.Owner(g * kGroupKeys) != owner) continue;
          groups[row * capacity + place++] =
              static_cast<int32_t>(layout.LocalIndex(g * kGroupKeys) / kGroupKeys);
        }
      }
      bounds[layout.ranks * rows + row] = place;
    }
  }
  KeyGroups Of(int owner) const {
    return {.groups = groups.data(),
            .begins = bounds.data() + owner * rows,
            .ends = bounds.data() + (owner + 1) * rows,
            .capacity = capacity};
  }
};

// Dealt to the ranks of a layout, one call for each pair of ranks.
struct Ring {
  const Problem& problem;
  const std::vector<uint64_t> own_tile;
  int64_t visited = 0;

  explicit Ring(const Problem& problem) : problem(problem), own_tile(problem.q.heads, 1) {}

  Result Run(const RandomGroups& random, ShardLayout layout, const std::vector<int32_t>& starts,
             int threads = 2) {
    Engine engine(threads);
    const Tensor &q = problem.q, &k = problem.k;
    Result result{Tensor(q.tokens, q.heads, q.head_dim), Tensor(q.tokens, q.heads, q.head_dim),
                  Tensor(k.tokens, k.heads, k.head_dim), Tensor(k.tokens, k.heads, k.head_dim),
                  std::vector<float>(q.tokens * q.heads)};
    for (layout.rank = 0; layout.rank < layout.ranks; ++layout.rank) {
      AddRank(engine, Lists(random, layout), layout, starts, result);
    }
    return result;
  }

  void AddRank(Engine& engine, const Lists& lists, const ShardLayout& mine,
               const std::vector<int32_t>& starts, Result& result) {
    const Tensor q = testing::Shard(problem.q, mine), d_out = testing::Shard(problem.d_out, mine);
    const std::vector<int32_t> local = starts.empty() ? starts : testing::ShardStarts(starts, mine);
    Tensor out(q.tokens, q.heads, q.head_dim), dq = out;
    std::vector<float> lse(q.tokens * q.heads, kNegativeInfinity), delta(lse.size());
    for (const bool forward : {true, false}) {
      ShardLayout owner = mine;
      for (owner.rank = 0; owner.rank < owner.ranks; ++owner.rank) {
        const TileSelection tiles = {.pattern = TilePattern::kToeplitz,
                                     .tile = kGroupTile,
                                     .diagonals = own_tile.data(),
                                     .diagonal_words = 1,
                                     .groups = lists.Of(owner.rank),
                                     .document_starts = local.empty() ? nullptr : local.data()};
        const Tensor k = testing::Shard(problem.k, owner), v = testing::Shard(problem.v, owner);
        if (forward) {
          int64_t of_call = 0;
          ASSERT_TRUE(AttentionForward(engine,
                                       {.q = q.view(),
                                        .k = k.view(),
                                        .v = v.view(),
                                        .out = out.view(),
                                        .lse = lse.data(),
                                        .query_layout = mine,
                                        .key_layout = owner,
                                        .tiles = tiles,
                                        .scale = problem.scale},
                                       &of_call)
                          .ok());
          visited += of_call;
          continue;
        }
        Tensor dk(k.tokens, k.heads, k.head_dim), dv = dk;
        ASSERT_TRUE(AttentionBackward(engine, {.q = q.view(),
                                               .k = k.view(),
                                               .v = v.view(),
                                               .d_out = d_out.view(),
                                               .lse = lse.data(),
                                               .delta = delta.data(),
                                               .dq = dq.view(),
                                               .dk = dk.view(),
                                               .dv = dv.view(),
                                               .query_layout = mine,
                                               .key_layout = owner,
                                               .tiles = tiles,
                                               .scale = problem.scale})
                        .ok());
        Add(dk, owner, result.dk);
        Add(dv, owner, result.dv);
      }
      if (forward) AttentionDelta(engine, d_out.view(), std::as_const(out).view(), delta.data());
    }
    Add(out, mine, result.out);
    Add(dq, mine, result.dq);
    for (int64_t i = 0; i < q.tokens; ++i) {
      for (int head = 0; head < q.heads; ++head) {
        result.lse[head * problem.q.tokens + mine.Position(i)] = lse[head * q.tokens + i];
      }
    }
  }

  static void Add(const Tensor& shard, const ShardLayout& layout, Tensor& whole) {
    const int64_t row = int64_t{shard.heads} * shard.head_dim;
    for (int64_t i = 0; i < shard.tokens * row; ++i) {
      whole.data[layout.Position(i / row) * row + i % row] += shard.data[i];
    }
  }
};

TEST(KeyGroupsTest, AreAttendedToBesideTheOwnTile) {
  for (const auto& [tokens, heads, kv_heads, d] :
       {std::tuple{333, 4, 2, 64}, {512, 2, 2, 20}, {64, 3, 1, 128}, {40, 1, 1, 64}}) {
    const Problem problem(tokens, heads, kv_heads, d, 1);
    const RandomGroups random(heads, tokens, 2);
    SCOPED_TRACE(tokens);
    Ring ring(problem);
    const Result result = ring.Run(random, {.tokens = tokens}, {});
    ExpectNear(result, problem.Expected([&](int head, int64_t i, int64_t j) {
      return random.Sees(head, i, j);
    }));
    const Result again = ring.Run(random, {.tokens = tokens}, {}, /*threads=*/5);
    EXPECT_EQ(again.out.data, result.out.data);
    EXPECT_EQ(again.dq.data, result.dq.data);
    EXPECT_EQ(again.dk.data, result.dk.data);
  }
}

TEST(KeyGroupsTest, RanksAttendAsOneDoesAndVisitAsMuch) {
  const Problem problem(512, 4, 2, 64, 3);
  const RandomGroups random(4, 512, 4);
  for (const std::vector<int32_t>& starts :
       {std::vector<int32_t>(), testing::DocumentStarts(512, {0, 3, 68, 69, 203, 260, 449})}) {
    const auto expected = problem.Expected([&](int head, int64_t i, int64_t j) {
      return random.Sees(head, i, j) && (starts.empty() || j >= starts[i]);
    });
    Ring one(problem);
    ExpectNear(one.Run(random, {.tokens = 512}, starts), expected);
    // Eight groups are a tile's pairs, rounded in each row.
    EXPECT_NEAR(static_cast<double>(one.visited),
                4 * 8 + static_cast<double>(random.kept.size()) / 8, 4 * 8 / 2.0);
    for (const auto kind : {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
      for (const int ranks : {2, 4}) {
        SCOPED_TRACE(::testing::Message() << static_cast<int>(kind) << " on " << ranks);
        Ring ring(problem);
        ExpectNear(
            ring.Run(random, {.kind = kind, .ranks = ranks, .stripe = 64, .tokens = 512}, starts),
            expected);
        EXPECT_EQ(ring.visited, one.visited);
      }
    }
  }
}

// What a caller may get wrong, by name.
TEST(KeyGroupsTest, ListsThatDoNotFitAreRefused) {
  const std::vector<uint64_t> own_tile = {1}, two_tiles = {3};
  const ShardLayout layout = {.tokens = 200};
  const auto complaint = [&](std::vector<int32_t> groups, int32_t begin, int32_t end,
                             const std::vector<uint64_t>& diagonals, TileSelection tiles) {
    std::vector<int32_t> all(4 * 4, 0), begins(4, 0), ends(4, 0);
    std::ranges::copy(groups, all.begin() + 2 * 4);  // of the third tile
    begins[2] = begin;
    ends[2] = end;
    tiles.diagonals = diagonals.data();
    tiles.diagonal_words = 1;
    tiles.groups = {.groups = all.data(),
                    .begins = tiles.window == 1 ? nullptr : begins.data(),
                    .ends = ends.data(),
                    .capacity = 4};
    return std::string(TileLists::Build(tiles, layout, layout, 200, 200, 1).status().message());
  };
  const TileSelection good = {.pattern = TilePattern::kToeplitz, .tile = 64};
  EXPECT_EQ(complaint({0, 9, 15}, 0, 3, own_tile, good), "");
  EXPECT_EQ(complaint({0, 9, 15}, 2, 2, own_tile, good), "");
  const auto has = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };
  EXPECT_TRUE(has(complaint({0}, 0, 5, own_tile, good), "room for 4"));
  EXPECT_TRUE(has(complaint({0}, -1, 1, own_tile, good), "room for 4"));
  EXPECT_TRUE(has(complaint({0}, 1, 0, own_tile, good), "room for 4"));
  EXPECT_TRUE(has(complaint({3, 3}, 0, 2, own_tile, good), "3 is out of order"));
  EXPECT_TRUE(has(complaint({-1}, 0, 1, own_tile, good), "-1 is out of order"));
  EXPECT_TRUE(has(complaint({16}, 0, 1, own_tile, good), "16 is out of order or not before"));
  EXPECT_TRUE(has(complaint({25}, 0, 1, own_tile, good), "25 is out of order or not before"));
  EXPECT_TRUE(has(complaint({9}, 0, 1, two_tiles, good), "9 lies in a tile that the diagonals"));
  EXPECT_TRUE(has(complaint({0}, 0, 1, own_tile, {.pattern = TilePattern::kCausal, .tile = 64}),
                  "groups go with kToeplitz and tiles of 64"));
  EXPECT_TRUE(has(complaint({0}, 0, 1, own_tile, {.pattern = TilePattern::kToeplitz, .tile = 128}),
                  "groups go with kToeplitz and tiles of 64"));
  TileSelection without = good;
  without.window = 1;
  EXPECT_TRUE(has(complaint({0}, 0, 1, own_tile, without), "groups need begins and ends"));
}

}  // namespace
}  // namespace ringleader::kernels::reference
