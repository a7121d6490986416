// Heads that ranks share out on a GPU, all ranks as threads that share it: one rank's result, and
// the tiles that it visits.
#include <c10/cuda/CUDAGuard.h>
#include <gtest/gtest.h>

#include <mutex>
#include <vector>

#include "ring/head_shares.h"
#include "worker/attention/cuda/cuda_ring_attention.h"
#include "worker/attention/testing/gpu_attention.h"
#include "worker/attention/testing/gpu_rings.h"
#include "worker/comm/testing/local_device_communicator.h"

namespace ringleader::attention {
namespace {

using testing::CudaAttentionTest;
using testing::Result;
using testing::Sequence;
using torch::Tensor;

Result RunOnRanks(const Sequence& sequence, const patterns::AttentionOptions& options) {
  const int share = options.head_ranks, ranks = options.ring.ranks() * share;
  const auto zeros = [](const Tensor& x) { return torch::zeros(x.sizes(), torch::kFloat); };
  Result result{.out = zeros(sequence.q),
                .dq = zeros(sequence.q),
                .dk = zeros(sequence.k),
                .dv = zeros(sequence.v),
                .stats = std::vector<AttentionStats>(ranks),
                .index = {},
                .rows = {}};
  std::mutex mutex;
  comm::testing::RunDeviceRanks(ranks, [&](comm::DeviceCommunicator& all) {
    const c10::cuda::CUDAStreamGuard stream(c10::cuda::getStreamFromPool());
    const int member = all.rank() % share;
    std::vector<int> ring_ranks, head_ranks;
    for (int i = 0; i < options.ring.ranks(); ++i) ring_ranks.push_back(i * share + member);
    for (int i = 0; i < share; ++i) head_ranks.push_back(all.rank() - member + i);
    const auto ring = all.Split(ring_ranks), heads = all.Split(head_ranks);
    TORCH_CHECK(ring.ok() && heads.ok());
    const auto attention = CreateCudaRingAttention(options, ring->get(), heads->get());
    TORCH_CHECK(attention.ok(), std::string(attention.status().message()));
    const kernels::ShardLayout layout =
        patterns::LayoutOf(options, options.ring.ranks(), all.rank() / share,
                           sequence.q.size(0) / options.ring.ranks());
    const int64_t held = layout.local_tokens() / share;
    Tensor positions = torch::empty({held}, torch::kLong);
    for (int64_t i = 0; i < held; ++i) {
      positions.data_ptr<int64_t>()[i] = layout.Position(member * held + i);
    }
    const auto shard = [&](const Tensor& x) {
      return x.index_select(0, positions).to(torch::kCUDA);
    };
    const Tensor q = shard(sequence.q), k = shard(sequence.k), v = shard(sequence.v),
                 d_out = shard(sequence.d_out);
    (*attention)->SetCasts(true);
    const AttentionOutput forward = (*attention)->Forward(0, q, k, v);
    EXPECT_EQ(forward.codes.defined(), share == 1 && options.head_groups == 1)
        << "of all heads of a token at once";
    forward.record->StartBackward(k, v);
    const AttentionGradients d = forward.record->Backward(q, k, v, forward.out, forward.lse, d_out);
    result.stats[all.rank()] = (*attention)->TakeStats();
    const std::lock_guard lock(mutex);
    const auto put = [&](Tensor& whole, const Tensor& part) {
      whole.index_copy_(0, positions, part.cpu().to(torch::kFloat));
    };
    put(result.out, forward.out);
    put(result.dq, d.dq);
    put(result.dk, d.dk);
    put(result.dv, d.dv);
  });
  return result;
}

class CudaSharedHeadsTest : public CudaAttentionTest {};

TEST_F(CudaSharedHeadsTest, AnyNumberOfRanksComputesWhatOneComputes) {
  for (const int kv_heads : {4, 2, 1}) {
    const Sequence sequence(1024, 8, kv_heads, 64);
    for (patterns::AttentionOptions options :
         {patterns::AttentionOptions{.tile = 64, .stripe = 64},
          patterns::AttentionOptions{.pattern = patterns::Pattern::kVerticalSlash,
          .budget = {.vertical_mass = 0.5, .slash_mass = 0.4},
          .tile = 64,
          .stripe = 64}}) {
      const Result expected = testing::RunOnGpu(sequence, options);  // of kLayers layers
      for (const auto& [heads, around] : {std::pair{2, 1}, {4, 1}, {2, 2}}) {
        options.head_ranks = heads;
        options.ring.inner = around;
        const Result actual = RunOnRanks(sequence, options);
        testing::ExpectNear(actual, expected);
        EXPECT_EQ(testing::kLayers * actual.TotalTiles(), expected.TotalTiles()) << heads << around;
        const ring::HeadShares shares = {.ranks = heads, .heads = 8, .kv_heads = kv_heads};
        const int64_t tokens = 1024 / (heads * around);
        EXPECT_EQ(actual.stats[0].head_bytes,
                  2 * static_cast<uint64_t>(shares.ForwardValues(tokens, 64) +
                                            shares.BackwardValues(tokens, 64)));
      }
    }
  }
}

// Two buffers of gathered keys take turns: one is attended to while the other fills.
TEST_F(CudaSharedHeadsTest, GroupsOfHeadsComputeWhatAllHeadsAtOnceCompute) {
  const Sequence sequence(1024, 8, 4, 64);
  for (const patterns::Pattern pattern :
       {patterns::Pattern::kDense, patterns::Pattern::kVerticalSlash}) {
    patterns::AttentionOptions options{.pattern = pattern,
                                       .budget = {.vertical_mass = 0.5, .slash_mass = 0.4},
                                       .tile = 64,
                                       .stripe = 64};
    const Result expected = testing::RunOnGpu(sequence, options);  // of kLayers layers
    options.ring = {ring::RingKind::kAllGather, 2, 1};
    for (const int groups : {2, 4}) {
      options.head_groups = groups;
      const Result actual = RunOnRanks(sequence, options);
      testing::ExpectNear(actual, expected);
      EXPECT_EQ(testing::kLayers * actual.TotalTiles(), expected.TotalTiles()) << groups;
    }
  }
}

}  // namespace
}  // namespace ringleader::attention
