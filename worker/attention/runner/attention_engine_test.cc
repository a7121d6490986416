#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "ring/ring_schedule.h"
#include "ring/tile_loads.h"
#include "worker/attention/testing/engine_test.h"

namespace ringleader::attention {
namespace {

using kernels::LayoutKind;
using kernels::ShardLayout;
using kernels::reference::testing::RandomTensor;
using kernels::reference::testing::RelativeError;
using kernels::reference::testing::Shard;
using testing::AttentionEngineTest;
using testing::RankResult;

TEST_F(AttentionEngineTest, IndexIsTheSameBitForBitOnAnyNumberOfRanks) {
  patterns::AttentionOptions share = VerticalSlash();
  share.budget = {.vertical_mass = 0.9, .slash_mass = 0.95, .density = 0.2};
  share.estimate_at = patterns::EstimateAt::kSpread;
  share.adapt_heads = true;
  for (patterns::AttentionOptions options : {VerticalSlash(), share}) {
    const testing::HostIndex expected = Run(options)[0].index;
    EXPECT_GT(expected.column_counts[0], 4);
    for (const ring::RingShape ring : {ring::RingShape{ring::RingKind::kFlat, 2, 1},
                                       ring::RingShape{ring::RingKind::kFlat, 4, 1},
                                       ring::RingShape{ring::RingKind::kHierarchical, 2, 2},
                                       ring::RingShape{ring::RingKind::kAllGather, 4, 1}}) {
      for (const LayoutKind layout :
           {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
        options.layout = layout;
        options.ring = ring;
        for (const RankResult& result : Run(options)) {
          EXPECT_EQ(result.index.diagonals, expected.diagonals);
          EXPECT_EQ(result.index.column_positions, expected.column_positions);
          EXPECT_EQ(result.index.column_counts, expected.column_counts);
          EXPECT_EQ(result.index.column_keys, expected.column_keys);
        }
      }
    }
  }
}

// A share is what is visited, at any length, but for what is always kept: the main diagonal here,
// and one element that crosses.
TEST_F(AttentionEngineTest, AShareOfTheTilesIsKeptTo) {
  patterns::AttentionOptions options = VerticalSlash();
  options.select = patterns::Select::kTopK;
  options.estimate_at = patterns::EstimateAt::kSpread;
  options.sink_tokens = options.local_blocks = 0;
  for (const double share : {0.15, 0.3, 0.6, 1.0}) {
    options.budget.density = share;
    const LayerStats stats = Run(options)[0].stats.layers.at(1);
    EXPECT_LT(stats.density, share + 2.0 / 32) << share;
    EXPECT_GT(stats.density, 0.75 * share) << share;
    EXPECT_EQ(stats.slashes_at_budget, 1.0) << share;
  }
}

TEST_F(AttentionEngineTest, StatisticsSayWhetherMassOrBudgetEndedTheChoice) {
  patterns::AttentionOptions options = VerticalSlash();
  const auto stats = [&] { return Run(options)[0].stats.layers.at(1); };
  EXPECT_EQ(stats().slashes_at_budget, 0.0);
  EXPECT_EQ(stats().verticals_at_budget, 0.0);
  options.budget.max_slashes = 3;
  EXPECT_EQ(stats().slashes_at_budget, 1.0);
  EXPECT_EQ(stats().verticals_at_budget, 0.0);
  options.budget = {.vertical_mass = 0.6, .slash_mass = 0.01, .max_verticals = 5};
  EXPECT_EQ(stats().slashes_at_budget, 0.0);
  EXPECT_EQ(stats().verticals_at_budget, 1.0);
}

// The sinks are kept whatever the budget says, and where a sequence has fewer tokens all of them.
TEST_F(AttentionEngineTest, SinksTakePlaceBeyondTheBudget) {
  patterns::AttentionOptions options = VerticalSlash();
  options.sink_tokens = 7;
  options.budget = {.vertical_mass = 1e-6, .slash_mass = 1e-6, .max_verticals = 2};
  const auto verticals = [&] { return Run(options)[0].stats.layers.at(1).verticals; };
  EXPECT_EQ(verticals(), 7.0);
  options.sink_tokens = kTokens + 1;
  EXPECT_EQ(verticals(), kTokens);
}

// Head 0 attends to few keys, the others to all alike.
TEST_F(AttentionEngineTest, HeadsThatRecallLittleGetMoreOfTheBudget) {
  patterns::AttentionOptions options = VerticalSlash();
  options.select = patterns::Select::kTopK;
  options.budget = {.max_verticals = 40, .max_slashes = 8};
  options.sink_tokens = 0;
  for (int64_t i = 0; i < kTokens; ++i) {
    for (int x = 0; x < kHeadDim; ++x) {
      k_.at(i, 0, x) = i < 20 ? 1.0f : -1.0f;
      q_.at(i, 0, x) = 1.0f;
    }
  }
  const testing::HostIndex equal = Run(options)[0].index;
  options.adapt_heads = true;
  const testing::HostIndex adapted = Run(options)[0].index;
  const auto slashes = [&](const testing::HostIndex& index, int head) {
    int count = 0;
    for (int64_t delta = 0; delta < kTokens / kTile; ++delta) count += index.Covers(head, delta);
    return count;
  };
  int total = 0;
  for (int head = 0; head < kHeads; ++head) {
    EXPECT_EQ(slashes(equal, head), 8);
    total += slashes(adapted, head);
  }
  EXPECT_EQ(adapted.Columns(0).size(), 20u);  // all that have mass, of half of 40
  EXPECT_EQ(slashes(adapted, 0), 4);
  EXPECT_EQ(total, kHeads * 8);  // the mean stays
}

// Output and gradients are those of fp64 attention over the tiles and columns of the index.
TEST_F(AttentionEngineTest, VerticalSlashAttendsToWhatItsIndexHolds) {
  constexpr int64_t kShort = 512;
  const auto random = [&](int heads) { return RandomTensor(kShort, heads, kHeadDim, random_); };
  const Tensor q = random(kHeads), k = random(kKvHeads), v = random(kKvHeads),
               d_out = random(kHeads);
  patterns::AttentionOptions options = VerticalSlash();
  const std::vector<int64_t> documents = {0, 70, 300};
  for (const int ranks : {1, 2, 4}) {
    options.ring.inner = ranks;
    std::vector<testing::HostIndex> indices(ranks);
    std::vector<float> out(q.data.size()), dq(q.data.size()), dk(k.data.size()), dv(k.data.size());
    comm::testing::RunRanks(ranks, [&](comm::Communicator& communicator) {
      const ShardLayout layout{.kind = options.layout,
                               .ranks = ranks,
                               .rank = communicator.rank(),
                               .stripe = kTile,
                               .tokens = kShort};
      const Tensor my_q = Shard(q, layout), my_k = Shard(k, layout), my_v = Shard(v, layout),
                   my_d_out = Shard(d_out, layout);
      Tensor my_out(layout.local_tokens(), kHeads, kHeadDim),
          my_dq = my_out, my_dk(layout.local_tokens(), kKvHeads, kHeadDim), my_dv = my_dk;
      std::vector<float> lse(kHeads * layout.local_tokens(),
                             -std::numeric_limits<float>::infinity());
      CpuAttentionDevice device(&communicator, /*threads=*/1);
      const auto engine = RingRunner::Create(options, &device);
      ASSERT_TRUE(engine.ok()) << engine.status();
      ASSERT_TRUE((*engine)->SetDocuments(kShort, documents).ok());
      CpuCall forward(&device, /*layer=*/0,
                      {my_q.view(), my_k.view(), my_v.view(), my_out.view(), lse.data()});
      const auto index = (*engine)->Forward(forward);
      ASSERT_TRUE(index.ok()) << index.status();
      CpuCall backward(&device, /*layer=*/0,
                       {.q = my_q.view(),
                        .k = my_k.view(),
                        .v = my_v.view(),
                        .out = my_out.view(),
                        .lse = lse.data(),
                        .d_out = my_d_out.view(),
                        .dq = my_dq.view(),
                        .dk = my_dk.view(),
                        .dv = my_dv.view()});
      ASSERT_TRUE((*engine)->Backward(**index, backward).ok());
      indices[layout.rank] = testing::ToHost(**index);
      const auto put = [&](std::vector<float>& whole, const Tensor& part) {
        const int64_t row = int64_t{part.heads} * part.head_dim;
        for (int64_t i = 0; i < part.tokens; ++i) {
          std::copy_n(part.data.begin() + i * row, row, whole.begin() + layout.Position(i) * row);
        }
      };
      put(out, my_out);
      put(dq, my_dq);
      put(dk, my_dk);
      put(dv, my_dv);
    });
    const testing::HostIndex& index = indices[0];
    EXPECT_GT(index.column_counts[0], 4);
    const auto visible = [&](int head, int64_t query, int64_t key) {
      const auto after = std::upper_bound(documents.begin(), documents.end(), query);
      if (key > query || key < *(after - 1)) return false;
      const auto columns = index.Columns(head);
      return index.Covers(head, query / kTile - key / kTile) ||
             std::binary_search(columns.begin(), columns.end(), key);
    };
    const auto expected =
        kernels::reference::testing::ComputeMaskedAttention(q, k, v, d_out, 1.0f / 8.0f, visible);
    EXPECT_LT(RelativeError(out, expected.out), 1e-5);
    EXPECT_LT(RelativeError(dq, expected.dq), 1e-5);
    EXPECT_LT(RelativeError(dk, expected.dk), 1e-5);
    EXPECT_LT(RelativeError(dv, expected.dv), 1e-5);
  }
}

TEST_F(AttentionEngineTest, StatisticsAddUpOverRanks) {
  patterns::AttentionOptions options = VerticalSlash();
  const LayerStats one = Run(options)[0].stats.layers.at(1);
  EXPECT_EQ(one.calls, 1);
  EXPECT_GT(one.recall, 0.5);
  EXPECT_LE(one.recall, 1.0 + 1e-6);
  EXPECT_EQ(one.causal_tiles, kHeads * 32 * 33 / 2);
  options.ring.inner = 4;
  uint64_t tiles = 0;
  for (const RankResult& result : Run(options)) {
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
  patterns::AttentionOptions options = VerticalSlash();
  for (const LayoutKind layout :
       {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
    for (const ring::RingShape shape : {ring::RingShape{ring::RingKind::kFlat, 4, 1},
                                        ring::RingShape{ring::RingKind::kHierarchical, 2, 2}}) {
      options.layout = layout;
      options.stripe = 2 * kTile;
      options.ring = shape;
      const std::vector<RankResult> results = Run(options);
      const testing::HostIndex& index = results[0].index;
      const kernels::ShardLayout sequence = {
          .kind = layout, .ranks = 4, .stripe = options.stripe, .tokens = kTokens};
      ring::TileLoads loads(4);
      for (int head = 0; head < kHeads; ++head) {
        ring::HeadPattern pattern;
        for (int64_t delta = 0; delta < (kTokens + kTile - 1) / kTile; ++delta) {
          const uint64_t word = index.diagonals[head * index.diagonal_words + delta / 64];
          pattern.diagonals.push_back(word >> (delta % 64) & 1);
        }
        loads.AddHead(pattern, sequence, kTile, 1.0);
      }
      for (int rank = 0; rank < 4; ++rank) {
        std::vector<uint64_t> predicted;
        const ring::RingSchedule schedule = *ring::ForwardSchedule(shape, rank);
        for (const ring::RingStep& step : schedule.steps) {
          predicted.push_back(static_cast<uint64_t>(loads.of(rank, step.owner)));
        }
        EXPECT_EQ(results[rank].stats.layers.at(1).tiles_per_ring_step, predicted);
      }
    }
  }
}

TEST_F(AttentionEngineTest, DenseLayersAndForwardsReplaceThePattern) {
  patterns::AttentionOptions options = VerticalSlash();
  options.dense_layers = {0, 1};
  EXPECT_EQ(Run(options)[0].stats.layers.at(1).density, 1.0);
  options.dense_layers = {};
  options.budget = {.vertical_mass = 1e-6, .slash_mass = 1e-6};
  const LayerStats stats = Run(options)[0].stats.layers.at(1);
  EXPECT_EQ(stats.verticals, 4.0);  // the sinks
  EXPECT_EQ(stats.slashes, 2.0);    // the diagonal and its neighbour
  EXPECT_EQ(Run(options, {}, /*dense=*/true)[0].stats.layers.at(1).density, 1.0);
}

TEST_F(AttentionEngineTest, AnAbortedRingReturnsItsReason) {
  patterns::AttentionOptions options{.tile = kTile};
  options.ring.inner = 2;
  absl::Status status;
  comm::testing::RunRanks(2, [&](comm::Communicator& communicator) {
    if (communicator.rank() == 1) return communicator.Abort("rank 1 ran out of memory");
    const ShardLayout layout{
        .kind = LayoutKind::kStriped, .ranks = 2, .rank = 0, .stripe = kTile, .tokens = kTokens};
    const Tensor q = Shard(q_, layout), k = Shard(k_, layout), v = Shard(v_, layout);
    Tensor out(layout.local_tokens(), kHeads, kHeadDim);
    std::vector<float> lse(kHeads * layout.local_tokens(), -std::numeric_limits<float>::infinity());
    CpuAttentionDevice device(&communicator, /*threads=*/1);
    const auto engine = RingRunner::Create(options, &device);
    ASSERT_TRUE(engine.ok()) << engine.status();
    CpuCall call(&device, /*layer=*/1, {q.view(), k.view(), v.view(), out.view(), lse.data()});
    status = (*engine)->Forward(call).status();
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
  EXPECT_NE(std::string(status.message()).find("rank 1 ran out of memory"), std::string::npos);
}

}  // namespace
}  // namespace ringleader::attention
