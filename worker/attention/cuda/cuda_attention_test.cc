// Attention on a GPU beyond rings of small shapes: what it reports, larger shapes, several GPUs,
// autograd and errors.
#include <c10/cuda/CUDAGuard.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "kernels/ops/cast_ops.h"
#include "kernels/ops/token_view.h"
#include "kernels/reference/testing/packed_documents.h"
#include "kernels/reference/testing/query_gate_oracle.h"
#include "ringleader/kernels/earlier_blocks.h"
#include "worker/attention/cuda/cuda_ring_attention.h"
#include "worker/attention/testing/changing_budgets.h"
#include "worker/attention/testing/differentiable_attention.h"
#include "worker/attention/testing/gpu_attention.h"
#include "worker/attention/testing/gpu_rings.h"
#include "worker/attention/testing/index_oracle.h"
#include "worker/comm/testing/hosts.h"
#include "worker/comm/testing/local_device_communicator.h"

namespace ringleader::attention {
namespace {

using testing::AdaSpa;
using testing::CudaAttentionTest;
using testing::ExpectNear;
using testing::GpuCount;
using testing::Gpus;
using testing::kTolerance;
using testing::MaskedAttention;
using testing::Moba;
using testing::MobaOfMost;
using testing::RelativeError;
using testing::Result;
using testing::RunOnCpu;
using testing::RunOnGpu;
using testing::Sequence;
using testing::TopP;
using testing::XAttention;
using torch::Tensor;

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
  for (patterns::AttentionOptions options : {Moba(), MobaOfMost(), XAttention(), AdaSpa()}) {
    options.tile = 128;
    options.block_size = 256;
    for (const std::vector<int64_t>& documents : {std::vector<int64_t>{}, {0, 5, 1000, 1100}}) {
      const Result result = RunOnGpu(sequence, options, Gpus::kShared, documents);
      ExpectNear(result, MaskedAttention(sequence, result.index[0]));
    }
  }
}

// MoBA scores a block of two tiles by the mean of its keys of the query's document, on any number
// of ranks.
TEST_F(CudaAttentionTest, MeansOfKeysAreOfOneDocument) {
  const Sequence sequence(2048, 4, 2, 128);
  const Tensor q = sequence.q.to(torch::kFloat), k = sequence.k.to(torch::kFloat);
  const std::vector<int64_t> documents = {0, 5, 130, 300, 301, 1000, 1100};
  patterns::AttentionOptions options = Moba();
  options.topk_blocks = 4;
  options.stripe = options.tile;
  for (const kernels::LayoutKind layout :
       {kernels::LayoutKind::kContiguous, kernels::LayoutKind::kZigzag,
        kernels::LayoutKind::kStriped}) {
    for (const int ranks : {1, 2, 4}) {
      options.layout = layout;
      options.ring.inner = ranks;
      const Result result = RunOnGpu(sequence, options, Gpus::kShared, documents);
      for (int rank = 0; rank < ranks; ++rank) {
        EXPECT_EQ(kernels::reference::testing::QueryGateComplaint(
                      kernels::ops::TokenView(q, q.const_data_ptr<float>()),
                      kernels::ops::TokenView(k, k.const_data_ptr<float>()),
                      {.block_size = options.block_size, .topk_blocks = options.topk_blocks},
                      kernels::reference::testing::DocumentStarts(q.size(0), documents),
                      patterns::LayoutOf(options, ranks, rank, q.size(0) / ranks),
                      result.index[rank].queries_chosen, /*tolerance=*/1e-3),
                  "")
            << "rank " << rank << " of " << ranks;
      }
    }
  }
}

// Heads that share a KV head by three, by none and by four; ends within a tile and a block.
TEST_F(CudaAttentionTest, GatheredQueriesOfAnyShape) {
  for (const Sequence& sequence :
       {Sequence(1000, 6, 2, 64), Sequence(1501, 2, 2, 128), Sequence(1100, 4, 1, 128)}) {
    for (const std::vector<int64_t>& documents :
         {std::vector<int64_t>{}, {0, 5, 130, 600, 601}, {0, 999}}) {
      patterns::AttentionOptions options = Moba();
      ASSERT_TRUE(kernels::GathersQueries(kernels::CountEarlierBlocks(
          {.tokens = sequence.q.size(0)}, options.tile, options.block_size, options.topk_blocks,
          0.0f, /*is_moved=*/false)));
      const Result result = RunOnGpu(sequence, options, Gpus::kShared, documents);
      ExpectNear(result, MaskedAttention(sequence, result.index[0]));
      options.deterministic = true;
      const Result once = RunOnGpu(sequence, options, Gpus::kShared, documents),
                   again = RunOnGpu(sequence, options, Gpus::kShared, documents);
      EXPECT_TRUE(torch::equal(once.out, again.out));
      EXPECT_TRUE(torch::equal(once.dq, again.dq));
      EXPECT_TRUE(torch::equal(once.dk, again.dk));
      EXPECT_TRUE(torch::equal(once.dv, again.dv));
      ExpectNear(once, result);
    }
  }
}

TEST_F(CudaAttentionTest, DenseLayersStayDense) {
  patterns::AttentionOptions options = TopP();
  options.dense_layers = {1};
  const Result result = RunOnGpu(Sequence(1024, 4, 2, 64), options);
  EXPECT_LT(result.stats[0].layers.at(0).density, 1.0);
  EXPECT_EQ(result.stats[0].layers.at(1).density, 1.0);
  EXPECT_EQ(result.stats[0].layers.at(1).recall, -1.0);
}

// As evaluation does between steps.
TEST_F(CudaAttentionTest, DenseForwardsComeBetweenOthers) {
  const Sequence sequence(1024, 4, 2, 64);
  const patterns::AttentionOptions options = TopP();
  const std::vector<bool> dense = {false, true, false};
  const std::vector<testing::HostIndex> indices = testing::IndicesOnGpu(sequence, options, dense);
  ASSERT_EQ(indices.size(), dense.size());
  const testing::HostIndex fresh = RunOnGpu(sequence, options).index[0];
  ASSERT_FALSE(fresh.diagonals.empty());
  for (size_t i = 0; i < dense.size(); ++i) {
    if (dense[i]) {
      EXPECT_EQ(indices[i].max_columns, 0);
      EXPECT_TRUE(indices[i].diagonals.empty());
      continue;
    }
    EXPECT_EQ(indices[i].diagonals, fresh.diagonals) << i;
    EXPECT_EQ(indices[i].column_positions, fresh.column_positions) << i;
    EXPECT_EQ(indices[i].column_counts, fresh.column_counts) << i;
  }
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

struct GpuEngine {
  static void SetUp() {
    if (GpuCount() == 0) GTEST_SKIP() << "no GPU on this machine";
    ASSERT_EQ(kernels::ops::LoadTorchCuda(), absl::OkStatus());
  }
  template <typename Body>
  static void RunRanks(int ranks, const Body& body) {
    comm::testing::RunDeviceRanks(ranks, [&](comm::DeviceCommunicator& communicator) {
      const c10::cuda::CUDAStreamGuard stream(c10::cuda::getStreamFromPool());
      body(communicator.rank(), [&](const patterns::AttentionOptions& options) {
        return CreateCudaRingAttention(options, &communicator);
      });
    });
  }
  static Tensor ToDevice(const Tensor& x) { return x.to(torch::kCUDA).to(torch::kBFloat16); }
};

}  // namespace

namespace testing {
INSTANTIATE_TYPED_TEST_SUITE_P(Gpu, ChangingBudgetsTest, GpuEngine);
}  // namespace testing

namespace {

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

// As a pass over the output would cast it, in the hops' last step.
TEST_F(CudaAttentionTest, TheOutputComesInE4m3WhereThatIsAskedFor) {
  const Sequence sequence(777, 4, 2, 128);
  const auto to_gpu = [](const Tensor& x) { return x.to(torch::kCUDA); };
  const auto communicators = comm::testing::LocalDeviceCommunicators(1);
  for (const patterns::AttentionOptions& options : {patterns::AttentionOptions{}, TopP(), Moba()}) {
    auto attention = CreateCudaRingAttention(options, communicators[0].get());
    ASSERT_TRUE(attention.ok()) << attention.status();
    const auto forward = [&] {
      return (*attention)->Forward(0, to_gpu(sequence.q), to_gpu(sequence.k), to_gpu(sequence.v));
    };
    const AttentionOutput plain = forward();
    EXPECT_FALSE(plain.codes.defined());
    (*attention)->SetCasts(true);
    const AttentionOutput output = forward();
    EXPECT_TRUE(torch::equal(output.out, plain.out));
    const auto expected = kernels::ops::CastRows(output.out.view({777, 4 * 128}));
    ASSERT_TRUE(output.codes.defined());
    EXPECT_EQ(output.codes.sizes(), expected.codes.sizes());
    EXPECT_TRUE(torch::equal(output.codes.view(torch::kByte), expected.codes.view(torch::kByte)));
    EXPECT_TRUE(torch::equal(output.scales, expected.scales));
    (*attention)->SetCasts(false);
    EXPECT_FALSE(forward().codes.defined());
  }
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
