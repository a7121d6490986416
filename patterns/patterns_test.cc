#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <set>

#include "absl/strings/str_cat.h"
#include "patterns/check_options.h"
#include "patterns/kinds/chosen_blocks.h"
#include "patterns/pattern.h"
#include "ringleader/kernels/block_choice.h"
#include "ringleader/kernels/block_mass.h"
#include "ringleader/kernels/shares.h"

namespace ringleader::patterns {
namespace {

using ::testing::HasSubstr;

TEST(DefinitionsTest, EachPatternHasOne) {
  std::set<Pattern> patterns;
  std::set<std::string_view> names;
  for (const PatternDefinition* definition : Definitions()) {
    patterns.insert(definition->pattern);
    names.insert(definition->name);
    EXPECT_EQ(&DefinitionOf(definition->pattern), definition);
    EXPECT_FALSE(definition->sees.empty());
    EXPECT_FALSE(definition->page.empty());
  }
  EXPECT_EQ(patterns.size(), Definitions().size());
  EXPECT_EQ(names.size(), Definitions().size());
}

TEST(DefinitionsTest, DefaultsAreReadIntoOptionsThatPass) {
  for (const PatternDefinition* definition : Definitions()) {
    AttentionOptions options{.pattern = definition->pattern, .tile = 64, .stripe = 64};
    for (const PatternField& field : definition->fields) {
      if (field.read == nullptr) continue;
      const std::string text = field.default_for == nullptr ? std::string(field.default_value)
                                                            : absl::StrCat(field.default_for(8192));
      EXPECT_TRUE(field.read(text, &options)) << field.path;
      EXPECT_FALSE(field.read("much", &options)) << field.path;
      EXPECT_TRUE(field.read(text, &options));
    }
    EXPECT_EQ(CheckOptions(options, 1), absl::OkStatus()) << definition->name;
  }
}

TEST(DefinitionsTest, AnUnknownPatternOrLayoutIsNamed) {
  const AttentionOptions options{.pattern = static_cast<Pattern>(77), .stripe = 128};
  EXPECT_EQ(FindDefinition(options.pattern), nullptr);
  EXPECT_THAT(std::string(CheckOptions(options, 1).message()), HasSubstr("pattern: 77 is unknown"));
  const AttentionOptions dealt{.layout = static_cast<kernels::LayoutKind>(9)};
  EXPECT_THAT(std::string(CheckOptions(dealt, 1).message()), HasSubstr("layout: 9 is unknown"));
}

TEST(DefinitionsTest, ACausalChoiceIsRefusedByNameWhereThereIsNone) {
  AttentionOptions options{.pattern = Pattern::kVerticalSlash,
                           .selection = Selection::kCausal,
                           .tile = 64,
                           .stripe = 64};
  const absl::Status refused = CheckOptions(options, 1);
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("attention.selection: causal does not go with attention.pattern: "
                        "vertical_slash"));
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("one of the patterns sliding_window, block_topk"));
  options.pattern = Pattern::kBlockTopK;
  EXPECT_EQ(CheckOptions(options, 1), absl::OkStatus());
}

TEST(SampleTest, StaticPatternsAreExact) {
  AttentionOptions options{.pattern = Pattern::kDense, .tile = 64};
  const ring::HeadPattern dense = SampleLayer(options, false, 16, 4, {}, 1)[0];
  EXPECT_EQ(std::count(dense.diagonals.begin(), dense.diagonals.end(), 1), 16);
  options.pattern = Pattern::kSlidingWindow;
  // A query sees itself; with one more token the first of a tile looks into the tile before.
  for (const auto& [window, diagonals] : {std::pair{1, 1}, {2, 2}, {65, 2}, {66, 3}, {129, 3}}) {
    options.window = window;
    const ring::HeadPattern head = SampleLayer(options, false, 16, 4, {}, 1)[0];
    EXPECT_EQ(std::count(head.diagonals.begin(), head.diagonals.end(), 1), diagonals) << window;
  }
}

// What trainers report as visited is what the planner assumed.
TEST(CountTilesTest, ArePredictedExactlyWherePositionsTell) {
  constexpr int kRanks = 4, kTile = 64;
  int known = 0;
  for (const PatternDefinition* definition : Definitions()) {
    if (!definition->goes_by_distance()) continue;
    ++known;
    const AttentionOptions options{.pattern = definition->pattern, .window = 200, .tile = kTile};
    for (const auto kind : {kernels::LayoutKind::kZigzag, kernels::LayoutKind::kStriped}) {
      kernels::ShardLayout query{.kind = kind, .ranks = kRanks, .stripe = kTile, .tokens = 2048};
      ring::TileLoads loads(kRanks);
      loads.AddHead(SampleLayer(options, false, 2048 / kTile, 1, {}, 1)[0], query, kTile, 1);
      const kernels::TileSelection tiles{
          .tile = kTile, .window = definition->pattern == Pattern::kSlidingWindow ? 200 : 0};
      for (; query.rank < kRanks; ++query.rank) {
        kernels::ShardLayout key = query;
        for (key.rank = 0; key.rank < kRanks; ++key.rank) {
          EXPECT_EQ(definition->count_tiles(tiles, query, key), loads.of(query.rank, key.rank))
              << definition->name;
        }
      }
    }
  }
  EXPECT_EQ(known, 2);
}

// Tile by tile, by the kernels' rule.
TEST(SampleTest, FixedBlocksAreExact) {
  constexpr int64_t kBlocks = 48;
  constexpr int kRanks = 4, kTile = 64;
  for (const Mask mask : {Mask::kCausal, Mask::kFull}) {
    for (const auto& [local, sinks, stride] :
         {std::array{3, 2, 5}, {0, 0, 0}, {0, 0, 1}, {1, 60, 7}, {60, 1, 7}, {2, 1, 48}}) {
      const AttentionOptions options{.pattern = Pattern::kFixedBlocks,
                                     .mask = mask,
                                     .local_blocks = local,
                                     .sink_blocks = sinks,
                                     .stride_blocks = stride,
                                     .tile = kTile};
      SCOPED_TRACE(::testing::Message() << local << " " << sinks << " " << stride);
      const kernels::ShardLayout layout{.kind = kernels::LayoutKind::kStriped,
                                        .ranks = kRanks,
                                        .stripe = kTile,
                                        .tokens = kBlocks * kTile};
      ring::TileLoads loads(kRanks);
      loads.AddHead(SampleLayer(options, false, kBlocks, 1, {}, 1)[0], layout, kTile, 1);
      std::array<std::array<double, kRanks>, kRanks> counted = {};
      for (int32_t q = 0; q < kBlocks; ++q) {
        const int32_t last = mask == Mask::kFull ? kBlocks - 1 : q;
        int64_t kept = 0;
        for (int32_t k = 0; k <= last; ++k) {
          const bool is_near = k >= q - local && k <= q + local,
                     is_landmark = k < sinks || (stride > 0 && (k + 1) % stride == 0);
          if (!is_near && !is_landmark) continue;
          ++counted[q % kRanks][k % kRanks];
          ++kept;
        }
        ASSERT_GE(kept, 1);
      }
      for (int rank = 0; rank < kRanks; ++rank) {
        for (int owner = 0; owner < kRanks; ++owner) {
          EXPECT_EQ(loads.of(rank, owner), counted[rank][owner]) << rank << " " << owner;
        }
      }
    }
  }
}

// Where they are too many to list, some stand for all.
TEST(SampleTest, FixedBlocksOfLongSequencesAreCounted) {
  constexpr int64_t kBlocks = 16384;
  AttentionOptions options{.pattern = Pattern::kFixedBlocks, .tile = 128};
  options.stride_blocks = 4;
  const ring::HeadPattern head = SampleLayer(options, false, kBlocks, 1, {}, 1)[0];
  const PatternDefinition& definition = DefinitionOf(Pattern::kFixedBlocks);
  EXPECT_LE(std::ssize(head.columns), definition.listed_tiles(options, kBlocks));
  double beside = 0, expected = 0;
  for (int64_t q = 0; q < kBlocks; ++q) {
    beside +=
        head.row_weights[q] * static_cast<double>(head.row_offsets[q + 1] - head.row_offsets[q]);
    const int64_t before = std::max<int64_t>(0, q - options.local_blocks);
    const int64_t landmarks = before / 4 + (before > 0 ? 1 : 0);  // and the first block
    expected += static_cast<double>(landmarks);
  }
  EXPECT_DOUBLE_EQ(beside, expected);
  for (const double density : {0.02, 0.05, 0.2}) {
    definition.set_density(&options, kBlocks * 128, density);
    ring::TileLoads loads(1);
    loads.AddHead(SampleLayer(options, false, kBlocks, 1, {}, 1)[0], {.tokens = kBlocks * 128}, 128,
                  1);
    const double causal = static_cast<double>(kBlocks) * static_cast<double>(kBlocks + 1) / 2;
    EXPECT_NEAR(loads.RankTotals()[0] / causal, density, 0.06 * density);
  }
}

TEST(SampleTest, AShareOfTheTilesIsWhatIsPredicted) {
  AttentionOptions options{
      .pattern = Pattern::kVerticalSlash, .select = Select::kTopK, .tile = 64, .stripe = 64};
  for (const double density : {0.02, 0.05, 0.2}) {
    options.budget.density = density;
    for (const int64_t blocks : {1024, 8192}) {
      ring::TileLoads loads(1);
      const auto heads = SampleLayer(options, false, blocks, 8, {}, 3);
      for (const ring::HeadPattern& head : heads) {
        loads.AddHead(head, {.tokens = blocks * 64}, 64, 1.0 / 8);
      }
      const double causal = static_cast<double>(blocks) * static_cast<double>(blocks + 1) / 2;
      // A head keeps to it, also where its columns cost twice what these do.
      EXPECT_LT(loads.RankTotals()[0] / causal, density);
      EXPECT_GT(loads.RankTotals()[0] / causal, 0.8 * density);
    }
  }
}

TEST(SharesTest, WhatIsAWholeNumberStaysThatNumber) {
  for (int percent = 1; percent <= 100; ++percent) {
    const double share = percent / 100.0;
    for (const int hundreds : {1, 3, 10, 120}) {
      const int whole = percent * hundreds;
      EXPECT_EQ(kernels::MostBlocks(kernels::ShareToRoundDown(share), 100 * hundreds), whole);
      EXPECT_EQ(kernels::BlocksOfShare(kernels::ShareToRoundUp(share), 100 * hundreds), whole);
    }
  }
  EXPECT_EQ(kernels::BlocksOfShare(kernels::ShareToRoundUp(0.3), 50), 15);
  EXPECT_EQ(kernels::MostBlocks(kernels::ShareToRoundDown(0.899), 10), 8);
  EXPECT_EQ(kernels::BlocksOfShare(kernels::ShareToRoundUp(0.801), 10), 9);
}

TEST(SampleTest, XAttentionIsPredictedByItsShare) {
  AttentionOptions options{.pattern = Pattern::kXAttention, .tile = 64, .stripe = 64};
  const auto visited = [&](double density, double threshold) {
    options.density = density;
    options.threshold = threshold;
    const ring::HeadPattern head = SampleLayer(options, false, 2048, 1, {}, 1)[0];
    if (head.row_offsets.empty()) return 1.0;  // all of it
    double tiles = 0;
    for (int64_t q = 0; q < 2048; ++q) {
      tiles +=
          head.row_weights[q] * static_cast<double>(head.row_offsets[q + 1] - head.row_offsets[q]);
    }
    return tiles / (2048.0 * 2049 / 2);
  };
  EXPECT_NEAR(visited(0.05, 1.0), 0.05, 0.002);
  EXPECT_NEAR(visited(0.05, 0.9), 0.05, 0.002);
  EXPECT_NEAR(visited(0.4, 1.0), 0.4, 0.002);
  EXPECT_NEAR(visited(0.4, 0.9), 0.1, 0.002);
  EXPECT_NEAR(visited(0.0, 0.9), 0.1, 0.002);
  EXPECT_EQ(visited(0.0, 1.0), 1.0);
}

// As many tiles as the groups that the gate keeps come to, and each row's own.
TEST(SampleTest, KeyGroupsArePredictedByTheirShare) {
  AttentionOptions options{.pattern = Pattern::kKeyGroups, .tile = 64, .stripe = 64};
  for (const double density : {0.02, 0.1, 0.4}) {
    options.density = density;
    const ring::HeadPattern head = SampleLayer(options, false, 2048, 1, {}, 1)[0];
    double tiles = 0;
    for (int64_t q = 0; q < 2048; ++q) {
      const double listed =
          head.row_weights[q] * static_cast<double>(head.row_offsets[q + 1] - head.row_offsets[q]);
      const int32_t groups =
          kernels::KeyGroupBudgetOf(static_cast<float>(density), 2048 * 64).MostGroups(q * 64, 0);
      ASSERT_NEAR(listed, 1 + kernels::TilesOfGroups(groups), 1e-9);
      tiles += listed;
    }
    EXPECT_NEAR(tiles / (2048.0 * 2049 / 2), density, 0.002);
  }
  options.density = 1;
  EXPECT_TRUE(SampleLayer(options, false, 2048, 1, {}, 1)[0].row_offsets.empty());  // all of it
}

TEST(CheckTest, KeyGroupsTakeTilesOf64AndAShareForQueriesOfAWholeOrAFourthOfOne) {
  AttentionOptions options{
      .pattern = Pattern::kKeyGroups, .density = 0.1, .tile = 128, .stripe = 128};
  EXPECT_THAT(std::string(CheckOptions(options, 1).message()),
              HasSubstr("attention.tile is 128; attention.pattern: key_groups takes 64"));
  options.tile = 64;
  EXPECT_EQ(CheckOptions(options, 1), absl::OkStatus());
  options.selection = Selection::kCausal;
  EXPECT_THAT(std::string(CheckOptions(options, 1).message()),
              HasSubstr("attention.selection: causal does not go with"));
  options.selection = Selection::kFull;
  options.density = 0;
  EXPECT_THAT(std::string(CheckOptions(options, 1).message()),
              HasSubstr("attention.density must lie in (0, 1]; got 0"));
  options.density = 0.1;
  options.group_queries = 16;
  EXPECT_EQ(CheckOptions(options, 1), absl::OkStatus());
  options.group_queries = 32;
  EXPECT_THAT(std::string(CheckOptions(options, 1).message()),
              HasSubstr("attention.group_queries is 32; allowed are 64 and 16"));
  options.group_queries = 64;
  options.group_heads = 2;
  EXPECT_EQ(CheckOptions(options, 1), absl::OkStatus());
  options.group_heads = 4;
  EXPECT_THAT(std::string(CheckOptions(options, 1).message()),
              HasSubstr("attention.group_heads is 4; allowed are 1, 2 and 0"));
}

TEST(CheckTest, CausalSelectionGoesWithNothingThatLooksAhead) {
  AttentionOptions options{.pattern = Pattern::kBlockTopK,
                           .selection = Selection::kCausal,
                           .block_size = 64,
                           .topk_blocks = 2,
                           .tile = 64,
                           .stripe = 64};
  EXPECT_EQ(CheckOptions(options, 1), absl::OkStatus());
  options.dense_below = 100;
  EXPECT_THAT(std::string(CheckOptions(options, 1).message()),
              HasSubstr("selection: causal does not go with attention.dense_below"));
  options.dense_below = 0;
  options.balance.anchor = kernels::Anchor::kMean;
  EXPECT_THAT(std::string(CheckOptions(options, 1).message()),
              HasSubstr("selection: causal does not go with attention.balance.anchor"));
}

TEST(StripeTest, BlocksOfMobaHaveOneOwnerWhereEachRankHasSeveral) {
  const auto stripe = DefinitionOf(Pattern::kMoba).stripe_on_gpus;
  AttentionOptions options{.pattern = Pattern::kMoba, .block_size = 1024, .topk_blocks = 8};
  EXPECT_EQ(stripe(options, 131072, 16), 1024);
  EXPECT_EQ(stripe(options, 131072, 32), 128) << "four stripes a rank";
  EXPECT_EQ(stripe(options, 131072 - 2048, 4), 128) << "does not divide";
  options.topk_blocks = 100;  // tiles are visited whole
  EXPECT_EQ(stripe(options, 131072, 4), 128);
}

// Where GPUs visit tiles whole, a tile's queries together are taken to keep twice as many blocks as
// one of them.
TEST(SampleTest, MobaIsPredictedByWhatAQueryKeeps) {
  AttentionOptions options{
      .pattern = Pattern::kMoba, .block_size = 128, .topk_blocks = 5, .tile = 64};
  const auto last_row = [&](int64_t blocks) {
    const ring::HeadPattern head = SampleLayer(options, false, blocks, 1, {}, 1)[0];
    return head.row_offsets[blocks] - head.row_offsets[blocks - 1];
  };
  for (const int64_t blocks : {32, 1024}) EXPECT_EQ(last_row(blocks), (4 + 1) * 2);
  options.topk_blocks = 12;  // 92 % of all: twice as many are all
  EXPECT_TRUE(SampleLayer(options, false, 32, 1, {}, 1)[0].row_offsets.empty());
  options.density = 0.05;
  EXPECT_EQ(last_row(1024), (24 + 1) * 2);
}

TEST(CheckTest, ADensityIsAShare) {
  AttentionOptions options{.pattern = Pattern::kVerticalSlash, .tile = 64, .stripe = 64};
  options.budget.density = 1.5;
  EXPECT_THAT(std::string(CheckOptions(options, 1).message()),
              HasSubstr("attention.density must lie in [0, 1]; got 1.5"));
}

TEST(SampleTest, HintsReplaceGuesses) {
  const AttentionOptions options{
      .pattern = Pattern::kVerticalSlash, .budget = {.max_slashes = 1024}, .tile = 64};
  const auto heads = SampleLayer(options, false, 8192, 64, {.slashes = 100, .verticals = 500}, 9);
  double slashes = 0;
  for (const ring::HeadPattern& head : heads) {
    slashes += std::count(head.diagonals.begin(), head.diagonals.end(), 1) / 64.0;
  }
  EXPECT_NEAR(slashes, 100, 10);
}

// A head lists a bounded number of tiles, each of which stands for several where rows see more: the
// sum is that of what rows see.
TEST(SampleTest, BlockTopKListsAreBoundedAndAddUp) {
  for (const auto& [blocks, topk] :
       {std::pair{512, 3}, {512, 100}, {32768, 8}, {32768, 4000}, {65536, 20}, {100'001, 8000}}) {
    const AttentionOptions options{
        .pattern = Pattern::kBlockTopK, .block_size = 256, .topk_blocks = topk, .tile = 64};
    const ring::HeadPattern head = SampleLayer(options, false, blocks, 1, {}, 1)[0];
    ASSERT_EQ(std::ssize(head.row_offsets), blocks + 1);
    EXPECT_LE(std::ssize(head.columns), int64_t{1} << 21);
    EXPECT_LE(std::ssize(head.columns),
              DefinitionOf(Pattern::kBlockTopK).listed_tiles(options, blocks));
    for (int64_t q = 0; q < blocks; ++q) {
      const int64_t own = q / 4, seen = std::min<int64_t>(own, topk) * 4 + q % 4 + 1;
      const auto listed = static_cast<double>(head.row_offsets[q + 1] - head.row_offsets[q]);
      ASSERT_NEAR(listed * head.row_weights[q], static_cast<double>(seen), 1e-6) << q;
      for (int64_t i = head.row_offsets[q]; i < head.row_offsets[q + 1]; ++i) {
        ASSERT_GE(head.columns[i], 0);
        ASSERT_LE(head.columns[i], q);
      }
    }
  }
  // Where every block is kept, that is what causal attention sees.
  const AttentionOptions all{
      .pattern = Pattern::kBlockTopK, .block_size = 256, .topk_blocks = 65536, .tile = 64};
  const ring::HeadPattern head = SampleLayer(all, false, 65536, 1, {}, 1)[0];
  EXPECT_TRUE(head.row_offsets.empty());
  EXPECT_EQ(std::count(head.diagonals.begin(), head.diagonals.end(), 1), 65536);
}

}  // namespace
}  // namespace ringleader::patterns
