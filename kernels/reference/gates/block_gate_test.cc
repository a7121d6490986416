// Which blocks block top-k keeps where scores are equal or nearly so, and by which queries.
#include "kernels/reference/gates/block_gate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <random>
#include <utility>
#include <vector>

#include "kernels/reference/testing/masked_attention.h"
#include "kernels/reference/testing/sight.h"
#include "kernels/reference/tiles/tile_lists.h"

namespace ringleader::kernels::reference {
namespace {

using testing::Sight;
using testing::Tensor;

constexpr int kTile = 64, kHeads = 2, kHeadDim = 16;

std::vector<char> Select(const Tensor& q, const Tensor& k, int block_size, int topk,
                         bool first_query_gates = false, const SeenKeys& seen = {},
                         const MeanKeys& counted = {}, const int32_t* head_halves = nullptr) {
  Engine engine(1);
  std::vector<float> sums(TileCount(k.tokens, kTile) * k.heads * k.head_dim);
  TileKeySums(engine, k.view(), {.counted = counted, .tile = kTile, .sums = sums.data()});
  return SelectBlocks(engine, {.q = q.view(),
                               .query_layout = {.tokens = q.tokens},
                               .seen = seen,
                               .key_sums = sums.data(),
                               .counted = counted,
                               .kv_heads = k.heads,
                               .tile = kTile,
                               .block_size = block_size,
                               .topk_blocks = topk,
                               .head_halves = head_halves,
                               .first_query_gates = first_query_gates});
}

// 131,072 tokens whose keys are all alike but for one block, which is more by less than bf16 would
// tell: it is kept, and of the others even heads keep the earliest and odd heads the latest.
TEST(BlockGateTest, TiesOfLongSequencesFavourNeitherEnd) {
  constexpr int64_t kTokens = 131072, kBlock = 1024, kBlocks = kTokens / kBlock;
  constexpr int64_t kMore = 77;
  Tensor q(kTokens, kHeads, kHeadDim), k(kTokens, 1, kHeadDim);
  for (float& x : q.data) x = 1.0f;
  for (int64_t i = 0; i < kTokens; ++i) k.at(i, 0, 0) = i / kBlock == kMore ? 1.001f : 1.0f;
  const std::vector<char> selected = Select(q, k, kBlock, /*topk=*/3);
  const int64_t tiles = kTokens / kTile;
  for (int head = 0; head < kHeads; ++head) {
    std::vector<int64_t> kept;
    for (int64_t block = 0; block < kBlocks; ++block) {
      if (selected[((head + 1) * tiles - 1) * kBlocks + block] != 0) kept.push_back(block);
    }
    const std::vector<int64_t> early = {0, 1, kMore, kBlocks - 1},
                               late = {kMore, kBlocks - 3, kBlocks - 2, kBlocks - 1};
    EXPECT_EQ(kept, head == 0 ? early : late);
  }
}

// How many a head keeps besides its tiles' own.
struct HeadBudget {
  std::vector<int32_t> halves;  // none: of all heads alike
  int64_t kept[kHeads];
};

// Of the blocks of which a tile sees a key, the best by their means' products in fp64, whatever the
// mask; the tile's own beside them. Under the causal one a mean is of one document's keys, under
// others of none of padding. Heads may have half more than others.
TEST(BlockGateTest, TheBestOfWhatAMaskShowsAreKept) {
  constexpr int64_t kTokens = 1000, kTopK = 3;
  const HeadBudget budgets[] = {{{}, {3, 3}}, {{2, 2}, {3, 3}}, {{1, 3}, {2, 4}}, {{3, 1}, {4, 2}}};
  std::mt19937 random(5);
  const Tensor q = testing::RandomTensor(kTokens, kHeads, kHeadDim, random),
               k = testing::RandomTensor(kTokens, 1, kHeadDim, random);
  for (const Sight::Mask mask : Sight::kMasks) {
    for (const std::vector<int64_t>& firsts : {std::vector<int64_t>{}, {0, 130, 700, 701}}) {
      for (const int block_size : {kTile, 2 * kTile}) {
        const Sight sight(mask, kTokens, firsts);
        const testing::RankSight whole = sight.Of({.tokens = kTokens});
        std::vector<std::vector<char>> selected;  // by budget
        for (const HeadBudget& budget : budgets) {
          selected.push_back(Select(q, k, block_size, kTopK, /*first_query_gates=*/false,
                                    whole.seen(), whole.counted(),
                                    budget.halves.empty() ? nullptr : budget.halves.data()));
        }
        const int64_t tiles = TileCount(kTokens, kTile), blocks = TileCount(kTokens, block_size);
        for (int64_t row = 0; row < kHeads * tiles; ++row) {
          const int64_t first = row % tiles * kTile, end = std::min(first + kTile, kTokens);
          std::vector<std::pair<double, int64_t>> scores;  // the best first
          for (int64_t block = 0; block < blocks; ++block) {
            const bool is_own = block == first / block_size;
            if (is_own || !sight.Meets(first, end - 1, block, block_size)) {
              for (const std::vector<char>& of_budget : selected) {
                EXPECT_EQ(of_budget[row * blocks + block], is_own) << row << " " << block;
              }
              continue;
            }
            int64_t behind = std::min((block + 1) * block_size, kTokens);
            int64_t counted = block * block_size;  // the first key that is
            if (mask == Sight::Mask::kCausal) {
              counted = std::max(counted, sight.Begin(first));
            } else if (counted < sight.content()) {
              behind = std::min(behind, sight.content());
            }
            double score = 0.0;
            for (int64_t i = first; i < end; ++i) {
              for (int64_t j = counted; j < behind; ++j) {
                for (int x = 0; x < kHeadDim; ++x) {
                  score +=
                      double{q.at(i, static_cast<int>(row / tiles), x)} * double{k.at(j, 0, x)};
                }
              }
            }
            scores.emplace_back(-score / static_cast<double>(behind - counted), block);
          }
          std::ranges::sort(scores);
          for (size_t budget = 0; budget < std::size(budgets); ++budget) {
            for (int64_t i = 0; i < std::ssize(scores); ++i) {
              EXPECT_EQ(selected[budget][row * blocks + scores[i].second],
                        i < budgets[budget].kept[row / tiles])
                  << static_cast<int>(mask) << " " << row << " " << scores[i].second << ", budget "
                  << budget;
            }
          }
        }
      }
    }
  }
}

// The first query of the last tile looks for block 1, all others of it for block 2.
TEST(BlockGateTest, TheFirstQueryOfATileMayChooseAlone) {
  constexpr int64_t kTokens = 6 * kTile, kBlocks = 6;
  Tensor q(kTokens, kHeads, kHeadDim), k(kTokens, 1, kHeadDim);
  for (int64_t i = 0; i < kTokens; ++i) {
    k.at(i, 0, static_cast<int>(i / kTile)) = 1.0f;
    for (int head = 0; head < kHeads; ++head) q.at(i, head, i == 5 * kTile ? 1 : 2) = 1.0f;
  }
  const auto keeps = [&](bool first_query_gates, int64_t block) {
    return Select(q, k, kTile, /*topk=*/1, first_query_gates)[5 * kBlocks + block] != 0;
  };
  EXPECT_TRUE(keeps(false, 2));
  EXPECT_FALSE(keeps(false, 1));
  EXPECT_TRUE(keeps(true, 1));
  EXPECT_FALSE(keeps(true, 2));
  EXPECT_TRUE(keeps(true, 5)) << "its own";
}

}  // namespace
}  // namespace ringleader::kernels::reference
