// Which blocks a query or a tile keeps where all keys are alike: even heads the earliest, odd heads
// the latest, whatever the ranks.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/reference/gates/antidiagonal_gate.h"
#include "kernels/reference/gates/block_gate.h"
#include "kernels/reference/gates/mass_gate.h"
#include "kernels/reference/testing/masked_attention.h"
#include "kernels/reference/tiles/tile_lists.h"

namespace ringleader::kernels::reference {
namespace {

using testing::RandomTensor;
using testing::Tensor;

constexpr int kTile = 64, kHeads = 4, kKvHeads = 2, kHeadDim = 64;
constexpr int64_t kFirst = 520;  // of the second document, within a block

// All layouts of ranks that deal a short sequence, and of a long one the last of 128 pieces.
std::vector<ShardLayout> Layouts() {
  std::vector<ShardLayout> layouts;
  for (const int ranks : {1, 2, 4}) {
    for (const auto kind : {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
      for (int rank = 0; rank < ranks; ++rank) {
        layouts.push_back(
            {.kind = kind, .ranks = ranks, .rank = rank, .stripe = kTile, .tokens = 2048});
      }
    }
  }
  layouts.push_back(
      {.kind = LayoutKind::kContiguous, .ranks = 128, .rank = 127, .tokens = 131'072});
  return layouts;
}

// Random queries of a rank, and the keys of the sequence, which are all alike.
struct Rows {
  explicit Rows(const ShardLayout& layout)
      : q(RandomTensor(layout.local_tokens(), kHeads, kHeadDim, random)),
        k(layout.tokens, kKvHeads, kHeadDim) {
    std::ranges::fill(k.data, 1.0f);
  }
  std::mt19937 random{29};
  Tensor q, k;
};

// Where the documents of a rank's tokens start.
std::vector<int32_t> Starts(const ShardLayout& layout) {
  std::vector<int32_t> starts(layout.local_tokens());
  for (int64_t i = 0; i < layout.local_tokens(); ++i) {
    starts[i] = layout.Position(i) < kFirst ? 0 : kFirst;
  }
  return starts;
}

// Heads keep `keep` of `count` candidates from block `begin` on, all of one score.
void ExpectTies(const std::vector<std::vector<int64_t>>& kept, int64_t begin, int64_t count,
                int64_t keep) {
  count = std::max<int64_t>(count, 0);
  keep = std::clamp<int64_t>(keep, 0, count);
  int64_t sum = 0;
  for (int head = 0; head < kHeads; ++head) {
    std::vector<int64_t> best(keep);
    std::iota(best.begin(), best.end(), head % 2 == 0 ? begin : begin + count - keep);
    ASSERT_EQ(kept[head], best) << "head " << head << " of candidates from " << begin;
    sum = std::accumulate(kept[head].begin(), kept[head].end(), sum);
  }
  // Of all heads together it is the middle.
  EXPECT_EQ(2 * sum, kHeads * keep * (2 * begin + count - 1));
}

// By head, the blocks that tile `a` of `tiles` keeps besides `own`, which it does. chosen: bits,
// [heads, tiles, words].
std::vector<std::vector<int64_t>> KeptBesides(int64_t own, const std::vector<uint32_t>& chosen,
                                              int64_t a, int64_t tiles, int64_t blocks) {
  const int32_t words = BlockWords(static_cast<int32_t>(blocks));
  std::vector<std::vector<int64_t>> kept(kHeads);
  for (int head = 0; head < kHeads; ++head) {
    const uint32_t* const row = chosen.data() + (head * tiles + a) * words;
    for (int64_t block = 0; block < blocks; ++block) {
      if ((row[block / 32] >> block % 32 & 1) != 0) kept[head].push_back(block);
    }
    EXPECT_EQ(std::erase(kept[head], own), 1u);
  }
  return kept;
}

TEST(TiesTest, QueriesFavourNeitherEnd) {
  Engine engine(2);
  for (const ShardLayout& layout : Layouts()) {
    SCOPED_TRACE(::testing::Message()
                 << layout.tokens << " tokens, layout " << static_cast<int>(layout.kind)
                 << ", rank " << layout.rank << " of " << layout.ranks);
    const Rows rows(layout);
    const int64_t n = layout.local_tokens(), words = QueryWords(n);
    const int block_size = layout.tokens > 2048 ? 1024 : kTile;
    const int64_t blocks = layout.tokens / block_size;
    std::vector<float> sums(layout.tokens / kTile * kKvHeads * kHeadDim);
    TileKeySums(engine, rows.k.view(), {.tile = kTile, .sums = sums.data()});
    const std::vector<int32_t> starts = Starts(layout);
    for (const bool packed : {false, true}) {
      std::vector<uint32_t> queries(kHeads * blocks * words),
          chosen(kHeads * n / kTile * BlockWords(static_cast<int32_t>(blocks)));
      const QueryGateStep step = {.key_sums = sums.data(),
                                  .query_layout = layout,
                                  .document_starts = packed ? starts.data() : nullptr,
                                  .tile = kTile,
                                  .block_size = block_size,
                                  .topk_blocks = 4,
                                  .queries = queries.data(),
                                  .chosen = chosen.data()};
      ChooseByQuery(engine, rows.q.view(), kKvHeads, step);
      for (int64_t i = 0; i < n; ++i) {
        const int64_t own = layout.Position(i) / block_size,
                      first = packed ? starts[i] / block_size : 0;
        std::vector<std::vector<int64_t>> kept(kHeads);
        for (int64_t row = 0; row < kHeads * blocks; ++row) {
          if ((queries[row * words + i / 32] >> i % 32 & 1) == 0) continue;
          kept[row / blocks].push_back(row % blocks);
        }
        for (std::vector<int64_t>& of_head : kept) {
          ASSERT_FALSE(of_head.empty());
          EXPECT_EQ(of_head.back(), own);
          of_head.pop_back();
        }
        ExpectTies(kept, first, own - first, 3);
      }
    }
  }
}

TEST(TiesTest, AntidiagonalsFavourNeitherEnd) {
  Engine engine(2);
  for (const ShardLayout& layout : Layouts()) {
    const Rows rows(layout);
    const int64_t tiles = layout.local_tokens() / kTile, blocks = layout.tokens / kTile;
    const int32_t words = BlockWords(static_cast<int32_t>(blocks));
    const std::vector<int32_t> starts = Starts(layout);
    for (const bool packed : {false, true}) {
      SCOPED_TRACE(::testing::Message() << layout.tokens << " tokens, layout "
                                        << static_cast<int>(layout.kind) << ", rank " << layout.rank
                                        << " of " << layout.ranks << (packed ? ", documents" : ""));
      std::vector<uint32_t> chosen(kHeads * tiles * words);
      const AntidiagonalGateStep step = {
          .query_layout = layout,
          .seen = {.document_starts = packed ? starts.data() : nullptr},
          .tile = kTile,
          .stride = 16,
          .scale = 0.125f,
          .threshold = 1.0f,
          .density = 0.3f,
          .chosen = chosen.data()};
      ChooseByAntidiagonals(engine, rows.q.view(), rows.k.view(), step);
      for (int64_t a = 0; a < tiles; ++a) {
        const int64_t own = layout.Position(a * kTile) / kTile,
                      first = packed ? starts[a * kTile] / kTile : 0;
        std::vector<std::vector<int64_t>> kept = KeptBesides(own, chosen, a, tiles, blocks);
        for (std::vector<int64_t>& of_head : kept) {
          EXPECT_EQ(std::erase(of_head, first), first == own ? 0u : 1u);
        }
        ExpectTies(kept, first + 1, own - first - 1,
                   MostBlocks(step.density, static_cast<int32_t>(own - first + 1)) - 2);
      }
    }
  }
}

// Of the same mass in all blocks that a tile sees.
TEST(TiesTest, MassesFavourNeitherEnd) {
  Engine engine(2);
  const std::vector<float> density(kHeads, 0.3f);
  for (const ShardLayout& layout : Layouts()) {
    const int64_t tiles = layout.local_tokens() / kTile, blocks = layout.tokens / kTile;
    const int32_t words = BlockWords(static_cast<int32_t>(blocks));
    const std::vector<int32_t> starts = Starts(layout);
    const std::vector<int32_t> mass(kHeads * tiles * blocks, 1000);
    for (const bool packed : {false, true}) {
      SCOPED_TRACE(::testing::Message() << layout.tokens << " tokens, layout "
                                        << static_cast<int>(layout.kind) << ", rank " << layout.rank
                                        << " of " << layout.ranks << (packed ? ", documents" : ""));
      std::vector<uint32_t> chosen(kHeads * tiles * words);
      std::vector<int64_t> sums(2 * kHeads);
      SelectBlocksByMass(engine, {.mass = mass.data(),
                                  .query_layout = layout,
                                  .seen = {.document_starts = packed ? starts.data() : nullptr},
                                  .heads = kHeads,
                                  .tile = kTile,
                                  .density = density.data(),
                                  .chosen = chosen.data(),
                                  .kept = sums.data(),
                                  .total = sums.data() + kHeads});
      for (int64_t a = 0; a < tiles; ++a) {
        const int64_t own = layout.Position(a * kTile) / kTile,
                      first = packed ? starts[a * kTile] / kTile : 0;
        ExpectTies(KeptBesides(own, chosen, a, tiles, blocks), first, own - first,
                   BlocksOfShare(density[0], static_cast<int32_t>(own - first)));
      }
    }
  }
}

}  // namespace
}  // namespace ringleader::kernels::reference
