// The vertical-slash index of the CPU engine, on any number of ranks, against the fp64 oracle: its
// masses, its selection and its recall.
#include "worker/attention/testing/index_oracle.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "kernels/reference/testing/masked_attention.h"
#include "patterns/index/vertical_slash.h"
#include "ringleader/kernels/index.h"
#include "worker/attention/cpu/cpu_attention_call.h"
#include "worker/attention/testing/forward_on_ranks.h"

namespace ringleader::attention {
namespace {

using kernels::LayoutKind;
using kernels::reference::testing::RandomTensor;
using kernels::reference::testing::Tensor;

constexpr int64_t kTokens = 1024;
constexpr int kHeads = 4, kKvHeads = 2, kHeadDim = 64, kTile = 64;
// fp32 logits of 64 products are off by 1e-6 or so, masses by as much of their size, and rounding
// to 2^-22 of a query adds 1e-7 a run of 64.
constexpr double kTolerance = 2e-5;

// Masses of all ranks as the selection gets them, in queries.
struct Masses {
  std::vector<double> diagonals;                    // [heads, blocks]
  std::vector<std::pair<int64_t, double>> columns;  // of head 0: position, mass
};

double InQueries(int32_t mass) {
  return mass / static_cast<double>(1 << kernels::kMassBits);
}

class RecordingCall : public CpuCall {
 public:
  using CpuCall::CpuCall;
  absl::Status Select(const patterns::VerticalSlash& work, const LayerIndex& index) override {
    for (int64_t i = 0; i < work.heads * work.blocks; ++i) {
      masses.diagonals.push_back(InQueries(work.diagonal_mass_of.data()[i]));
    }
    for (int rank = 0; rank < work.layout.ranks; ++rank) {
      for (int32_t c = 0; c < work.max_columns; ++c) {
        if (work.CandidatePositions(rank)[c] < 0) continue;
        masses.columns.emplace_back(work.CandidatePositions(rank)[c],
                                    InQueries(work.CandidateMass(rank)[c]));
      }
    }
    return CpuCall::Select(work, index);
  }
  Masses masses;
};

struct RankResult {
  testing::HostIndex index;
  Masses masses;
  double recall = 0.0;
};

class IndexOracleTest : public ::testing::TestWithParam<std::vector<int64_t>> {
 protected:
  std::vector<RankResult> Run(const patterns::AttentionOptions& options) {
    std::vector<RankResult> results(options.ring.ranks());
    testing::ForwardOnRanks<RecordingCall>(
        options, /*layer=*/0, q_, k_, /*v=*/k_,
        [](RingRunner& runner) { ASSERT_TRUE(runner.SetDocuments(kTokens, GetParam()).ok()); },
        [&](const testing::RankForward<RecordingCall>& rank) {
          results[rank.rank] = {testing::ToHost(*rank.index), rank.call.masses,
                                rank.runner.TakeStats().layers.at(0).recall};
        });
    return results;
  }

  void ExpectTheOracles(patterns::AttentionOptions options) {
    options.pattern = patterns::Pattern::kVerticalSlash;
    options.tile = kTile;
    const testing::IndexOracle oracle(q_.view(), k_.view(), options, GetParam());
    for (const int ranks : {1, 2, 4}) {
      for (const LayoutKind layout : {LayoutKind::kStriped, LayoutKind::kZigzag}) {
        options.ring.inner = ranks;
        options.layout = layout;
        for (const RankResult& result : Run(options)) {
          EXPECT_EQ(oracle.CheckSelection(result.index, options, kTolerance), absl::OkStatus());
          EXPECT_NEAR(result.recall, oracle.Recall(result.index, /*stride=*/8), kTolerance);
          ExpectMasses(result.masses, oracle);
        }
      }
    }
  }

  static void ExpectMasses(const Masses& masses, const testing::IndexOracle& oracle) {
    const auto tolerance = [](double mass) { return kTolerance * mass + 5e-6; };
    const size_t blocks = kTokens / kTile;
    ASSERT_EQ(masses.diagonals.size(), kHeads * blocks);
    for (size_t i = 0; i < masses.diagonals.size(); ++i) {
      const double expected = oracle.DiagonalMass(static_cast<int>(i / blocks))[i % blocks];
      EXPECT_NEAR(masses.diagonals[i], expected, tolerance(expected)) << i;
    }
    ASSERT_FALSE(masses.columns.empty());
    for (const auto& [position, mass] : masses.columns) {
      const double expected = oracle.ColumnMass(0)[position];
      EXPECT_NEAR(mass, expected, tolerance(expected)) << position;
    }
  }

  std::mt19937 random_{11};
  const Tensor q_ = RandomTensor(kTokens, kHeads, kHeadDim, random_);
  const Tensor k_ = RandomTensor(kTokens, kKvHeads, kHeadDim, random_);
};

TEST_P(IndexOracleTest, TopP) {
  ExpectTheOracles({.budget = {.vertical_mass = 0.6, .slash_mass = 0.5}, .sink_tokens = 4});
}

// Queries of several blocks, few of the heads' columns, and budgets whose counts end the choice.
TEST_P(IndexOracleTest, TopPWithCaps) {
  ExpectTheOracles(
      {.budget = {.vertical_mass = 0.9, .slash_mass = 0.95, .max_verticals = 40, .max_slashes = 5},
       .estimate_queries = 100,
       .sink_tokens = 0});
}

TEST_P(IndexOracleTest, TopK) {
  ExpectTheOracles({.select = patterns::Select::kTopK,
                    .budget = {.max_verticals = 100, .max_slashes = 6},
                    .estimate_queries = 100,
                    .sink_tokens = 8,
                    .local_blocks = 0});
}

// Sinks are kept whatever the budget allows besides.
TEST_P(IndexOracleTest, MoreSinksThanTheBudgetHasColumns) {
  patterns::AttentionOptions options{.pattern = patterns::Pattern::kVerticalSlash,
                                     .select = patterns::Select::kTopK,
                                     .budget = {.max_verticals = 40, .max_slashes = 6},
                                     .sink_tokens = 100};
  ExpectTheOracles(options);
  options.tile = kTile;
  for (const int ranks : {1, 4}) {
    options.ring.inner = ranks;
    for (const RankResult& result : Run(options)) {
      for (int head = 0; head < kHeads; ++head) {
        const auto columns = result.index.Columns(head);
        ASSERT_EQ(columns.size(), 100u);
        EXPECT_EQ(columns.front(), 0);
        EXPECT_EQ(columns.back(), 99);
      }
    }
  }
}

// Queries in all parts of the sequence.
TEST_P(IndexOracleTest, SpreadTopP) {
  ExpectTheOracles({.budget = {.vertical_mass = 0.6, .slash_mass = 0.5},
                    .estimate_at = patterns::EstimateAt::kSpread,
                    .sink_tokens = 4});
}

TEST_P(IndexOracleTest, SpreadTopKOfAShare) {
  ExpectTheOracles({.select = patterns::Select::kTopK,
                    .budget = {.density = 0.3},
                    .estimate_queries = 100,
                    .estimate_at = patterns::EstimateAt::kSpread,
                    .sink_tokens = 0});
}

// Both may end the choice: the mass of some heads, the share of others.
TEST_P(IndexOracleTest, TopPOfAShare) {
  ExpectTheOracles({.budget = {.vertical_mass = 0.2, .slash_mass = 0.5, .density = 0.4},
                    .sink_tokens = 0,
                    .local_blocks = 0});
}

// One document, and several: of one token, within a tile, at its border, of many tiles.
INSTANTIATE_TEST_SUITE_P(Documents, IndexOracleTest,
                         ::testing::Values(std::vector<int64_t>{},
                                           std::vector<int64_t>{0, 1, 64, 200, 201, 230, 700}));

}  // namespace
}  // namespace ringleader::attention
