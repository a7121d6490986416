#include "worker/attention/attention_engine.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/reference/testing/masked_attention.h"
#include "kernels/reference/tile_lists.h"
#include "worker/attention/check_options.h"
#include "worker/attention/ring_load.h"
#include "worker/attention/tile_counts.h"
#include "worker/comm/testing/local_communicator.h"

namespace ringleader::attention {
namespace {

using kernels::LayoutKind;
using kernels::ShardLayout;
using kernels::reference::testing::RandomTensor;
using kernels::reference::testing::Shard;
using kernels::reference::testing::Tensor;

constexpr int64_t kTokens = 2048;
constexpr int kHeads = 4, kKvHeads = 2, kHeadDim = 64, kTile = 64;

// What one rank was left with by one Forward of layer 1.
struct RankResult {
  LayerIndex index;
  AttentionStats stats;
};

class AttentionEngineTest : public ::testing::Test {
 protected:
  std::vector<RankResult> Run(const AttentionOptions& options, int ranks,
                              const std::vector<LayerBudget>& budgets = {}) {
    std::vector<RankResult> results(ranks);
    comm::testing::RunRanks(ranks, [&](comm::Communicator& communicator) {
      const ShardLayout layout{.kind = options.layout,
                               .ranks = ranks,
                               .rank = communicator.rank(),
                               .stripe = options.stripe == 0 ? kTile : options.stripe,
                               .tokens = kTokens};
      const Tensor q = Shard(q_, layout), k = Shard(k_, layout), v = Shard(v_, layout);
      Tensor out(layout.local_tokens(), kHeads, kHeadDim);
      std::vector<float> lse(kHeads * layout.local_tokens(),
                             -std::numeric_limits<float>::infinity());
      const auto engine = AttentionEngine::Create(options, &communicator);
      ASSERT_TRUE(engine.ok()) << engine.status();
      ASSERT_TRUE((*engine)->SetBudgets(budgets).ok());
      const auto index =
          (*engine)->Forward(1, q.view(), k.view(), v.view(), out.view(), lse.data());
      ASSERT_TRUE(index.ok()) << index.status();
      results[communicator.rank()] = {**index, (*engine)->TakeStats()};
    });
    return results;
  }

  static AttentionOptions VerticalSlash() {
    return {.pattern = Pattern::kVerticalSlash,
            .budget = {.vertical_mass = 0.6, .slash_mass = 0.5},
            .estimate_queries = 100,
            .sink_tokens = 4,
            .tile = kTile};
  }

  std::mt19937 random_{3};
  const Tensor q_ = RandomTensor(kTokens, kHeads, kHeadDim, random_);
  const Tensor k_ = RandomTensor(kTokens, kKvHeads, kHeadDim, random_);
  const Tensor v_ = RandomTensor(kTokens, kKvHeads, kHeadDim, random_);
};

TEST_F(AttentionEngineTest, IndexIsTheSameBitForBitOnAnyNumberOfRanks) {
  AttentionOptions options = VerticalSlash();
  const LayerIndex expected = Run(options, 1)[0].index;
  EXPECT_GT(expected.column_counts[0], 4);
  for (const int ranks : {2, 4}) {
    for (const LayoutKind layout :
         {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
      options.layout = layout;
      options.ring.inner = ranks;
      for (const RankResult& result : Run(options, ranks)) {
        EXPECT_EQ(result.index.diagonals, expected.diagonals);
        EXPECT_EQ(result.index.column_positions, expected.column_positions);
        EXPECT_EQ(result.index.column_counts, expected.column_counts);
        EXPECT_EQ(result.index.column_keys, expected.column_keys);
      }
    }
  }
}

TEST_F(AttentionEngineTest, StatisticsAddUpOverRanks) {
  AttentionOptions options = VerticalSlash();
  const LayerStats one = Run(options, 1)[0].stats.layers.at(1);
  EXPECT_EQ(one.calls, 1);
  EXPECT_GT(one.recall, 0.5);
  EXPECT_LE(one.recall, 1.0 + 1e-6);
  EXPECT_EQ(one.causal_tiles, kHeads * 32 * 33 / 2);
  options.ring.inner = 4;
  uint64_t tiles = 0;
  for (const RankResult& result : Run(options, 4)) {
    const LayerStats& layer = result.stats.layers.at(1);
    tiles += layer.TotalTiles();
    EXPECT_EQ(layer.tiles_per_ring_step.size(), 4u);
    EXPECT_NEAR(layer.recall, one.recall, 1e-6);
    EXPECT_EQ(layer.verticals, one.verticals);
    EXPECT_EQ(layer.slashes, one.slashes);
  }
  EXPECT_EQ(tiles, one.TotalTiles());
}

TEST_F(AttentionEngineTest, TilesAreThosePredictedFromTheDiagonals) {
  AttentionOptions options = VerticalSlash();
  for (const LayoutKind layout :
       {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
    for (const RingShape shape :
         {RingShape{RingKind::kFlat, 4, 1}, RingShape{RingKind::kHierarchical, 2, 2}}) {
      options.layout = layout;
      options.stripe = 2 * kTile;
      options.ring = shape;
      const std::vector<RankResult> results = Run(options, 4);
      const LayerIndex& index = results[0].index;
      const RingLoad load = DiagonalLoad(
          index.diagonals.data(), index.diagonal_words, kHeads,
          {.kind = layout, .ranks = 4, .stripe = options.stripe, .tokens = kTokens}, kTile, shape);
      for (int rank = 0; rank < 4; ++rank) {
        const std::vector<uint64_t>& visited = results[rank].stats.layers.at(1).tiles_per_ring_step;
        EXPECT_EQ(std::vector<int64_t>(visited.begin(), visited.end()), load.tiles[rank]);
      }
    }
  }
}

TEST_F(AttentionEngineTest, DenseLayersAndBudgetsReplaceThePattern) {
  AttentionOptions options = VerticalSlash();
  options.dense_layers = {0, 1};
  EXPECT_EQ(Run(options, 1)[0].stats.layers.at(1).density, 1.0);
  options.dense_layers = {};
  const LayerBudget narrow{.vertical_mass = 1e-6, .slash_mass = 1e-6};
  const LayerStats stats = Run(options, 1, {LayerBudget{}, narrow})[0].stats.layers.at(1);
  EXPECT_EQ(stats.verticals, 4.0);  // the sinks
  EXPECT_EQ(stats.slashes, 2.0);    // the diagonal and its neighbour
  EXPECT_EQ(Run(options, 1, {LayerBudget{}, {.dense = true}})[0].stats.layers.at(1).density, 1.0);
}

TEST_F(AttentionEngineTest, AnAbortedRingReturnsItsReason) {
  AttentionOptions options{.tile = kTile};
  options.ring.inner = 2;
  absl::Status status;
  comm::testing::RunRanks(2, [&](comm::Communicator& communicator) {
    if (communicator.rank() == 1) return communicator.Abort("rank 1 ran out of memory");
    const ShardLayout layout{
        .kind = LayoutKind::kStriped, .ranks = 2, .rank = 0, .stripe = kTile, .tokens = kTokens};
    const Tensor q = Shard(q_, layout), k = Shard(k_, layout), v = Shard(v_, layout);
    Tensor out(layout.local_tokens(), kHeads, kHeadDim);
    std::vector<float> lse(kHeads * layout.local_tokens(), -std::numeric_limits<float>::infinity());
    const auto engine = AttentionEngine::Create(options, &communicator);
    ASSERT_TRUE(engine.ok()) << engine.status();
    status = (*engine)->Forward(0, q.view(), k.view(), v.view(), out.view(), lse.data()).status();
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
  EXPECT_NE(std::string(status.message()).find("rank 1 ran out of memory"), std::string::npos);
}

TEST(BandTilesTest, CountsWhatTheListsHold) {
  for (const LayoutKind layout :
       {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
    for (const int64_t window : {0, 1, 64, 65, 300, 5000}) {
      for (int pair = 0; pair < 16; ++pair) {
        const ShardLayout query{
            .kind = layout, .ranks = 4, .rank = pair / 4, .stripe = 128, .tokens = kTokens};
        ShardLayout key = query;
        key.rank = pair % 4;
        const auto lists = kernels::reference::TileLists::Build(
            {.pattern = window == 0 ? kernels::TilePattern::kCausal : kernels::TilePattern::kWindow,
             .tile = kTile,
             .window = window},
            query, key, query.local_tokens(), key.local_tokens(), 1);
        ASSERT_TRUE(lists.ok()) << lists.status();
        EXPECT_EQ(BandTiles(query, key, kTile, window), lists->TotalTiles());
      }
    }
  }
  EXPECT_EQ(BandTiles({.tokens = 777}, {.tokens = 777}, kTile, 0), 13 * 14 / 2);
}

TEST(CheckOptionsTest, ErrorsNameTheOption) {
  const auto message = [](const AttentionOptions& options, int ranks) {
    return std::string(CheckOptions(options, ranks).message());
  };
  EXPECT_EQ(message({.stripe = 128}, 1), "");
  EXPECT_NE(message({.tile = 96}, 1).find("attention.tile"), std::string::npos);
  EXPECT_NE(message({.stripe = 100}, 1).find("parallelism.stripe"), std::string::npos);
  EXPECT_NE(message({.stripe = 128}, 4).find("ring of 1 x 1"), std::string::npos);
  EXPECT_NE(
      message({.pattern = Pattern::kSlidingWindow, .stripe = 128}, 1).find("attention.window"),
      std::string::npos);
  EXPECT_NE(message({.pattern = Pattern::kBlockTopK, .block_size = 200, .stripe = 128}, 1)
                .find("attention.block_size"),
            std::string::npos);
  EXPECT_NE(message({.pattern = Pattern::kVerticalSlash, .estimate_queries = 999, .stripe = 128}, 1)
                .find("attention.estimate_queries"),
            std::string::npos);
  EXPECT_NE(message({.budget = {.slash_mass = 0.0}, .stripe = 128}, 1).find("slash_mass"),
            std::string::npos);
}

TEST(CheckLengthTest, SequencesMustDivideIntoWholeTiles) {
  AttentionOptions options{.tile = 64, .stripe = 128};
  EXPECT_TRUE(CheckLength(options, 1, 777).ok());
  EXPECT_TRUE(CheckLength(options, 4, 256).ok());
  EXPECT_FALSE(CheckLength(options, 4, 64).ok());
  options.layout = LayoutKind::kZigzag;
  EXPECT_TRUE(CheckLength(options, 4, 128).ok());
  EXPECT_FALSE(CheckLength(options, 4, 192).ok());
  options.layout = LayoutKind::kContiguous;
  EXPECT_TRUE(CheckLength(options, 4, 100).ok());
  options.pattern = Pattern::kVerticalSlash;
  EXPECT_FALSE(CheckLength(options, 4, 100).ok());
}

}  // namespace
}  // namespace ringleader::attention
