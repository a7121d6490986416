#include "ring/tile_loads.h"

#include <gtest/gtest.h>

#include <random>

#include "coordinator/planner/simulate/ring_simulator.h"
#include "coordinator/planner/simulate/sample_pattern.h"
#include "coordinator/planner/testing.h"

namespace ringleader::planner {
namespace {

using kernels::LayoutKind;

constexpr int kTile = 64;

// Counts tile by tile, with the layout that the kernels use.
ring::TileLoads BruteForce(const ring::HeadPattern& head, const ring::Dealing& dealing) {
  kernels::ShardLayout layout{.kind = dealing.kind,
                              .ranks = dealing.ranks,
                              .stripe = static_cast<int32_t>(dealing.stripe_blocks * kTile),
                              .tokens = dealing.blocks * kTile};
  ring::TileLoads loads(dealing.ranks);
  for (int64_t q = 0; q < dealing.blocks; ++q) {
    const int owner = layout.Owner(q * kTile);
    for (int64_t k = 0; k <= q; ++k) {
      if (!head.diagonals.empty() && head.diagonals[q - k]) {
        loads.ring[owner * dealing.ranks + layout.Owner(k * kTile)] += 1;
      }
      if (k < q && !head.columns_in_block.empty()) {
        loads.column[owner] += head.columns_in_block[k] / kTile;
      }
    }
    if (head.row_offsets.empty()) continue;
    for (int64_t i = head.row_offsets[q]; i < head.row_offsets[q + 1]; ++i) {
      loads.ring[owner * dealing.ranks + layout.Owner(int64_t{head.columns[i]} * kTile)] += 1;
    }
  }
  return loads;
}

void ExpectEqual(const ring::TileLoads& a, const ring::TileLoads& b) {
  for (size_t i = 0; i < a.ring.size(); ++i) ASSERT_NEAR(a.ring[i], b.ring[i], 1e-6) << i;
  for (size_t i = 0; i < a.column.size(); ++i) ASSERT_NEAR(a.column[i], b.column[i], 1e-6) << i;
}

TEST(TileLoadsTest, ClosedFormsCountWhatALoopCounts) {
  std::mt19937 random(1);
  int cases = 0;
  for (int trial = 0; trial < 200; ++trial) {
    for (const auto kind : {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
      ring::Dealing dealing;
      dealing.kind = kind;
      dealing.ranks = 1 + random() % 8;
      dealing.stripe_blocks = 1 + random() % 3;
      const int64_t unit = kind == LayoutKind::kZigzag ? int64_t{2} * dealing.ranks
                           : kind == LayoutKind::kStriped
                               ? int64_t{dealing.ranks} * dealing.stripe_blocks
                               : dealing.ranks;
      dealing.blocks = unit * (1 + random() % 6);
      ring::HeadPattern head;
      for (int64_t i = 0; i < dealing.blocks; ++i) {
        head.diagonals.push_back(random() % 3 == 0);
        head.columns_in_block.push_back(random() % 5);
      }
      ring::TileLoads loads(dealing.ranks);
      ring::AddHead(head, dealing, kTile, 1.0, &loads);
      ExpectEqual(loads, BruteForce(head, dealing));
      ++cases;
    }
  }
  EXPECT_EQ(cases, 600);
}

TEST(TileLoadsTest, RowsAreCountedPerLayout) {
  const v1::JobSpec job = LongJob(4, 16384);
  v1::AttentionSpec attention = job.attention();
  attention.set_pattern(v1::AttentionSpec::BLOCK_TOPK);
  attention.set_block_size(256);
  attention.set_topk_blocks(4);
  const auto heads = SampleLayer(attention, false, 256, 2, {}, 3);
  for (const auto kind : {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
    const ring::Dealing dealing{.kind = kind, .ranks = 4, .blocks = 256, .stripe_blocks = 2};
    for (const ring::HeadPattern& head : heads) {
      ring::TileLoads loads(4);
      ring::AddHead(head, dealing, kTile, 1.0, &loads);
      ExpectEqual(loads, BruteForce(head, dealing));
    }
  }
}

// The figures of a thousand-rank ring need no thousand ranks' time.
TEST(TileLoadsTest, StripesBalanceAnyDiagonals) {
  const v1::JobSpec job = LongJob(32, 524288);
  const int64_t blocks = 524288 / 64;
  const auto heads = SampleLayer(job.attention(), false, blocks, 4, {}, 5);
  const auto imbalance = [&](LayoutKind kind) {
    const ring::Dealing dealing{.kind = kind, .ranks = 32, .blocks = blocks, .stripe_blocks = 1};
    ring::TileLoads loads(32);
    for (const ring::HeadPattern& head : heads) ring::AddHead(head, dealing, kTile, 1.0, &loads);
    return loads.worker_imbalance();
  };
  EXPECT_LT(imbalance(LayoutKind::kStriped), 1.02);
  EXPECT_GT(imbalance(LayoutKind::kContiguous), 1.2);
  EXPECT_LT(imbalance(LayoutKind::kStriped), imbalance(LayoutKind::kZigzag));
}

TEST(PatternsTest, StaticPatternsAreExact) {
  v1::AttentionSpec attention;
  attention.set_tile(64);
  attention.set_pattern(v1::AttentionSpec::DENSE);
  const ring::HeadPattern dense = SampleLayer(attention, false, 16, 4, {}, 1)[0];
  EXPECT_EQ(std::count(dense.diagonals.begin(), dense.diagonals.end(), 1), 16);
  attention.set_pattern(v1::AttentionSpec::SLIDING_WINDOW);
  // A query sees itself; with one more token the first of a tile looks into the tile before.
  for (const auto& [window, diagonals] : {std::pair{1, 1}, {2, 2}, {65, 2}, {66, 3}, {129, 3}}) {
    attention.set_window(window);
    const ring::HeadPattern head = SampleLayer(attention, false, 16, 4, {}, 1)[0];
    EXPECT_EQ(std::count(head.diagonals.begin(), head.diagonals.end(), 1), diagonals) << window;
  }
}

TEST(PatternsTest, HintsReplaceGuesses) {
  const v1::JobSpec job = LongJob(4, 524288);
  const auto heads =
      SampleLayer(job.attention(), false, 8192, 64, {.slashes = 100, .verticals = 500}, 9);
  double slashes = 0;
  for (const ring::HeadPattern& head : heads) {
    slashes += std::count(head.diagonals.begin(), head.diagonals.end(), 1) / 64.0;
  }
  EXPECT_NEAR(slashes, 100, 10);
}

}  // namespace
}  // namespace ringleader::planner
