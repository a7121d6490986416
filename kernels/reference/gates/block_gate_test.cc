// Which blocks block top-k keeps where scores are equal or nearly so, and by which queries.
#include "kernels/reference/gates/block_gate.h"

#include <gtest/gtest.h>

#include <vector>

#include "kernels/reference/testing/masked_attention.h"
#include "kernels/reference/tiles/tile_lists.h"

namespace ringleader::kernels::reference {
namespace {

using testing::Tensor;

constexpr int kTile = 64, kHeads = 2, kHeadDim = 16;

std::vector<char> Select(const Tensor& q, const Tensor& k, int block_size, int topk,
                         bool first_query_gates = false) {
  Engine engine(1);
  std::vector<float> sums(TileCount(k.tokens, kTile) * k.heads * k.head_dim);
  TileKeySums(engine, k.view(), kTile, sums.data());
  return SelectBlocks(engine, {.q = q.view(),
                               .query_layout = {.tokens = q.tokens},
                               .key_sums = sums.data(),
                               .kv_heads = k.heads,
                               .tile = kTile,
                               .block_size = block_size,
                               .topk_blocks = topk,
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
