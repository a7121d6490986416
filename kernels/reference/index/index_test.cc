#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "kernels/reference/gates/block_gate.h"
#include "kernels/reference/index/index_estimate.h"
#include "kernels/reference/index/index_select.h"
#include "kernels/reference/testing/masked_attention.h"
#include "kernels/reference/testing/packed_documents.h"

namespace ringleader::kernels::reference {
namespace {

using testing::RandomTensor;
using testing::Tensor;

constexpr int kHeads = 4, kKvHeads = 2, kHeadDim = 64, kTile = 64;

// Estimates of queries of one rank's sequence.
struct Estimate {
  std::vector<float> row_max;
  std::vector<int64_t> row_sum;
  std::vector<int32_t> column_mass, diagonal_mass;

  // `starts` may be empty.
  Estimate(Engine& engine, const Tensor& q, const Tensor& k, const std::vector<int64_t>& positions,
           const std::vector<int64_t>& starts) {
    const int64_t n = k.tokens, count = static_cast<int64_t>(positions.size());
    Tensor queries(count, kHeads, kHeadDim);
    for (int64_t e = 0; e < count; ++e) {
      std::copy_n(q.data.begin() + positions[e] * kHeads * kHeadDim, kHeads * kHeadDim,
                  queries.data.begin() + e * kHeads * kHeadDim);
    }
    row_max.resize(int64_t{kHeads} * count);
    row_sum.resize(int64_t{kHeads} * count);
    column_mass.resize(kHeads * n);
    diagonal_mass.resize(kHeads * ((n + kTile - 1) / kTile));
    absl::StatusOr<IndexEstimate> estimate =
        IndexEstimate::Create(engine, {.q = std::as_const(queries).view(),
                                       .query_positions = positions.data(),
                                       .query_starts = starts.empty() ? nullptr : starts.data(),
                                       .k = k.view(),
                                       .key_layout = {.tokens = n},
                                       .tile = kTile,
                                       .scale = 0.125f,
                                       .row_max = row_max.data(),
                                       .row_sum = row_sum.data(),
                                       .column_mass = column_mass.data(),
                                       .diagonal_mass = diagonal_mass.data()});
    EXPECT_TRUE(estimate.ok());
    estimate->RowMax();
    estimate->RowSum();
    estimate->Mass();
  }
  // The last `count` queries.
  Estimate(Engine& engine, const Tensor& q, const Tensor& k, int64_t count)
      : Estimate(engine, q, k, Last(k.tokens, count), {}) {}

  static std::vector<int64_t> Last(int64_t n, int64_t count) {
    std::vector<int64_t> positions(count);
    std::iota(positions.begin(), positions.end(), n - count);
    return positions;
  }
};

// The sums of softmaxes over keys [start, position] of each query, in fp64.
void ExpectMasses(const Estimate& estimate, const Tensor& q, const Tensor& k,
                  const std::vector<int64_t>& positions, const std::vector<int64_t>& starts) {
  const int64_t n = k.tokens, blocks = (n + kTile - 1) / kTile;
  const double unit = 1 << kMassBits, tolerance = 1e-5 * static_cast<double>(positions.size());
  for (int head = 0; head < kHeads; ++head) {
    std::vector<double> columns(n, 0.0), diagonals(blocks, 0.0);
    for (size_t e = 0; e < positions.size(); ++e) {
      const int64_t i = positions[e], start = starts[e];
      std::vector<double> p(i + 1);
      double sum = 0.0;
      for (int64_t j = start; j <= i; ++j) {
        double dot = 0.0;
        for (int x = 0; x < kHeadDim; ++x) dot += double{q.at(i, head, x)} * k.at(j, head / 2, x);
        sum += p[j] = std::exp(dot * 0.125);
      }
      for (int64_t j = start; j <= i; ++j) {
        columns[j] += p[j] / sum;
        diagonals[i / kTile - j / kTile] += p[j] / sum;
      }
    }
    for (int64_t j = 0; j < n; ++j) {
      EXPECT_NEAR(estimate.column_mass[head * n + j] / unit, columns[j], tolerance);
      if (columns[j] == 0.0) {
        EXPECT_EQ(estimate.column_mass[head * n + j], 0);
      }
    }
    for (int64_t delta = 0; delta < blocks; ++delta) {
      EXPECT_NEAR(estimate.diagonal_mass[head * blocks + delta] / unit, diagonals[delta],
                  tolerance);
    }
  }
}

class EstimateTest : public ::testing::TestWithParam<std::pair<int64_t, int>> {};

TEST_P(EstimateTest, MassesAreTheSumsOfTheSoftmax) {
  const auto [n, count] = GetParam();
  std::mt19937 random(1);
  const Tensor q = RandomTensor(n, kHeads, kHeadDim, random);
  const Tensor k = RandomTensor(n, kKvHeads, kHeadDim, random);
  Engine engine(2);
  const Estimate estimate(engine, q, k, count);
  ExpectMasses(estimate, q, k, Estimate::Last(n, count), std::vector<int64_t>(count, 0));
}

TEST_P(EstimateTest, DoesNotDependOnThreads) {
  const auto [n, count] = GetParam();
  std::mt19937 random(2);
  const Tensor q = RandomTensor(n, kHeads, kHeadDim, random);
  const Tensor k = RandomTensor(n, kKvHeads, kHeadDim, random);
  Engine one(1), three(3);
  const Estimate a(one, q, k, count), b(three, q, k, count);
  EXPECT_EQ(a.row_sum, b.row_sum);
  EXPECT_EQ(a.column_mass, b.column_mass);
  EXPECT_EQ(a.diagonal_mass, b.diagonal_mass);
}

// Lengths that are no multiple of a tile, estimate queries over several blocks, a single query.
INSTANTIATE_TEST_SUITE_P(Sizes, EstimateTest,
                         ::testing::Values(std::pair<int64_t, int>{512, 64},
                                           std::pair<int64_t, int>{500, 100},
                                           std::pair<int64_t, int>{70, 1},
                                           std::pair<int64_t, int>{33, 33}));

TEST(EstimateOfDocumentsTest, KeysOfOtherDocumentsHaveNoMass) {
  std::mt19937 random(3);
  const Tensor q = RandomTensor(500, kHeads, kHeadDim, random);
  const Tensor k = RandomTensor(500, kKvHeads, kHeadDim, random);
  // Queries of documents that start at 0, 64, 200 and 499.
  const std::vector<int64_t> positions = {3, 62, 64, 65, 190, 198, 200, 300, 498, 499};
  const std::vector<int64_t> starts = {0, 0, 64, 64, 64, 64, 200, 200, 200, 499};
  Engine engine(2);
  ExpectMasses(Estimate(engine, q, k, positions, starts), q, k, positions, starts);
}

std::vector<int64_t> Select(std::vector<ColumnCandidate> candidates, int64_t total, int64_t sinks,
                            float mass, int32_t max_count) {
  std::vector<int64_t> positions(16);
  positions.resize(SelectColumns(candidates.data(), candidates.size(), total, sinks, mass,
                                 max_count, 16, positions.data()));
  return positions;
}

TEST(SelectColumnsTest, TheColumnThatCrossesTheMassIsIncluded) {
  const std::vector<ColumnCandidate> columns = {{.position = 1, .mass = 50},
                                                {.position = 7, .mass = 30},
                                                {.position = 3, .mass = 15},
                                                {.position = 5, .mass = 5}};
  EXPECT_EQ(Select(columns, 100, 0, 0.5f, 16), (std::vector<int64_t>{1}));
  EXPECT_EQ(Select(columns, 100, 0, 0.51f, 16), (std::vector<int64_t>{1, 7}));
  EXPECT_EQ(Select(columns, 100, 0, 1.0f, 16), (std::vector<int64_t>{1, 3, 5, 7}));
  EXPECT_EQ(Select(columns, 100, 0, 1.0f, 3), (std::vector<int64_t>{1, 3, 7}));
}

TEST(SelectColumnsTest, SinksAreForcedAndCountTowardsMassAndNumber) {
  const std::vector<ColumnCandidate> columns = {{.position = 0, .mass = 1},
                                                {.position = 1, .mass = 0},
                                                {.position = 9, .mass = 60},
                                                {.position = 8, .mass = 39}};
  EXPECT_EQ(Select(columns, 100, 2, 0.6f, 16), (std::vector<int64_t>{0, 1, 9}));
  EXPECT_EQ(Select(columns, 100, 2, 1.0f, 3), (std::vector<int64_t>{0, 1, 9}));
  EXPECT_EQ(Select(columns, 100, 2, 1.0f, 1), (std::vector<int64_t>{0, 1}));
}

TEST(SelectColumnsTest, TiesGoToTheLowerPositionAndNoMassIsNotTaken) {
  const std::vector<ColumnCandidate> columns = {{.position = 9, .mass = 10},
                                                {.position = 4, .mass = 10},
                                                {.position = 6, .mass = 10},
                                                {.position = 2, .mass = 0}};
  EXPECT_EQ(Select(columns, 30, 0, 1.0f, 2), (std::vector<int64_t>{4, 6}));
  EXPECT_EQ(Select(columns, 30, 0, 1.0f, 9), (std::vector<int64_t>{4, 6, 9}));
}

TEST(SelectColumnsTest, InOddHeadsTiesGoToTheHigherPosition) {
  const std::vector<ColumnCandidate> columns = {{.position = 9, .mass = 10},
                                                {.position = 4, .mass = 10},
                                                {.position = 6, .mass = 10},
                                                {.position = 0, .mass = 10},
                                                {.position = 1, .mass = 10}};
  std::vector<int64_t> positions(3);
  EXPECT_EQ(SelectColumns(columns.data(), 5, 50, 2, 1.0f, 3, 3, positions.data(), nullptr,
                          /*late=*/true),
            3);
  EXPECT_EQ(positions, (std::vector<int64_t>{0, 1, 9}));
  // What a rank puts forward is ordered alike.
  std::vector<ColumnCandidate> best(2);
  const std::vector<int32_t> mass = {7, 7, 7, 7};
  CandidateColumns(mass.data(), {.tokens = 4}, 0, 2, best.data(), /*late=*/true);
  EXPECT_EQ(best[0].position, 3);
  EXPECT_EQ(best[1].position, 2);
}

TEST(SelectColumnsTest, CandidatesOfShardsSelectWhatOneRankSelects) {
  std::mt19937 random(5);
  constexpr int64_t kTokens = 1024;
  std::vector<int32_t> mass(kTokens);
  for (int32_t& m : mass) m = random() % 50;
  const auto select = [&](LayoutKind kind, int ranks) {
    std::vector<ColumnCandidate> all;
    for (int rank = 0; rank < ranks; ++rank) {
      const ShardLayout layout{
          .kind = kind, .ranks = ranks, .rank = rank, .stripe = 64, .tokens = kTokens};
      std::vector<int32_t> local(layout.local_tokens());
      for (int64_t i = 0; i < layout.local_tokens(); ++i) local[i] = mass[layout.Position(i)];
      std::vector<ColumnCandidate> mine(16);
      CandidateColumns(local.data(), layout, 4, 16, mine.data());
      all.insert(all.end(), mine.begin(), mine.end());
    }
    return Select(all, std::accumulate(mass.begin(), mass.end(), int64_t{0}), 4, 1.0f, 16);
  };
  const std::vector<int64_t> one = select(LayoutKind::kContiguous, 1);
  EXPECT_EQ(one.size(), 16);
  EXPECT_EQ(select(LayoutKind::kStriped, 4), one);
  EXPECT_EQ(select(LayoutKind::kZigzag, 2), one);
}

TEST(SelectDiagonalsTest, ForcedFirstThenByMassUntilItIsReached) {
  const std::vector<int32_t> mass = {10, 0, 40, 5, 45};
  const auto select = [&](int local, float share, int max_count) {
    uint64_t word = 0;
    const int count = SelectDiagonals(mass.data(), 5, local, share, max_count, &word);
    EXPECT_EQ(count, std::popcount(word));
    return word;
  };
  EXPECT_EQ(select(0, 0.5f, 5), 0b10001u);
  EXPECT_EQ(select(0, 0.56f, 5), 0b10101u);
  EXPECT_EQ(select(1, 0.01f, 5), 0b00011u);
  EXPECT_EQ(select(1, 1.0f, 3), 0b10011u);
  EXPECT_EQ(select(0, 1.0f, 5), 0b11101u);
  EXPECT_EQ(select(9, 1.0f, 1), 0b11111u);
}

TEST(SelectDiagonalsTest, OfAShareTheyCountForTheirTiles) {
  const std::vector<int32_t> mass = {10, 30, 40, 5, 45};  // 5, 4, 3, 2 and 1 tiles
  const auto select = [&](float share, int max_tiles) {
    uint64_t word = 0;
    Taken taken;
    SelectDiagonals(mass.data(), 5, 0, share, max_tiles, &word, /*by_tiles=*/true, &taken);
    return std::pair{word, taken.at_budget};
  };
  EXPECT_EQ(select(1.0f, 6), (std::pair<uint64_t, bool>{0b10001u, true}));
  EXPECT_EQ(select(1.0f, 7), (std::pair<uint64_t, bool>{0b10101u, true}));  // crosses
  EXPECT_EQ(select(1.0f, 10), (std::pair<uint64_t, bool>{0b10111u, true}));
  EXPECT_EQ(select(0.4f, 10), (std::pair<uint64_t, bool>{0b10001u, false}));
}

// However long the padding behind it is, a sequence keeps the same.
TEST(SelectDiagonalsTest, TilesOfPaddingCostNothing) {
  const auto select = [](std::vector<int32_t> mass, int max_tiles) {
    uint64_t word = 0;
    SelectDiagonals(mass.data(), std::ssize(mass), 0, 1.0f, max_tiles, &word, /*by_tiles=*/true,
                    nullptr, /*content_blocks=*/5);
    return word;
  };
  for (const int max_tiles : {5, 6, 7, 9, 10, 12}) {
    EXPECT_EQ(select({10, 30, 40, 5, 45}, max_tiles),
              select({10, 30, 40, 5, 45, 0, 0, 0, 0}, max_tiles));
  }
}

TEST(DiagonalCostTest, AllOfTheLongestSequenceFitIntoAnInteger) {
  for (const int64_t blocks : {int64_t{1}, int64_t{4096}, int64_t{65535}, int64_t{1} << 18}) {
    int64_t sum = 0;
    for (int64_t delta = 0; delta < blocks; ++delta) sum += DiagonalCost(true, blocks, delta);
    EXPECT_LT(sum, int64_t{1} << 30) << blocks;  // and half more fits, too
    if (blocks < 65535) {
      EXPECT_EQ(sum, blocks * (blocks + 1) / 2);
    }
  }
}

TEST(AdaptBudgetsTest, MovesBudgetFromTheBestHeadsToTheWorst) {
  std::vector<int32_t> counts = {10, 10, 10, 10, 10, 7, 7, 7, 7, 7};
  AdaptBudgets(std::vector<double>{0.9, 0.2, 0.85, 0.5, 0.1}, counts.data());
  EXPECT_EQ(counts, (std::vector<int32_t>{5, 15, 5, 10, 15, 4, 10, 4, 7, 10}));
  // At most half of the heads give; of equal ones, those with the lower number.
  counts = {8, 8, 8, 8};
  AdaptBudgets(std::vector<double>{0.95, 0.95}, counts.data());
  EXPECT_EQ(counts, (std::vector<int32_t>{4, 12, 4, 12}));
  counts = {8, 8, 8, 8};
  AdaptBudgets(std::vector<double>{0.8, 0.1}, counts.data());
  EXPECT_EQ(counts, (std::vector<int32_t>{8, 8, 8, 8}));
}

// There are 4,096 ranks, each with as many keys, and all keys score alike.
TEST(EstimateTest, ARowOfTheLongestSequenceDoesNotOverflow) {
  constexpr int64_t kRanks = 4096, kLocal = 4096;
  Tensor q(1, kHeads, kHeadDim), k(kLocal, kKvHeads, kHeadDim);
  const int64_t position = kRanks * kLocal - 1;
  std::vector<float> row_max(kHeads);
  std::vector<int64_t> row_sum(kHeads);
  std::vector<int32_t> columns(kHeads * kLocal), diagonals(kHeads * kRanks * kLocal / kTile);
  Engine engine(1);
  absl::StatusOr<IndexEstimate> estimate =
      IndexEstimate::Create(engine, {.q = std::as_const(q).view(),
                                     .query_positions = &position,
                                     .k = std::as_const(k).view(),
                                     .key_layout = {.kind = LayoutKind::kContiguous,
                                                    .ranks = kRanks,
                                                    .rank = 7,
                                                    .tokens = kRanks * kLocal},
                                     .tile = kTile,
                                     .scale = 0.125f,
                                     .row_max = row_max.data(),
                                     .row_sum = row_sum.data(),
                                     .column_mass = columns.data(),
                                     .diagonal_mass = diagonals.data()});
  ASSERT_TRUE(estimate.ok());
  estimate->RowMax();
  estimate->RowSum();
  int64_t all = 0;
  ASSERT_FALSE(__builtin_mul_overflow(row_sum[0], kRanks, &all));
  EXPECT_EQ(static_cast<double>(all), kRanks * kLocal * std::exp2(kRowSumBits));
}

TEST(BlockTopKTest, PicksTheBlocksThatLookLikeTheQueries) {
  constexpr int64_t kTokens = int64_t{8} * kTile;
  Tensor q(kTokens, 2, kHeadDim), k(kTokens, 1, kHeadDim);
  // Block b's keys point along axis b; queries of tile 6 like blocks 1 and 4, most of all 5 of the
  // second head.
  for (int64_t i = 0; i < kTokens; ++i) {
    k.at(i, 0, static_cast<int>(i / kTile)) = 1.0f;
    q.at(i, 0, 1) = 2.0f;
    q.at(i, 0, 4) = 1.0f;
    q.at(i, 1, 5) = 1.0f;
    q.at(i, 1, 7) = 9.0f;
  }
  Engine engine(2);
  std::vector<float> sums(int64_t{8} * kHeadDim);
  TileKeySums(engine, std::as_const(k).view(), {.tile = kTile, .sums = sums.data()});
  std::vector<char> selected;
  const auto select = [&](const int32_t* document_starts) {
    selected = SelectBlocks(engine, {.q = std::as_const(q).view(),
                                     .query_layout = {.tokens = kTokens},
                                     .seen = {.document_starts = document_starts},
                                     .key_sums = sums.data(),
                                     .kv_heads = 1,
                                     .tile = kTile,
                                     .block_size = kTile,
                                     .topk_blocks = 2});
  };
  select(nullptr);
  const auto row = [&](int head, int64_t tile) {
    std::vector<int> blocks;
    for (int b = 0; b < 8; ++b) {
      if (selected[(int64_t{head} * 8 + tile) * 8 + b]) blocks.push_back(b);
    }
    return blocks;
  };
  EXPECT_EQ(row(0, 6), (std::vector<int>{1, 4, 6}));
  // 7 lies ahead; in odd heads ties go to the higher block.
  EXPECT_EQ(row(1, 6), (std::vector<int>{4, 5, 6}));
  EXPECT_EQ(row(0, 0), (std::vector<int>{0}));
  EXPECT_EQ(row(0, 1), (std::vector<int>{0, 1}));

  // Documents that start within block 2, and within tile 6 itself: its first rows' counts.
  const std::vector<int32_t> starts = testing::DocumentStarts(kTokens, {0, 150, 400});
  select(starts.data());
  EXPECT_EQ(row(0, 6), (std::vector<int>{2, 4, 6}));
  EXPECT_EQ(row(0, 7), (std::vector<int>{6, 7}));
  EXPECT_EQ(row(0, 2), (std::vector<int>{0, 1, 2}));
  EXPECT_EQ(row(0, 1), (std::vector<int>{0, 1}));
}

}  // namespace
}  // namespace ringleader::kernels::reference
