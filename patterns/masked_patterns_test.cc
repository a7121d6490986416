// Patterns under other masks than the causal one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "patterns/check_options.h"
#include "patterns/kinds/chosen_blocks.h"
#include "patterns/pattern.h"
#include "ringleader/kernels/block_choice.h"

namespace ringleader::patterns {
namespace {

using ::testing::HasSubstr;

TEST(MaskTest, PatternsThatCanOnlyChooseEarlierKeysRefuseOthersByName) {
  for (const PatternDefinition* definition : Definitions()) {
    AttentionOptions options{
        .pattern = definition->pattern, .window = 100, .density = 0.1, .tile = 64, .stripe = 64};
    for (const Mask mask : {Mask::kFull, Mask::kPrefixLm, Mask::kBlockCausal}) {
      options.mask = mask;
      options.mask_block = 1;
      const std::string message(CheckOptions(options, 1).message());
      if (definition->takes_masks) {
        EXPECT_EQ(message, "");
        continue;
      }
      EXPECT_EQ(message,
                "attention.mask: " + std::string(MaskName(mask)) +
                    " does not go with attention.pattern: " + std::string(definition->name) +
                    ", whose choice is of earlier keys by construction; give causal, or one of "
                    "the patterns dense, sliding_window, block_topk, xattention, adaspa, "
                    "fixed_blocks");
    }
  }
}

TEST(MaskTest, OptionsThatDoNotFitItAreNamed) {
  AttentionOptions options{.mask = Mask::kBlockCausal, .tile = 64, .stripe = 64};
  EXPECT_THAT(std::string(CheckOptions(options, 1).message()),
              HasSubstr("attention.mask_block is 0"));
  options.mask = Mask::kFull;
  options.probe_every = 3;
  EXPECT_THAT(std::string(CheckOptions(options, 1).message()),
              HasSubstr("attention.probe_every: a probe compares with causal attention"));
  options.probe_every = 0;
  options.by_documents = true;
  EXPECT_THAT(std::string(CheckOptions(options, 1).message()),
              HasSubstr("parallelism.layout: documents goes with attention.mask: causal alone"));
}

// What the planner is told is what the tiles of one document are, rank by rank in every layout; of
// blocks, which stripes may meet in step, all ranks together.
TEST(MaskTest, ThePlannersTilesAreThoseOfAMask) {
  constexpr int64_t kTokens = 4096;
  using kernels::LayoutKind;
  for (const Mask mask : {Mask::kFull, Mask::kPrefixLm, Mask::kBlockCausal}) {
    for (const int64_t window : {0, 1, 64, 65, 300}) {
      if (mask == Mask::kBlockCausal && window > 0) continue;  // a window cuts blocks anywhere
      const AttentionOptions options{
          .pattern = window > 0 ? Pattern::kSlidingWindow : Pattern::kDense,
          .mask = mask,
          .mask_block = 256,
          .window = window,
          .tile = 64};
      const auto head = SampleLayer(options, false, kTokens / 64, 1, {}, 1)[0];
      for (const LayoutKind kind :
           {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
        const kernels::ShardLayout layout{
            .kind = kind, .ranks = 4, .stripe = 256, .tokens = kTokens};
        ring::TileLoads loads(4);
        loads.AddHead(head, layout, 64, 1.0);
        const std::vector<int64_t> firsts = {0}, no_prefix = {0};
        double told = 0, visited = 0;
        for (int pair = 0; pair < 16; ++pair) {
          kernels::ShardLayout mine = layout, owner = layout;
          mine.rank = pair / 4;
          owner.rank = pair % 4;
          const auto rows = VisibleKeys({.mask = mask, .block = 256, .prefix_ends = no_prefix},
                                        mine, firsts, window);
          const auto tiles = static_cast<double>(ring::VisibleTiles(mine, owner, 64, rows.data()));
          told += loads.of(mine.rank, owner.rank);
          visited += tiles;
          if (mask == Mask::kBlockCausal) continue;
          EXPECT_NEAR(loads.of(mine.rank, owner.rank), tiles, 1e-9)
              << MaskName(mask) << " " << window << " " << static_cast<int>(kind) << " " << pair;
        }
        EXPECT_NEAR(told, visited, 1e-6) << MaskName(mask);
      }
    }
  }
}

// What is drawn for the planner of patterns that choose: own blocks, and as many others of what the
// mask shows as the budget says.
TEST(MaskTest, SampledChoicesAreOfWhatTheMaskShows) {
  constexpr int64_t kBlocks = 96;
  for (const Mask mask : {Mask::kCausal, Mask::kFull, Mask::kPrefixLm, Mask::kBlockCausal}) {
    SCOPED_TRACE(std::string(MaskName(mask)));
    AttentionOptions options{.mask = mask, .mask_block = 640, .density = 0.25, .tile = 64};
    int64_t ahead = 0;
    for (const Pattern pattern : {Pattern::kBlockTopK, Pattern::kXAttention, Pattern::kAdaSpa}) {
      options.pattern = pattern;
      options.threshold = 1.0;
      options.block_size = 256;
      options.topk_blocks = 5;
      const auto head = SampleLayer(options, false, kBlocks, 1, {}, 1)[0];
      for (int64_t q = 0; q < kBlocks; ++q) {
        const int64_t end = SeenTiles(options, kBlocks, q);
        EXPECT_EQ(end, mask == Mask::kFull          ? kBlocks
                       : mask == Mask::kBlockCausal ? std::min(kBlocks, (q / 10 + 1) * 10)
                                                    : q + 1);
        std::vector<int64_t> row(head.columns.begin() + head.row_offsets[q],
                                 head.columns.begin() + head.row_offsets[q + 1]);
        EXPECT_NE(std::ranges::find(row, q), row.end()) << "its own tile";
        std::ranges::sort(row);
        EXPECT_EQ(std::ranges::adjacent_find(row), row.end()) << "each once";
        EXPECT_LT(row.back(), end);
        const int64_t most = pattern == Pattern::kBlockTopK ? 6 * 4 : 1 + (end + 3) / 4;
        EXPECT_LE(std::ssize(row), std::max<int64_t>(2, most)) << q;
        EXPECT_GE(std::ssize(row), std::min(end, pattern == Pattern::kBlockTopK ? 5 * 4 : end / 4));
        ahead += std::ranges::count_if(row, [&](int64_t k) { return k > q; });
      }
    }
    EXPECT_EQ(ahead > 0, mask == Mask::kFull || mask == Mask::kBlockCausal);
    options.pattern = Pattern::kBlockTopK;
    options.topk_blocks = 1000;  // all
    const auto all = SampleLayer(options, false, kBlocks, 1, {}, 1)[0];
    EXPECT_TRUE(all.row_offsets.empty());
    EXPECT_EQ(all.ahead, Visible(options, kBlocks, kBlocks).ahead);
  }
}

TEST(MaskTest, ATilesFirstQueryChoosesAloneUnderTheCausalMask) {
  AttentionOptions options{.pattern = Pattern::kBlockTopK,
                           .mask = Mask::kPrefixLm,
                           .selection = Selection::kCausal,
                           .tile = 64,
                           .stripe = 64};
  EXPECT_THAT(std::string(CheckOptions(options, 1).message()),
              HasSubstr("attention.selection: causal does not go with attention.mask: prefix_lm"));
  options.pattern = Pattern::kSlidingWindow;
  options.window = 100;
  EXPECT_TRUE(CheckOptions(options, 1).ok());
}

TEST(MaskTest, PrefixesLieInTheirDocuments) {
  const std::vector<int64_t> firsts = {0, 10};
  const auto message = [&](std::vector<int64_t> ends) {
    return std::string(CheckPrefixes(firsts, 20, ends).message());
  };
  EXPECT_EQ(message({0, 20}), "");
  EXPECT_EQ(message({10, 10}), "");
  EXPECT_THAT(message({10}), HasSubstr("1 prefixes of 2 documents"));
  EXPECT_THAT(message({11, 10}), HasSubstr("document 0 ends at 11, the document is [0, 10)"));
  EXPECT_THAT(message({3, 9}), HasSubstr("document 1 ends at 9, the document is [10, 20)"));
}

}  // namespace
}  // namespace ringleader::patterns
