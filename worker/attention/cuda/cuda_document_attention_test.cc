// Attention by documents on a GPU, all ranks as threads that share it, against the CPU engine:
// ragged parts of stripes and the whole documents behind them.
#include <c10/cuda/CUDAGuard.h>
#include <gtest/gtest.h>

#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "worker/attention/cuda/cuda_ring_attention.h"
#include "worker/attention/documents/document_attention.h"
#include "worker/attention/testing/gpu_attention.h"
#include "worker/attention/testing/gpu_rings.h"
#include "worker/attention/testing/ring_settings.h"
#include "worker/comm/testing/local_device_communicator.h"

namespace ringleader::attention {
namespace {

using testing::Result;
using testing::Sequence;
using torch::Tensor;
using Holders = std::vector<std::optional<int>>;

// Some long, some short, one of a single token; the last is spread and ends within a stripe.
struct Documents {
  std::vector<int64_t> firsts;
  Holders holders;  // modulo the ranks
};
const Documents kMixed = {{0, 1, 64, 200, 201, 230, 1500, 1700},
                          {0, std::nullopt, 1, std::nullopt, 2, std::nullopt, 3, std::nullopt}};
const Documents kOneSpread = {{0, 1100, 1500, 1900}, {std::nullopt, 0, 1, 2}};
const Documents kAllSpread = {{0, 700}, {std::nullopt, std::nullopt}};

Result RunByDocuments(const Sequence& sequence, patterns::AttentionOptions options,
                      const Documents& documents) {
  options.by_documents = true;
  const int ranks = options.ring.ranks();
  Holders holders;
  for (const std::optional<int>& holder : documents.holders) {
    holders.push_back(holder.has_value() ? std::optional<int>(*holder % ranks) : std::nullopt);
  }
  const auto layout = ring::DocumentLayout::Create(sequence.q.size(0), documents.firsts, holders,
                                                   ranks, options.tile);
  TORCH_CHECK(layout.ok(), std::string(layout.status().message()));
  const auto zeros = [](const Tensor& x) { return torch::zeros(x.sizes(), torch::kFloat); };
  Result result = {.out = zeros(sequence.q),
                   .dq = zeros(sequence.q),
                   .dk = zeros(sequence.k),
                   .dv = zeros(sequence.v),
                   .stats = std::vector<AttentionStats>(ranks),
                   .index = {},
                   .rows = {}};
  std::mutex mutex;
  comm::testing::RunDeviceRanks(ranks, [&](comm::DeviceCommunicator& communicator) {
    const c10::cuda::CUDAStreamGuard stream(c10::cuda::getStreamFromPool());
    const int rank = communicator.rank();
    const auto one = communicator.Split({rank});
    kernels::ops::Check(one.status());
    auto ring = CreateCudaRingAttention(options, &communicator);
    auto alone = CreateCudaRingAttention(AloneOptions(options), one->get());
    kernels::ops::Check(ring.status());
    kernels::ops::Check(alone.status());
    DocumentAttention attention(options, *std::move(ring), *std::move(alone), rank);
    kernels::ops::Check(attention.SetLayout(*layout));
    const Tensor positions = torch::tensor(layout->Positions(rank));
    const auto shard = [&](const Tensor& x) {
      return x.index_select(0, positions).to(torch::kCUDA);
    };
    const Tensor q = shard(sequence.q), k = shard(sequence.k), v = shard(sequence.v);
    std::vector<AttentionOutput> outputs;
    for (int layer = 0; layer < testing::kLayers; ++layer) {
      outputs.push_back(attention.Forward(layer, q, k, v));
    }
    AttentionGradients gradients;
    for (int layer = testing::kLayers - 1; layer >= 0; --layer) {
      const AttentionOutput& output = outputs[layer];
      // As a model does of some layers.
      if (layer % 2 == 0) output.record->StartBackward(k, v);
      gradients = output.record->Backward(q, k, v, output.out, output.lse, shard(sequence.d_out));
    }
    result.stats[rank] = attention.TakeStats();
    const std::lock_guard lock(mutex);
    const auto put = [&](Tensor& whole, const Tensor& part) {
      whole.index_copy_(0, positions, part.cpu().to(torch::kFloat));
    };
    put(result.out, outputs[0].out);
    put(result.dq, gradients.dq);
    put(result.dk, gradients.dk);
    put(result.dv, gradients.dv);
  });
  return result;
}

class CudaDocumentAttentionTest : public testing::CudaAttentionTest,
                                  public ::testing::WithParamInterface<testing::RingSetting> {};

TEST_P(CudaDocumentAttentionTest, IsThatOfTheCpu) {
  const Sequence sequence(2048, 4, 2, 64);
  for (const int tile : {64, 128}) {
    for (const Documents* const documents : {&kMixed, &kOneSpread, &kAllSpread}) {
      for (const bool rounded : {false, true}) {
        const patterns::AttentionOptions options = {.tile = tile,
                                                    .layout = kernels::LayoutKind::kStriped,
                                                    .ring = GetParam().ring,
                                                    .bf16_gradients = rounded};
        const Result result = RunByDocuments(sequence, options, *documents);
        testing::ExpectNear(result, testing::RunOnCpu(sequence, options, documents->firsts));
        for (const AttentionStats& stats : result.stats) {
          EXPECT_GT(stats.layers.at(0).TotalTiles(), 0u);
          EXPECT_LE(stats.layers.at(0).density, 1.0);
        }
      }
    }
  }
}

std::vector<testing::RingSetting> StripedSettings() {
  std::vector<testing::RingSetting> settings;
  for (const testing::RingSetting& setting : testing::AllRingSettings()) {
    if (setting.layout == kernels::LayoutKind::kStriped && setting.ring.ranks() > 1) {
      settings.push_back(setting);
    }
  }
  return settings;
}

INSTANTIATE_TEST_SUITE_P(Settings, CudaDocumentAttentionTest,
                         ::testing::ValuesIn(StripedSettings()),
                         [](const auto& info) { return testing::NameOf(info.param); });

}  // namespace
}  // namespace ringleader::attention
