// MoBA's gate by query of the CPU engine against the fp64 oracle.
#include <gtest/gtest.h>

#include <random>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/reference/gates/block_gate.h"
#include "kernels/reference/testing/masked_attention.h"
#include "kernels/reference/testing/packed_documents.h"
#include "kernels/reference/testing/query_gate_oracle.h"

namespace ringleader::kernels::reference {
namespace {

using testing::RandomTensor;
using testing::Tensor;

struct Choice {
  std::vector<uint32_t> queries, chosen;
};

// Sums that each rank makes of its keys, in the order of the sequence.
std::vector<float> SumsOfRanks(Engine& engine, const Tensor& k, const QueryGateStep& step,
                               ShardLayout layout) {
  const int64_t row = int64_t{k.heads} * k.head_dim,
                part = (layout.local_tokens() + step.tile - 1) / step.tile * row;
  std::vector<float> gathered(layout.ranks * part), ordered(gathered.size());
  for (layout.rank = 0; layout.rank < layout.ranks; ++layout.rank) {
    const Tensor local = testing::Shard(k, layout);
    TileKeySums(engine, local.view(),
                {.layout = layout,
                 .counted = step.counted,
                 .tile = step.tile,
                 .sums = gathered.data() + layout.rank * part});
  }
  RunBlockStep(engine, {}, {},
               OrderTilesStep{.gathered = gathered.data(),
                              .layout = layout,
                              .tile = step.tile,
                              .row = row,
                              .ordered = ordered.data()});
  return ordered;
}

Choice Choose(const Tensor& q, const Tensor& k, QueryGateStep step, const ShardLayout& layout,
              const std::vector<int32_t>& starts) {
  Engine engine(2);
  const Tensor local = testing::Shard(q, layout);
  const std::vector<int32_t> local_starts =
      starts.empty() ? starts : testing::ShardStarts(starts, layout);
  const int64_t n = local.tokens, tiles = (n + step.tile - 1) / step.tile;
  const int64_t blocks = (q.tokens + step.block_size - 1) / step.block_size;
  const std::vector<int32_t> key_starts = testing::KeyStarts(starts);
  if (!key_starts.empty()) step.counted.starts = key_starts.data();
  const std::vector<float> sums = SumsOfRanks(engine, k, step, layout);
  Choice choice;
  choice.queries.resize(q.heads * blocks * QueryWords(n));
  choice.chosen.resize(q.heads * tiles * BlockWords(static_cast<int32_t>(blocks)));
  step.key_sums = sums.data();
  step.query_layout = layout;
  step.document_starts = local_starts.empty() ? nullptr : local_starts.data();
  step.queries = choice.queries.data();
  step.chosen = choice.chosen.data();
  ChooseByQuery(engine, local.view(), k.heads, step);
  return choice;
}

TEST(QueryGateTest, IsTheOraclesOnAnyRank) {
  std::mt19937 random(3);
  for (const auto& [tokens, tile, block_size, ranks] :
       {std::tuple{1000, 64, 64, 1}, {1024, 128, 256, 4}, {2048, 64, 128, 4}, {50, 64, 64, 1}}) {
    const Tensor q = RandomTensor(tokens, 4, 64, random), k = RandomTensor(tokens, 2, 64, random);
    const auto documents =
        testing::DocumentStarts(tokens, testing::RandomDocuments(tokens, tile, random));
    for (const bool packed : {false, true}) {
      const auto starts = packed ? documents : std::vector<int32_t>();
      for (const auto& [topk, density] :
           {std::pair{1, 0.0f}, {3, 0.0f}, {1000, 0.0f}, {1, 0.3f}, {7, 1.0f}}) {
        const QueryGateStep step = {
            .tile = tile, .block_size = block_size, .topk_blocks = topk, .density = density};
        for (int rank = 0; rank < ranks; ++rank) {
          SCOPED_TRACE(::testing::Message()
                       << tokens << " tokens, rank " << rank << ", topk " << topk << ", density "
                       << density << (packed ? ", documents" : ""));
          const ShardLayout layout = {.kind = LayoutKind::kStriped,
                                      .ranks = ranks,
                                      .rank = rank,
                                      .stripe = tile,
                                      .tokens = tokens};
          const Choice choice = Choose(q, k, step, layout, starts);
          EXPECT_EQ(testing::QueryGateComplaint(q.view(), k.view(), step, starts, layout,
                                                choice.queries, 1e-5),
                    "");
          EXPECT_EQ(testing::ChosenByTileComplaint(step, 4, layout, choice.queries, choice.chosen),
                    "");
        }
      }
    }
  }
}

// Heads have budgets of their own, of what a query keeps besides its own block.
TEST(QueryGateTest, HeadsKeepTheirHalvesOfTheBudget) {
  std::mt19937 random(9);
  constexpr int64_t kTokens = 2048;
  const Tensor q = RandomTensor(kTokens, 4, 64, random), k = RandomTensor(kTokens, 2, 64, random);
  const std::vector<int32_t> halves = {3, 1, 2, 3};
  const auto documents =
      testing::DocumentStarts(kTokens, testing::RandomDocuments(kTokens, 64, random));
  for (const std::vector<int32_t>& starts : {std::vector<int32_t>(), documents}) {
    for (const auto& [topk, density] :
         {std::pair{1, 0.0f}, {2, 0.0f}, {6, 0.0f}, {30, 0.0f}, {1, 0.3f}, {1, 2.0f / 3.0f}}) {
      SCOPED_TRACE(::testing::Message() << "topk " << topk << ", density " << density);
      const QueryGateStep step = {.tile = 64,
                                  .block_size = 64,
                                  .topk_blocks = topk,
                                  .density = density,
                                  .head_halves = halves.data()};
      const ShardLayout layout = {.tokens = kTokens};
      const Choice choice = Choose(q, k, step, layout, starts);
      EXPECT_EQ(testing::QueryGateComplaint(q.view(), k.view(), step, starts, layout,
                                            choice.queries, 1e-5),
                "");
      EXPECT_EQ(testing::ChosenByTileComplaint(step, 4, layout, choice.queries, choice.chosen), "");
    }
  }
}

// Queries of one tile that look for different blocks each get theirs; the gate by tile, which sums
// them, would miss one.
TEST(QueryGateTest, NeighboursChooseApart) {
  Tensor q(512, 1, 64), k(512, 1, 64);
  for (int64_t i = 0; i < 512; ++i) k.at(i, 0, static_cast<int>(i / 64)) = 1.0f;
  q.at(7 * 64 + 3, 0, 2) = 1.0f;
  q.at(7 * 64 + 4, 0, 5) = 1.0f;
  const Choice choice =
      Choose(q, k, {.tile = 64, .block_size = 64, .topk_blocks = 2}, {.tokens = 512}, {});
  const auto keeps = [&](int64_t query, int block) {
    return (choice.queries[block * 16 + query / 32] >> query % 32 & 1) != 0;
  };
  EXPECT_TRUE(keeps(7 * 64 + 3, 2));
  EXPECT_FALSE(keeps(7 * 64 + 3, 5));
  EXPECT_TRUE(keeps(7 * 64 + 4, 5));
  EXPECT_FALSE(keeps(7 * 64 + 4, 2));
  EXPECT_TRUE(keeps(7 * 64, 0));  // where ties of an even head go
  EXPECT_EQ(choice.chosen[7], 1u | 1u << 2 | 1u << 5 | 1u << 7);
}

}  // namespace
}  // namespace ringleader::kernels::reference
