// What a probe says of a pattern, against fp64 attention over the keys that the index holds; and
// what later queries have to do with what a query attends to.
#include "patterns/probe.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "kernels/reference/testing/masked_attention.h"
#include "patterns/index/head_budgets.h"
#include "worker/attention/testing/forward_on_ranks.h"
#include "worker/attention/testing/visited.h"

namespace ringleader::attention {
namespace {

using kernels::LayoutKind;
using kernels::ShardLayout;
using kernels::reference::testing::RandomTensor;
using kernels::reference::testing::Tensor;
using patterns::AttentionOptions;
using patterns::Pattern;

constexpr int64_t kTokens = 1024;
constexpr int kHeads = 4, kKvHeads = 2, kHeadDim = 64, kTile = 64;
constexpr uint64_t kStep = 11;

struct RankResult {
  std::shared_ptr<const LayerIndex> index;
  LayerStats stats;
  Tensor out{0, kHeads, kHeadDim};
};

std::vector<AttentionOptions> SparseOptions() {
  return {{.pattern = Pattern::kVerticalSlash,
           .select = patterns::Select::kTopK,
           .budget = {.max_verticals = 40, .max_slashes = 3},
           .sink_tokens = 4},
          {.pattern = Pattern::kVerticalSlash,
           .budget = {.density = 0.3},
           .estimate_at = patterns::EstimateAt::kSpread},
          {.pattern = Pattern::kBlockTopK, .block_size = 2 * kTile, .topk_blocks = 2},
          {.pattern = Pattern::kMoba, .block_size = 2 * kTile, .topk_blocks = 2},
          {.pattern = Pattern::kMoba, .block_size = kTile, .density = 0.3},
          {.pattern = Pattern::kXAttention, .threshold = 0.5},
          {.pattern = Pattern::kXAttention, .stride = 32, .threshold = 0.9, .density = 0.3},
          {.pattern = Pattern::kKeyGroups, .density = 0.3},
          {.pattern = Pattern::kKeyGroups, .density = 0.3, .group_queries = 16},
          {.pattern = Pattern::kKeyGroups, .density = 0.3, .group_heads = 2},
          {.pattern = Pattern::kAdaSpa, .density = 0.3},
          {.pattern = Pattern::kFixedBlocks, .local_blocks = 1, .stride_blocks = 5},
          {.pattern = Pattern::kSlidingWindow, .window = 100}};
}

// How many blocks a tile of queries keeps, at most.
int MostKept(const LayerIndex& index) {
  const int words = kernels::BlockWords(static_cast<int32_t>(kTokens / index.block_size));
  std::vector<int> kept(index.chosen.size / words, 0);
  for (int64_t word = 0; word < index.chosen.size; ++word) {
    kept[word / words] += std::popcount(index.chosen.data()[word]);
  }
  return std::ranges::max(kept);
}

class ProbeTest : public ::testing::TestWithParam<std::vector<int64_t>> {
 protected:
  ShardLayout LayoutOf(const AttentionOptions& options, int rank) const {
    return {.kind = options.layout,
            .ranks = options.ring.inner,
            .rank = rank,
            .stripe = kTile,
            .tokens = kTokens};
  }

  std::vector<RankResult> Run(const AttentionOptions& options,
                              const std::vector<patterns::LayerBudgets>& budgets = {}) {
    std::vector<RankResult> results(options.ring.ranks());
    testing::ForwardOnRanks(
        options, /*layer=*/0, q_, k_, v_,
        [&](RingRunner& runner) {
          ASSERT_TRUE(runner.SetDocuments(kTokens, GetParam()).ok());
          runner.SetStep(kStep);
          runner.SetHeadBudgets(budgets);
        },
        [&](const testing::RankForward<CpuCall>& rank) {
          results[rank.rank] = {rank.index, rank.runner.TakeStats().layers.at(0), rank.out};
        });
    return results;
  }

  patterns::EstimateQueries Probed(const AttentionOptions& options) const {
    const auto documents = patterns::MakeDocuments({.tokens = kTokens}, GetParam());
    return patterns::ChooseProbeQueries(options, kTokens, kStep, documents->get());
  }
  patterns::EstimateQueries Heard(const AttentionOptions& options) const {
    const auto documents = patterns::MakeDocuments({.tokens = kTokens}, GetParam());
    return patterns::ChooseHeardQueries(options, kTokens, kStep, documents->get());
  }

  // Returns, by head, the share of the attention of queries at `positions` that `results` visited.
  std::vector<double> Expected(const std::vector<int64_t>& positions,
                               const AttentionOptions& options,
                               const std::vector<RankResult>& results) const {
    std::vector<std::shared_ptr<const LayerIndex>> indices;
    indices.reserve(results.size());
    for (const RankResult& result : results) indices.push_back(result.index);
    const testing::Visited visited(indices, LayoutOf(options, 0), GetParam());
    const testing::Visited causal({std::make_shared<LayerIndex>()}, {.tokens = kTokens},
                                  GetParam());
    std::vector<double> recall(kHeads, 0.0);
    for (int head = 0; head < kHeads; ++head) {
      for (const int64_t position : positions) {
        double kept = 0.0, all = 0.0;
        for (int64_t key = 0; key <= position; ++key) {
          if (!causal(head, position, key)) continue;
          const double weight = std::exp(Logit(head, position, key));
          all += weight;
          if (visited(head, position, key)) kept += weight;
        }
        recall[head] += kept / all / static_cast<double>(positions.size());
      }
    }
    return recall;
  }

  double Logit(int head, int64_t query, int64_t key) const {
    double product = 0.0;
    for (int x = 0; x < kHeadDim; ++x) {
      product += double{q_.at(query, head, x)} * double{k_.at(key, head / (kHeads / kKvHeads), x)};
    }
    return product / std::sqrt(static_cast<double>(kHeadDim));
  }

  std::mt19937 random_{17};
  Tensor q_ = RandomTensor(kTokens, kHeads, kHeadDim, random_);
  Tensor k_ = RandomTensor(kTokens, kKvHeads, kHeadDim, random_);
  Tensor v_ = RandomTensor(kTokens, kKvHeads, kHeadDim, random_);
};

TEST_P(ProbeTest, IsTheExactShareOfWhatWasVisitedOnAnyNumberOfRanks) {
  for (AttentionOptions options : SparseOptions()) {
    options.probe_every = 11;
    options.tile = kTile;
    for (const int ranks : {1, 2, 4}) {
      for (const LayoutKind layout : {LayoutKind::kStriped, LayoutKind::kZigzag}) {
        options.ring.inner = ranks;
        options.layout = layout;
        const std::vector<RankResult> results = Run(options);
        const std::vector<double> expected = Expected(Probed(options).positions, options, results);
        const std::vector<int64_t> heard = Heard(options).positions;
        const std::vector<double> of_heard = Expected(heard, options, results);
        for (const RankResult& result : results) {
          EXPECT_EQ(result.stats.probed_recall, results[0].stats.probed_recall);
          ASSERT_EQ(result.stats.probed_recall.size(), kHeads);
          for (int head = 0; head < kHeads; ++head) {
            EXPECT_NEAR(result.stats.probed_recall[head], expected[head], 1e-5)
                << static_cast<int>(options.pattern) << " head " << head << " of " << ranks;
            EXPECT_LT(expected[head], 0.99);  // there is something to see
          }
          if (heard.empty()) continue;
          EXPECT_NEAR(result.stats.recall,
                      std::accumulate(of_heard.begin(), of_heard.end(), 0.0) / kHeads, 1e-5)
              << static_cast<int>(options.pattern) << " of " << ranks;
        }
      }
    }
  }
}

// Heads 0 and 2 attend to the first key of a document, 1 and 3 to all keys alike.
TEST_P(ProbeTest, BudgetsGoWhereTheProbeFindsLittle) {
  std::set<int64_t> firsts(GetParam().begin(), GetParam().end());
  firsts.insert(0);
  for (int64_t token = 0; token < kTokens; ++token) {
    for (int head = 0; head < kHeads; ++head) {
      for (int x = 0; x < kHeadDim; ++x) {
        q_.at(token, head, x) = head % 2 == 0 ? 4.0f : 0.0f;
        k_.at(token, head / 2, x) = firsts.contains(token) ? 1.0f : -1.0f;
      }
    }
  }
  for (AttentionOptions options :
       {SparseOptions()[0], AttentionOptions{.pattern = Pattern::kAdaSpa, .density = 0.3},
        AttentionOptions{.pattern = Pattern::kBlockTopK, .block_size = kTile, .topk_blocks = 2},
        AttentionOptions{.pattern = Pattern::kXAttention, .threshold = 1.0, .density = 0.66},
        AttentionOptions{.pattern = Pattern::kKeyGroups, .density = 0.6}}) {
    SCOPED_TRACE(static_cast<int>(options.pattern));
    options.probe_every = 11;
    options.tile = kTile;
    options.adapt_heads = options.adapt_by_probe = true;
    for (const int ranks : {1, 2, 4}) {
      options.ring.inner = ranks;
      const std::vector<RankResult> equal = Run(options);
      const std::vector<double>& before = equal[0].stats.probed_recall;
      ASSERT_GT(before[0], 0.99);
      ASSERT_LT(before[1], 0.95);
      for (const RankResult& rank : equal) {
        patterns::LayerBudgets budgets;
        FollowProbe(/*layer=*/0, rank.stats.probed_visited, rank.stats.probed_queries,
                    /*heads_together=*/1, &budgets);
        EXPECT_EQ(budgets.halves, std::vector<int32_t>({1, 3, 1, 3}));
      }
      patterns::LayerBudgets budgets = {.recall = {0, 0, 0, 0}, .halves = {1, 3, 1, 3}};
      const std::vector<RankResult> moved = Run(options, {budgets});
      for (const RankResult& rank : moved) {
        for (const int head : {1, 3}) {
          EXPECT_GT(rank.stats.probed_recall[head], before[head] + 0.01);
        }
        // Lists hold what the heads keep that were given more.
        if (const int32_t room = rank.index->kept_blocks; room > 0) {
          const int kept = MostKept(*rank.index);
          EXPECT_LE(kept, room);
          EXPECT_TRUE(kept == room || ranks > 1 || !GetParam().empty()) << kept << " of " << room;
        }
        if (options.pattern != Pattern::kVerticalSlash) continue;
        // Head 0 finds no mass in more columns than documents have.
        EXPECT_LE(rank.index->column_counts.data()[0], 20);
        EXPECT_EQ(rank.index->column_counts.data()[1], 60);
      }
      budgets.halves = {2, 2, 2, 2};
      EXPECT_EQ(Run(options, {budgets})[0].stats.probed_recall, before);
    }
  }
}

TEST_P(ProbeTest, IsNotDueInEveryStep) {
  AttentionOptions options = SparseOptions()[0];
  options.tile = kTile;
  options.probe_every = 7;  // steps 7 and 14
  EXPECT_TRUE(Run(options)[0].stats.probed_recall.empty());
  options.probe_every = 0;
  EXPECT_TRUE(Run(options)[0].stats.probed_recall.empty());
}

TEST_P(ProbeTest, QueriesThatChoseAreNotProbed) {
  const auto documents = patterns::MakeDocuments({.tokens = kTokens}, GetParam());
  const AttentionOptions by_first{.pattern = Pattern::kBlockTopK,
                                  .selection = patterns::Selection::kCausal,
                                  .block_size = kTile,
                                  .tile = kTile};
  for (uint64_t step = 1; step <= 20; ++step) {
    for (const int64_t position :
         patterns::ChooseProbeQueries(by_first, kTokens, step, documents->get()).positions) {
      EXPECT_NE(position % kTile, 0);
    }
  }
  for (const bool spread : {false, true}) {
    AttentionOptions options{.pattern = Pattern::kVerticalSlash, .estimate_queries = 256};
    if (spread) options.estimate_at = patterns::EstimateAt::kSpread;
    const auto chose =
        patterns::ChooseEstimateQueries(kTokens, 256, spread, documents->get()).positions;
    std::set<int64_t> places;
    for (uint64_t step = 1; step <= 20; ++step) {
      const auto probed =
          patterns::ChooseProbeQueries(options, kTokens, step, documents->get()).positions;
      EXPECT_EQ(probed.size(), 64u);
      EXPECT_TRUE(std::ranges::is_sorted(probed));
      for (const int64_t position : probed) {
        EXPECT_FALSE(std::ranges::binary_search(chose, position)) << position;
        places.insert(position);
      }
    }
    EXPECT_GT(places.size(), 400u);  // not the same ones in every step
  }
}

// The output of all other queries is the same, whatever the probed ones ask; in a step without a
// probe, where these choose with the others, it is not.
TEST_P(ProbeTest, WhatProbedQueriesAskChoosesNothing) {
  std::vector<AttentionOptions> choosing = SparseOptions();
  std::erase_if(choosing, [](const AttentionOptions& options) {
    return options.pattern == Pattern::kMoba || options.pattern == Pattern::kSlidingWindow;
  });
  choosing.push_back({.pattern = Pattern::kBlockTopK,
                      .selection = patterns::Selection::kCausal,
                      .block_size = 2 * kTile,
                      .topk_blocks = 2});
  const Tensor q = q_;
  for (AttentionOptions options : choosing) {
    options.tile = kTile;
    const std::vector<int64_t> positions = Probed(options).positions;
    const auto others_differ = [&] {
      const std::vector<RankResult> before = Run(options);
      for (const int64_t position : positions) {
        for (int head = 0; head < kHeads; ++head) {
          for (int x = 0; x < kHeadDim; ++x) q_.at(position, head, x) *= -30.0f;
        }
      }
      const std::vector<RankResult> after = Run(options);
      q_ = q;
      int differ = 0;
      for (int rank = 0; rank < options.ring.ranks(); ++rank) {
        const Tensor &out = before[rank].out, &changed = after[rank].out;
        for (int64_t i = 0; i < out.tokens; ++i) {
          if (std::ranges::binary_search(positions, LayoutOf(options, rank).Position(i))) continue;
          for (int head = 0; head < kHeads; ++head) {
            for (int x = 0; x < kHeadDim; ++x) {
              differ += out.at(i, head, x) != changed.at(i, head, x) ? 1 : 0;
            }
          }
        }
      }
      return differ;
    };
    for (const int ranks : {1, 4}) {
      SCOPED_TRACE(::testing::Message() << static_cast<int>(options.pattern) << " of " << ranks);
      options.ring.inner = ranks;
      options.probe_every = 11;
      EXPECT_EQ(others_differ(), 0);
      if (!GetParam().empty()) continue;  // of few blocks some keep those alone that all keep
      options.probe_every = 0;
      EXPECT_EQ(others_differ() > 0, patterns::SilenceOf(options).has_value());
    }
  }
}

// Queries whose recall is told beside the probed ones' have their say: none of them is silent.
TEST_P(ProbeTest, QueriesThatAreHeardAreOthers) {
  const std::set<Pattern> with_heard = {Pattern::kBlockTopK, Pattern::kXAttention,
                                        Pattern::kKeyGroups};
  for (const AttentionOptions& options : SparseOptions()) {
    const std::vector<int64_t> silent = Probed(options).positions, heard = Heard(options).positions;
    EXPECT_EQ(!heard.empty(), with_heard.contains(options.pattern));
    if (heard.empty()) continue;
    EXPECT_GE(heard.size(), silent.size() / 2);
    EXPECT_TRUE(std::ranges::is_sorted(heard));
    for (const int64_t position : heard) {
      EXPECT_FALSE(std::ranges::binary_search(silent, position)) << position;
    }
  }
  EXPECT_TRUE(Heard({.pattern = Pattern::kBlockTopK, .selection = patterns::Selection::kCausal})
                  .positions.empty());
  const AttentionOptions groups{.pattern = Pattern::kKeyGroups};
  EXPECT_TRUE(patterns::ChooseHeardQueries(groups, /*tokens=*/1, kStep, nullptr).positions.empty())
      << "none is left";
}

// Padding says nothing: the queries are those of the sequence without it.
TEST(ProbeQueriesTest, AreNoPadding) {
  constexpr int64_t kContent = 300, kPadding = 84;
  const std::vector<int64_t> firsts = {0, 100}, padded = {0, 100, kContent};
  const auto without = patterns::MakeDocuments({.tokens = kContent}, firsts);
  const auto with = patterns::MakeDocuments({.tokens = kContent + kPadding}, padded, kPadding);
  ASSERT_TRUE(without.ok() && with.ok()) << without.status() << with.status();
  const AttentionOptions options{.pattern = Pattern::kVerticalSlash, .estimate_queries = 200};
  for (uint64_t step = 1; step <= 20; ++step) {
    const auto probed =
        patterns::ChooseProbeQueries(options, kContent + kPadding, step, with->get());
    EXPECT_LT(probed.positions.back(), kContent);
    EXPECT_EQ(probed.positions,
              patterns::ChooseProbeQueries(options, kContent, step, without->get()).positions);
  }
}

// Short documents attend to all of their tokens, whatever was chosen.
TEST(ProbeQueriesTest, AreOfDocumentsThatChoose) {
  const std::vector<int64_t> firsts = {0, 100, 150, 400, 420, 600};  // and 40 of padding
  const auto documents = patterns::MakeDocuments({.tokens = 640}, firsts, /*padding=*/40);
  ASSERT_TRUE(documents.ok()) << documents.status();
  AttentionOptions options{.pattern = Pattern::kBlockTopK, .dense_below = 120};
  std::set<int64_t> places;
  for (uint64_t step = 1; step <= 50; ++step) {
    const patterns::EstimateQueries probed =
        patterns::ChooseProbeQueries(options, 640, step, documents->get());
    EXPECT_EQ(probed.positions.size(), 64u);
    for (const int64_t position : probed.positions) {
      EXPECT_TRUE((position >= 150 && position < 400) || (position >= 420 && position < 600))
          << position;
      places.insert(position);
    }
  }
  EXPECT_GT(places.size(), 400u);
  options.dense_below = 300;  // than which all are shorter
  EXPECT_EQ(patterns::ChooseProbeQueries(options, 640, /*step=*/1, documents->get()).positions,
            patterns::ChooseProbeQueries({.pattern = Pattern::kBlockTopK}, 640, /*step=*/1,
                                         documents->get())
                .positions);
}

// What tokens from `kChanged` on are, as queries, keys and values, decides nothing of what earlier
// ones see, and with it of their output, where the choice is causal. The tile in which it lies, and
// tiles after it, tell.
TEST_P(ProbeTest, ACausalChoiceKnowsNothingOfLaterTokens) {
  constexpr int64_t kChanged = kTokens - 32;
  const auto outputs = [&](const AttentionOptions& options) {
    const Tensor q = q_, k = k_, v = v_;
    const Tensor before = Run(options)[0].out;
    for (Tensor* const changed : {&q_, &k_, &v_}) {
      const Tensor noise = RandomTensor(kTokens, changed->heads, kHeadDim, random_);
      for (int64_t i = kChanged * changed->heads * kHeadDim; i < std::ssize(noise.data); ++i) {
        changed->data[i] = 4 * noise.data[i];
      }
    }
    const Tensor after = Run(options)[0].out;
    q_ = q;
    k_ = k;
    v_ = v;
    const int64_t row = int64_t{kHeads} * kHeadDim;
    return std::equal(before.data.begin(), before.data.begin() + kChanged * row,
                      after.data.begin());
  };
  AttentionOptions options{
      .pattern = Pattern::kBlockTopK, .block_size = kTile, .topk_blocks = 2, .tile = kTile};
  EXPECT_FALSE(outputs(options)) << "the tile's later queries chose";
  options.selection = patterns::Selection::kCausal;
  EXPECT_TRUE(outputs(options));
  EXPECT_TRUE(outputs({.pattern = Pattern::kMoba,
                       .selection = patterns::Selection::kCausal,
                       .block_size = kTile,
                       .topk_blocks = 3,
                       .tile = kTile}));
  EXPECT_TRUE(outputs({.pattern = Pattern::kSlidingWindow,
                       .selection = patterns::Selection::kCausal,
                       .window = 100,
                       .tile = kTile}));
}

INSTANTIATE_TEST_SUITE_P(Documents, ProbeTest,
                         ::testing::Values(std::vector<int64_t>{},
                                           std::vector<int64_t>{0, 1, 64, 200, 201, 230, 700}));

}  // namespace
}  // namespace ringleader::attention
