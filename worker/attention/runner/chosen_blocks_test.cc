// Tiles, blocks and groups of keys that queries choose: alike on any number of ranks, and what is
// attended to.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "kernels/reference/testing/key_group_oracle.h"
#include "kernels/reference/testing/packed_documents.h"
#include "kernels/reference/testing/query_gate_oracle.h"
#include "worker/attention/testing/engine_test.h"

namespace ringleader::attention {
namespace {

using kernels::BlockWords;
using kernels::LayoutKind;
using kernels::ShardLayout;
using kernels::reference::testing::RelativeError;
using testing::AttentionEngineTest;
using testing::RankResult;

// Rows of the choice that ranks made are those of one rank.
TEST_F(AttentionEngineTest, ChosenBlocksAreTheSameOnAnyNumberOfRanks) {
  for (patterns::AttentionOptions options :
       {patterns::AttentionOptions{.pattern = patterns::Pattern::kBlockTopK, .block_size = 128},
        {.pattern = patterns::Pattern::kMoba, .block_size = 128, .topk_blocks = 2},
        {.pattern = patterns::Pattern::kMoba, .block_size = 64, .density = 0.1},
        {.pattern = patterns::Pattern::kXAttention, .stride = 32, .threshold = 0.3},
        {.pattern = patterns::Pattern::kXAttention, .threshold = 0.9, .density = 0.2},
        {.pattern = patterns::Pattern::kAdaSpa, .adapt_heads = true, .density = 0.2},
        {.pattern = patterns::Pattern::kAdaSpa, .density = 0.5},
        {.pattern = patterns::Pattern::kFixedBlocks, .sink_blocks = 2, .stride_blocks = 6}}) {
    options.tile = kTile;
    for (const std::vector<int64_t>& documents : {std::vector<int64_t>{}, {0, 70, 71, 640, 1500}}) {
      const RankResult one = Run(options, documents)[0];
      // Queries that choose apart leave little out together.
      EXPECT_LT(one.stats.layers.at(1).density, 1.0);
      const bool is_exact = options.pattern == patterns::Pattern::kAdaSpa;
      EXPECT_EQ(one.stats.layers.at(1).recall >= 0.0, is_exact);  // else not estimated
      const auto words = static_cast<int64_t>(one.index.chosen.size()) / (kHeads * kTokens / kTile);
      for (const LayoutKind layout :
           {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
        patterns::AttentionOptions dealt = options;
        dealt.layout = layout;
        dealt.ring.inner = 4;
        uint64_t tiles = 0;
        const std::vector<RankResult> results = Run(dealt, documents);
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
          EXPECT_EQ(results[rank].stats.layers.at(1).recall, one.stats.layers.at(1).recall);
        }
        EXPECT_EQ(tiles, one.stats.layers.at(1).TotalTiles());
      }
    }
  }
}

// Query by query: those near its tile, the first of its document and every sixth of the sequence.
TEST_F(AttentionEngineTest, FixedBlocksAreWhatPositionsSay) {
  const patterns::AttentionOptions options = {.pattern = patterns::Pattern::kFixedBlocks,
                                              .local_blocks = 2,
                                              .sink_blocks = 2,
                                              .stride_blocks = 6,
                                              .tile = kTile};
  for (const std::vector<int64_t>& documents :
       {std::vector<int64_t>{0}, {0, 70, 71, 640, 900, 1500}}) {
    const std::vector<int32_t> starts =
        kernels::reference::testing::DocumentStarts(kTokens, documents);
    const RankResult one = Run(options, documents)[0];
    const auto keeps = [&](int64_t i, int64_t j) {
      const int64_t own = i / kTile, block = j / kTile, first = starts[own * kTile] / kTile;
      return own - block <= 2 || block - first < 2 || block % 6 == 5;
    };
    EXPECT_LT(RelativeError(one.out, Masked([&](int, int64_t i, int64_t j) {
                              return j >= starts[i] && keeps(i, j);
                            })),
              1e-5);
    EXPECT_EQ(one.stats.layers.at(1).recall, -1.0) << "nothing was chosen";
  }
}

// Blocks are scored by the mean of their keys of the query's own document, on any number of ranks.
TEST_F(AttentionEngineTest, MeansOfKeysAreOfOneDocument) {
  const std::vector<int64_t> documents = {0, 70, 71, 300, 1000, 1001, 1350};
  const std::vector<int32_t> starts =
      kernels::reference::testing::DocumentStarts(kTokens, documents);
  patterns::AttentionOptions options = {
      .pattern = patterns::Pattern::kMoba, .block_size = 128, .topk_blocks = 3, .tile = kTile};
  for (const int ranks : {1, 4}) {
    for (const LayoutKind layout :
         {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
      options.layout = layout;
      options.ring.inner = ranks;
      const std::vector<RankResult> results = Run(options, documents);
      for (int rank = 0; rank < ranks; ++rank) {
        EXPECT_EQ(
            kernels::reference::testing::QueryGateComplaint(
                std::as_const(q_).view(), std::as_const(k_).view(),
                {.block_size = options.block_size, .topk_blocks = options.topk_blocks}, starts,
                {.kind = layout, .ranks = ranks, .rank = rank, .stripe = kTile, .tokens = kTokens},
                results[rank].index.queries_chosen, 1e-5),
            "")
            << "rank " << rank << " of " << ranks;
      }
    }
  }
}

// What a document's tiles keep does not depend on the keys of those before it, of which the block
// holds some in which it begins.
TEST_F(AttentionEngineTest, TilesOfADocumentChooseByItsOwnKeys) {
  constexpr int64_t kFirst = 1000, kTiles = kTokens / kTile, kOwn = (kFirst + kTile - 1) / kTile;
  const patterns::AttentionOptions options = {
      .pattern = patterns::Pattern::kBlockTopK, .block_size = 128, .topk_blocks = 3, .tile = kTile};
  const std::vector<uint32_t> chosen = Run(options, {0, kFirst})[0].index.chosen;
  const auto earlier = k_.data.begin() + kFirst * kKvHeads * kHeadDim;
  std::transform(k_.data.begin(), earlier, k_.data.begin(), [](float x) { return -8.0f * x; });
  const std::vector<uint32_t> other = Run(options, {0, kFirst})[0].index.chosen;
  EXPECT_NE(chosen, other) << "of the first document";
  const int64_t words = BlockWords(static_cast<int32_t>(kTokens / options.block_size));
  for (int64_t i = 0; i < std::ssize(chosen); ++i) {
    if (i / words % kTiles < kOwn) continue;
    EXPECT_EQ(chosen[i], other[i]) << "tile " << i / words % kTiles;
  }
}

// Keys that are all alike score alike: what odd heads keep of the blocks before a tile's own is
// what even heads keep, mirrored, so that no end is favoured, on any number of ranks.
TEST_F(AttentionEngineTest, TiesFavourNeitherEndOnAnyNumberOfRanks) {
  std::ranges::fill(k_.data, 1.0f);
  for (patterns::AttentionOptions options :
       {patterns::AttentionOptions{.pattern = patterns::Pattern::kBlockTopK, .topk_blocks = 3},
        {.pattern = patterns::Pattern::kMoba, .topk_blocks = 4},
        {.pattern = patterns::Pattern::kXAttention, .threshold = 1.0, .density = 0.3},
        {.pattern = patterns::Pattern::kAdaSpa, .density = 0.3}}) {
    options.tile = options.block_size = kTile;
    for (const int ranks : {1, 2, 4}) {
      options.ring.inner = ranks;
      SCOPED_TRACE(::testing::Message()
                   << "pattern " << static_cast<int>(options.pattern) << ", " << ranks << " ranks");
      const std::vector<RankResult> results = Run(options);
      constexpr int64_t kBlocks = kTokens / kTile;
      const int64_t local_tiles = kBlocks / ranks, words = BlockWords(kBlocks);
      // XAttention always keeps the first block.
      const int64_t begin = options.pattern == patterns::Pattern::kXAttention ? 1 : 0;
      for (int64_t own = 0; own < kBlocks; ++own) {
        std::vector<std::vector<int64_t>> kept(kHeads);
        for (int head = 0; head < kHeads; ++head) {
          const int64_t row = head * local_tiles + own / ranks;  // striped
          for (int64_t block = begin; block < own; ++block) {
            const uint32_t word = results[own % ranks].index.chosen.at(row * words + block / 32);
            if ((word >> block % 32 & 1) != 0) kept[head].push_back(block);
          }
        }
        std::vector<int64_t> first(kept[0].size()), mirrored;
        std::iota(first.begin(), first.end(), begin);
        EXPECT_EQ(kept[0], first) << own;
        for (const int64_t block : kept[1])
          mirrored.insert(mirrored.begin(), begin + own - 1 - block);
        EXPECT_EQ(mirrored, kept[0]) << own;
        EXPECT_EQ(kept[2], kept[0]);
        EXPECT_EQ(kept[3], kept[1]);
        EXPECT_GE(std::ssize(kept[0]), own > 20 ? 3 : 0);
      }
    }
  }
}

// Of masses that are attention's own, recall is that of the choice: no other of as many blocks
// holds more.
TEST_F(AttentionEngineTest, TheRecallOfAnExactSearchIsThatOfAllQueries) {
  const auto recall = [&](const patterns::AttentionOptions& options) {
    return Run(options)[0].stats.layers.at(1).recall;
  };
  patterns::AttentionOptions options = {
      .pattern = patterns::Pattern::kAdaSpa, .density = 1.0, .tile = kTile};
  EXPECT_EQ(recall(options), 1.0);
  options.density = 0.25;
  const RankResult result = Run(options)[0];
  double kept = 0.0;
  for (int head = 0; head < kHeads; ++head) {
    for (int64_t i = 0; i < kTokens; ++i) {
      double of_row = 0.0, all = 0.0;
      for (int64_t j = 0; j <= i; ++j) {
        double logit = 0.0;
        for (int x = 0; x < kHeadDim; ++x) {
          logit += double{q_.at(i, head, x)} * double{k_.at(j, head / (kHeads / kKvHeads), x)};
        }
        const double weight = std::exp(logit / std::sqrt(double{kHeadDim}));
        const int64_t row = head * (kTokens / kTile) + i / kTile, block = j / kTile;
        const uint32_t word =
            result.index.chosen.at(row * BlockWords(kTokens / kTile) + block / 32);
        all += weight;
        if ((word >> block % 32 & 1) != 0) of_row += weight;
      }
      kept += of_row / all;
    }
  }
  EXPECT_NEAR(result.stats.layers.at(1).recall, kept / (kHeads * kTokens), 1e-5);
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
  const RankResult by_tile = Run(xattention)[0];
  EXPECT_LT(RelativeError(by_tile.out, Masked([&](int head, int64_t i, int64_t j) {
                            return bit(by_tile.index.chosen, BlockWords(kTiles),
                                       head * kTiles + i / kTile, j / kTile);
                          })),
            1e-5);
  const patterns::AttentionOptions moba = {.pattern = patterns::Pattern::kMoba,
                                           .block_size = 2 * kTile,
                                           .topk_blocks = 3,
                                           .tile = kTile};
  const RankResult by_query = Run(moba)[0];
  EXPECT_LT(RelativeError(by_query.out, Masked([&](int head, int64_t i, int64_t j) {
                            return bit(by_query.index.queries_chosen, kTokens / 32,
                                       head * (kTiles / 2) + j / kTile / 2, i);
                          })),
            1e-5);
}

// Rows of the choice that ranks made are those of one rank, the fp64 oracle's, and what is attended
// to.
TEST_F(AttentionEngineTest, KeyGroupsAreTheOraclesOnAnyNumberOfRanks) {
  using kernels::reference::testing::GroupsOfRow;
  const std::vector<int64_t> packed = {0, 70, 71, 640, 1500};
  struct Asked {
    int queries, together;
    std::vector<int64_t> documents;
  };
  for (const auto& [queries, together, documents] : {Asked{kTile, 1, {}},
                                                     {kTile, 1, packed},
                                                     {16, 1, {}},
                                                     {16, 1, packed},
                                                     {kTile, 2, {}},
                                                     {kTile, 2, packed},
                                                     {16, 2, packed}}) {
    SCOPED_TRACE(::testing::Message() << "tiles of " << queries << ", heads " << together);
    patterns::AttentionOptions options = {.pattern = patterns::Pattern::kKeyGroups,
                                          .density = 0.1,
                                          .group_queries = queries,
                                          .group_heads = together,
                                          .tile = kTile};
    const int64_t of_sequence = kTokens / queries;
    const std::vector<int32_t> starts =
        documents.empty() ? std::vector<int32_t>()
                          : kernels::reference::testing::DocumentStarts(kTokens, documents);
    const kernels::reference::testing::KeyGroupOracle oracle(
        std::as_const(q_).view(), std::as_const(k_).view(),
        {.tile = queries,
         .scale = 1.0f / std::sqrt(static_cast<float>(kHeadDim)),
         .density = 0.1f,
         .budget_tokens = kTokens,
         .heads_together = together},
        starts);
    const RankResult one = Run(options, documents)[0];
    EXPECT_LT(one.stats.layers.at(1).density, 0.2);
    EXPECT_EQ(one.stats.layers.at(1).recall, -1.0);  // not estimated
    EXPECT_EQ(oracle.Complaint(one.index.groups_chosen, {.tokens = kTokens}, 1e-5), "");
    const auto kept = [queries](const RankResult& result, const ShardLayout& layout, int64_t row) {
      const int64_t tiles = layout.local_tokens() / queries;
      return GroupsOfRow(result.index.groups_chosen, layout, static_cast<int>(row / tiles),
                         row % tiles, queries);
    };
    std::vector<std::vector<int64_t>> rows;
    for (int64_t row = 0; row < kHeads / together * of_sequence; ++row) {
      rows.push_back(kept(one, {.tokens = kTokens}, row));
    }
    EXPECT_LT(RelativeError(one.out, Masked([&](int head, int64_t i, int64_t j) {
                              return (starts.empty() || j >= starts[i]) &&
                                     (i / queries == j / queries ||
                                      std::ranges::binary_search(
                                          rows[head / together * of_sequence + i / queries],
                                          j / kernels::kGroupKeys));
                            })),
              1e-5);
    for (const int ranks : {2, 4}) {
      for (const LayoutKind kind :
           {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
        options.layout = kind;
        options.ring.inner = ranks;
        uint64_t tiles = 0;
        const std::vector<RankResult> results = Run(options, documents);
        for (int rank = 0; rank < ranks; ++rank) {
          const ShardLayout layout{
              .kind = kind, .ranks = ranks, .rank = rank, .stripe = kTile, .tokens = kTokens};
          const int64_t local_tiles = of_sequence / ranks;
          for (int64_t row = 0; row < kHeads / together * local_tiles; ++row) {
            ASSERT_EQ(kept(results[rank], layout, row),
                      rows[row / local_tiles * of_sequence +
                           layout.Position(row % local_tiles * queries) / queries]);
          }
          tiles += results[rank].stats.layers.at(1).TotalTiles();
        }
        EXPECT_EQ(tiles, one.stats.layers.at(1).TotalTiles());
      }
    }
  }
}

}  // namespace
}  // namespace ringleader::attention
