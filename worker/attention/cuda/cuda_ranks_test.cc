// Attention patterns on a GPU in rings of all shapes, all ranks as threads that share it: against
// the CPU engine, against the mask that an index stands for, and on several ranks against one.
#include <gtest/gtest.h>

#include <bit>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/ops/token_view.h"
#include "patterns/index/mask.h"
#include "ringleader/kernels/block_mass.h"
#include "ringleader/kernels/earlier_blocks.h"
#include "worker/attention/testing/gpu_attention.h"
#include "worker/attention/testing/gpu_rings.h"
#include "worker/attention/testing/index_oracle.h"
#include "worker/attention/testing/ring_settings.h"

namespace ringleader::attention {
namespace {

using testing::AdaSpa;
using testing::CudaAttentionTest;
using testing::ExpectNear;
using testing::FixedBlocks;
using testing::Gpus;
using testing::kLayers;
using testing::kTolerance;
using testing::MaskedAttention;
using testing::Moba;
using testing::MobaOfMost;
using testing::Result;
using testing::RunOnCpu;
using testing::RunOnGpu;
using testing::Sequence;
using testing::TopP;
using testing::XAttention;
using torch::Tensor;

// How far a mass of the index may be off, as a share of its head's. The oracle reads the same bf16
// values, whose products fp32 holds exactly; what differs is fp32 sums of 64 of them. A term is
// below 32, the tensor cores keep 2^-22 of the largest one in each of 64 additions, and the logit
// is an eighth of the sum: 64 * 32 * 2^-22 / 8 = 6e-5 at worst, and exp makes that a relative error
// of the masses. Maximum and sum of a row add as much each, exp2 and fixed point 1e-6.
constexpr double kMassTolerance = 2e-4;

class CudaRanksTest : public CudaAttentionTest,
                      public ::testing::WithParamInterface<testing::RingSetting> {
 protected:
  static patterns::AttentionOptions With(patterns::AttentionOptions options) {
    options.layout = GetParam().layout;
    options.ring = GetParam().ring;
    return options;
  }
  static const Sequence& Small() {
    static const Sequence sequence(1024, 4, 2, 64);
    return sequence;
  }

  static bool GathersQueries(const patterns::AttentionOptions& options) {
    if (options.pattern != patterns::Pattern::kMoba) return false;
    return kernels::GathersQueries(
        kernels::CountEarlierBlocks({.tokens = Small().q.size(0)}, options.tile, options.block_size,
                                    options.topk_blocks, static_cast<float>(options.density),
                                    /*is_moved=*/false));
  }
  // Tiles of gathered rows hold the pairs that were chosen, and each rank's padding: less than a
  // tile for each block and head. `index` is one rank's.
  static void ExpectTilesOfRows(const Result& actual, const testing::HostIndex& index) {
    const int64_t tokens = Small().q.size(0), blocks = tokens / index.block_size, heads = 4,
                  span = index.block_size / index.tile, words = kernels::QueryWords(tokens);
    int64_t rows = 0;
    for (int64_t row = 0; row < heads * blocks; ++row) {
      for (int64_t word = 0; word < words; ++word) {
        if (word * 32 / index.block_size == row % blocks) continue;  // their own
        rows += std::popcount(index.queries_chosen[row * words + word]);
      }
    }
    const int64_t own = heads * blocks * span * (span + 1) / 2;
    const int64_t ranks = std::ssize(actual.stats), padding = ranks * heads * blocks * span;
    const auto tiles = static_cast<int64_t>(actual.TotalTiles());
    EXPECT_GE(tiles, kLayers * (own + rows * span / index.tile));
    EXPECT_LE(tiles, kLayers * (own + rows * span / index.tile + padding));
  }

  // The same result on this setting's ranks as on the CPU; `name` names the expectation.
  void ExpectSameAsCpu(const std::string& name, const patterns::AttentionOptions& options,
                       double tolerance = kTolerance, const std::vector<int64_t>& documents = {}) {
    static auto* const known = new std::map<std::string, Result>;
    if (!known->contains(name)) known->emplace(name, RunOnCpu(Small(), options, documents));
    const Result actual = RunOnGpu(Small(), With(options), Gpus::kShared, documents);
    const Result& expected = known->at(name);
    ExpectNear(actual, expected, tolerance);
    for (int layer = 0; layer < kLayers; ++layer) {
      uint64_t tiles = 0;
      for (const AttentionStats& rank : actual.stats) tiles += rank.layers.at(layer).TotalTiles();
      EXPECT_EQ(tiles, expected.stats[0].layers.at(0).TotalTiles());
    }
  }

  // The index is what the fp64 oracle would choose; recall is exact where all estimate queries lie
  // in one block, and none where they lie all over the sequence.
  void ExpectTheOracles(const patterns::AttentionOptions& options,
                        const std::vector<int64_t>& documents = {}) {
    const Tensor q = Small().q.to(torch::kFloat), k = Small().k.to(torch::kFloat);
    const auto view = [](const Tensor& x) {
      return kernels::ops::TokenView(x, x.const_data_ptr<float>());
    };
    const testing::IndexOracle oracle(view(q), view(k), options, documents);
    const Result actual = RunOnGpu(Small(), With(options), Gpus::kShared, documents);
    for (size_t rank = 0; rank < actual.index.size(); ++rank) {
      const testing::HostIndex& index = actual.index[rank];
      EXPECT_EQ(oracle.CheckSelection(index, options, kMassTolerance), absl::OkStatus());
      const double recall = actual.stats[rank].layers.at(0).recall;
      if (options.estimate_at == patterns::EstimateAt::kSpread) {
        EXPECT_EQ(recall, -1.0);
      } else if (documents.empty()) {
        EXPECT_NEAR(recall, oracle.Recall(index, /*stride=*/1), kMassTolerance);
      }
    }
  }

  // The same index and result as on one rank, and the result of the index.
  void ExpectSameAsOneRank(const std::string& name, const patterns::AttentionOptions& options,
                           const std::vector<int64_t>& documents = {}) {
    struct Expected {
      Result one, masked;
    };
    static auto* const known = new std::map<std::string, Expected>;
    if (!known->contains(name)) {
      Expected expected;
      expected.one = RunOnGpu(Small(), options, Gpus::kShared, documents);
      expected.masked = MaskedAttention(Small(), expected.one.index[0]);
      known->emplace(name, std::move(expected));
    }
    const Expected& expected = known->at(name);
    const testing::HostIndex& index = expected.one.index[0];
    const Result actual = RunOnGpu(Small(), With(options), Gpus::kShared, documents);
    ExpectNear(actual, expected.masked);
    for (const testing::HostIndex& of_rank : actual.index) {
      EXPECT_EQ(of_rank.diagonals, index.diagonals);
      EXPECT_EQ(of_rank.column_positions, index.column_positions);
      EXPECT_EQ(of_rank.column_counts, index.column_counts);
      EXPECT_EQ(of_rank.column_keys, index.column_keys);
    }
    if (GathersQueries(options)) {
      ExpectTilesOfRows(actual, index);
    } else {
      EXPECT_EQ(actual.TotalTiles(), expected.one.TotalTiles());
    }
    const LayerStats& one = expected.one.stats[0].layers.at(0);
    for (const AttentionStats& of_rank : actual.stats) {
      EXPECT_NEAR(of_rank.layers.at(0).recall, one.recall, 1e-9);
      EXPECT_NEAR(of_rank.layers.at(0).verticals, one.verticals, 1e-9);
      EXPECT_NEAR(of_rank.layers.at(0).slashes, one.slashes, 1e-9);
    }
  }
};

// Documents of one token, within a tile, that end at its border, and of many tiles.
const std::vector<int64_t> kDocuments = {0, 1, 64, 200, 201, 230, 900};

patterns::AttentionOptions Window() {
  return {.pattern = patterns::Pattern::kSlidingWindow, .window = 200, .tile = 64};
}

patterns::AttentionOptions Blocks() {
  return {
      .pattern = patterns::Pattern::kBlockTopK, .block_size = 128, .topk_blocks = 2, .tile = 64};
}

TEST_P(CudaRanksTest, Dense) {
  ExpectSameAsCpu("dense", {.tile = 64});
}

TEST_P(CudaRanksTest, DenseWithRoundedGradients) {
  ExpectSameAsCpu("dense", {.tile = 64, .bf16_gradients = true}, 1.5 * kTolerance);
}

TEST_P(CudaRanksTest, SlidingWindow) {
  ExpectSameAsCpu("window", Window());
}

TEST_P(CudaRanksTest, BlockTopK) {
  ExpectSameAsCpu("blocks", Blocks());
}

TEST_P(CudaRanksTest, Moba) {
  ExpectSameAsOneRank("moba", Moba());
  ExpectSameAsOneRank(
      "moba of a share",
      {.pattern = patterns::Pattern::kMoba, .block_size = 64, .density = 0.3, .tile = 64});
  ExpectSameAsOneRank("moba of most", MobaOfMost());
}

patterns::AttentionOptions KeyGroups(int queries = 64, int heads = 1) {
  return {.pattern = patterns::Pattern::kKeyGroups,
          .density = 0.3,
          .group_queries = queries,
          .group_heads = heads,
          .tile = 64};
}

TEST_P(CudaRanksTest, KeyGroups) {
  for (const auto& [queries, heads] : {std::pair(64, 1), {16, 1}, {64, 2}, {16, 2}}) {
    SCOPED_TRACE(::testing::Message() << queries << " queries of " << heads);
    const patterns::AttentionOptions options = KeyGroups(queries, heads);
    ExpectSameAsOneRank(absl::StrCat("key groups of ", queries, " queries, heads ", heads),
                        options);
    // In each of its three layers as many as the CPU keeps in its one; which they are may differ
    // within rounding.
    const Result gpu = RunOnGpu(Small(), With(options));
    EXPECT_EQ(gpu.TotalTiles(), 3 * RunOnCpu(Small(), options).TotalTiles());
  }
}

TEST_P(CudaRanksTest, KeyGroupsThatKeepEverythingAreDense) {
  for (const auto& [queries, heads] : {std::pair(64, 1), {16, 1}, {64, 2}}) {
    patterns::AttentionOptions all = KeyGroups(queries, heads);
    all.density = 1.0;
    ExpectNear(RunOnGpu(Small(), With(all)), RunOnCpu(Small(), {.tile = 64}));
  }
}

TEST_P(CudaRanksTest, AdaSpa) {
  ExpectSameAsOneRank("adaspa", AdaSpa());
  // Heads have as much of the budget as on the CPU, in each of the three layers; recall is exact.
  const Result gpu = RunOnGpu(Small(), With(AdaSpa())), cpu = RunOnCpu(Small(), AdaSpa());
  EXPECT_EQ(gpu.TotalTiles(), 3 * cpu.TotalTiles());
  EXPECT_NEAR(gpu.stats[0].layers.at(0).recall, cpu.stats[0].layers.at(0).recall, 2e-3);
}

// Where two heads' attention lies in two blocks and that of the others everywhere, the two have
// half of the share and the others half more.
TEST_P(CudaRanksTest, AdaSpaMovesBudgetsBetweenHeads) {
  Sequence sequence = Small();
  sequence.q = sequence.q.clone();
  sequence.k = sequence.k.clone();
  sequence.q.select(2, 0).fill_(0);
  sequence.k.select(2, 0).fill_(0);
  for (const int head : {0, 3}) sequence.q.select(1, head).select(1, 0).fill_(8);
  for (const int64_t block : {0, 3}) {
    sequence.k.slice(0, block * 64, (block + 1) * 64).select(2, 0).fill_(8);
  }
  const Result result = RunOnGpu(sequence, With(AdaSpa()));
  ExpectNear(result, MaskedAttention(sequence, RunOnGpu(sequence, AdaSpa()).index[0]));
  std::vector<int64_t> kept(4);
  for (const testing::HostIndex& index : result.index) {
    for (size_t i = 0; i < index.chosen.size(); ++i) {
      kept[i / (index.chosen.size() / 4)] += std::popcount(index.chosen[i]);
    }
  }
  for (const int head : {0, 1, 2, 3}) {
    const float share = head == 0 || head == 3 ? 0.5f * 0.3f : 1.5f * 0.3f;
    int64_t blocks = 0;
    for (int before = 0; before < 16; ++before) {
      blocks += 1 + kernels::BlocksOfShare(share, before);
    }
    EXPECT_EQ(kept[head], blocks) << "head " << head;
  }
}

TEST_P(CudaRanksTest, XAttention) {
  ExpectSameAsOneRank("xattention", XAttention());
  ExpectSameAsOneRank("xattention of a share", {.pattern = patterns::Pattern::kXAttention,
                                                .stride = 8,
                                                .threshold = 1.0,
                                                .density = 0.3,
                                                .tile = 64});
}

TEST_P(CudaRanksTest, VerticalSlash) {
  ExpectSameAsOneRank("top-p", TopP());
}

TEST_P(CudaRanksTest, VerticalSlashTopK) {
  ExpectSameAsOneRank("top-k", {.pattern = patterns::Pattern::kVerticalSlash,
                                .select = patterns::Select::kTopK,
                                .budget = {.max_verticals = 100, .max_slashes = 4},
                                .estimate_queries = 100,
                                .tile = 64});
}

// A share of the tiles, moved between heads, from queries all over the sequence.
patterns::AttentionOptions SpreadShare() {
  patterns::AttentionOptions options = TopP();
  options.budget = {.vertical_mass = 0.9, .slash_mass = 0.9, .density = 0.2};
  options.estimate_at = patterns::EstimateAt::kSpread;
  options.adapt_heads = true;
  return options;
}

TEST_P(CudaRanksTest, VerticalSlashOfAShare) {
  ExpectSameAsOneRank("share", SpreadShare());
  ExpectSameAsOneRank("share of documents", SpreadShare(), kDocuments);
}

TEST_P(CudaRanksTest, VerticalSlashIndexIsTheOracles) {
  ExpectTheOracles(TopP());
  patterns::AttentionOptions share = SpreadShare();
  share.adapt_heads = false;
  ExpectTheOracles(share);
  ExpectTheOracles({.pattern = patterns::Pattern::kVerticalSlash,
                    .select = patterns::Select::kTopK,
                    .budget = {.max_verticals = 100, .max_slashes = 4},
                    .tile = 64});
}

// attention.balance: as many tiles as the factor says, within the tolerance, and the same columns
// and diagonals on all ranks.
TEST_P(CudaRanksTest, MovedChoices) {
  patterns::AttentionOptions options = TopP();
  // About half of the causal tiles: there is room to grow.
  options.budget = {.vertical_mass = 0.125, .slash_mass = 0.25};
  options.balance = {.anchor = kernels::Anchor::kMean, .tolerance = 0.5f};
  const auto tiles = [](const Result& result) { return static_cast<double>(result.TotalTiles()); };
  const double base = tiles(RunOnGpu(Small(), options));
  for (const float move : {0.6f, 1.4f}) {
    const Result one = RunOnGpu(Small(), options, Gpus::kShared, {}, move);
    EXPECT_NEAR(tiles(one) / kLayers, tiles(RunOnCpu(Small(), options, {}, move)), 2.0);
    EXPECT_EQ(tiles(one) > base, move > 1);
    EXPECT_NEAR(tiles(one) / base, move, 0.3) << "short sequences have few diagonals";
    const Result many = RunOnGpu(Small(), With(options), Gpus::kShared, {}, move);
    for (size_t rank = 0; rank < many.index.size(); ++rank) {
      EXPECT_EQ(many.index[rank].diagonals, one.index[0].diagonals);
      EXPECT_EQ(many.index[rank].column_positions, one.index[0].column_positions);
      EXPECT_EQ(many.stats[rank].layers.at(0).balanced, 1u);
    }
    ExpectNear(many, MaskedAttention(Small(), one.index[0]));
  }
  options.balance.tolerance = 0.0f;
  EXPECT_EQ(tiles(RunOnGpu(Small(), options, Gpus::kShared, {}, 0.6f)), base);

  patterns::AttentionOptions blocks = With(XAttention());
  blocks.balance = {.anchor = kernels::Anchor::kMean, .tolerance = 0.5f};
  const Result moved = RunOnGpu(Small(), blocks, Gpus::kShared, {}, 0.6f);
  EXPECT_LT(tiles(moved), tiles(RunOnGpu(Small(), With(XAttention()))));
  for (const AttentionStats& stats : moved.stats) EXPECT_EQ(stats.layers.at(0).balanced, 1u);
  for (patterns::AttentionOptions chosen : {Moba(), MobaOfMost(), KeyGroups(), AdaSpa()}) {
    SCOPED_TRACE(::testing::Message()
                 << static_cast<int>(chosen.pattern) << " of " << chosen.topk_blocks);
    const double unmoved = tiles(RunOnGpu(Small(), chosen));
    chosen.balance = {.anchor = kernels::Anchor::kMean, .tolerance = 0.5f};
    for (const float move : {0.6f, 1.4f}) {
      const double alone = tiles(RunOnGpu(Small(), chosen, Gpus::kShared, {}, move));
      if (!GathersQueries(chosen)) {
        // Which are chosen may differ within rounding, how many by what a row then loses.
        EXPECT_NEAR(alone / kLayers, tiles(RunOnCpu(Small(), chosen, {}, move)),
                    0.02 * unmoved / kLayers);
      }
      // Tiles of many queries that keep most blocks are all visited, whatever each keeps.
      if (chosen.topk_blocks == MobaOfMost().topk_blocks) {
        EXPECT_TRUE(move < 1 ? alone <= unmoved : alone >= unmoved);
      } else {
        EXPECT_EQ(alone < unmoved, move < 1);
      }
    }
    for (const float move : {0.6f, 1.4f}) {
      const Result ranks = RunOnGpu(Small(), With(chosen), Gpus::kShared, {}, move);
      for (const AttentionStats& stats : ranks.stats) EXPECT_EQ(stats.layers.at(0).balanced, 1u);
      if (ranks.stats.size() > 1) continue;  // of several each has moved by itself
      ExpectNear(ranks, MaskedAttention(Small(), ranks.index[0]));
    }
  }
}

TEST_P(CudaRanksTest, Documents) {
  ExpectSameAsCpu("dense documents", {.tile = 64}, kTolerance, kDocuments);
  ExpectSameAsCpu("window documents", Window(), kTolerance, kDocuments);
  ExpectSameAsCpu("block documents", Blocks(), kTolerance, kDocuments);
}

TEST_P(CudaRanksTest, Masks) {
  for (const patterns::Mask mask :
       {patterns::Mask::kFull, patterns::Mask::kPrefixLm, patterns::Mask::kBlockCausal}) {
    patterns::AttentionOptions options{.mask = mask, .mask_block = 96, .tile = 64};
    const std::string name(patterns::MaskName(mask));
    SCOPED_TRACE(name);
    ExpectSameAsCpu(name, options);
    ExpectSameAsCpu(name + " documents", options, kTolerance, kDocuments);
    options.pattern = patterns::Pattern::kSlidingWindow;
    options.window = 200;
    ExpectSameAsCpu(name + " window documents", options, kTolerance, kDocuments);
  }
}

TEST_P(CudaRanksTest, MasksUnderChosenBlocks) {
  for (const patterns::Mask mask :
       {patterns::Mask::kFull, patterns::Mask::kPrefixLm, patterns::Mask::kBlockCausal}) {
    const auto under = [&](patterns::AttentionOptions options) {
      options.tile = 64;
      options.mask = mask;
      options.mask_block = 96;
      return options;
    };
    const std::string name(patterns::MaskName(mask));
    SCOPED_TRACE(name);
    const patterns::AttentionOptions blocks = under(Blocks());
    ExpectSameAsCpu(name + " blocks", blocks);
    ExpectSameAsCpu(name + " blocks documents", blocks, kTolerance, kDocuments);
    ExpectSameAsCpu(name + " fixed blocks", under(FixedBlocks()));
    ExpectSameAsCpu(name + " fixed blocks documents", under(FixedBlocks()), kTolerance, kDocuments);
    ExpectSameAsOneRank(name + " xattention", under(XAttention()));
    ExpectSameAsOneRank(name + " xattention documents", under(XAttention()), kDocuments);
    ExpectSameAsOneRank(name + " adaspa", under(AdaSpa()));
    ExpectSameAsOneRank(name + " adaspa documents", under(AdaSpa()), kDocuments);
  }
}

TEST_P(CudaRanksTest, FixedBlocks) {
  ExpectSameAsCpu("fixed blocks", FixedBlocks());
  ExpectSameAsCpu("fixed blocks documents", FixedBlocks(), kTolerance, kDocuments);
}

TEST_P(CudaRanksTest, DocumentsUnderChosenBlocks) {
  ExpectSameAsOneRank("moba documents", Moba(), kDocuments);
  ExpectSameAsOneRank("moba of most documents", MobaOfMost(), kDocuments);
  ExpectSameAsOneRank("xattention documents", XAttention(), kDocuments);
  ExpectSameAsOneRank("key groups documents", KeyGroups(), kDocuments);
  ExpectSameAsOneRank("key groups of few documents", KeyGroups(16), kDocuments);
  ExpectSameAsOneRank("adaspa documents", AdaSpa(), kDocuments);
}

// The bits of hops that carry everything, by rows that others need alone: what ranks do not send
// each other nobody misses, whatever lies in its place.
TEST_P(CudaRanksTest, HopsOfSomeRowsBringTheSameBits) {
  const std::vector<int64_t> documents = {0, 70, 200, 250, 500, 700, 1000};
  for (const bool rounded : {false, true}) {
    for (patterns::AttentionOptions options :
         {patterns::AttentionOptions{},
          {.pattern = patterns::Pattern::kSlidingWindow, .window = 100},
          FixedBlocks(),
          {.mask = patterns::Mask::kFull},
          {.mask = patterns::Mask::kBlockCausal, .mask_block = 96}}) {
      options.tile = 64;
      options.deterministic = true;
      options.bf16_gradients = rounded;
      const Result some = RunOnGpu(Small(), With(options), Gpus::kShared, documents),
                   all = testing::RunWithAllRows(Small(), With(options), documents);
      EXPECT_TRUE(torch::equal(some.out, all.out));
      EXPECT_TRUE(torch::equal(some.dq, all.dq));
      EXPECT_TRUE(torch::equal(some.dk, all.dk));
      EXPECT_TRUE(torch::equal(some.dv, all.dv));
      uint64_t sent = 0, whole = 0;
      for (size_t rank = 0; rank < all.stats.size(); ++rank) {
        EXPECT_EQ(all.stats[rank].ring_bytes.sent, all.stats[rank].ring_bytes.whole);
        EXPECT_EQ(some.stats[rank].ring_bytes.whole, all.stats[rank].ring_bytes.whole);
        sent += some.stats[rank].ring_bytes.sent;
        whole += some.stats[rank].ring_bytes.whole;
      }
      EXPECT_LE(sent, whole);
      const bool has_hops =
          all.stats.size() > 1 && GetParam().ring.kind != ring::RingKind::kAllGather;
      if (has_hops && GetParam().layout == kernels::LayoutKind::kContiguous) {
        // Under a mask that looks ahead, keys are on their way for longer to those behind.
        EXPECT_LT(sent, options.mask == patterns::Mask::kFull ? whole : whole / 2);
      }
    }
  }
}

TEST_P(CudaRanksTest, DocumentsUnderVerticalSlash) {
  ExpectSameAsOneRank("top-p documents", TopP(), kDocuments);
}

TEST_P(CudaRanksTest, IndexOfDocumentsIsTheOracles) {
  ExpectTheOracles(TopP(), kDocuments);
}

// Patterns whose index is the CPU's; on all ranks the same figures.
TEST_P(CudaRanksTest, ProbesAreThoseOfTheCpu) {
  patterns::AttentionOptions causal = Blocks();
  causal.selection = patterns::Selection::kCausal;
  causal.block_size = 64;
  causal.topk_blocks = 3;
  for (patterns::AttentionOptions options : {Blocks(), causal, Window()}) {
    options.probe_every = 1;
    for (const std::vector<int64_t>& documents : {std::vector<int64_t>{}, kDocuments}) {
      const LayerStats cpu = RunOnCpu(Small(), options, documents).stats[0].layers.at(0);
      const Result gpu = RunOnGpu(Small(), With(options), Gpus::kShared, documents);
      ASSERT_EQ(cpu.probed_recall.size(), 4u);
      for (const AttentionStats& rank : gpu.stats) {
        const std::vector<double>& heads = rank.layers.at(0).probed_recall;
        EXPECT_EQ(heads, gpu.stats[0].layers.at(0).probed_recall);
        ASSERT_EQ(heads.size(), cpu.probed_recall.size());
        for (size_t head = 0; head < heads.size(); ++head) {
          EXPECT_NEAR(heads[head], cpu.probed_recall[head], 2e-3) << "head " << head;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Settings, CudaRanksTest, ::testing::ValuesIn(testing::AllRingSettings()),
                         [](const auto& info) { return testing::NameOf(info.param); });

}  // namespace
}  // namespace ringleader::attention
