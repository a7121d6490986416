#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels/reference/testing/key_group_oracle.h"
#include "kernels/reference/testing/masked_attention.h"
#include "kernels/reference/testing/packed_documents.h"
#include "ring/ring_schedule.h"
#include "ring/tile_loads.h"
#include "worker/attention/cpu/cpu_attention_call.h"
#include "worker/attention/runner/ring_runner.h"
#include "worker/attention/testing/index_oracle.h"
#include "worker/comm/testing/local_communicator.h"

namespace ringleader::attention {
namespace {

using kernels::BlockWords;
using kernels::LayoutKind;
using kernels::ShardLayout;
using kernels::reference::testing::RandomTensor;
using kernels::reference::testing::RelativeError;
using kernels::reference::testing::Shard;
using kernels::reference::testing::Tensor;

constexpr int64_t kTokens = 2048;
constexpr int kHeads = 4, kKvHeads = 2, kHeadDim = 64, kTile = 64;

// What one rank was left with by one Forward of layer 1.
struct RankResult {
  testing::HostIndex index;
  AttentionStats stats;
  std::vector<float> out = {};
};

class AttentionEngineTest : public ::testing::Test {
 protected:
  std::vector<RankResult> Run(const patterns::AttentionOptions& options, int ranks,
                              const std::vector<int64_t>& documents = {}, bool dense = false) {
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
      CpuAttentionDevice device(&communicator, options.threads);
      const auto engine = RingRunner::Create(options, &device);
      ASSERT_TRUE(engine.ok()) << engine.status();
      (*engine)->SetDense(dense);
      ASSERT_TRUE((*engine)->SetDocuments(kTokens, documents).ok());
      CpuCall call(&device, /*layer=*/1, {q.view(), k.view(), v.view(), out.view(), lse.data()});
      const auto index = (*engine)->Forward(call);
      ASSERT_TRUE(index.ok()) << index.status();
      results[communicator.rank()] = {testing::ToHost(**index), (*engine)->TakeStats(), out.data};
    });
    return results;
  }

  // Causal attention to what is `visible`, in fp64.
  std::vector<double> Masked(const kernels::reference::testing::Visible& visible) const {
    const Tensor none(kTokens, kHeads, kHeadDim);
    return kernels::reference::testing::ComputeMaskedAttention(
               q_, k_, v_, none, 1.0f / std::sqrt(static_cast<float>(kHeadDim)),
               [&](int head, int64_t i, int64_t j) { return j <= i && visible(head, i, j); })
        .out;
  }

  static patterns::AttentionOptions VerticalSlash() {
    return {.pattern = patterns::Pattern::kVerticalSlash,
            .budget = {.vertical_mass = 0.6, .slash_mass = 0.5},
            .estimate_queries = 100,
            .sink_tokens = 4,
            .tile = kTile};
  }

  std::mt19937 random_{3};
  Tensor q_ = RandomTensor(kTokens, kHeads, kHeadDim, random_);
  Tensor k_ = RandomTensor(kTokens, kKvHeads, kHeadDim, random_);
  const Tensor v_ = RandomTensor(kTokens, kKvHeads, kHeadDim, random_);
};

TEST_F(AttentionEngineTest, IndexIsTheSameBitForBitOnAnyNumberOfRanks) {
  patterns::AttentionOptions share = VerticalSlash();
  share.budget = {.vertical_mass = 0.9, .slash_mass = 0.95, .density = 0.2};
  share.estimate_at = patterns::EstimateAt::kSpread;
  share.adapt_heads = true;
  for (patterns::AttentionOptions options : {VerticalSlash(), share}) {
    const testing::HostIndex expected = Run(options, 1)[0].index;
    EXPECT_GT(expected.column_counts[0], 4);
    for (const ring::RingShape ring : {ring::RingShape{ring::RingKind::kFlat, 2, 1},
                                       ring::RingShape{ring::RingKind::kFlat, 4, 1},
                                       ring::RingShape{ring::RingKind::kHierarchical, 2, 2},
                                       ring::RingShape{ring::RingKind::kAllGather, 4, 1}}) {
      for (const LayoutKind layout :
           {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
        options.layout = layout;
        options.ring = ring;
        for (const RankResult& result : Run(options, ring.ranks())) {
          EXPECT_EQ(result.index.diagonals, expected.diagonals);
          EXPECT_EQ(result.index.column_positions, expected.column_positions);
          EXPECT_EQ(result.index.column_counts, expected.column_counts);
          EXPECT_EQ(result.index.column_keys, expected.column_keys);
        }
      }
    }
  }
}

// Rows of the choice that ranks made are those of one rank.
TEST_F(AttentionEngineTest, ChosenBlocksAreTheSameOnAnyNumberOfRanks) {
  for (patterns::AttentionOptions options :
       {patterns::AttentionOptions{.pattern = patterns::Pattern::kBlockTopK, .block_size = 128},
        {.pattern = patterns::Pattern::kMoba, .block_size = 128, .topk_blocks = 2},
        {.pattern = patterns::Pattern::kMoba, .block_size = 64, .density = 0.1},
        {.pattern = patterns::Pattern::kXAttention, .stride = 32, .threshold = 0.3},
        {.pattern = patterns::Pattern::kXAttention, .threshold = 0.9, .density = 0.2}}) {
    options.tile = kTile;
    for (const std::vector<int64_t>& documents : {std::vector<int64_t>{}, {0, 70, 71, 640, 1500}}) {
      const RankResult one = Run(options, 1, documents)[0];
      // Queries that choose apart leave little out together.
      EXPECT_LT(one.stats.layers.at(1).density, 1.0);
      EXPECT_EQ(one.stats.layers.at(1).recall, -1.0);  // not estimated
      const auto words = static_cast<int64_t>(one.index.chosen.size()) / (kHeads * kTokens / kTile);
      for (const LayoutKind layout :
           {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
        patterns::AttentionOptions dealt = options;
        dealt.layout = layout;
        dealt.ring.inner = 4;
        uint64_t tiles = 0;
        const std::vector<RankResult> results = Run(dealt, 4, documents);
        for (int rank = 0; rank < 4; ++rank) {
          const ShardLayout of_rank{
              .kind = layout, .ranks = 4, .rank = rank, .stripe = kTile, .tokens = kTokens};
          const int64_t local_tiles = kTokens / 4 / kTile;
          for (int64_t i = 0; i < kHeads * local_tiles * words; ++i) {
            const int64_t row = i / words / local_tiles * (kTokens / kTile) +
                                of_rank.Position(i / words % local_tiles * kTile) / kTile;
            ASSERT_EQ(results[rank].index.chosen.at(i),
                      one.index.chosen.at(row * words + i % words));
          }
          const std::vector<uint32_t>& bits = results[rank].index.queries_chosen;
          const int64_t local_words = kTokens / 4 / 32;
          for (int64_t i = 0; i < std::ssize(bits); ++i) {  // words of 32 queries of a tile
            const int64_t position = of_rank.Position(i % local_words * 32);
            ASSERT_EQ(bits[i], one.index.queries_chosen.at(i / local_words * (kTokens / 32) +
                                                           position / 32));
          }
          tiles += results[rank].stats.layers.at(1).TotalTiles();
        }
        EXPECT_EQ(tiles, one.stats.layers.at(1).TotalTiles());
      }
    }
  }
}

// The output is attention, in fp64, to what the choice says and to nothing else.
TEST_F(AttentionEngineTest, WhatIsChosenIsWhatIsAttendedTo) {
  const auto bit = [](const std::vector<uint32_t>& words, int64_t row_words, int64_t row,
                      int64_t i) {
    return (words.at(row * row_words + i / 32) >> i % 32 & 1) != 0;
  };
  const patterns::AttentionOptions xattention = {
      .pattern = patterns::Pattern::kXAttention, .threshold = 0.4, .tile = kTile};
  constexpr int64_t kTiles = kTokens / kTile;
  const RankResult by_tile = Run(xattention, 1)[0];
  EXPECT_LT(RelativeError(by_tile.out, Masked([&](int head, int64_t i, int64_t j) {
                            return bit(by_tile.index.chosen, BlockWords(kTiles),
                                       head * kTiles + i / kTile, j / kTile);
                          })),
            1e-5);
  const patterns::AttentionOptions moba = {.pattern = patterns::Pattern::kMoba,
                                           .block_size = 2 * kTile,
                                           .topk_blocks = 3,
                                           .tile = kTile};
  const RankResult by_query = Run(moba, 1)[0];
  EXPECT_LT(RelativeError(by_query.out, Masked([&](int head, int64_t i, int64_t j) {
                            return bit(by_query.index.queries_chosen, kTokens / 32,
                                       head * (kTiles / 2) + j / (2 * kTile), i);
                          })),
            1e-5);
}

// Rows of the choice that ranks made are those of one rank, the fp64 oracle's, and what is attended
// to.
TEST_F(AttentionEngineTest, KeyGroupsAreTheOraclesOnAnyNumberOfRanks) {
  using kernels::reference::testing::GroupsOfRow;
  patterns::AttentionOptions options = {
      .pattern = patterns::Pattern::kKeyGroups, .density = 0.1, .tile = kTile};
  constexpr int64_t kTiles = kTokens / kTile;
  for (const std::vector<int64_t>& documents : {std::vector<int64_t>{}, {0, 70, 71, 640, 1500}}) {
    const std::vector<int32_t> starts =
        documents.empty() ? std::vector<int32_t>()
                          : kernels::reference::testing::DocumentStarts(kTokens, documents);
    const kernels::reference::testing::KeyGroupOracle oracle(
        std::as_const(q_).view(), std::as_const(k_).view(),
        {.scale = 1.0f / std::sqrt(static_cast<float>(kHeadDim)), .density = 0.1f}, starts);
    const RankResult one = Run(options, 1, documents)[0];
    EXPECT_LT(one.stats.layers.at(1).density, 0.2);
    EXPECT_EQ(one.stats.layers.at(1).recall, -1.0);  // not estimated
    EXPECT_EQ(oracle.Complaint(one.index.groups, one.index.group_bounds, one.index.group_capacity,
                               {.tokens = kTokens}, 1e-5),
              "");
    const auto kept = [](const RankResult& result, const ShardLayout& layout, int64_t row) {
      std::string wrong;
      const std::vector<int64_t> groups =
          GroupsOfRow(result.index.groups, result.index.group_bounds, result.index.group_capacity,
                      layout, kHeads * (layout.local_tokens() / kTile), row, &wrong);
      EXPECT_EQ(wrong, "");
      return groups;
    };
    std::vector<std::vector<int64_t>> rows;
    for (int64_t row = 0; row < kHeads * kTiles; ++row) {
      rows.push_back(kept(one, {.tokens = kTokens}, row));
    }
    EXPECT_LT(RelativeError(one.out, Masked([&](int head, int64_t i, int64_t j) {
                              return (starts.empty() || j >= starts[i]) &&
                                     (i / kTile == j / kTile ||
                                      std::ranges::binary_search(rows[head * kTiles + i / kTile],
                                                                 j / kernels::kGroupKeys));
                            })),
              1e-5);
    for (const int ranks : {2, 4}) {
      for (const LayoutKind kind :
           {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
        options.layout = kind;
        options.ring.inner = ranks;
        uint64_t tiles = 0;
        const std::vector<RankResult> results = Run(options, ranks, documents);
        for (int rank = 0; rank < ranks; ++rank) {
          const ShardLayout layout{
              .kind = kind, .ranks = ranks, .rank = rank, .stripe = kTile, .tokens = kTokens};
          const int64_t local_tiles = kTiles / ranks;
          for (int64_t row = 0; row < kHeads * local_tiles; ++row) {
            ASSERT_EQ(kept(results[rank], layout, row),
                      rows[row / local_tiles * kTiles +
                           layout.Position(row % local_tiles * kTile) / kTile]);
          }
          tiles += results[rank].stats.layers.at(1).TotalTiles();
        }
        EXPECT_EQ(tiles, one.stats.layers.at(1).TotalTiles());
      }
    }
    options.layout = LayoutKind::kStriped;
    options.ring.inner = 1;
  }
}

// Four queries for twenty documents of 90 tokens and what is left: those without a query are kept
// whole, as far as their longest reaches and no further.
TEST_F(AttentionEngineTest, ShortDocumentsWithoutAnEstimateQueryAreKeptWhole) {
  patterns::AttentionOptions options = VerticalSlash();
  options.select = patterns::Select::kTopK;
  options.budget = {.max_verticals = 1, .max_slashes = 1};
  options.estimate_queries = 4;
  options.sink_tokens = options.local_blocks = 0;
  std::vector<int64_t> documents;
  for (int64_t i = 0; i < 20; ++i) documents.push_back(90 * i);
  const testing::HostIndex kept = Run(options, 1, documents)[0].index;
  for (int head = 0; head < kHeads; ++head) {
    EXPECT_TRUE(kept.Covers(head, 1) && kept.Covers(head, 2));  // 90 tokens may lie in three tiles
    EXPECT_FALSE(kept.Covers(head, 3));
  }
  options.estimate_queries = 20;  // one each
  const testing::HostIndex chosen = Run(options, 1, documents)[0].index;
  EXPECT_FALSE(chosen.Covers(0, 1) && chosen.Covers(0, 2));
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
    const LayerStats stats = Run(options, 1)[0].stats.layers.at(1);
    EXPECT_LT(stats.density, share + 2.0 / 32) << share;
    EXPECT_GT(stats.density, 0.75 * share) << share;
    EXPECT_EQ(stats.slashes_at_budget, 1.0) << share;
  }
}

TEST_F(AttentionEngineTest, StatisticsSayWhetherMassOrBudgetEndedTheChoice) {
  patterns::AttentionOptions options = VerticalSlash();
  const auto stats = [&] { return Run(options, 1)[0].stats.layers.at(1); };
  EXPECT_EQ(stats().slashes_at_budget, 0.0);
  EXPECT_EQ(stats().verticals_at_budget, 0.0);
  options.budget.max_slashes = 3;
  EXPECT_EQ(stats().slashes_at_budget, 1.0);
  EXPECT_EQ(stats().verticals_at_budget, 0.0);
  options.budget = {.vertical_mass = 0.6, .slash_mass = 0.01, .max_verticals = 5};
  EXPECT_EQ(stats().slashes_at_budget, 0.0);
  EXPECT_EQ(stats().verticals_at_budget, 1.0);
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
  const testing::HostIndex equal = Run(options, 1)[0].index;
  options.adapt_heads = true;
  const testing::HostIndex adapted = Run(options, 1)[0].index;
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

TEST_F(AttentionEngineTest, IndexOfDocumentsIsTheSameOnAnyNumberOfRanks) {
  patterns::AttentionOptions options = VerticalSlash();
  const std::vector<int64_t> documents = {0, 70, 71, 640, 1500, 2047};
  const RankResult expected = Run(options, 1, documents)[0];
  const LayerStats& one = expected.stats.layers.at(1);
  EXPECT_GT(one.recall, 0.5);
  EXPECT_LE(one.recall, 1.0 + 1e-6);
  EXPECT_LT(one.TotalTiles(), Run(options, 1)[0].stats.layers.at(1).TotalTiles());
  for (const int ranks : {2, 4}) {
    for (const LayoutKind layout :
         {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
      options.layout = layout;
      options.ring.inner = ranks;
      uint64_t tiles = 0;
      for (const RankResult& result : Run(options, ranks, documents)) {
        EXPECT_EQ(result.index.diagonals, expected.index.diagonals);
        EXPECT_EQ(result.index.column_positions, expected.index.column_positions);
        EXPECT_EQ(result.index.column_counts, expected.index.column_counts);
        EXPECT_NEAR(result.stats.layers.at(1).recall, one.recall, 1e-6);
        tiles += result.stats.layers.at(1).TotalTiles();
      }
      EXPECT_EQ(tiles, one.TotalTiles());
    }
  }
}

// Estimated at the end of the sequence alone, the long first document would get no column.
TEST_F(AttentionEngineTest, ColumnsAreChosenInAllLongDocuments) {
  patterns::AttentionOptions options = VerticalSlash();
  options.sink_tokens = 0;
  const testing::HostIndex index = Run(options, 1, {0, 1024, 1984})[0].index;
  for (int head = 0; head < kHeads; ++head) {
    const int64_t* positions = index.column_positions.data() + int64_t{head} * index.max_columns;
    const int64_t* end = positions + index.column_counts[head];
    EXPECT_LT(positions[0], 1024);
    EXPECT_NE(std::find_if(positions, end, [](int64_t p) { return p >= 1024 && p < 1984; }), end);
  }
}

TEST_F(AttentionEngineTest, OneDocumentIsNoMask) {
  const patterns::AttentionOptions options = VerticalSlash();
  const RankResult none = Run(options, 1)[0], one = Run(options, 1, {0})[0];
  EXPECT_EQ(one.index.documents, nullptr);
  EXPECT_EQ(one.index.column_positions, none.index.column_positions);
  EXPECT_EQ(one.index.diagonals, none.index.diagonals);
}

TEST_F(AttentionEngineTest, DocumentsThatDoNotFitAreRefused) {
  comm::testing::RunRanks(1, [&](comm::Communicator& communicator) {
    CpuAttentionDevice device(&communicator, /*threads=*/1);
    const auto engine = RingRunner::Create({.tile = kTile}, &device);
    ASSERT_TRUE(engine.ok()) << engine.status();
    const auto message = [&](const std::vector<int64_t>& firsts) {
      return std::string((*engine)->SetDocuments(kTokens, firsts).message());
    };
    EXPECT_NE(message({1}).find("number 0 starts at 1"), std::string::npos);
    EXPECT_NE(message({0, 7, 7}).find("number 2 starts at 7"), std::string::npos);
    EXPECT_NE(message({0, kTokens}).find("starts at 2048 of a sequence of 2048"),
              std::string::npos);
    ASSERT_TRUE((*engine)->SetDocuments(100, std::vector<int64_t>{0, 7}).ok());
    Tensor out(kTokens, kHeads, kHeadDim);
    std::vector<float> lse(kHeads * kTokens, -std::numeric_limits<float>::infinity());
    CpuCall call(
        &device, /*layer=*/1,
        {std::as_const(q_).view(), std::as_const(k_).view(), v_.view(), out.view(), lse.data()});
    const absl::Status status = (*engine)->Forward(call).status();
    EXPECT_NE(std::string(status.message()).find("a sequence of 100 tokens, q is of one of 2048"),
              std::string::npos)
        << status;
  });
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
      const std::vector<RankResult> results = Run(options, 4);
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
  EXPECT_EQ(Run(options, 1)[0].stats.layers.at(1).density, 1.0);
  options.dense_layers = {};
  options.budget = {.vertical_mass = 1e-6, .slash_mass = 1e-6};
  const LayerStats stats = Run(options, 1)[0].stats.layers.at(1);
  EXPECT_EQ(stats.verticals, 4.0);  // the sinks
  EXPECT_EQ(stats.slashes, 2.0);    // the diagonal and its neighbour
  EXPECT_EQ(Run(options, 1, {}, /*dense=*/true)[0].stats.layers.at(1).density, 1.0);
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
