// The CPU engine's choice of groups of keys against the fp64 oracle.
#include "kernels/reference/gates/key_group_gate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels/reference/gates/block_gate.h"
#include "kernels/reference/testing/key_group_oracle.h"
#include "kernels/reference/testing/masked_attention.h"
#include "kernels/reference/testing/packed_documents.h"

namespace ringleader::kernels::reference {
namespace {

using testing::GroupsOfRow;
using testing::KeyGroupOracle;
using testing::RandomTensor;
using testing::Tensor;

constexpr double kTolerance = 1e-4;  // fp32 logits of up to 50

struct NarrowRowPair {
  std::vector<uint8_t> queries, keys;
};

// What the ranks of a sequence agree on.
struct PickedRows {
  PickedRows(Engine& engine, const Tensor& q, const Tensor& k)
      : dims(k.heads * kScoreDims), inverses(2 * k.heads) {
    std::vector<int64_t> energy(2 * k.heads * k.head_dim);
    std::vector<float> largest(energy.size());
    RunBlockStep(engine, q.view(), k.view(),
                 DimEnergyStep{.tokens = q.tokens,
                               .rows = q.tokens,
                               .energy = energy.data(),
                               .largest = largest.data()});
    RunBlockStep(engine, q.view(), k.view(),
                 PickDimsStep{.energy = energy.data(),
                              .largest = largest.data(),
                              .dims = dims.data(),
                              .inverses = inverses.data()});
  }
  NarrowRowPair Narrow(Engine& engine, const Tensor& q, const Tensor& k,
                       const SpreadRows& tiles) const {
    NarrowRowPair rows{std::vector<uint8_t>(tiles.Rows(q.tokens) * q.heads * kScoreDims),
                       std::vector<uint8_t>(k.tokens * k.heads * kScoreDims)};
    RunBlockStep(engine, q.view(), k.view(),
                 NarrowRowsStep{.dims = dims.data(),
                                .inverses = inverses.data(),
                                .rows = tiles,
                                .queries = rows.queries.data(),
                                .keys = rows.keys.data()});
    return rows;
  }

  std::vector<int32_t> dims;
  std::vector<float> inverses;
};

std::vector<uint32_t> Choose(const Tensor& q, const Tensor& k, KeyGroupGateStep step,
                             const ShardLayout& layout, const std::vector<int32_t>& starts = {},
                             int threads = 2) {
  const Tensor local = testing::Shard(q, layout);
  const std::vector<int32_t> local_starts =
      starts.empty() ? starts : testing::ShardStarts(starts, layout);
  const Tensor local_keys = testing::Shard(k, layout);
  Engine engine(threads);
  const PickedRows picked(engine, q, k);
  const NarrowRowPair rows = picked.Narrow(engine, local, local_keys, {step.tile}),
                      of_sequence = picked.Narrow(engine, q, k, {step.tile});
  const std::vector<int64_t> of_tiles = GroupRows(layout, step.tile);
  std::vector<uint32_t> chosen(q.heads / step.heads_together * of_tiles.back(),
                               0xA5A5A5A5u);  // nothing is left of it
  step.query_layout = layout;
  step.queries = rows.queries.data();
  step.keys = of_sequence.keys.data();
  step.document_starts = local_starts.empty() ? nullptr : local_starts.data();
  step.rows = of_tiles.data();
  step.chosen = chosen.data();
  RunBlockStep(engine, local.view(), local_keys.view(), step);
  return chosen;
}

TEST(KeyGroupGateTest, IsTheOracles) {
  std::mt19937 random(3);
  for (const auto& [tokens, head_dim] :
       {std::pair(1024, 128), {1024, 64}, {1001, 96}, {130, 32}, {64, 64}, {3, 128}}) {
    const Tensor q = RandomTensor(tokens, 4, head_dim, random),
                 k = RandomTensor(tokens, 2, head_dim, random);
    const std::vector<int32_t> documents =
        testing::DocumentStarts(tokens, testing::RandomDocuments(tokens, kGroupTile, random));
    for (const auto& [packed, tile, together] : testing::kAskedChoices) {
      for (const float density : {0.02f, 0.1f, 0.4f, 1.0f}) {
        SCOPED_TRACE(::testing::Message()
                     << tokens << " tokens, density " << density << (packed ? ", documents" : "")
                     << ", tiles of " << tile << ", heads together " << together);
        const KeyGroupGateStep step = {.tile = tile,
                                       .scale = 1.0f,  // logits far apart
                                       .density = density,
                                       .budget_tokens = tokens,
                                       .heads_together = together};
        const auto starts = packed ? documents : std::vector<int32_t>();
        const KeyGroupOracle oracle(q.view(), k.view(), step, starts);
        const ShardLayout whole = {.tokens = tokens};
        const std::vector<uint32_t> chosen = Choose(q, k, step, whole, starts);
        EXPECT_EQ(oracle.Complaint(chosen, whole, kTolerance), "");
        EXPECT_EQ(Choose(q, k, step, whole, starts, /*threads=*/5), chosen);
      }
    }
  }
}

TEST(KeyGroupGateTest, IsTheOraclesWhereASampleWillDo) {
  std::mt19937 random(13);
  const std::vector<int32_t> halves = {1, 3};
  for (const testing::SampledChoice& choice : testing::kSampledChoices) {
    const auto& [tokens, asked] = choice;
    Tensor q = RandomTensor(tokens, 2, 64, random), k = RandomTensor(tokens, 1, 64, random);
    q.at(tokens - 40, 0, 3) = std::nanf("");
    for (const int64_t key : {int64_t{80}, int64_t{81}, int64_t{82}, int64_t{83}, tokens - 36}) {
      k.at(key, 0, 5) = std::nanf("");
    }
    const std::vector<int32_t> starts =
        asked.packed ? testing::DocumentStarts(tokens, testing::SampledDocuments(choice))
                     : std::vector<int32_t>();
    for (const bool has_halves : {false, true}) {
      for (const float move : {1.0f, 0.8f, 1.3f}) {
        if (has_halves && (move != 1.0f || asked.heads_together == 2)) continue;
        if (tokens > 2048 && (has_halves || move > 1.0f)) continue;
        const KeyGroupGateStep step = {.tile = asked.tile,
                                       .scale = 0.25f,
                                       .density = testing::kSampledDensity,
                                       .budget_tokens = tokens,
                                       .heads_together = asked.heads_together,
                                       .head_halves = has_halves ? halves.data() : nullptr,
                                       .move = move,
                                       .tolerance = 0.3f};
        const KeyGroupOracle oracle(std::as_const(q).view(), std::as_const(k).view(), step, starts);
        EXPECT_GT(oracle.ShareSampled(), 0.1);
        EXPECT_LT(oracle.ShareSampled(), 0.9);
        const ShardLayout whole = {.tokens = tokens};
        EXPECT_EQ(oracle.Complaint(Choose(q, k, step, whole, starts), whole, kTolerance), "")
            << tokens << " tokens, tiles of " << asked.tile << ", heads together "
            << asked.heads_together << ", move " << move;
      }
    }
  }
}

// Of each four keys one is in the sample, each of the four places as often, and of what comes again
// after any number of tokens as much as of all.
TEST(KeyGroupGateTest, TheSampleIsSpread) {
  constexpr int32_t kSampled = 1 << 18;  // of a sequence of a million
  std::vector<int32_t> at(kSampleEvery);
  for (int32_t i = 0; i < kSampled; ++i) {
    const int32_t place = SampleKey(i) - i * kSampleEvery;
    ASSERT_GE(place, 0);
    ASSERT_LT(place, kSampleEvery);
    ++at[place];
  }
  for (const int32_t count : at) EXPECT_NEAR(count, kSampled / kSampleEvery, 2000);
  for (int32_t period = 1; period <= 4096; ++period) {
    // Of 256 times that a place comes again, 64 are met on average; 7 is the standard deviation.
    int32_t met = 0;
    for (int32_t j = 0; j < 256; ++j) met += SampleKey(j * period) == j * period * kSampleEvery;
    ASSERT_GT(met, 26) << "every " << period * kSampleEvery << " tokens";
    ASSERT_LT(met, 102) << "every " << period * kSampleEvery << " tokens";
  }
}

// What the sample has missed is all worth the same: the first groups are kept, though the later a
// key, the larger its logit.
TEST(KeyGroupGateTest, WhatIsAboveTheSampleTies) {
  constexpr int64_t kTokens = 2048, kFirst = kTokens - 16;
  Tensor q(kTokens, 1, 64), k(kTokens, 1, 64);
  std::ranges::fill(q.data, 1.0f);
  for (int32_t j = 0; j < kFirst; ++j) {
    if (SampleKey(j / kSampleEvery) == j) continue;
    for (int x = 0; x < 64; ++x) k.at(j, 0, x) = static_cast<float>(8 + j / 256);
  }
  const KeyGroupGateStep step = {
      .tile = 16, .scale = 0.1f, .density = testing::kSampledDensity, .budget_tokens = kTokens};
  const ShardLayout whole = {.tokens = kTokens};
  const std::vector<uint32_t> chosen = Choose(q, k, step, whole);
  const KeyGroupOracle oracle(std::as_const(q).view(), std::as_const(k).view(), step, {});
  EXPECT_EQ(oracle.Complaint(chosen, whole, 0.0), "");
  std::vector<int64_t> first(step.budget().MostGroups(kFirst, 0));
  ASSERT_GE(std::ssize(first), SampledFrom(16, 1));
  ASSERT_LT(std::ssize(first), kFirst / kGroupKeys);
  std::iota(first.begin(), first.end(), 0);
  EXPECT_EQ(GroupsOfRow(chosen, whole, 0, kFirst / 16, 16), first);
}

TEST(KeyGroupGateTest, HeadsHaveBudgetsOfTheirOwn) {
  std::mt19937 random(5);
  constexpr int kTokens = 1024;
  const Tensor q = RandomTensor(kTokens, 4, 64, random), k = RandomTensor(kTokens, 2, 64, random);
  const std::vector<int32_t> halves = {1, 3, 2, 3};
  for (const float density : {0.3f, 0.6f}) {
    const KeyGroupGateStep equal = {.scale = 1.0f, .density = density, .budget_tokens = kTokens};
    KeyGroupGateStep step = equal;
    step.head_halves = halves.data();
    const ShardLayout whole = {.tokens = kTokens};
    const std::vector<uint32_t> chosen = Choose(q, k, step, whole);
    EXPECT_EQ(KeyGroupOracle(q.view(), k.view(), step, {}).Complaint(chosen, whole, kTolerance),
              "");
    const std::vector<uint32_t> before = Choose(q, k, equal, whole);
    const int64_t words = std::ssize(chosen) / q.heads;
    std::vector<int64_t> kept(q.heads), kept_before(q.heads);
    for (int64_t i = 0; i < std::ssize(chosen); ++i) {
      kept[i / words] += std::popcount(chosen[i]);
      kept_before[i / words] += std::popcount(before[i]);
    }
    EXPECT_LT(kept[0], kept_before[0] * 6 / 10);
    EXPECT_GT(kept[1], kept_before[1] * 12 / 10);
    EXPECT_EQ(kept[2], kept_before[2]);
    // What one head has less and another more comes out even, but where there are no more groups.
    EXPECT_LE(kept[0] + kept[1], 2 * kept_before[0]);
  }
}

TEST(KeyGroupGateTest, RanksChooseAsOneDoes) {
  std::mt19937 random(7);
  const Tensor q = RandomTensor(1024, 2, 128, random), k = RandomTensor(1024, 1, 128, random);
  const std::vector<int32_t> packed = testing::DocumentStarts(1024, {0, 1, 203, 260, 700, 1000});
  for (const auto& [tile, starts] :
       {std::pair(kGroupTile, std::vector<int32_t>()), {kGroupTile, packed}, {16, packed}}) {
    const KeyGroupGateStep step = {
        .tile = tile, .scale = 0.125f, .density = 0.3f, .budget_tokens = 2000};
    const ShardLayout whole = {.tokens = 1024};
    const std::vector<uint32_t> one = Choose(q, k, step, whole, starts);
    const KeyGroupOracle oracle(q.view(), k.view(), step, starts);
    for (const auto kind : {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
      for (int rank = 0; rank < 4; ++rank) {
        const ShardLayout layout = {
            .kind = kind, .ranks = 4, .rank = rank, .stripe = 128, .tokens = 1024};
        const std::vector<uint32_t> chosen = Choose(q, k, step, layout, starts);
        EXPECT_EQ(oracle.Complaint(chosen, layout, kTolerance), "");
        for (int head = 0; head < 2; ++head) {
          for (int64_t i = 0; i < 256 / tile; ++i) {
            EXPECT_EQ(GroupsOfRow(chosen, layout, head, i, tile),
                      GroupsOfRow(one, whole, head, layout.Position(i * tile) / tile, tile));
          }
        }
      }
    }
  }
}

// Keys that are all the same score the same: the first ones in even heads, the last in odd ones.
TEST(KeyGroupGateTest, TiesGoWhereTheHeadSays) {
  Tensor q(512, 2, 64), k(512, 1, 64);
  for (int64_t i = 0; i < 512; ++i) {
    for (int x = 0; x < 64; ++x) {
      q.at(i, 0, x) = q.at(i, 1, x) = 0.5f;
      k.at(i, 0, x) = 1.0f;
    }
  }
  const ShardLayout whole = {.tokens = 512};
  const KeyGroupGateStep step = {.scale = 1.0f, .density = 0.2f, .budget_tokens = 2048};
  const std::vector<uint32_t> chosen = Choose(q, k, step, whole);
  const KeyGroupOracle oracle(std::as_const(q).view(), std::as_const(k).view(), step, {});
  EXPECT_EQ(oracle.Complaint(chosen, whole, 0.0), "");
  // a is 0.1501: a * sqrt(512 * 2048) keys are 153.7, less 64 of the tile itself 11 groups.
  EXPECT_EQ(GroupsOfRow(chosen, whole, 0, 7),
            (std::vector<int64_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10}));
  EXPECT_EQ(GroupsOfRow(chosen, whole, 1, 7),
            (std::vector<int64_t>{45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55}));
}

// So they do at 131,072 tokens, of which a rank has the last 128.
TEST(KeyGroupGateTest, TiesOfLongSequencesFavourNeitherEnd) {
  constexpr int64_t kTokens = 131'072;
  Tensor q(kTokens, 2, 64), k(kTokens, 1, 64);
  std::ranges::fill(q.data, 0.5f);
  std::ranges::fill(k.data, 1.0f);
  const ShardLayout last = {.ranks = 1024, .rank = 1023, .tokens = kTokens};
  const KeyGroupGateStep step = {.scale = 1.0f, .density = 0.05f, .budget_tokens = kTokens};
  const std::vector<uint32_t> chosen = Choose(q, k, step, last);
  for (int64_t tile = 0; tile < 2; ++tile) {
    const int64_t first = last.Position(tile * kGroupTile), groups = first / kGroupKeys;
    std::vector<int64_t> best(KeyGroupBudgetOf(0.05f, kTokens).MostGroups(first, 0));
    ASSERT_GT(best.size(), 100u);
    std::iota(best.begin(), best.end(), 0);
    EXPECT_EQ(GroupsOfRow(chosen, last, 0, tile), best);
    std::iota(best.begin(), best.end(), groups - std::ssize(best));
    EXPECT_EQ(GroupsOfRow(chosen, last, 1, tile), best);
  }
}

// One query of a tile that looks far back, for one key, gets its group; the others look at
// themselves. So it does where another head chooses with its own.
TEST(KeyGroupGateTest, FindsAKeyThatOneQueryLooksFor) {
  std::mt19937 random(5);
  const Tensor k = RandomTensor(1024, 1, 64, random);
  const ShardLayout whole = {.tokens = 1024};
  for (const int heads : {1, 2}) {
    for (int looking = 0; looking < heads; ++looking) {
      Tensor q(1024, heads, 64);
      for (int head = 0; head < heads; ++head) {
        for (int64_t i = 0; i < 1024; ++i) {
          const int64_t key = head == looking && i == 900 ? 333 : i;
          for (int x = 0; x < 64; ++x) q.at(i, head, x) = std::as_const(k).at(key, 0, x);
        }
      }
      const KeyGroupGateStep step = {.scale = 0.125f, .density = 0.2f, .heads_together = heads};
      const auto row = GroupsOfRow(Choose(q, k, step, whole), whole, 0, 14);
      EXPECT_EQ(std::ssize(row), KeyGroupBudgetOf(0.2f, 1024).MostGroups(int64_t{14} * 64, 0));
      EXPECT_TRUE(std::ranges::binary_search(row, 333 / 8)) << looking << " of " << heads;
    }
  }
}

// What is not a number is not preferred, whichever dimension it is in, and as many are kept.
TEST(KeyGroupGateTest, NotANumberIsTheWorst) {
  std::mt19937 random(9);
  for (const auto& [head_dim, dim] : {std::pair(64, 3), {128, 3}, {128, 77}}) {
    const Tensor q = RandomTensor(512, 1, head_dim, random);
    Tensor k = RandomTensor(512, 1, head_dim, random);
    for (int64_t j = 0; j < 200; ++j) k.at(j, 0, dim) = NAN;
    const ShardLayout whole = {.tokens = 512};
    const auto row =
        GroupsOfRow(Choose(q, k, {.scale = 1.0f, .density = 0.3f}, whole), whole, 0, 7);
    ASSERT_EQ(std::ssize(row), KeyGroupBudgetOf(0.3f, 512).MostGroups(448, 0));
    EXPECT_GE(row.front(), 200 / 8);
  }
}

// Each owner's groups are listed once, as its local ones, ascending.
TEST(KeyGroupGateTest, ListsHoldWhatWasChosenOfEachOwner) {
  std::mt19937 random(11);
  const Tensor q = RandomTensor(1024, 2, 64, random), k = RandomTensor(1024, 1, 64, random);
  for (const auto& [kind, tile] : {std::pair(LayoutKind::kContiguous, kGroupTile),
                                   {LayoutKind::kZigzag, kGroupTile},
                                   {LayoutKind::kStriped, kGroupTile},
                                   {LayoutKind::kStriped, 16}}) {
    for (int rank = 0; rank < 4; ++rank) {
      const ShardLayout layout = {
          .kind = kind, .ranks = 4, .rank = rank, .stripe = 64, .tokens = 1024};
      const auto chosen = Choose(q, k, {.tile = tile, .scale = 0.125f, .density = 0.3f}, layout);
      const std::vector<int64_t> rows = GroupRows(layout, tile);
      const ListedGroups all =
          ListGroups({.rows = rows.data(), .chosen = chosen.data(), .tile = tile}, layout, 2);
      const int tiles = 256 / tile;
      std::vector<std::vector<int64_t>> listed(2 * tiles);
      ShardLayout owner = layout;
      for (owner.rank = 0; owner.rank < 4; ++owner.rank) {
        const KeyGroups of_owner = all.lists.Of(owner);
        for (size_t row = 0; row < listed.size(); ++row) {
          const int32_t* const list = of_owner.groups + row * of_owner.capacity;
          for (int32_t i = of_owner.begins[row]; i < of_owner.ends[row]; ++i) {
            ASSERT_TRUE(i == of_owner.begins[row] || list[i] > list[i - 1]);
            ASSERT_LT(list[i] * kGroupKeys, owner.local_tokens());
            listed[row].push_back(owner.Position(int64_t{list[i]} * kGroupKeys) / kGroupKeys);
          }
        }
      }
      for (int row = 0; row < 2 * tiles; ++row) {
        std::ranges::sort(listed[row]);
        EXPECT_EQ(listed[row], GroupsOfRow(chosen, layout, row / tiles, row % tiles, tile));
      }
    }
  }
}

// Groups of few queries are counted as many pairs, whoever has the queries.
TEST(SpreadRowsTest, TilesOfGroupsComeToAsManyPairsOnAnyRanks) {
  constexpr SpreadRows kFew = {.tile = 16};
  constexpr int64_t kTokens = 2048;
  const auto total = [&](const ShardLayout& layout, int heads) {
    int64_t tiles = 0;
    for (int64_t row = 0; row < heads * kFew.Tiles(layout.local_tokens()); ++row) {
      tiles += kFew.TilesOfGroups(layout, row, 5);
    }
    return tiles;
  };
  const int64_t one = total({.tokens = kTokens}, 3);
  EXPECT_EQ(one, 3 * (kTokens / 16) * 5 * 8 * 16 / 4096);  // pairs of a tile of 64 by 64
  for (const auto kind : {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
    int64_t of_ranks = 0;
    for (int rank = 0; rank < 4; ++rank) {
      of_ranks +=
          total({.kind = kind, .ranks = 4, .rank = rank, .stripe = 64, .tokens = kTokens}, 3);
    }
    EXPECT_EQ(of_ranks, one);
  }
  EXPECT_EQ(kFew.OwnTiles(kTokens), (kTokens / 16) * 16 * 16 / 4096);
}

// Each query has a row of its tile, padding has none, and rows lie on ranks as their queries do.
TEST(SpreadRowsTest, RowsAreQueriesAndPadding) {
  constexpr SpreadRows kFew = {.tile = 16};
  EXPECT_EQ(kFew.Rows(1001), 63 * 64);
  EXPECT_EQ(SpreadRows().Rows(1001), 1001);
  for (int64_t query = 0; query < 1001; ++query) {
    EXPECT_EQ(kFew.QueryOf(kFew.RowOf(query)), query);
    EXPECT_EQ(SpreadRows().RowOf(query), query);
  }
  EXPECT_EQ(kFew.QueryOf(64 + 20), 31) << "padding";
  for (const auto kind : {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
    const ShardLayout queries = {
        .kind = kind, .ranks = 4, .rank = 2, .stripe = 128, .tokens = 1024};
    const ShardLayout rows = kFew.LayoutOf(queries);
    ASSERT_EQ(rows.local_tokens(), kFew.Rows(queries.local_tokens()));
    for (int64_t query = 0; query < queries.local_tokens(); query += 16) {
      EXPECT_EQ(rows.Position(kFew.RowOf(query)), kFew.RowOf(queries.Position(query)));
    }
  }
}

}  // namespace
}  // namespace ringleader::kernels::reference
