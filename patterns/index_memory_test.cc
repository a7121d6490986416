// What estimates of memory say that choices take.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "patterns/check_options.h"
#include "patterns/pattern.h"
#include "ringleader/kernels/block_choice.h"

namespace ringleader::patterns {
namespace {

// What a choice takes is not left out because a definition does not say it.
TEST(IndexMemoryTest, EveryPatternThatChoosesSaysWhatItTakes) {
  const IndexShape shape{.tokens = 1048576,
                         .ranks = 4,
                         .heads = 16,
                         .kv_heads = 2,
                         .head_dim = 128,
                         .element_bytes = 2};
  for (const PatternDefinition* definition : Definitions()) {
    if (definition->is_known_before_data() && definition->pattern != Pattern::kFixedBlocks)
      continue;
    EXPECT_NE(definition->index_memory, nullptr) << definition->name;
  }
  constexpr int64_t kTiles = 262144 / 64, kBlocks = 16384;  // of a rank, of the sequence
  AttentionOptions options{.pattern = Pattern::kXAttention, .tile = 64};
  // Without a share a tile may keep every block: lists name all pairs, in both directions.
  EXPECT_EQ(IndexMemoryOf(options, shape, 36).kept, int64_t{36} * 16 * kTiles * (kBlocks / 8));
  EXPECT_EQ(IndexMemoryOf(options, shape, 36).working, 2 * 16 * kTiles * kTiles * 4);
  // With one the keys of the whole sequence take more, which lie twice in memory.
  options.density = 0.01;
  EXPECT_EQ(IndexMemoryOf(options, shape, 36).working, int64_t{2} * 1048576 * 2 * 128 * 2);
  options = {.pattern = Pattern::kBlockTopK, .block_size = 512, .topk_blocks = 8, .tile = 64};
  EXPECT_EQ(IndexMemoryOf(options, shape, 36).kept, int64_t{36} * 16 * kTiles * (2048 / 8));
  EXPECT_EQ(IndexMemoryOf(options, shape, 36).working, 2 * 16 * kTiles * 9 * 8 * 4);
  // A tenth of the share are columns, whose keys and values wait for backward in each layer.
  options = {.pattern = Pattern::kVerticalSlash, .select = Select::kTopK, .tile = 64};
  options.budget.density = 0.2;
  const int64_t columns = 16 * std::llround(0.1 * 0.2 * 1048576);
  EXPECT_EQ(IndexMemoryOf(options, shape, 36).kept,
            36 * (columns * (8 + 2 * 128 * 2) + 16 * (kBlocks / 64) * 8));
  EXPECT_EQ(IndexMemoryOf(options, shape, 36).working, 2 * columns * 128 * 4);
}

TEST(IndexMemoryTest, CountsListsOfSparseLayersAndGatheredKeys) {
  AttentionOptions options{
      .pattern = Pattern::kKeyGroups, .dense_layers = {0, 5}, .density = 0.1, .tile = 64};
  IndexShape shape{.tokens = 131072,
                   .ranks = 4,
                   .heads = 16,
                   .kv_heads = 2,
                   .head_dim = 128,
                   .element_bytes = 2};
  const IndexMemory memory = IndexMemoryOf(options, shape, 36);
  // The j-th tile of the last rank comes after 32 j + 24 groups: it has j + 1 words of bits.
  EXPECT_EQ(memory.kept, int64_t{34} * (16 * (512 * 513 / 2) * 4 + 513 * 8));
  constexpr int64_t kScores = int64_t{256} << 20;
  // Hops of the dense layers pack up to half of a slot: keys and values twice, gradients once.
  constexpr int64_t kPacked = 32768 * 2 * 2 * 128 / 2 * (2 * 2 + 4);
  EXPECT_EQ(memory.working,
            kScores + (32768 * 16 + 2 * 131072 * 2 + 131072 / 4 * 2) * 64 + kPacked);
  options.ring.kind = ring::RingKind::kAllGather;
  EXPECT_EQ(memory.working - IndexMemoryOf(options, shape, 36).working, kPacked);
  options.ring.kind = ring::RingKind::kFlat;
  options.density = 0.9;  // its lists take more than the choice
  const int64_t groups = kernels::KeyGroupBudgetOf(0.9f, 131072).MostGroups(131072 - 64, 0);
  EXPECT_GT(16 * 512 * groups * 4, kScores);
  EXPECT_EQ(IndexMemoryOf(options, shape, 36).working, 16 * 512 * (groups + 5) * 4 + kPacked);
  EXPECT_EQ(IndexMemoryOf(options, shape, 36).kept, memory.kept);
  options.density = 0.1;
  options.layout = kernels::LayoutKind::kContiguous;  // the last rank has the last tiles
  EXPECT_EQ(IndexMemoryOf(options, shape, 36).kept,
            int64_t{34} * (16 * (384 + 4 * (511 * 512 - 384 * 385) / 2 + 3 * 512) * 4 + 513 * 8));
  options.layout = kernels::LayoutKind::kStriped;
  shape.ranks = 1;
  EXPECT_EQ(IndexMemoryOf(options, shape, 36).working,
            kScores + (131072 * (16 + 2) + 131072 / 4 * 2) * 64);  // nothing is gathered
  shape.tokens = 1024;
  EXPECT_EQ(
      IndexMemoryOf(options, shape, 36).working,
      16 * 16 * 128 * 2 + 1024 * (16 + 2) * 64);  // all scores, and too few groups for a sample
  // Tiles of 16 queries are four times as many, each 64 rows of q, of its output's gradient, and in
  // fp32 of its own; the last one is behind 126 groups.
  options.group_queries = 16;
  const int64_t most = kernels::KeyGroupBudgetOf(0.1f, 1024, 16).MostGroups(1024 - 16, 0);
  EXPECT_GT(most, kernels::KeyGroupBudgetOf(0.1f, 1024).MostGroups(1024 - 64, 0));
  EXPECT_EQ(IndexMemoryOf(options, shape, 36).working,
            16 * 64 * (most + 2) * 4 + 4 * 1024 * 16 * 128 * (2 + 2 + 4));
  EXPECT_EQ(IndexMemoryOf(options, shape, 36).kept,
            int64_t{34} * (16 * (16 * (1 + 2 + 3) + 15 * 4) * 4 + 65 * 8));
  // Of two heads that choose together there is one choice and one list.
  options.group_heads = 2;
  EXPECT_EQ(IndexMemoryOf(options, shape, 36).working,
            8 * 64 * (most + 2) * 4 + 4 * 1024 * 16 * 128 * (2 + 2 + 4));
  EXPECT_EQ(IndexMemoryOf(options, shape, 36).kept,
            int64_t{34} * (8 * (16 * (1 + 2 + 3) + 15 * 4) * 4 + 65 * 8));
  options.group_heads = 1;
  options.group_queries = 64;
  options.pattern = Pattern::kXAttention;
  // Short documents: a second set of results, and on several ranks of slots.
  const int64_t alone = IndexMemoryOf(options, shape, 36).working;
  options.dense_below = 512;
  EXPECT_EQ(IndexMemoryOf(options, shape, 36).working - alone, 1024 * (3 * 16 + 2 * 2) * 128 * 2);
  options.by_documents = true;
  EXPECT_EQ(IndexMemoryOf(options, shape, 36).working, alone) << "each is in one call alone";
  options.by_documents = false;
  shape.ranks = 4;
  const int64_t with = IndexMemoryOf(options, shape, 36).working;
  options.dense_below = 0;
  EXPECT_EQ(with - IndexMemoryOf(options, shape, 36).working,
            256 * 128 * ((3 * 16 + 2 * 2) * 2 + 2 * 2 * (3 * 2 + 4 * 4)));
}

TEST(IndexMemoryTest, CountsTheRowsOfQueriesThatChoseForThemselves) {
  AttentionOptions options{
      .pattern = Pattern::kMoba, .block_size = 1024, .density = 0.05, .tile = 128, .stripe = 1024};
  IndexShape shape{262144, /*ranks=*/2, /*heads=*/16, /*kv_heads=*/2, 128, /*element_bytes=*/2};
  constexpr int64_t kBits = 16 * 256 * (131072 / 32) * 4, kChosen = 16 * 1024 * 8 * 4;
  EXPECT_EQ(IndexMemoryOf(options, shape, 36).kept, 36 * (kBits + kChosen));
  // Of b + 1 blocks a query keeps a twentieth, its own counted. The second rank has every other
  // block, the last one among them.
  int64_t rows = 0;
  for (int64_t b = 1; b < 256; b += 2) rows += 1024 * (std::max<int64_t>(1, (b + 1) / 20) - 1);
  const int64_t capacity = (rows + 256 * 127) / 128 * 128 + 128,
                lists = kBits + kChosen + 2 * 16 * capacity / 128 * 8 * 4;
  // Of a KV head's eight as many as fit 4 GiB: of each row and dimension a query, an output's
  // gradient and a gradient in fp32.
  EXPECT_GT(8 * capacity, int64_t{1} << 22);
  EXPECT_EQ(IndexMemoryOf(options, shape, 36).working, (int64_t{1} << 22) * 128 * 8 + lists);
  shape.kv_heads = 16;  // no heads to gather together
  EXPECT_EQ(IndexMemoryOf(options, shape, 36).working, capacity * 128 * 8 + lists);
  // A head may keep half more besides its own block.
  options.adapt_heads = options.adapt_by_probe = true;
  for (int64_t b = 1; b < 256; b += 2)
    rows += 1024 * ((std::max<int64_t>(1, (b + 1) / 20) - 1) / 2);
  const int64_t by_head = (rows + 256 * 127) / 128 * 128 + 128;
  EXPECT_GT(by_head, capacity);
  EXPECT_EQ(IndexMemoryOf(options, shape, 36).working,
            by_head * 128 * 8 + kBits + kChosen + 2 * 16 * by_head / 128 * 8 * 4);
  options.adapt_heads = options.adapt_by_probe = false;
  shape.element_bytes = 4;  // a CPU's
  EXPECT_EQ(IndexMemoryOf(options, shape, 36).working, 0);
  options.density = 0.9;  // tiles are visited whole
  shape.element_bytes = 2;
  EXPECT_EQ(IndexMemoryOf(options, shape, 36).working, 0);
}

}  // namespace
}  // namespace ringleader::patterns
