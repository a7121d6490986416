// Patterns that choose blocks, under masks that are not causal: queries choose among the keys that
// they see, alike on any number of ranks, and attend to what they chose.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "kernels/reference/testing/masked_attention.h"
#include "kernels/reference/testing/sight.h"
#include "worker/attention/testing/engine_test.h"

namespace ringleader::attention {
namespace {

using kernels::BlockWords;
using kernels::LayoutKind;
using kernels::ShardLayout;
using kernels::reference::testing::RelativeError;
using kernels::reference::testing::Sight;
using patterns::Mask;
using testing::AttentionEngineTest;
using testing::RankResult;

struct MaskedPattern {
  std::string name;
  patterns::AttentionOptions options;
};

std::vector<MaskedPattern> Patterns() {
  using patterns::Pattern;
  return {
      {"BlockTopK", {.pattern = Pattern::kBlockTopK, .block_size = 128, .topk_blocks = 3}},
      {"XAttention", {.pattern = Pattern::kXAttention, .stride = 32, .threshold = 0.4}},
      {"XAttentionShare", {.pattern = Pattern::kXAttention, .threshold = 1.0, .density = 0.2}},
      {"AdaSpa", {.pattern = Pattern::kAdaSpa, .adapt_heads = true, .density = 0.2}},
      {"FixedBlocks", {.pattern = Pattern::kFixedBlocks, .local_blocks = 2, .stride_blocks = 5}}};
}

class MaskedChoicesTest : public AttentionEngineTest,
                          public ::testing::WithParamInterface<MaskedPattern> {
 protected:
  static constexpr int64_t kTiles = kTokens / kTile;

  static Sight SightOf(Mask mask, const std::vector<int64_t>& documents) {
    return Sight(mask == Mask::kFull       ? Sight::Mask::kFull
                 : mask == Mask::kPrefixLm ? Sight::Mask::kPrefix
                                           : Sight::Mask::kBlocks,
                 kTokens, documents);
  }
  // Where Sight's prefixes end.
  static std::vector<int64_t> PrefixEnds(Mask mask, std::vector<int64_t> firsts) {
    if (mask != Mask::kPrefixLm) return {};
    if (firsts.empty()) firsts = {0};
    firsts.push_back(kTokens);
    std::vector<int64_t> ends;
    for (size_t i = 0; i + 1 < firsts.size(); ++i) {
      ends.push_back(firsts[i] + (firsts[i + 1] - firsts[i]) / 3);
    }
    return ends;
  }
  // Attention to what is `visible`, in fp64.
  std::vector<double> Attended(const kernels::reference::testing::Visible& visible) const {
    const Tensor none(0, kHeads, kHeadDim);
    return kernels::reference::testing::ComputeMaskedAttention(
               q_, k_, v_, none, 1.0f / std::sqrt(static_cast<float>(kHeadDim)), visible)
        .out;
  }
  // The rows of the choice that a rank made are those of one rank.
  static void ExpectRowsOf(const RankResult& one, const RankResult& of_rank,
                           const ShardLayout& layout) {
    const int64_t words = BlockWords(static_cast<int32_t>(kTokens / one.index.block_size)),
                  local_tiles = kTiles / 4;
    for (int64_t i = 0; i < kHeads * local_tiles * words; ++i) {
      const int64_t row = i / words / local_tiles * kTiles +
                          layout.Position(i / words % local_tiles * kTile) / kTile;
      ASSERT_EQ(of_rank.index.chosen.at(i), one.index.chosen.at(row * words + i % words));
    }
  }
  // Whether tile `a` of a head chose the block that holds the key.
  static bool HasChosen(const RankResult& one, int64_t head, int64_t a, int64_t key) {
    const int64_t block_size = one.index.block_size,
                  words = BlockWords(static_cast<int32_t>(kTokens / block_size));
    const int64_t block = key / block_size;
    const uint32_t word = one.index.chosen.at((head * kTiles + a) * words + block / 32);
    return (word >> block % 32 & 1) != 0;
  }
};

TEST_P(MaskedChoicesTest, AreAmongWhatTheMaskShowsAndAlikeOnRanks) {
  for (const Mask mask : {Mask::kFull, Mask::kPrefixLm, Mask::kBlockCausal}) {
    for (const std::vector<int64_t>& documents : {std::vector<int64_t>{}, {0, 70, 71, 640, 1500}}) {
      SCOPED_TRACE(std::string(MaskName(mask)) + (documents.empty() ? "" : ", documents"));
      patterns::AttentionOptions options = GetParam().options;
      options.tile = kTile;
      options.mask = mask;
      options.mask_block = 100;
      const Sight sight = SightOf(mask, documents);
      const std::vector<int64_t> prefix_ends = PrefixEnds(mask, documents);
      const RankResult one = Run(options, documents, /*dense=*/false, prefix_ends)[0];
      EXPECT_LT(RelativeError(one.out, Attended([&](int head, int64_t i, int64_t j) {
                                return sight.Sees(i, j) && HasChosen(one, head, i / kTile, j);
                              })),
                1e-5);
      uint64_t tiles = 0;
      int64_t ahead = 0;  // that lie behind the queries' own block
      for (int64_t row = 0; row < kHeads * kTiles; ++row) {
        const int64_t a = row % kTiles, first = a * kTile;
        EXPECT_TRUE(HasChosen(one, row / kTiles, a, first)) << "its own block";
        for (int64_t b = 0; b < kTiles; ++b) {
          if (!HasChosen(one, row / kTiles, a, b * kTile)) continue;
          const int64_t block = b * kTile / one.index.block_size;
          EXPECT_TRUE(sight.Meets(first, first + kTile - 1, block, one.index.block_size));
          if (!sight.Meets(first, first + kTile - 1, b, kTile)) continue;
          ++tiles;
          ahead += b > a;
        }
      }
      // Of a mask's block little is ahead, which a small share may leave.
      if (mask != Mask::kBlockCausal) {
        EXPECT_GT(ahead, 0);
      }
      EXPECT_EQ(one.stats.layers.at(1).TotalTiles(), tiles);
      for (const LayoutKind layout :
           {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
        options.layout = layout;
        options.ring.inner = 4;
        const std::vector<RankResult> results =
            Run(options, documents, /*dense=*/false, prefix_ends);
        uint64_t of_ranks = 0;
        for (int rank = 0; rank < 4; ++rank) {
          ExpectRowsOf(
              one, results[rank],
              {.kind = layout, .ranks = 4, .rank = rank, .stripe = kTile, .tokens = kTokens});
          of_ranks += results[rank].stats.layers.at(1).TotalTiles();
          EXPECT_EQ(results[rank].stats.layers.at(1).recall, one.stats.layers.at(1).recall);
        }
        EXPECT_EQ(of_ranks, tiles);
      }
      options.layout = LayoutKind::kStriped;
      options.ring.inner = 1;
    }
  }
}

// A budget of all that a tile sees is the mask itself, and no more.
TEST_P(MaskedChoicesTest, WholeBudgetsAreTheMask) {
  for (const Mask mask : {Mask::kFull, Mask::kPrefixLm, Mask::kBlockCausal}) {
    SCOPED_TRACE(std::string(MaskName(mask)));
    const std::vector<int64_t> documents = {0, 70, 71, 640, 1500};
    patterns::AttentionOptions options = GetParam().options;
    options.tile = kTile;
    options.mask = mask;
    options.mask_block = 100;
    options.threshold = 1.0;
    options.density = options.pattern == patterns::Pattern::kAdaSpa ? 1.0 : 0.0;
    options.adapt_heads = false;
    options.topk_blocks = options.local_blocks = kTokens;
    const std::vector<int64_t> prefix_ends = PrefixEnds(mask, documents);
    const RankResult all = Run(options, documents, /*dense=*/false, prefix_ends)[0],
                     dense = Run(options, documents, /*dense=*/true, prefix_ends)[0];
    EXPECT_EQ(all.stats.layers.at(1).TotalTiles(), dense.stats.layers.at(1).TotalTiles());
    EXPECT_EQ(all.out, dense.out);
  }
}

INSTANTIATE_TEST_SUITE_P(Patterns, MaskedChoicesTest, ::testing::ValuesIn(Patterns()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace ringleader::attention
