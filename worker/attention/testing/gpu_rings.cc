#include "worker/attention/testing/gpu_rings.h"

#include <c10/cuda/CUDAGuard.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <mutex>
#include <string>
#include <utility>

#include "kernels/ops/cuda_call.h"
#include "kernels/reference/testing/key_group_oracle.h"
#include "worker/attention/cpu/cpu_ring_attention.h"
#include "worker/attention/cuda/cuda_attention_call.h"
#include "worker/attention/runner/ring_runner.h"
#include "worker/attention/testing/differentiable_attention.h"
#include "worker/attention/testing/shard_rows.h"
#include "worker/comm/nccl/nccl_communicator.h"
#include "worker/comm/testing/hosts.h"
#include "worker/comm/testing/local_device_communicator.h"

namespace ringleader::attention::testing {

using kernels::ops::Check;
using torch::Tensor;

int GpuCount() {
  int devices = 0;
  return cudaGetDeviceCount(&devices) == cudaSuccess ? devices : 0;
}

namespace {

// Runs `body` on a thread a rank.
void RunRanks(Gpus gpus, int ranks, const std::function<void(comm::DeviceCommunicator&)>& body) {
  if (gpus == Gpus::kShared) return comm::testing::RunDeviceRanks(ranks, body);
  comm::testing::RunRanks(comm::testing::HostCommunicators(ranks), [&](comm::Communicator& host) {
    const int gpus = GpuCount();
    TORCH_CHECK(gpus > 0, "there is no GPU");
    const int gpu = host.rank() % gpus;
    cudaSetDevice(gpu);
    const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(gpu));
    auto device = comm::CreateNcclCommunicator({.device = gpu}, &host);
    TORCH_CHECK(device.ok(), std::string(device.status().message()));
    body(**device);
    host.Barrier().IgnoreError();  // nobody leaves while others' transfers run
  });
}

Result EmptyResult(const Sequence& s, int ranks) {
  const auto zeros = [](const Tensor& x) { return torch::zeros(x.sizes(), torch::kFloat); };
  return {.out = zeros(s.q),
          .dq = zeros(s.q),
          .dk = zeros(s.k),
          .dv = zeros(s.v),
          .stats = std::vector<AttentionStats>(ranks),
          .index = std::vector<HostIndex>(ranks),
          .rows = {}};
}

// Where the prefixes of a sequence's documents end: MaskRule's.
std::vector<int64_t> PrefixEnds(const patterns::AttentionOptions& options,
                                std::vector<int64_t> firsts, int64_t tokens) {
  if (options.mask != patterns::Mask::kPrefixLm) return {};
  if (firsts.empty()) firsts = {0};
  std::vector<int64_t> ends;
  for (size_t i = 0; i < firsts.size(); ++i) {
    const int64_t end = i + 1 < firsts.size() ? firsts[i + 1] : tokens;
    ends.push_back(firsts[i] + (end - firsts[i]) / 3);
  }
  return ends;
}

}  // namespace

Sequence::Sequence(int64_t tokens, int heads, int kv_heads, int head_dim) {
  torch::manual_seed(7);
  const auto random = [&](int of) {
    return torch::randn({tokens, of, head_dim}).to(torch::kBFloat16);
  };
  q = random(heads) * 1.5;
  k = random(kv_heads);
  v = random(kv_heads);
  d_out = random(heads);
}

uint64_t Result::TotalTiles() const {
  uint64_t tiles = 0;
  for (const AttentionStats& of_rank : stats) tiles += of_rank.TotalTiles();
  return tiles;
}

namespace {

class AllRowsDevice : public CudaAttentionDevice {
 public:
  using CudaAttentionDevice::CudaAttentionDevice;
  double most_carried() const override { return 0.0; }
};

template <typename Device>
Result RunOnDevice(const Sequence& sequence, const patterns::AttentionOptions& options, Gpus gpus,
                   const std::vector<int64_t>& documents, float move) {
  const int ranks = options.ring.inner * options.ring.outer;
  Result result = EmptyResult(sequence, ranks);
  std::mutex mutex;
  RunRanks(gpus, ranks, [&](comm::DeviceCommunicator& communicator) {
    const c10::cuda::CUDAStreamGuard stream(c10::cuda::getStreamFromPool());
    const int rank = communicator.rank();
    Device device(&communicator, {.bf16_gradients = options.bf16_gradients,
                                  .deterministic = options.deterministic});
    auto engine = RingRunner::Create(options, &device);
    TORCH_CHECK(engine.ok(), std::string(engine.status().message()));
    const Tensor positions = PositionsOf(options, rank, sequence.q.size(0));
    const auto shard = [&](const Tensor& x) {
      return x.index_select(0, positions).to(torch::kCUDA);
    };
    const Tensor q = shard(sequence.q), k = shard(sequence.k), v = shard(sequence.v),
                 d_out = shard(sequence.d_out);
    std::vector<CallTensors> calls(kLayers, {.q = q, .k = k, .v = v});
    std::vector<std::shared_ptr<const LayerIndex>> indices;
    (*engine)->SetStep(1);
    (*engine)->SetMove(move);
    const int64_t tokens = sequence.q.size(0);
    const auto set_documents = [&](const std::vector<int64_t>& firsts) {
      Check((*engine)->SetDocuments(tokens, firsts, /*padding=*/0,
                                    PrefixEnds(options, firsts, tokens)));
    };
    set_documents(documents);
    for (int layer = 0; layer < kLayers; ++layer) {
      CudaCall call(&device, layer, &calls[layer]);
      auto index = (*engine)->Forward(call);
      Check(index.status());
      indices.push_back(*std::move(index));
    }
    // Backward is of what forward saw, whatever comes next.
    set_documents({});
    for (int layer = kLayers - 1; layer >= 0; --layer) {
      calls[layer].d_out = d_out;
      CudaCall call(&device, layer, &calls[layer]);
      Check((*engine)->Backward(*indices[layer], call));
    }
    result.stats[rank] = (*engine)->TakeStats();
    result.index[rank] = ToHost(*indices[0], [](void* to, const void* from, size_t bytes) {
      ASSERT_EQ(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), cudaSuccess);
    });
    const std::lock_guard lock(mutex);
    const auto put = [&](Tensor& whole, const Tensor& part) {
      whole.index_copy_(0, positions, part.cpu().to(torch::kFloat));
    };
    put(result.out, calls[0].out);
    put(result.dq, calls[0].gradients.dq);
    put(result.dk, calls[0].gradients.dk);
    put(result.dv, calls[0].gradients.dv);
    result.rows.push_back(positions);
  });
  return result;
}

}  // namespace

Result RunOnGpu(const Sequence& sequence, const patterns::AttentionOptions& options, Gpus gpus,
                const std::vector<int64_t>& documents, float move) {
  return RunOnDevice<CudaAttentionDevice>(sequence, options, gpus, documents, move);
}

Result RunWithAllRows(const Sequence& sequence, const patterns::AttentionOptions& options,
                      const std::vector<int64_t>& documents) {
  return RunOnDevice<AllRowsDevice>(sequence, options, Gpus::kShared, documents, /*move=*/1.0f);
}

std::vector<HostIndex> IndicesOnGpu(const Sequence& sequence,
                                    const patterns::AttentionOptions& options,
                                    const std::vector<bool>& dense) {
  std::vector<HostIndex> indices;
  RunRanks(Gpus::kShared, 1, [&](comm::DeviceCommunicator& communicator) {
    CudaAttentionDevice device(&communicator, {});
    auto engine = RingRunner::Create(options, &device);
    TORCH_CHECK(engine.ok(), std::string(engine.status().message()));
    CallTensors tensors{.q = sequence.q.to(torch::kCUDA),
                        .k = sequence.k.to(torch::kCUDA),
                        .v = sequence.v.to(torch::kCUDA)};
    // All are enqueued before the first is read.
    std::vector<std::shared_ptr<const LayerIndex>> chosen;
    for (const bool is_dense : dense) {
      (*engine)->SetDense(is_dense);
      CudaCall call(&device, /*layer=*/0, &tensors);
      auto index = (*engine)->Forward(call);
      Check(index.status());
      chosen.push_back(*std::move(index));
    }
    for (const auto& index : chosen) {
      indices.push_back(ToHost(*index, [](void* to, const void* from, size_t bytes) {
        ASSERT_EQ(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), cudaSuccess);
      }));
    }
  });
  return indices;
}

Result RunOnCpu(const Sequence& sequence, patterns::AttentionOptions options,
                const std::vector<int64_t>& documents, float move) {
  options.ring = {};
  Result result = EmptyResult(sequence, 1);
  comm::testing::RunRanks(1, [&](comm::Communicator& communicator) {
    auto attention = CreateCpuRingAttention(options, &communicator);
    TORCH_CHECK(attention.ok(), std::string(attention.status().message()));
    const auto leaf = [](const Tensor& x) { return x.to(torch::kFloat).requires_grad_(); };
    const Tensor q = leaf(sequence.q), k = leaf(sequence.k), v = leaf(sequence.v);
    (*attention)->SetStep(1);
    (*attention)->SetMove(move);
    const int64_t tokens = sequence.q.size(0);
    Check((*attention)
              ->SetDocuments(tokens, documents, /*padding=*/0,
                             PrefixEnds(options, documents, tokens)));
    const Tensor out = DifferentiableAttention(**attention, 0, q, k, v);
    out.backward(sequence.d_out.to(torch::kFloat));
    result.stats[0] = (*attention)->TakeStats();
    result.out = out.detach();
    result.dq = q.grad();
    result.dk = k.grad();
    result.dv = v.grad();
  });
  return result;
}

namespace {

// Sets what the blocks say that tiles of queries, or queries, chose.
void AddChosen(const HostIndex& index, Tensor& mask) {
  const int64_t n = mask.size(1), blocks = (n + index.block_size - 1) / index.block_size;
  const int64_t tiles = (n + index.tile - 1) / index.tile;
  const auto bit = [](const std::vector<uint32_t>& words, int64_t count, int64_t row, int64_t i) {
    return (words.at(row * ((count + 31) / 32) + i / 32) >> i % 32 & 1) != 0;
  };
  for (int64_t h = 0; h < mask.size(0); ++h) {
    for (int64_t block = 0; block < blocks; ++block) {
      Tensor of_block = mask[h].slice(1, block * index.block_size, (block + 1) * index.block_size);
      for (int64_t i = 0; i < n; ++i) {
        if (index.queries_chosen.empty()
                ? bit(index.chosen, blocks, h * tiles + i / index.tile, block)
                : bit(index.queries_chosen, n, h * blocks + block, i)) {
          of_block[i].fill_(true);
        }
      }
    }
  }
}

// Sets the groups of keys that tiles of queries chose, and what these see of their own keys.
void AddGroups(const HostIndex& index, Tensor& mask) {
  const int64_t tokens = mask.size(1), queries = index.group_queries;
  for (int64_t head = 0; head < mask.size(0); ++head) {
    for (int64_t tile = 0; tile * queries < tokens; ++tile) {
      Tensor of_tile = mask[head].slice(0, tile * queries, (tile + 1) * queries);
      of_tile.slice(1, tile * queries, (tile + 1) * queries).fill_(true);
      for (const int64_t group : kernels::reference::testing::GroupsOfRow(
               index.groups_chosen, {.tokens = tokens},
               static_cast<int>(head) / index.heads_together, tile, index.group_queries)) {
        const int64_t key = group * kernels::kGroupKeys;
        of_tile.slice(1, key, key + kernels::kGroupKeys).fill_(true);
      }
    }
  }
}

// What the mask and the documents show: [n, n].
Tensor Shown(const HostIndex& index, int64_t n) {
  const auto host = index.documents == nullptr ? nullptr : index.documents->host;
  if (host != nullptr && !host->visible.empty()) {
    Tensor shown = torch::zeros({n, n}, torch::kBool);
    for (int64_t i = 0; i < n; ++i) {
      const kernels::KeyIntervals& row = host->visible.at(i);
      shown[i].slice(0, row.begin, row.end).fill_(true);
    }
    return shown;
  }
  Tensor shown = torch::ones({n, n}).tril().to(torch::kBool);
  if (host == nullptr) return shown;
  for (size_t i = 1; i < host->firsts.size(); ++i) {
    shown.slice(0, host->firsts[i], n).slice(1, 0, host->firsts[i]).fill_(false);
  }
  return shown;
}

// What the index of one rank, the mask and the documents say is visited: [heads, n, n].
Tensor VisitedMask(const HostIndex& index, int64_t heads, int64_t n) {
  const int64_t tile = index.tile;
  Tensor mask = torch::zeros({heads, n, n}, torch::kBool);
  if (!index.chosen.empty()) AddChosen(index, mask);
  if (!index.groups_chosen.empty()) AddGroups(index, mask);
  const int64_t blocks = (n + tile - 1) / tile;
  const bool has_own = !index.groups_chosen.empty();
  for (int64_t h = 0; h < heads && !index.diagonals.empty() && !has_own; ++h) {
    for (int64_t delta = 0; delta < blocks; ++delta) {
      if (!index.Covers(static_cast<int>(h), delta)) continue;
      for (int64_t a = delta; a < blocks; ++a) {
        mask[h]
            .slice(0, a * tile, (a + 1) * tile)
            .slice(1, (a - delta) * tile, (a - delta + 1) * tile)
            .fill_(true);
      }
    }
    for (const int64_t position : index.Columns(static_cast<int>(h))) {
      mask[h].select(1, position).fill_(true);
    }
  }
  return mask.logical_and(Shown(index, n));
}

}  // namespace

Result MaskedAttention(const Sequence& s, const HostIndex& index) {
  const int64_t n = s.q.size(0), heads = s.q.size(1), group = heads / s.k.size(1);
  const Tensor mask = VisitedMask(index, heads, n).to(torch::kCUDA);
  const auto leaf = [](const Tensor& x) {
    return x.to(torch::kCUDA).to(torch::kDouble).requires_grad_();
  };
  const Tensor q = leaf(s.q), k = leaf(s.k), v = leaf(s.v);
  const auto by_head = [&](const Tensor& x) {
    return x.transpose(0, 1).repeat_interleave(heads / x.size(1), 0);
  };
  EXPECT_EQ(group * s.k.size(1), heads);
  const Tensor logits = by_head(q)
                            .matmul(by_head(k).transpose(1, 2))
                            .div(std::sqrt(static_cast<double>(s.q.size(2))))
                            .masked_fill(mask.logical_not(), -INFINITY);
  const Tensor out = logits.softmax(-1).matmul(by_head(v)).transpose(0, 1);
  out.backward(s.d_out.to(torch::kCUDA).to(torch::kDouble));
  const auto back = [](const Tensor& x) { return x.detach().cpu().to(torch::kFloat); };
  Result result = EmptyResult(s, 0);
  result.out = back(out);
  result.dq = back(q.grad());
  result.dk = back(k.grad());
  result.dv = back(v.grad());
  return result;
}

std::vector<double> VisitedShares(const Sequence& s, const HostIndex& index,
                                  const std::vector<int64_t>& positions) {
  const int64_t n = s.q.size(0), heads = s.q.size(1), group = heads / s.k.size(1);
  const Tensor rows = torch::tensor(positions), mask = VisitedMask(index, heads, n),
               shown = Shown(index, n).index_select(0, rows);
  std::vector<double> shares;
  for (int64_t head = 0; head < heads; ++head) {
    const Tensor q = s.q.select(1, head).index_select(0, rows).to(torch::kDouble),
                 k = s.k.select(1, head / group).to(torch::kDouble);
    const Tensor softmax = q.matmul(k.t())
                               .div(std::sqrt(static_cast<double>(s.q.size(2))))
                               .masked_fill(shown.logical_not(), -INFINITY)
                               .softmax(-1);
    const Tensor visited = softmax.mul(mask[head].index_select(0, rows));
    shares.push_back(visited.sum(-1).mean().item<double>());
  }
  return shares;
}

double RelativeError(const Tensor& actual, const Tensor& expected) {
  return ((actual - expected).norm() / expected.norm()).item<double>();
}

void ExpectNear(const Result& actual, const Result& expected, double tolerance) {
  const auto here = [&](const Tensor& x) {
    return actual.rows.empty() ? x : x.index_select(0, torch::cat(actual.rows));
  };
  EXPECT_LT(RelativeError(here(actual.out), here(expected.out)), tolerance);
  EXPECT_LT(RelativeError(here(actual.dq), here(expected.dq)), tolerance);
  EXPECT_LT(RelativeError(here(actual.dk), here(expected.dk)), tolerance);
  EXPECT_LT(RelativeError(here(actual.dv), here(expected.dv)), tolerance);
}

}  // namespace ringleader::attention::testing
