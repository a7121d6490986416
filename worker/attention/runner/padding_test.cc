// The padding that fills a micro-batch up, whose length depends on the number of ranks and on the
// layout, has no say in what the content attends to.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "patterns/pattern.h"
#include "worker/attention/testing/forward_on_ranks.h"

namespace ringleader::attention {
namespace {

using kernels::reference::testing::Tensor;
using patterns::AttentionOptions;
using patterns::Mask;
using patterns::Pattern;

constexpr int kHeads = 4, kKvHeads = 2, kHeadDim = 128, kTile = 64;
constexpr int64_t kContent = 1000;

// In the content all queries of the upper half of the heads look for ten keys; in the padding these
// heads look for nothing, and the others' logits are large. So what heads keep of their mass, the
// energies of dimensions and the scales are other ones with the padding than without. `padding`: a
// factor of what it holds.
Tensor Draw(int64_t tokens, int heads, unsigned seed, float padding) {
  Tensor x(tokens, heads, kHeadDim);
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (int64_t token = 0; token < tokens; ++token) {
    for (int head = 0; head < heads; ++head) {
      const bool looks = 2 * head >= heads, is_content = token < kContent;
      const bool is_looked_for = heads == kHeads || (token >= 130 && token < 140);
      for (int dim = 0; dim < kHeadDim; ++dim) {
        float& value = x.data[(token * heads + head) * kHeadDim + dim];
        value = (is_content ? 0.5f : padding * (looks ? 0.05f : 9.0f)) * normal(random);
        if (is_content && looks && is_looked_for && dim >= 40) value += heads == kHeads ? 1 : 2;
      }
    }
  }
  return x;
}

// The rows of the content.
std::vector<float> Content(const AttentionOptions& options, int64_t tokens, float padding = 1.0f) {
  const std::vector<int64_t> documents = {0, kContent};
  std::vector<float> rows(kContent * kHeads * kHeadDim);
  testing::ForwardOnRanks(
      options, /*layer=*/0, Draw(tokens, kHeads, 1, padding), Draw(tokens, kKvHeads, 2, padding),
      Draw(tokens, kKvHeads, 3, padding),
      [&](RingRunner& runner) {
        const std::vector<int64_t> prefix_ends = {300, kContent};
        const bool has_prefixes = options.mask == Mask::kPrefixLm;
        ASSERT_TRUE(runner
                        .SetDocuments(tokens, documents, tokens - kContent,
                                      has_prefixes ? prefix_ends : std::vector<int64_t>())
                        .ok());
      },
      [&](const auto& rank) {
        const kernels::ShardLayout layout =
            patterns::LayoutOf(options, options.ring.ranks(), rank.rank, rank.out.tokens);
        for (int64_t i = 0; i < rank.out.tokens; ++i) {
          const int64_t position = layout.Position(i);
          if (position >= kContent) continue;
          std::copy_n(rank.out.data.begin() + i * kHeads * kHeadDim, kHeads * kHeadDim,
                      rows.begin() + position * kHeads * kHeadDim);
        }
      });
  return rows;
}

struct Setting {
  Pattern pattern;
  Mask mask = Mask::kCausal;
  int group_queries = 64, group_heads = 1;
};

class PaddingTest : public ::testing::TestWithParam<Setting> {
 protected:
  static AttentionOptions Options(int ranks) {
    const Pattern pattern = GetParam().pattern;
    return {.pattern = pattern,
            .mask = GetParam().mask,
            .mask_block = 300,
            .budget = {.vertical_mass = 0.6, .slash_mass = 0.5},
            .adapt_heads = pattern == Pattern::kAdaSpa,
            .window = 300,
            .block_size = kTile,
            .topk_blocks = 2,
            .threshold = 0.5,
            .density = pattern == Pattern::kVerticalSlash ? 0.0 : 0.4,
            .sequence_length = 2048,
            .group_queries = GetParam().group_queries,
            .group_heads = GetParam().group_heads,
            .tile = kTile,
            .layout = kernels::LayoutKind::kStriped,
            .stripe = kTile,
            .ring = {.inner = ranks}};
  }
};

float MostApart(const std::vector<float>& a, const std::vector<float>& b) {
  float most = 0;
  for (size_t i = 0; i < a.size(); ++i) most = std::max(most, std::abs(a[i] - b[i]));
  return most;
}

TEST_P(PaddingTest, HasNoSay) {
  const std::vector<float> alone = Content(Options(1), 1024);
  for (const auto& [ranks, tokens] :
       {std::pair{1, int64_t{1536}}, {8, int64_t{1024}}, {8, int64_t{2048}}}) {
    EXPECT_LT(MostApart(Content(Options(ranks), tokens), alone), 1e-4f)
        << ranks << " ranks, " << tokens << " tokens";
  }
}

// Nor in the tile that the content ends in: however long it is there, a whole group of 16 or less,
// and whatever it holds.
using OddPaddingTest = PaddingTest;
TEST_P(OddPaddingTest, HasNoSay) {
  AttentionOptions options = Options(1);
  if (options.pattern == Pattern::kXAttention) {
    options.threshold = 0.9;
    options.density = 0;
  }
  const std::vector<float> alone = Content(options, 1024);
  for (const int64_t tokens : {1003, 1008}) {
    EXPECT_LT(MostApart(Content(options, tokens), alone), 1e-4f) << tokens << " tokens";
  }
  EXPECT_LT(MostApart(Content(options, 1024, /*padding=*/-30.0f), alone), 1e-4f);
}
INSTANTIATE_TEST_SUITE_P(
    Patterns, OddPaddingTest,
    ::testing::Values(Setting{.pattern = Pattern::kKeyGroups},
                      Setting{.pattern = Pattern::kKeyGroups, .group_queries = 16},
                      Setting{.pattern = Pattern::kKeyGroups, .group_heads = 2},
                      Setting{.pattern = Pattern::kBlockTopK},
                      Setting{.pattern = Pattern::kXAttention},
                      Setting{.pattern = Pattern::kAdaSpa}),
    [](const auto& info) {
      return std::string(patterns::DefinitionOf(info.param.pattern).name) + "_" +
             std::to_string(info.param.group_queries) + "_" +
             std::to_string(info.param.group_heads);
    });

std::vector<Setting> Settings() {
  std::vector<Setting> settings = {{.pattern = Pattern::kKeyGroups, .group_queries = 16}};
  for (const Pattern pattern :
       {Pattern::kSlidingWindow, Pattern::kVerticalSlash, Pattern::kBlockTopK, Pattern::kMoba,
        Pattern::kXAttention, Pattern::kKeyGroups, Pattern::kAdaSpa}) {
    settings.push_back({.pattern = pattern});
    if (!patterns::DefinitionOf(pattern).takes_masks) continue;
    for (const Mask mask : {Mask::kFull, Mask::kPrefixLm, Mask::kBlockCausal}) {
      settings.push_back({.pattern = pattern, .mask = mask});
    }
  }
  return settings;
}

INSTANTIATE_TEST_SUITE_P(Patterns, PaddingTest, ::testing::ValuesIn(Settings()),
                         [](const auto& info) {
                           const std::string mask(patterns::MaskName(info.param.mask));
                           const auto& pattern = patterns::DefinitionOf(info.param.pattern);
                           const bool few = info.param.group_queries < 64;
                           return std::string(pattern.name) + (few ? "_few_" : "_") + mask;
                         });

}  // namespace
}  // namespace ringleader::attention
