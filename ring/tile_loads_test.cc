#include "ring/tile_loads.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "patterns/sample.h"
#include "ring/band_tiles.h"

namespace ringleader::ring {
namespace {

using kernels::LayoutKind;
using kernels::ShardLayout;

constexpr int kTile = 64;

ShardLayout Layout(LayoutKind kind, int ranks, int64_t blocks, int stripe_blocks) {
  return {.kind = kind, .ranks = ranks, .stripe = stripe_blocks * kTile, .tokens = blocks * kTile};
}

// Counts tile by tile.
TileLoads BruteForce(const HeadPattern& head, const ShardLayout& layout) {
  TileLoads loads(layout.ranks);
  for (int64_t q = 0; q < layout.tokens / kTile; ++q) {
    const int rank = layout.Owner(q * kTile);
    for (int64_t k = 0; k <= q; ++k) {
      if (!head.diagonals.empty() && head.diagonals[q - k]) {
        loads.AddRing(rank, layout.Owner(k * kTile), 1);
      }
      if (k < q && !head.columns_in_block.empty()) {
        loads.AddColumns(rank, head.columns_in_block[k] / kTile);
      }
    }
    for (int64_t k = q; k < layout.tokens / kTile && k - q < std::ssize(head.ahead); ++k) {
      loads.AddRing(rank, layout.Owner(k * kTile), head.ahead[k - q]);
    }
    if (head.row_offsets.empty()) continue;
    for (int64_t i = head.row_offsets[q]; i < head.row_offsets[q + 1]; ++i) {
      loads.AddRing(rank, layout.Owner(int64_t{head.columns[i]} * kTile), head.row_weights[q]);
    }
  }
  return loads;
}

// Pair by pair.
double StepImbalance(const TileLoads& loads) {
  double sum = 0;
  int counted = 0;
  for (int rank = 0; rank < loads.ranks(); ++rank) {
    double total = 0, largest = 0;
    for (int owner = 0; owner < loads.ranks(); ++owner) {
      total += loads.of(rank, owner);
      largest = std::max(largest, loads.of(rank, owner));
    }
    if (total > 0) sum += largest * loads.ranks() / total;
    counted += total > 0;
    EXPECT_NEAR(loads.RankTotals()[rank], total + loads.columns(rank), 1e-6) << rank;
  }
  return counted == 0 ? 1 : sum / counted;
}

void ExpectEqual(const TileLoads& a, const TileLoads& b) {
  EXPECT_NEAR(a.StepImbalance(), StepImbalance(b), 1e-9);
  for (int rank = 0; rank < a.ranks(); ++rank) {
    for (int owner = 0; owner < a.ranks(); ++owner) {
      ASSERT_NEAR(a.of(rank, owner), b.of(rank, owner), 1e-6) << rank << " " << owner;
    }
    ASSERT_NEAR(a.columns(rank), b.columns(rank), 1e-6) << rank;
  }
}

TEST(TileLoadsTest, ClosedFormsCountWhatALoopCounts) {
  std::mt19937 random(1);
  int cases = 0;
  for (int trial = 0; trial < 200; ++trial) {
    for (const auto kind : {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
      const int ranks = 1 + random() % 8, stripe = 1 + random() % 3;
      const int64_t unit = kind == LayoutKind::kZigzag    ? int64_t{2} * ranks
                           : kind == LayoutKind::kStriped ? int64_t{ranks} * stripe
                                                          : ranks;
      const int64_t blocks = unit * (1 + random() % 6);
      const ShardLayout layout = Layout(kind, ranks, blocks, stripe);
      HeadPattern head;
      for (int64_t i = 0; i < blocks; ++i) {
        head.diagonals.push_back(random() % 3 == 0);
        head.columns_in_block.push_back(random() % 5);
      }
      for (int64_t i = random() % (blocks + 1); i > 0; --i)
        head.ahead.push_back(random() % 4 / 4.0);
      TileLoads loads(ranks);
      loads.AddHead(head, layout, kTile, 4.0);
      loads.Scale(0.25);
      ExpectEqual(loads, BruteForce(head, layout));
      ++cases;
    }
  }
  EXPECT_EQ(cases, 600);
}

TEST(TileLoadsTest, RowsAreCountedPerLayout) {
  const patterns::AttentionOptions options = {
      .pattern = patterns::Pattern::kBlockTopK, .block_size = 256, .topk_blocks = 4, .tile = kTile};
  auto heads = patterns::SampleLayer(options, false, 256, 2, {}, 3);
  for (HeadPattern& head : heads) {
    for (size_t row = 0; row < 256; row += 3) head.row_weights[row] = 2.5;
  }
  for (const auto kind : {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
    const ShardLayout layout = Layout(kind, 4, 256, 2);
    for (const HeadPattern& head : heads) {
      TileLoads loads(4);
      loads.AddHead(head, layout, kTile, 4.0);
      loads.Scale(0.25);
      ExpectEqual(loads, BruteForce(head, layout));
    }
    // Heads add up.
    TileLoads both(4), one(4);
    both.AddHead(heads[0], layout, kTile, 1.0);
    both.AddHead(heads[1], layout, kTile, 2.0);
    one.AddHead(heads[1], layout, kTile, 2.0);
    const TileLoads first = BruteForce(heads[0], layout);
    for (int rank = 0; rank < 4; ++rank) {
      for (int owner = 0; owner < 4; ++owner) {
        EXPECT_NEAR(both.of(rank, owner), first.of(rank, owner) + one.of(rank, owner), 1e-6);
      }
    }
  }
}

// More ranks than bits in a word or numbers in a vector register.
TEST(TileLoadsTest, ManyRanksAreCountedAsFewAre) {
  constexpr int kRanks = 70;
  constexpr int64_t kBlocks = 2 * kRanks;
  std::mt19937 random(2);
  HeadPattern diagonals, rows;
  rows.row_offsets.push_back(0);
  for (int64_t q = 0; q < kBlocks; ++q) {
    diagonals.diagonals.push_back(random() % 3 == 0);
    for (int64_t k = random() % 9; k <= q; k += 1 + random() % 30) {
      rows.columns.push_back(static_cast<int32_t>(k));
    }
    rows.row_offsets.push_back(std::ssize(rows.columns));
    rows.row_weights.push_back(random() % 4 / 2.0);
  }
  HeadPattern both = rows;
  both.diagonals = diagonals.diagonals;
  for (const auto kind : {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
    const ShardLayout layout = Layout(kind, kRanks, kBlocks, 1);
    for (const HeadPattern& head : {diagonals, rows, both}) {
      TileLoads loads(kRanks);
      loads.AddHead(head, layout, kTile, 1.0);
      ExpectEqual(loads, BruteForce(head, layout));
    }
  }
}

// The figures of a thousand-rank ring need no thousand ranks' time.
TEST(TileLoadsTest, StripesBalanceAnyDiagonals) {
  const patterns::AttentionOptions options = {
      .pattern = patterns::Pattern::kVerticalSlash, .budget = {.max_slashes = 1024}, .tile = kTile};
  const int64_t blocks = 524288 / kTile;
  const auto heads = patterns::SampleLayer(options, false, blocks, 4, {}, 5);
  const auto imbalance = [&](LayoutKind kind) {
    TileLoads loads(32);
    for (const HeadPattern& head : heads) {
      loads.AddHead(head, Layout(kind, 32, blocks, 1), kTile, 1.0);
    }
    const std::vector<double> totals = loads.RankTotals();
    return std::ranges::max(totals) * 32 / std::accumulate(totals.begin(), totals.end(), 0.0);
  };
  EXPECT_LT(imbalance(LayoutKind::kStriped), 1.02);
  EXPECT_GT(imbalance(LayoutKind::kContiguous), 1.2);
  EXPECT_LT(imbalance(LayoutKind::kStriped), imbalance(LayoutKind::kZigzag));
}

TEST(BandTilesTest, WhatRanksVisitOfAllOwnersIsTheTriangle) {
  constexpr int64_t kBlocks = 24;
  for (const auto kind : {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
    ShardLayout mine = Layout(kind, 4, kBlocks, 2);
    int64_t visited = 0;
    for (mine.rank = 0; mine.rank < 4; ++mine.rank) {
      int64_t of_owners = 0;
      ShardLayout owner = mine;
      for (owner.rank = 0; owner.rank < 4; ++owner.rank) {
        of_owners += BandTiles(mine, owner, kTile, /*window=*/0, /*document_starts=*/nullptr);
      }
      EXPECT_EQ(CausalTiles(mine, kTile), of_owners) << mine.rank;
      visited += of_owners;
    }
    EXPECT_EQ(visited, kBlocks * (kBlocks + 1) / 2);
  }
  EXPECT_EQ(CausalTiles({.tokens = 777}, kTile), 13 * 14 / 2) << "the last tile is not full";
}

// Ranks whose tokens end in the middle of a tile: counted pair by pair.
TEST(BandTilesTest, ShardsThatHoldFewerTokensHaveFewerTiles) {
  for (const auto kind : {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
    for (const int64_t window : {0, 1, 100}) {
      for (int pair = 0; pair < 4; ++pair) {
        ShardLayout layout = Layout(kind, 2, 8, 1);
        layout.rank = pair / 2;
        const Shard query(layout, 200);
        layout.rank = pair % 2;
        const Shard key(layout, 130);
        std::set<std::pair<int64_t, int64_t>> tiles;
        std::vector<kernels::KeyIntervals> visible;
        for (int64_t q = 0; q < query.tokens; ++q) {
          const int64_t last = query.layout.Position(q);
          const int64_t first = window == 0 ? 0 : std::max<int64_t>(0, last - window + 1);
          visible.push_back(
              {.begin = static_cast<int32_t>(first), .end = static_cast<int32_t>(last + 1)});
          for (int64_t k = 0; k < key.tokens; ++k) {
            const int64_t position = key.layout.Position(k);
            if (position >= first && position <= last) tiles.insert({q / kTile, k / kTile});
          }
        }
        EXPECT_EQ(BandTiles(query, key, kTile, window, nullptr), std::ssize(tiles)) << pair;
        EXPECT_EQ(VisibleTiles(query, key, kTile, visible.data()), std::ssize(tiles)) << pair;
      }
    }
  }
}

}  // namespace
}  // namespace ringleader::ring
