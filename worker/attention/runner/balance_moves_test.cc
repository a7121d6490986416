// attention.balance: choices that are moved to an anchor, on one rank and in rings.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kernels/reference/testing/key_group_oracle.h"
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
  static patterns::AttentionOptions Moba(float tolerance) {
    patterns::AttentionOptions options = BlockTopK(tolerance);
    options.pattern = patterns::Pattern::kMoba;
    return options;
  }
  static patterns::AttentionOptions KeyGroups(float tolerance) {
    return {.pattern = patterns::Pattern::kKeyGroups,
            .balance = {.anchor = Anchor::kMean, .tolerance = tolerance},
            .density = 0.3,
            .tile = kTile};
  }
  // How many groups each row keeps beside its own tile.
  static std::vector<int64_t> Groups(const RankResult& result) {
    std::vector<int64_t> counts;
    for (const auto& row : GroupsKept(result)) counts.push_back(std::ssize(row));
    return counts;
  }
  // Which, ascending.
  static std::vector<std::vector<int64_t>> GroupsKept(const RankResult& result) {
    std::vector<std::vector<int64_t>> rows;
    for (int head = 0; head < kHeads; ++head) {
      for (int64_t tile = 0; tile < kBlocks; ++tile) {
        rows.push_back(kernels::reference::testing::GroupsOfRow(result.index.groups_chosen,
                                                                {.tokens = kTokens}, head, tile));
      }
    }
    return rows;
  }
  // Queries that keep each block, summed over the blocks.
  static int64_t Kept(const RankResult& result) {
    int64_t kept = 0;
    for (const uint32_t word : result.index.queries_chosen) kept += std::popcount(word);
    return kept;
  }
  static patterns::AttentionOptions XAttention(float tolerance) {
    return {.pattern = patterns::Pattern::kXAttention,
            .balance = {.anchor = Anchor::kMean, .tolerance = tolerance},
            .threshold = 0.6,
            .tile = kTile};
  }

  static patterns::AttentionOptions AdaSpa(float tolerance, bool adapt_heads = false) {
    return {.pattern = patterns::Pattern::kAdaSpa,
            .balance = {.anchor = Anchor::kMean, .tolerance = tolerance},
            .adapt_heads = adapt_heads,
            .density = 0.3,
            .tile = kTile};
  }
  // Whether a tile of queries keeps a block.
  static bool Keeps(const RankResult& result, int head, int64_t row, int64_t block) {
    const int64_t word = (head * kBlocks + row) * BlockWords(kBlocks) + block / 32;
    return (result.index.chosen[word] >> block % 32 & 1) != 0;
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

// Of 1,000 a tenth may go: half of it from each part, or what the other leaves of it.
TEST(HoldMassTest, OnePartMayLoseWhatTheOtherLeaves) {
  const auto held_after_losing = [](int64_t columns, int64_t diagonals) {
    const kernels::HeadChoice before = {.columns = 40,
                                        .column_mass = 500,
                                        .diagonal_tiles = 60,
                                        .diagonal_mass = 400,
                                        .total = 1000};
    kernels::HeadChoice moved = before;
    moved.column_mass -= columns;
    moved.diagonal_mass -= diagonals;
    std::vector<float> masses = {1, 1};
    std::vector<int32_t> counts = {20, 30};
    kernels::HoldMass({.before = &before,
                       .moved = &moved,
                       .heads = 1,
                       .tolerance = 0.1f,
                       .masses = masses.data(),
                       .counts = counts.data()},
                      /*head=*/0);
    for (int part = 0; part < 2; ++part) {
      EXPECT_EQ(counts[part] == (part == 0 ? 40 : 60), masses[part] != 1) << part;
    }
    return masses;
  };
  using ::testing::ElementsAre;
  using ::testing::FloatEq;
  EXPECT_THAT(held_after_losing(70, 20), ElementsAre(1, 1));
  EXPECT_THAT(held_after_losing(90, 20), ElementsAre(FloatEq(0.42f), 1)) << "loses 80";
  EXPECT_THAT(held_after_losing(20, 90), ElementsAre(1, FloatEq(0.32f)));
  EXPECT_THAT(held_after_losing(90, 90), ElementsAre(FloatEq(0.45f), FloatEq(0.35f)));
  EXPECT_THAT(held_after_losing(105, -10), ElementsAre(1, 1)) << "diagonals gained";
}

TEST_F(BalanceMovesTest, WithoutToleranceOrStepNothingChanges) {
  for (patterns::AttentionOptions options :
       {VerticalSlash(0), BlockTopK(0), XAttention(0), Moba(0), KeyGroups(0), AdaSpa(0)}) {
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
  for (const patterns::AttentionOptions& options :
       {BlockTopK(0.5f), XAttention(0.5f), AdaSpa(0.5f), AdaSpa(0.5f, /*adapt_heads=*/true)}) {
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
      EXPECT_EQ(moved.stats.anchor_missed, 0u);
    }
  }
}

// Groups are the best of those that were kept, or hold all of them, and their number comes to the
// anchor with those of a row's own tile.
TEST_F(BalanceMovesTest, GroupsComeToTheAnchor) {
  constexpr int64_t kOwn = kTile / kernels::kGroupKeys;
  const RankResult base = Run(KeyGroups(0.5f), 1.0f)[0];
  EXPECT_EQ(base.stats.balanced, 0u);
  const auto work = [](const RankResult& result) {
    const std::vector<int64_t> groups = Groups(result);
    return static_cast<double>(std::accumulate(groups.begin(), groups.end(), int64_t{0}) +
                               kOwn * std::ssize(groups));
  };
  for (const float move : {0.7f, 1.2f}) {
    const RankResult moved = Run(KeyGroups(0.5f), move)[0];
    EXPECT_NEAR(work(moved) / work(base), move, 0.04);
    EXPECT_EQ(moved.stats.balanced, 1u);
    EXPECT_EQ(moved.stats.anchor_missed, 0u);
    const auto &fewer = move < 1 ? moved : base, &more = move < 1 ? base : moved;
    const auto few = GroupsKept(fewer), many = GroupsKept(more);
    for (int64_t row = 0; row < kHeads * kBlocks; ++row) {
      ASSERT_TRUE(std::ranges::includes(many[row], few[row])) << row;
    }
  }
}

// A row gives up no larger share of its groups than the tolerance, and those of lowest score.
TEST_F(BalanceMovesTest, NoRowLosesMoreGroupsThanTheTolerance) {
  constexpr float kTolerance = 0.1f;
  const RankResult base = Run(KeyGroups(kTolerance), 1.0f)[0],
                   moved = Run(KeyGroups(kTolerance), 0.6f)[0];
  EXPECT_EQ(moved.stats.anchor_missed, 1u);
  const std::vector<int64_t> before = Groups(base), after = Groups(moved);
  double largest = 0;
  for (size_t row = 0; row < before.size(); ++row) {
    if (before[row] == 0) continue;
    largest =
        std::max(largest, 1 - static_cast<double>(after[row]) / static_cast<double>(before[row]));
  }
  EXPECT_LE(largest, static_cast<double>(kTolerance));
  EXPECT_GT(largest, 0.9 * static_cast<double>(kTolerance));
}

// MoBA's queries choose for themselves.
TEST_F(BalanceMovesTest, QueriesThatChooseForThemselvesKeepLessAndMore) {
  const RankResult base = Run(Moba(0.5f), 1.0f)[0];
  ASSERT_GT(Kept(base), 0);
  for (const float move : {0.7f, 1.3f}) {
    const RankResult moved = Run(Moba(0.5f), move)[0];
    EXPECT_NEAR(static_cast<double>(Kept(moved)) / static_cast<double>(Kept(base)), move, 0.05);
    const auto &smaller = move < 1 ? moved : base, &larger = move < 1 ? base : moved;
    for (size_t i = 0; i < smaller.index.queries_chosen.size(); ++i) {
      ASSERT_EQ(smaller.index.queries_chosen[i] & ~larger.index.queries_chosen[i], 0u) << i;
    }
    EXPECT_EQ(moved.stats.balanced, 1u);
  }
}

// A choice of blocks by one query, or by the mean of a tile of them, that was moved to half of what
// it kept: the largest share of the softmax of its scores that it lost.
class LossTest : public BalanceMovesTest {
 protected:
  using KeepsBlock =
      std::function<bool(const RankResult& result, int head, int64_t row, int64_t block)>;
  double LargestLoss(const RankResult& base, const RankResult& moved, int64_t queries,
                     const KeepsBlock& keeps) const {
    double largest = 0;
    for (int64_t row = 0; row < kHeads * kTokens / queries; ++row) {
      const auto head = static_cast<int>(row % kHeads);
      const int64_t first = row / kHeads * queries;
      double lost = 0, all = 0;
      for (int64_t block = 0; block < first / kTile; ++block) {
        double score = 0;
        for (int x = 0; x < kHeadDim; ++x) {
          double query = 0, key = 0;
          for (int64_t i = 0; i < queries; ++i) query += double{q_.at(first + i, head, x)};
          for (int i = 0; i < kTile; ++i) {
            key += double{k_.at(block * kTile + i, head / (kHeads / kKvHeads), x)} / kTile;
          }
          score += query / static_cast<double>(queries) * key;
        }
        const double weight = std::exp(score / std::sqrt(static_cast<double>(kHeadDim)));
        all += weight;
        const int64_t of_head = row / kHeads;
        if (keeps(base, head, of_head, block) && !keeps(moved, head, of_head, block))
          lost += weight;
      }
      if (all > 0) largest = std::max(largest, lost / all);
    }
    return largest;
  }
};

TEST_F(LossTest, NoRowLosesMoreThanTheTolerance) {
  constexpr float kTolerance = 0.05f;
  const RankResult base = Run(BlockTopK(kTolerance), 1.0f)[0],
                   moved = Run(BlockTopK(kTolerance), 0.5f)[0];
  EXPECT_LT(Chosen(moved), Chosen(base));
  EXPECT_EQ(moved.stats.anchor_missed, 1u);
  const double largest = LargestLoss(base, moved, kTile, Keeps);
  EXPECT_LE(largest, double{kTolerance} + 1e-4);
  EXPECT_GT(largest, 0.5 * double{kTolerance});
}

// Exact masses: of the attention of each tile's queries.
TEST_F(LossTest, NoTileLosesMoreOfItsAttentionThanTheTolerance) {
  constexpr float kTolerance = 0.05f;
  for (const bool adapt_heads : {false, true}) {
    const RankResult base = Run(AdaSpa(kTolerance, adapt_heads), 1.0f)[0],
                     moved = Run(AdaSpa(kTolerance, adapt_heads), 0.5f)[0];
    EXPECT_LT(Chosen(moved), Chosen(base));
    EXPECT_EQ(moved.stats.anchor_missed, 1u);
    double largest = 0;
    for (const int head : {0, kHeads - 1}) {
      std::vector<double> lost(kBlocks, 0);  // by tile of queries
      for (int64_t i = 0; i < kTokens; ++i) {
        std::vector<double> of_blocks(kBlocks, 0);
        double all = 0;
        for (int64_t t = 0; t <= i; ++t) {
          double logit = 0;
          for (int x = 0; x < kHeadDim; ++x) {
            logit += double{q_.at(i, head, x)} * double{k_.at(t, head / (kHeads / kKvHeads), x)};
          }
          const double weight = std::exp(logit / std::sqrt(static_cast<double>(kHeadDim)));
          of_blocks[t / kTile] += weight;
          all += weight;
        }
        for (int64_t block = 0; block <= i / kTile; ++block) {
          const bool is_lost =
              Keeps(base, head, i / kTile, block) && !Keeps(moved, head, i / kTile, block);
          if (is_lost) lost[i / kTile] += of_blocks[block] / all / kTile;
        }
      }
      largest = std::max(largest, *std::ranges::max_element(lost));
    }
    EXPECT_LE(largest, double{kTolerance} + 1e-4);
    EXPECT_GT(largest, 0.5 * double{kTolerance});
  }
}

TEST_F(LossTest, NoQueryLosesMoreThanTheTolerance) {
  constexpr float kTolerance = 0.05f;
  const RankResult base = Run(Moba(kTolerance), 1.0f)[0], moved = Run(Moba(kTolerance), 0.5f)[0];
  EXPECT_LT(Kept(moved), Kept(base));
  EXPECT_EQ(moved.stats.anchor_missed, 1u);
  const double largest = LargestLoss(
      base, moved, 1, [](const RankResult& result, int head, int64_t query, int64_t block) {
        const int64_t word = (head * kBlocks + block) * kernels::QueryWords(kTokens) + query / 32;
        return (result.index.queries_chosen[word] >> query % 32 & 1) != 0;
      });
  EXPECT_LE(largest, double{kTolerance} + 1e-4);
  EXPECT_GT(largest, 0.5 * double{kTolerance});
}

// Ranks that choose apart are brought to each other: in contiguous pieces the later one sees more.
TEST_F(BalanceMovesTest, RanksOfARingComeToTheirAnchor) {
  for (patterns::AttentionOptions options :
       {XAttention(0.5f), BlockTopK(0.5f), Moba(0.5f), KeyGroups(0.5f), AdaSpa(0.5f)}) {
    SCOPED_TRACE(static_cast<int>(options.pattern));
    options.layout = LayoutKind::kContiguous;
    options.ring.inner = 2;
    // 64 queries that have little in common would visit nearly every block together.
    if (options.pattern == patterns::Pattern::kMoba) options.topk_blocks = 2;
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
