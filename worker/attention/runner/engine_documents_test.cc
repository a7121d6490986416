// Documents that are packed into a sequence, on the CPU engine.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "worker/attention/testing/engine_test.h"

namespace ringleader::attention {
namespace {

using kernels::LayoutKind;
using testing::AttentionEngineTest;
using testing::RankResult;

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
  const testing::HostIndex kept = Run(options, documents)[0].index;
  for (int head = 0; head < kHeads; ++head) {
    EXPECT_TRUE(kept.Covers(head, 1) && kept.Covers(head, 2));  // 90 tokens may lie in three tiles
    EXPECT_FALSE(kept.Covers(head, 3));
  }
  options.estimate_queries = 20;  // one each
  const testing::HostIndex chosen = Run(options, documents)[0].index;
  EXPECT_FALSE(chosen.Covers(0, 1) && chosen.Covers(0, 2));
}

TEST_F(AttentionEngineTest, IndexOfDocumentsIsTheSameOnAnyNumberOfRanks) {
  patterns::AttentionOptions options = VerticalSlash();
  const std::vector<int64_t> documents = {0, 70, 71, 640, 1500, 2047};
  const RankResult expected = Run(options, documents)[0];
  const LayerStats& one = expected.stats.layers.at(1);
  EXPECT_GT(one.recall, 0.5);
  EXPECT_LE(one.recall, 1.0 + 1e-6);
  EXPECT_LT(one.TotalTiles(), Run(options)[0].stats.layers.at(1).TotalTiles());
  for (const int ranks : {2, 4}) {
    for (const LayoutKind layout :
         {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
      options.layout = layout;
      options.ring.inner = ranks;
      uint64_t tiles = 0;
      for (const RankResult& result : Run(options, documents)) {
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
  const testing::HostIndex index = Run(options, {0, 1024, 1984})[0].index;
  for (int head = 0; head < kHeads; ++head) {
    const int64_t* positions = index.column_positions.data() + int64_t{head} * index.max_columns;
    const int64_t* end = positions + index.column_counts[head];
    EXPECT_LT(positions[0], 1024);
    EXPECT_NE(std::find_if(positions, end, [](int64_t p) { return p >= 1024 && p < 1984; }), end);
  }
}

TEST_F(AttentionEngineTest, OneDocumentIsNoMask) {
  const patterns::AttentionOptions options = VerticalSlash();
  const RankResult none = Run(options)[0], one = Run(options, {0})[0];
  EXPECT_EQ(one.index.documents, nullptr);
  EXPECT_EQ(one.index.column_positions, none.index.column_positions);
  EXPECT_EQ(one.index.diagonals, none.index.diagonals);
}

// A mask of which nobody said what it shows is no causal one.
TEST_F(AttentionEngineTest, AMaskWithoutDocumentsIsRefused) {
  comm::testing::RunRanks(1, [&](comm::Communicator& communicator) {
    CpuAttentionDevice device(&communicator, /*threads=*/1);
    const auto engine =
        RingRunner::Create({.mask = patterns::Mask::kPrefixLm, .tile = kTile}, &device);
    ASSERT_TRUE(engine.ok()) << engine.status();
    Tensor out(kTokens, kHeads, kHeadDim);
    std::vector<float> lse(kHeads * kTokens, -std::numeric_limits<float>::infinity());
    CpuCall call(
        &device, /*layer=*/1,
        {std::as_const(q_).view(), std::as_const(k_).view(), v_.view(), out.view(), lse.data()});
    EXPECT_NE(std::string((*engine)->Forward(call).status().message())
                  .find("attention.mask: prefix_lm: nobody said"),
              std::string::npos);
    EXPECT_NE(std::string((*engine)->SetDocuments(kTokens, std::vector<int64_t>{0, 7}).message())
                  .find("0 prefixes of 2 documents"),
              std::string::npos);
  });
}

TEST_F(AttentionEngineTest, WhatQueriesSeeIsListedForDenseAttentionUnderFullAlone) {
  comm::testing::RunRanks(1, [&](comm::Communicator& communicator) {
    CpuAttentionDevice device(&communicator, /*threads=*/1);
    const std::vector<kernels::KeyIntervals> all(kTokens, {0, kTokens, kTokens, kTokens});
    const auto message = [&](patterns::Pattern pattern, patterns::Mask mask) {
      const auto engine = RingRunner::Create(
          {.pattern = pattern, .mask = mask, .window = 64, .tile = kTile}, &device);
      return engine.ok() ? std::string((*engine)->SetVisible(all).message())
                         : std::string(engine.status().message());
    };
    EXPECT_EQ(message(patterns::Pattern::kDense, patterns::Mask::kFull), "");
    EXPECT_NE(message(patterns::Pattern::kDense, patterns::Mask::kCausal)
                  .find("not for dense under causal"),
              std::string::npos);
    EXPECT_NE(message(patterns::Pattern::kSlidingWindow, patterns::Mask::kFull)
                  .find("not for sliding_window under full"),
              std::string::npos);
  });
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

}  // namespace
}  // namespace ringleader::attention
