#include "ring/tile_loads.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "patterns/sample.h"

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
      loads.AddHead(head, layout, kTile, 1.0);
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
      loads.AddHead(head, layout, kTile, 1.0);
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

}  // namespace
}  // namespace ringleader::ring
