// What is decided without looking at numbers: which queries estimate, which tiles a band holds, and
// which options and lengths are refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "kernels/masks/masks.h"
#include "kernels/reference/tiles/tile_lists.h"
#include "patterns/check_options.h"
#include "ring/band_tiles.h"
#include "worker/attention/runner/ring_runner.h"

namespace ringleader::attention {
namespace {

using kernels::LayoutKind;
using kernels::ShardLayout;
using ::testing::HasSubstr;

constexpr int64_t kTokens = 2048;
constexpr int kTile = 64;

TEST(EstimateQueriesTest, EachDocumentGetsItsShareAtItsEnd) {
  const auto choose = [](int64_t tokens, int64_t count, const std::vector<int64_t>& firsts) {
    const auto documents = patterns::MakeDocuments({.tokens = tokens}, firsts);
    return patterns::ChooseEstimateQueries(tokens, count, /*spread=*/false, documents->get());
  };
  using Positions = std::vector<int64_t>;
  EXPECT_EQ(choose(100, 3, {0}).positions, (Positions{97, 98, 99}));
  EXPECT_TRUE(choose(100, 3, {0}).starts.empty());
  EXPECT_EQ(choose(5, 9, {0}).positions, (Positions{0, 1, 2, 3, 4}));
  // A separator is passed over, but for the last document's, which the sequence cuts off.
  const patterns::EstimateQueries two = choose(100, 4, {0, 50});
  EXPECT_EQ(two.positions, (Positions{47, 48, 98, 99}));
  EXPECT_EQ(two.starts, (Positions{0, 0, 50, 50}));
  // The document of two tokens has no share by its size; it gets a query where there are enough for
  // all.
  EXPECT_EQ(choose(100, 4, {0, 50, 52}).positions, (Positions{48, 50, 98, 99}));
  EXPECT_EQ(choose(100, 2, {0, 50, 52}).positions, (Positions{48, 99}));
  // There are as many queries as tokens: all are chosen.
  EXPECT_EQ(choose(6, 6, {0, 1, 4}).positions, (Positions{0, 1, 2, 3, 4, 5}));
  for (int64_t count = 1; count <= 64; ++count) {
    const patterns::EstimateQueries many = choose(64, count, {0, 1, 2, 3, 30, 31, 63});
    EXPECT_EQ(static_cast<int64_t>(many.positions.size()), count);
    for (int64_t e = 0; e < count; ++e) {
      EXPECT_LE(many.starts[e], many.positions[e]);
      if (e > 0) {
        EXPECT_LT(many.positions[e - 1], many.positions[e]);
      }
    }
  }
}

TEST(EstimateQueriesTest, SpreadQueriesLieInAllPartsOfTheSequence) {
  const auto choose = [](int64_t tokens, int64_t count, const std::vector<int64_t>& firsts) {
    const auto documents = patterns::MakeDocuments({.tokens = tokens}, firsts);
    return patterns::ChooseEstimateQueries(tokens, count, /*spread=*/true, documents->get());
  };
  std::set<int64_t> places;  // in the parts
  const std::vector<int64_t> one = choose(6400, 64, {}).positions;
  for (int64_t part = 0; part < 64; ++part) {
    EXPECT_EQ(one[part] / 100, part);
    places.insert(one[part] % 100);
  }
  EXPECT_GT(places.size(), 50u);
  EXPECT_TRUE(choose(6400, 64, {}).starts.empty());
  // Those of documents know where their own starts, and none is of a separator.
  const std::vector<int64_t> firsts = {0, 3000, 3100, 5000};
  const patterns::EstimateQueries many = choose(6400, 256, firsts);
  ASSERT_EQ(many.positions.size(), 256u);
  EXPECT_TRUE(std::is_sorted(many.positions.begin(), many.positions.end()));
  for (size_t e = 0; e < many.positions.size(); ++e) {
    const auto after = std::upper_bound(firsts.begin(), firsts.end(), many.positions[e]);
    EXPECT_EQ(many.starts[e], *(after - 1));
    EXPECT_FALSE(std::binary_search(firsts.begin(), firsts.end(), many.positions[e] + 1));
  }
  // There are as many queries as tokens: each is chosen once.
  const std::vector<int64_t> all = choose(64, 256, {0, 1, 2, 30}).positions;
  EXPECT_EQ(std::set<int64_t>(all.begin(), all.end()).size(), all.size());
}

TEST(BandTilesTest, OfDocumentsTooCountsWhatTheListsHold) {
  const std::vector<int64_t> firsts = {0, 63, 64, 65, 700, 1280, 2000};
  for (const LayoutKind layout :
       {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
    for (const int64_t window : {0, 65, 300}) {
      for (int pair = 0; pair < 16; ++pair) {
        const ShardLayout query{
            .kind = layout, .ranks = 4, .rank = pair / 4, .stripe = 128, .tokens = kTokens};
        ShardLayout key = query;
        key.rank = pair % 4;
        const auto documents = patterns::MakeDocuments(query, firsts);
        ASSERT_TRUE(documents.ok()) << documents.status();
        const int32_t* const starts = (*documents)->local_starts.data();
        const auto lists = kernels::reference::TileLists::Build(
            {.pattern = window == 0 ? kernels::TilePattern::kCausal : kernels::TilePattern::kWindow,
             .tile = kTile,
             .window = window,
             .document_starts = starts},
            query, key, query.local_tokens(), key.local_tokens(), 1);
        ASSERT_TRUE(lists.ok()) << lists.status();
        EXPECT_EQ(ring::BandTiles(query, key, kTile, window, starts), lists->TotalTiles());
      }
    }
  }
}

TEST(VisibleTilesTest, CountsWhatTheListsHold) {
  const std::vector<int64_t> firsts = {0, 63, 64, 65, 700, 1280, 2000};
  const std::vector<int64_t> prefix_ends = {20, 64, 64, 400, 1280, 1280, 2048};
  using patterns::Mask;
  for (const LayoutKind layout :
       {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
    for (const Mask mask : {Mask::kFull, Mask::kPrefixLm, Mask::kBlockCausal}) {
      for (int trial = 0; trial < 32; ++trial) {
        const int64_t window = trial < 16 ? 0 : 65;
        const ShardLayout query{
            .kind = layout, .ranks = 4, .rank = trial / 4 % 4, .stripe = 128, .tokens = kTokens};
        ShardLayout key = query;
        key.rank = trial % 4;
        const auto rows = patterns::VisibleKeys(
            {.mask = mask, .block = 100, .prefix_ends = prefix_ends}, query, firsts, window);
        const auto lists = kernels::reference::TileLists::Build(
            {.pattern = kernels::TilePattern::kFull, .tile = kTile, .intervals = rows.data()},
            query, key, query.local_tokens(), key.local_tokens(), 1);
        ASSERT_TRUE(lists.ok()) << lists.status();
        EXPECT_EQ(ring::VisibleTiles(query, key, kTile, rows.data()), lists->TotalTiles());
      }
    }
  }
}

TEST(VisibleTilesTest, CountsTwoIntervals) {
  const std::vector<int32_t> documents = {0, 63, 64, 65, 700, 1280, 2000};
  for (const kernels::Mask& mask :
       {kernels::Mask{.kind = kernels::MaskKind::kSharedQuestion},
        kernels::Mask{.kind = kernels::MaskKind::kCausalBlockwise},
        kernels::Mask{.kind = kernels::MaskKind::kGlobalSliding, .window = 90}}) {
    const auto queries = kernels::IntervalsOf(mask, kTokens, documents);
    ASSERT_TRUE(queries.ok()) << queries.status();
    for (const LayoutKind layout :
         {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
      for (int pair = 0; pair < 16; ++pair) {
        const ShardLayout query{
            .kind = layout, .ranks = 4, .rank = pair / 4, .stripe = 128, .tokens = kTokens};
        ShardLayout key = query;
        key.rank = pair % 4;
        const auto listed = patterns::MakeListed(query, *queries);
        ASSERT_TRUE(listed.ok()) << listed.status();
        const auto lists = kernels::reference::TileLists::Build(
            {.pattern = kernels::TilePattern::kFull,
             .tile = kTile,
             .intervals = (*listed)->visible.data()},
            query, key, query.local_tokens(), key.local_tokens(), 1);
        ASSERT_TRUE(lists.ok()) << lists.status();
        EXPECT_EQ(ring::VisibleTiles(query, key, kTile, (*listed)->visible.data()),
                  lists->TotalTiles())
            << kernels::MaskName(mask.kind) << " " << pair;
      }
    }
  }
}

TEST(MakeListedTest, NamesTheQueryThatDoesNotFit) {
  const auto complaint = [](std::vector<kernels::KeyIntervals> queries) {
    return std::string(patterns::MakeListed({.tokens = 4}, queries).status().message());
  };
  const kernels::KeyIntervals all{0, 4, 4, 4};
  EXPECT_EQ(complaint({all, all, all, all}), "");
  EXPECT_THAT(complaint({all, all, all}), HasSubstr("listed for 3 of a sequence of 4 tokens"));
  for (const kernels::KeyIntervals& wrong :
       {kernels::KeyIntervals{0, 2, 3, 4}, kernels::KeyIntervals{0, 3, 2, 4},
        kernels::KeyIntervals{3, 0, 3, 4}, kernels::KeyIntervals{0, 3, 3, 5},
        kernels::KeyIntervals{-1, 3, 3, 4}}) {
    EXPECT_THAT(complaint({all, all, wrong, all}), HasSubstr("the query at 2 is to see"));
  }
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
        EXPECT_EQ(ring::BandTiles(query, key, kTile, window, nullptr), lists->TotalTiles());
      }
    }
  }
  EXPECT_EQ(
      ring::BandTiles(ShardLayout{.tokens = 777}, ShardLayout{.tokens = 777}, kTile, 0, nullptr),
      13 * 14 / 2);
}

TEST(CheckOptionsTest, ErrorsNameTheOption) {
  const auto message = [](const patterns::AttentionOptions& options, int ranks) {
    return std::string(patterns::CheckOptions(options, ranks).message());
  };
  EXPECT_EQ(message({.stripe = 128}, 1), "");
  EXPECT_NE(message({.tile = 96}, 1).find("attention.tile"), std::string::npos);
  EXPECT_NE(message({.stripe = 100}, 1).find("parallelism.stripe"), std::string::npos);
  EXPECT_NE(message({.stripe = 128}, 4).find("ring of 1 x 1"), std::string::npos);
  EXPECT_NE(message({.pattern = patterns::Pattern::kSlidingWindow, .stripe = 128}, 1)
                .find("attention.window"),
            std::string::npos);
  EXPECT_NE(message({.pattern = patterns::Pattern::kBlockTopK, .block_size = 200, .stripe = 128}, 1)
                .find("attention.block_size"),
            std::string::npos);
  EXPECT_NE(
      message(
          {.pattern = patterns::Pattern::kVerticalSlash, .estimate_queries = 999, .stripe = 128}, 1)
          .find("attention.estimate_queries"),
      std::string::npos);
  EXPECT_NE(message({.pattern = patterns::Pattern::kVerticalSlash,
                     .budget = {.slash_mass = 0.0},
                     .stripe = 128},
                    1)
                .find("slash_mass"),
            std::string::npos);
}

TEST(CheckLengthTest, SequencesMustDivideIntoWholeTiles) {
  patterns::AttentionOptions options{.tile = 64, .stripe = 128};
  EXPECT_TRUE(patterns::CheckLength(options, 1, 777).ok());
  EXPECT_TRUE(patterns::CheckLength(options, 4, 256).ok());
  EXPECT_FALSE(patterns::CheckLength(options, 4, 64).ok());
  options.layout = LayoutKind::kZigzag;
  EXPECT_TRUE(patterns::CheckLength(options, 4, 128).ok());
  EXPECT_FALSE(patterns::CheckLength(options, 4, 192).ok());
  options.layout = LayoutKind::kContiguous;
  EXPECT_TRUE(patterns::CheckLength(options, 4, 100).ok());
  options.pattern = patterns::Pattern::kVerticalSlash;
  EXPECT_FALSE(patterns::CheckLength(options, 4, 100).ok());
}

}  // namespace
}  // namespace ringleader::attention
