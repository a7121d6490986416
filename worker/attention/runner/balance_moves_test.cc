// attention.balance: choices that are moved to an anchor, on one rank and in rings.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kernels/reference/testing/masked_attention.h"
#include "patterns/index/vertical_slash.h"
#include "worker/attention/testing/forward_on_ranks.h"
#include "worker/attention/testing/index_oracle.h"

namespace ringleader::attention {
namespace {

using kernels::Anchor;
using kernels::BlockWords;
using kernels::LayoutKind;
using kernels::reference::testing::RandomTensor;
using kernels::reference::testing::Tensor;

constexpr int64_t kTokens = 4096;
constexpr int kHeads = 4, kKvHeads = 2, kHeadDim = 64, kTile = 64;
constexpr int64_t kBlocks = kTokens / kTile;

struct RankResult {
  testing::HostIndex index;
  LayerStats stats;
  std::vector<kernels::HeadChoice> choices;  // vertical-slash
  std::vector<float> out;
};

class BalanceMovesTest : public ::testing::Test {
 protected:
  BalanceMovesTest() {
    // Some keys matter more than others, and near ones more than far ones.
    for (float& x : q_.data) x *= 1.5f;
  }

  std::vector<RankResult> Run(const patterns::AttentionOptions& options, float move,
                              uint64_t step = 1) {
    std::vector<RankResult> results(options.ring.ranks());
    testing::ForwardOnRanks(
        options, /*layer=*/0, q_, k_, v_,
        [&](RingRunner& runner) {
          runner.SetStep(step);
          runner.SetMove(move);
        },
        [&](const testing::RankForward<CpuCall>& rank) {
          RankResult& result = results[rank.rank];
          if (rank.index->has_columns()) {
            result.choices.resize(kHeads);
            patterns::VerticalSlash work;
            work.heads = kHeads;
            work.blocks = kBlocks;
            ASSERT_TRUE(rank.call.NoteChoices(work, *rank.index, result.choices.data()).ok());
          }
          result.index = testing::ToHost(*rank.index);
          result.stats = rank.runner.TakeStats().layers.at(0);
          result.out = rank.out.data;
        });
    return results;
  }

  static patterns::AttentionOptions VerticalSlash(float tolerance) {
    return {.pattern = patterns::Pattern::kVerticalSlash,
            .budget = {.vertical_mass = 0.5, .slash_mass = 0.6},
            .balance = {.anchor = Anchor::kMean, .tolerance = tolerance},
            .estimate_queries = 64,
            .sink_tokens = 4,
            .tile = kTile};
  }
  static patterns::AttentionOptions BlockTopK(float tolerance) {
    return {.pattern = patterns::Pattern::kBlockTopK,
            .balance = {.anchor = Anchor::kMean, .tolerance = tolerance},
            .block_size = kTile,
            .topk_blocks = 12,
            .tile = kTile};
  }
  static patterns::AttentionOptions XAttention(float tolerance) {
    return {.pattern = patterns::Pattern::kXAttention,
            .balance = {.anchor = Anchor::kMean, .tolerance = tolerance},
            .threshold = 0.6,
            .tile = kTile};
  }

  static double Work(const std::vector<kernels::HeadChoice>& choices) {
    double work = 0;
    for (const kernels::HeadChoice& head : choices) {
      work += static_cast<double>(head.Work(kBlocks, kTile));
    }
    return work;
  }
  static int64_t Chosen(const RankResult& result) {
    int64_t blocks = 0;
    for (const uint32_t word : result.index.chosen) blocks += std::popcount(word);
    return blocks;
  }

  std::mt19937 random_{5};
  Tensor q_ = RandomTensor(kTokens, kHeads, kHeadDim, random_);
  const Tensor k_ = RandomTensor(kTokens, kKvHeads, kHeadDim, random_);
  const Tensor v_ = RandomTensor(kTokens, kKvHeads, kHeadDim, random_);
};

TEST_F(BalanceMovesTest, ColumnsAndDiagonalsComeToTheAnchor) {
  const patterns::AttentionOptions options = VerticalSlash(0.5f);
  const RankResult base = Run(options, 1.0f)[0];
  EXPECT_EQ(base.stats.balanced, 0u);
  const double most = kHeads * (kBlocks + 2);  // the last diagonal of each head may go beyond
  for (const float move : {0.6f, 0.8f, 1.2f, 1.4f}) {
    const RankResult moved = Run(options, move)[0];
    EXPECT_NEAR(Work(moved.choices), move * Work(base.choices), most) << move;
    EXPECT_GT(std::abs(Work(moved.choices) - Work(base.choices)), most) << move;
    for (int head = 0; head < kHeads; ++head) {
      EXPECT_NEAR(static_cast<double>(moved.choices[head].columns),
                  move * static_cast<double>(base.choices[head].columns), 1.0);
    }
    EXPECT_EQ(moved.stats.balanced, 1u);
    EXPECT_EQ(moved.stats.anchor_missed, 0u) << move;
    EXPECT_EQ(moved.stats.density > base.stats.density, move > 1.0f);
  }
}

// What it was estimated to cover, columns and diagonals together, falls by the tolerance at most.
TEST_F(BalanceMovesTest, NoHeadLosesMoreThanTheTolerance) {
  for (const float tolerance : {0.01f, 0.04f, 0.1f}) {
    const patterns::AttentionOptions options = VerticalSlash(tolerance);
    const RankResult base = Run(options, 1.0f)[0], moved = Run(options, 0.5f)[0];
    double largest = 0;
    for (int head = 0; head < kHeads; ++head) {
      const kernels::HeadChoice &before = base.choices[head], &after = moved.choices[head];
      EXPECT_EQ(before.total, after.total);
      const auto lost = static_cast<double>(before.column_mass + before.diagonal_mass -
                                            after.column_mass - after.diagonal_mass);
      largest = std::max(largest, lost / static_cast<double>(before.total));
    }
    EXPECT_LE(largest, tolerance);
    EXPECT_GT(largest, 0.3 * tolerance) << "it is used";
    EXPECT_LT(Work(moved.choices), Work(base.choices));
    EXPECT_EQ(moved.stats.anchor_missed, 1u);
  }
}

TEST_F(BalanceMovesTest, WithoutToleranceOrStepNothingChanges) {
  for (patterns::AttentionOptions options : {VerticalSlash(0), BlockTopK(0), XAttention(0)}) {
    for (const int ranks : {1, 2}) {
      options.ring.inner = ranks;
      options.balance.tolerance = 0.0f;
      const std::vector<RankResult> still = Run(options, 0.6f);
      options.balance.tolerance = 0.1f;
      const std::vector<RankResult> of_no_step = Run(options, 0.6f, /*step=*/0);
      options.balance.anchor = Anchor::kNone;
      const std::vector<RankResult> unbalanced = Run(options, 0.6f);
      for (int rank = 0; rank < ranks; ++rank) {
        EXPECT_EQ(still[rank].out, unbalanced[rank].out);
        EXPECT_EQ(of_no_step[rank].out, unbalanced[rank].out);
        EXPECT_EQ(still[rank].stats.balanced, 0u);
        EXPECT_EQ(still[rank].index.column_positions, unbalanced[rank].index.column_positions);
      }
    }
  }
}

TEST_F(BalanceMovesTest, AMovedChoiceIsTheSameOnAnyNumberOfRanks) {
  for (const float move : {0.7f, 1.3f}) {
    patterns::AttentionOptions options = VerticalSlash(0.03f);
    const testing::HostIndex expected = Run(options, move)[0].index;
    for (const LayoutKind layout :
         {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
      options.layout = layout;
      options.ring.inner = 4;
      for (const RankResult& result : Run(options, move)) {
        EXPECT_EQ(result.index.diagonals, expected.diagonals);
        EXPECT_EQ(result.index.column_positions, expected.column_positions);
        EXPECT_EQ(result.stats.balanced, 1u);
      }
    }
  }
}

// Fewer are the best of those that were kept, and more hold all of them.
TEST_F(BalanceMovesTest, BlocksComeToTheAnchor) {
  for (const patterns::AttentionOptions& options : {BlockTopK(0.5f), XAttention(0.5f)}) {
    const RankResult base = Run(options, 1.0f)[0];
    for (const float move : {0.7f, 1.3f}) {
      const RankResult moved = Run(options, move)[0];
      EXPECT_NEAR(static_cast<double>(Chosen(moved)) / static_cast<double>(Chosen(base)), move,
                  0.05);
      const auto &smaller = move < 1 ? moved : base, &larger = move < 1 ? base : moved;
      for (size_t i = 0; i < smaller.index.chosen.size(); ++i) {
        ASSERT_EQ(smaller.index.chosen[i] & ~larger.index.chosen[i], 0u) << i;
      }
      EXPECT_EQ(moved.stats.balanced, 1u);
    }
  }
}

// A row of block top-k loses no more than the tolerance of the softmax of its scores.
TEST_F(BalanceMovesTest, NoRowLosesMoreThanTheTolerance) {
  constexpr float kTolerance = 0.05f;
  const patterns::AttentionOptions options = BlockTopK(kTolerance);
  const RankResult base = Run(options, 1.0f)[0], moved = Run(options, 0.5f)[0];
  EXPECT_LT(Chosen(moved), Chosen(base));
  EXPECT_EQ(moved.stats.anchor_missed, 1u);
  const int32_t words = BlockWords(kBlocks);
  double largest = 0;
  for (int64_t row = 0; row < kHeads * kBlocks; ++row) {
    const auto head = static_cast<int>(row / kBlocks);
    const int64_t own = row % kBlocks;
    std::vector<double> weights(own);
    for (int64_t block = 0; block < own; ++block) {
      double score = 0;
      for (int x = 0; x < kHeadDim; ++x) {
        double query = 0, key = 0;
        for (int i = 0; i < kTile; ++i) {
          query += double{q_.at(own * kTile + i, head, x)} / kTile;
          key += double{k_.at(block * kTile + i, head / (kHeads / kKvHeads), x)} / kTile;
        }
        score += query * key;
      }
      weights[block] = std::exp(score / std::sqrt(static_cast<double>(kHeadDim)));
    }
    double lost = 0;
    for (int64_t block = 0; block < own; ++block) {
      const int64_t word = row * words + block / 32;
      const uint32_t gone = base.index.chosen[word] & ~moved.index.chosen[word];
      if (gone >> block % 32 & 1) lost += weights[block];
    }
    const double all = std::accumulate(weights.begin(), weights.end(), 0.0);
    if (own > 0) largest = std::max(largest, lost / all);
  }
  EXPECT_LE(largest, kTolerance + 1e-4);
  EXPECT_GT(largest, 0.5 * kTolerance);
}

// Ranks that choose apart are brought to each other: in contiguous pieces the later one sees more.
TEST_F(BalanceMovesTest, RanksOfARingComeToTheirAnchor) {
  for (patterns::AttentionOptions options : {XAttention(0.5f), BlockTopK(0.5f)}) {
    options.layout = LayoutKind::kContiguous;
    options.ring.inner = 2;
    const auto tiles = [](const std::vector<RankResult>& results) {
      return std::vector<double>{static_cast<double>(results[0].stats.TotalTiles()),
                                 static_cast<double>(results[1].stats.TotalTiles())};
    };
    patterns::AttentionOptions alone = options;
    alone.balance.anchor = Anchor::kNone;
    const std::vector<double> before = tiles(Run(alone, 1.0f));
    ASSERT_GT(before[1], 1.1 * before[0]);
    const double mean = (before[0] + before[1]) / 2;
    for (const Anchor anchor : {Anchor::kMin, Anchor::kMean, Anchor::kMax}) {
      options.balance.anchor = anchor;
      const std::vector<RankResult> results = Run(options, 1.0f);
      const std::vector<double> after = tiles(results);
      const double wanted = anchor == Anchor::kMin   ? before[0]
                            : anchor == Anchor::kMax ? before[1]
                                                     : mean;
      // Early rows have no more to keep, and nobody moves by more than a half.
      EXPECT_LT(std::abs(after[1] - wanted), std::abs(before[1] - wanted) + 0.06 * wanted);
      EXPECT_LT(after[1] / after[0], 0.97 * before[1] / before[0]);
      EXPECT_EQ(results[1].stats.balanced, anchor == Anchor::kMax ? 0u : 1u);
      EXPECT_EQ(results[0].stats.balanced, anchor == Anchor::kMin ? 0u : 1u);
    }
  }
}

TEST(AnchorTest, OfThoseThatWait) {
  const int64_t works[] = {10, 20, 60};
  EXPECT_EQ(kernels::AnchorOf(Anchor::kMin, works, 3), 10);
  EXPECT_EQ(kernels::AnchorOf(Anchor::kMean, works, 3), 30);
  EXPECT_EQ(kernels::AnchorOf(Anchor::kMax, works, 3), 60);
  EXPECT_EQ(kernels::BoundedMove(1.009), 1.0f);
  EXPECT_EQ(kernels::BoundedMove(0.1), kernels::kLeastMove);
  EXPECT_EQ(kernels::BoundedMove(9), kernels::kMostMove);
  EXPECT_EQ(kernels::BoundedMove(std::numeric_limits<double>::quiet_NaN()), 1.0f);
  // Few elements come to the factor together.
  int64_t sum = 0;
  for (uint32_t place = 0; place < 1000; ++place) sum += kernels::MovedCount(3, 0.5f, place);
  EXPECT_NEAR(static_cast<double>(sum), 1500, 5);
}

}  // namespace
}  // namespace ringleader::attention
