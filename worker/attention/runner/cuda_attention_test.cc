// Ring attention on a GPU, all ranks of a ring as threads that share it: against the CPU engine,
// against the mask that an index stands for, and on several ranks against one.
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "kernels/ops/cuda_call.h"
#include "kernels/ops/token_view.h"
#include "worker/attention/cuda/cuda_ring_attention.h"
#include "worker/attention/testing/differentiable_attention.h"
#include "worker/attention/testing/gpu_rings.h"
#include "worker/attention/testing/index_oracle.h"
#include "worker/attention/testing/ring_settings.h"
#include "worker/comm/testing/hosts.h"
#include "worker/comm/testing/local_device_communicator.h"

namespace ringleader::attention {
namespace {

using testing::ExpectNear;
using testing::GpuCount;
using testing::Gpus;
using testing::kLayers;
using testing::kTolerance;
using testing::MaskedAttention;
using testing::RelativeError;
using testing::Result;
using testing::RunOnCpu;
using testing::RunOnGpu;
using testing::Sequence;
using torch::Tensor;

// How far a mass of the index may be off, as a share of its head's. The oracle reads the same bf16
// values, whose products fp32 holds exactly; what differs is fp32 sums of 64 of them. A term is
// below 32, the tensor cores keep 2^-22 of the largest one in each of 64 additions, and the logit
// is an eighth of the sum: 64 * 32 * 2^-22 / 8 = 6e-5 at worst, and exp makes that a relative error
// of the masses. Maximum and sum of a row add as much each, exp2 and fixed point 1e-6.
constexpr double kMassTolerance = 2e-4;

class CudaAttentionTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (GpuCount() == 0) GTEST_SKIP() << "no GPU on this machine";
    ASSERT_EQ(kernels::ops::LoadTorchCuda(), absl::OkStatus());
  }
};

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

  // The same result on this setting's ranks as on the CPU; `name` names the expectation.
  void ExpectSameAsCpu(const char* name, const patterns::AttentionOptions& options,
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
  // in one block.
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
      if (!documents.empty() || options.estimate_at == patterns::EstimateAt::kSpread) continue;
      EXPECT_NEAR(actual.stats[rank].layers.at(0).recall, oracle.Recall(index, /*stride=*/1),
                  kMassTolerance);
    }
  }

  // The same index and result as on one rank, and the result of the index.
  void ExpectSameAsOneRank(const char* name, const patterns::AttentionOptions& options,
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
    EXPECT_EQ(actual.TotalTiles(), expected.one.TotalTiles());
    const LayerStats& one = expected.one.stats[0].layers.at(0);
    for (const AttentionStats& of_rank : actual.stats) {
      EXPECT_NEAR(of_rank.layers.at(0).recall, one.recall, 1e-9);
      EXPECT_NEAR(of_rank.layers.at(0).verticals, one.verticals, 1e-9);
      EXPECT_NEAR(of_rank.layers.at(0).slashes, one.slashes, 1e-9);
    }
  }
};

patterns::AttentionOptions TopP() {
  return {.pattern = patterns::Pattern::kVerticalSlash,
          .budget = {.vertical_mass = 0.5, .slash_mass = 0.4, .max_verticals = 256},
          .sink_tokens = 8,
          .tile = 64};
}

TEST_P(CudaRanksTest, Dense) {
  ExpectSameAsCpu("dense", {.tile = 64});
}

TEST_P(CudaRanksTest, DenseWithRoundedGradients) {
  ExpectSameAsCpu("dense", {.tile = 64, .bf16_gradients = true}, 1.5 * kTolerance);
}

TEST_P(CudaRanksTest, SlidingWindow) {
  ExpectSameAsCpu("window",
                  {.pattern = patterns::Pattern::kSlidingWindow, .window = 200, .tile = 64});
}

TEST_P(CudaRanksTest, BlockTopK) {
  ExpectSameAsCpu(
      "blocks",
      {.pattern = patterns::Pattern::kBlockTopK, .block_size = 128, .topk_blocks = 2, .tile = 64});
}

patterns::AttentionOptions Moba() {
  return {.pattern = patterns::Pattern::kMoba, .block_size = 128, .topk_blocks = 2, .tile = 64};
}

TEST_P(CudaRanksTest, Moba) {
  ExpectSameAsOneRank("moba", Moba());
  ExpectSameAsOneRank(
      "moba of a share",
      {.pattern = patterns::Pattern::kMoba, .block_size = 64, .density = 0.3, .tile = 64});
}

patterns::AttentionOptions KeyGroups() {
  return {.pattern = patterns::Pattern::kKeyGroups, .density = 0.3, .tile = 64};
}

TEST_P(CudaRanksTest, KeyGroups) {
  ExpectSameAsOneRank("key groups", KeyGroups());
  // In each of its three layers as many as the CPU keeps in its one; which they are may differ
  // within rounding.
  const Result gpu = RunOnGpu(Small(), With(KeyGroups()));
  EXPECT_EQ(gpu.TotalTiles(), 3 * RunOnCpu(Small(), KeyGroups()).TotalTiles());
}

TEST_P(CudaRanksTest, KeyGroupsThatKeepEverythingAreDense) {
  patterns::AttentionOptions all = KeyGroups();
  all.density = 1.0;
  ExpectNear(RunOnGpu(Small(), With(all)), RunOnCpu(Small(), {.tile = 64}));
}

patterns::AttentionOptions XAttention() {
  return {.pattern = patterns::Pattern::kXAttention, .threshold = 0.5, .tile = 64};
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
  ExpectSameAsOneRank("share of documents", SpreadShare(), {0, 1, 64, 200, 201, 230, 900});
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
}

// Documents of one token, within a tile, that end at its border, and of many tiles.
const std::vector<int64_t> kDocuments = {0, 1, 64, 200, 201, 230, 900};

TEST_P(CudaRanksTest, Documents) {
  ExpectSameAsCpu("dense documents", {.tile = 64}, kTolerance, kDocuments);
  ExpectSameAsCpu("window documents",
                  {.pattern = patterns::Pattern::kSlidingWindow, .window = 200, .tile = 64},
                  kTolerance, kDocuments);
  ExpectSameAsCpu(
      "block documents",
      {.pattern = patterns::Pattern::kBlockTopK, .block_size = 128, .topk_blocks = 2, .tile = 64},
      kTolerance, kDocuments);
}

TEST_P(CudaRanksTest, DocumentsUnderChosenBlocks) {
  ExpectSameAsOneRank("moba documents", Moba(), kDocuments);
  ExpectSameAsOneRank("xattention documents", XAttention(), kDocuments);
  ExpectSameAsOneRank("key groups documents", KeyGroups(), kDocuments);
}

TEST_P(CudaRanksTest, DocumentsUnderVerticalSlash) {
  ExpectSameAsOneRank("top-p documents", TopP(), kDocuments);
}

TEST_P(CudaRanksTest, IndexOfDocumentsIsTheOracles) {
  ExpectTheOracles(TopP(), kDocuments);
}

// Patterns whose index is the CPU's; on all ranks the same figures.
TEST_P(CudaRanksTest, ProbesAreThoseOfTheCpu) {
  for (patterns::AttentionOptions options :
       {patterns::AttentionOptions{
            .pattern = patterns::Pattern::kBlockTopK, .block_size = 128, .topk_blocks = 2},
        patterns::AttentionOptions{.pattern = patterns::Pattern::kBlockTopK,
        .selection = patterns::Selection::kCausal,
        .block_size = 64,
        .topk_blocks = 3},
        patterns::AttentionOptions{.pattern = patterns::Pattern::kSlidingWindow, .window = 200}}) {
    options.tile = 64;
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

class CudaStatisticsTest : public CudaAttentionTest,
                           public ::testing::WithParamInterface<std::vector<int64_t>> {};

TEST_P(CudaStatisticsTest, AreThoseOfTheCpu) {
  const Sequence sequence(2048, 4, 2, 64);
  const LayerStats cpu = RunOnCpu(sequence, TopP(), GetParam()).stats[0].layers.at(0);
  const Result gpu = RunOnGpu(sequence, TopP(), Gpus::kShared, GetParam());
  const LayerStats& layer = gpu.stats[0].layers.at(0);
  EXPECT_EQ(layer.calls, 1);
  EXPECT_EQ(layer.causal_tiles, cpu.causal_tiles);
  // Selections differ where masses are within rounding of the threshold.
  EXPECT_NEAR(layer.verticals, cpu.verticals, 0.02 * cpu.verticals);
  EXPECT_NEAR(layer.slashes, cpu.slashes, 0.5);
  EXPECT_NEAR(layer.density, cpu.density, 0.05 * cpu.density);
  // Recall here is that of all estimate queries, not of every eighth: a short document may have one
  // of the eight.
  EXPECT_NEAR(layer.recall, cpu.recall, GetParam().empty() ? 0.05 : 0.1);
  EXPECT_GT(gpu.stats[0].seconds.index, 0.0);
  EXPECT_GT(gpu.stats[0].seconds.forward, 0.0);
  EXPECT_GT(gpu.stats[0].seconds.backward, 0.0);
}

// One document, and several.
INSTANTIATE_TEST_SUITE_P(Documents, CudaStatisticsTest,
                         ::testing::Values(std::vector<int64_t>{},
                                           std::vector<int64_t>{0, 70, 1000, 1001, 1500}));

TEST_F(CudaAttentionTest, DocumentsWithTilesOf128) {
  const Sequence sequence(2048, 4, 2, 128);
  for (const std::vector<int64_t>& documents :
       {std::vector<int64_t>{0, 128, 1280}, {}, std::vector<int64_t>{0, 5, 1000, 1100, 2047}}) {
    ExpectNear(RunOnGpu(sequence, {.tile = 128}, Gpus::kShared, documents),
               RunOnCpu(sequence, {.tile = 128}, documents));
  }
}

TEST_F(CudaAttentionTest, ChosenBlocksWithTilesOf128) {
  const Sequence sequence(2048, 4, 2, 128);
  for (patterns::AttentionOptions options : {Moba(), XAttention()}) {
    options.tile = 128;
    options.block_size = 256;
    for (const std::vector<int64_t>& documents : {std::vector<int64_t>{}, {0, 5, 1000, 1100}}) {
      const Result result = RunOnGpu(sequence, options, Gpus::kShared, documents);
      ExpectNear(result, MaskedAttention(sequence, result.index[0]));
    }
  }
}

TEST_F(CudaAttentionTest, BudgetsReplaceThePatternAndDenseLayersStayDense) {
  patterns::AttentionOptions options = TopP();
  options.dense_layers = {1};
  const Result result = RunOnGpu(Sequence(1024, 4, 2, 64), options);
  EXPECT_LT(result.stats[0].layers.at(0).density, 1.0);
  EXPECT_EQ(result.stats[0].layers.at(1).density, 1.0);
  EXPECT_EQ(result.stats[0].layers.at(1).recall, -1.0);
}

// As a plan does between steps: more, less, none at all, and back.
TEST_F(CudaAttentionTest, BudgetsChangeInMidRun) {
  const Sequence sequence(1024, 4, 2, 64);
  patterns::AttentionOptions options = TopP();
  std::vector<patterns::LayerBudget> budgets(4, {.vertical_slash = options.budget});
  budgets[1].vertical_slash.vertical_mass = 0.2;
  budgets[1].vertical_slash.max_slashes = 2;
  budgets[2].dense = true;
  const std::vector<testing::HostIndex> indices = testing::IndicesOnGpu(sequence, options, budgets);
  ASSERT_EQ(indices.size(), budgets.size());
  for (size_t i = 0; i < budgets.size(); ++i) {
    if (budgets[i].dense) {
      EXPECT_EQ(indices[i].max_columns, 0);
      EXPECT_TRUE(indices[i].diagonals.empty());
      continue;
    }
    options.budget = budgets[i].vertical_slash;
    const testing::HostIndex fresh = RunOnGpu(sequence, options).index[0];
    EXPECT_EQ(indices[i].diagonals, fresh.diagonals) << i;
    EXPECT_EQ(indices[i].column_positions, fresh.column_positions) << i;
    EXPECT_EQ(indices[i].column_counts, fresh.column_counts) << i;
  }
  EXPECT_NE(indices[0].diagonals, indices[1].diagonals);
}

// Transfers, computation and the buffers of several layers overlap: shapes large enough that a
// missing order would show.
void ExpectFourRanksEqualOne(Gpus gpus) {
  const Sequence sequence(16384, 8, 2, 128);
  patterns::AttentionOptions options{
      .budget = {.vertical_mass = 0.3, .slash_mass = 0.3, .max_verticals = 512, .max_slashes = 24}};
  for (const patterns::Pattern pattern :
       {patterns::Pattern::kVerticalSlash, patterns::Pattern::kDense}) {
    options.pattern = pattern;
    options.ring = {};
    const Result one = RunOnGpu(sequence, options);
    for (const ring::RingShape ring : {ring::RingShape{ring::RingKind::kFlat, 4, 1},
                                       ring::RingShape{ring::RingKind::kHierarchical, 2, 2},
                                       ring::RingShape{ring::RingKind::kAllGather, 4, 1}}) {
      options.ring = ring;
      for (int repeat = gpus == Gpus::kShared ? 3 : 1; repeat > 0; --repeat) {
        // Tighter: both sides round the same inputs and sum the same products.
        ExpectNear(RunOnGpu(sequence, options, gpus), one, 4e-3);
      }
      options.bf16_gradients = true;
      ExpectNear(RunOnGpu(sequence, options, gpus), one, 1e-2);
      options.bf16_gradients = false;
    }
  }
}

TEST_F(CudaAttentionTest, LargerShapesOnFourRanksEqualOne) {
  ExpectFourRanksEqualOne(Gpus::kShared);
}

TEST_F(CudaAttentionTest, FourGpusEqualOne) {
  const int hosts = comm::testing::TestHosts().count;
  if (GpuCount() * hosts < 4) {
    GTEST_SKIP() << GpuCount() << " GPUs for each of " << hosts << " hosts; 4 are needed";
  }
  ExpectFourRanksEqualOne(Gpus::kOneEach);
}

TEST_F(CudaAttentionTest, GradientsFlowThroughAutograd) {
  const Sequence sequence(777, 4, 2, 128);
  const Result expected = RunOnCpu(sequence, {});
  const auto communicators = comm::testing::LocalDeviceCommunicators(1);
  auto attention = CreateCudaRingAttention({}, communicators[0].get());
  ASSERT_TRUE(attention.ok()) << attention.status();
  // Views of one projection, as a model makes them.
  const Tensor qkv =
      torch::cat({sequence.q, sequence.k, sequence.v}, 1).to(torch::kCUDA).requires_grad_();
  const auto parts = qkv.split_with_sizes({4, 2, 2}, 1);
  const Tensor out = testing::DifferentiableAttention(**attention, 0, parts[0], parts[1], parts[2]);
  attention->reset();  // the graph keeps what it needs
  out.backward(sequence.d_out.to(torch::kCUDA));
  const auto gradients = qkv.grad().cpu().to(torch::kFloat).split_with_sizes({4, 2, 2}, 1);
  EXPECT_LT(RelativeError(out.detach().cpu().to(torch::kFloat), expected.out), kTolerance);
  EXPECT_LT(RelativeError(gradients[0], expected.dq), kTolerance);
  EXPECT_LT(RelativeError(gradients[1], expected.dk), kTolerance);
  EXPECT_LT(RelativeError(gradients[2], expected.dv), kTolerance);
}

TEST_F(CudaAttentionTest, WhatIsNotSupportedIsNamed) {
  const auto communicators = comm::testing::LocalDeviceCommunicators(1);
  auto attention = CreateCudaRingAttention({}, communicators[0].get());
  ASSERT_TRUE(attention.ok()) << attention.status();
  const auto message = [&](const Tensor& q, const Tensor& k) -> std::string {
    try {
      testing::DifferentiableAttention(**attention, 0, q, k, k);
    } catch (const c10::Error& error) {
      return error.what();
    }
    return "";
  };
  const auto tensor = [](int64_t heads, int64_t dim, torch::ScalarType type) {
    return torch::randn({128, heads, dim}, torch::device(torch::kCUDA)).to(type);
  };
  const auto bf16 = torch::kBFloat16;
  EXPECT_NE(message(tensor(4, 64, torch::kFloat), tensor(2, 64, bf16)).find("q must be"),
            std::string::npos);
  EXPECT_NE(message(tensor(4, 96, bf16), tensor(2, 96, bf16)).find("head_dim is 96"),
            std::string::npos);
  EXPECT_NE(message(tensor(4, 64, bf16), tensor(3, 64, bf16)).find("heads"), std::string::npos);
  EXPECT_EQ(message(tensor(4, 64, bf16), tensor(2, 64, bf16)), "");
  const absl::Status status =
      CreateCudaRingAttention({.tile = 96}, communicators[0].get()).status();
  EXPECT_NE(std::string(status.message()).find("attention.tile"), std::string::npos) << status;
}

TEST_F(CudaAttentionTest, AnAbortedRingReturnsItsReason) {
  const Sequence sequence(1024, 4, 2, 64);
  patterns::AttentionOptions options{.tile = 64};
  options.ring.inner = 2;
  std::string message;
  comm::testing::RunDeviceRanks(2, [&](comm::DeviceCommunicator& communicator) {
    if (communicator.rank() == 1) return communicator.Abort("rank 1 ran out of memory");
    auto attention = CreateCudaRingAttention(options, &communicator);
    TORCH_CHECK(attention.ok());
    const auto half = [](const Tensor& x) { return x.slice(0, 0, 512).to(torch::kCUDA); };
    try {
      (*attention)->Forward(0, half(sequence.q), half(sequence.k), half(sequence.v));
    } catch (const c10::Error& error) {
      message = error.what();
    }
  });
  EXPECT_NE(message.find("rank 1 ran out of memory"), std::string::npos) << message;
}

}  // namespace
}  // namespace ringleader::attention
