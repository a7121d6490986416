// Ring attention on a GPU beside the CPU engine and a mask: what its tests run and compare.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <vector>

#include "patterns/attention_options.h"
#include "worker/attention/stats/attention_stats.h"
#include "worker/attention/testing/index_oracle.h"

namespace ringleader::attention::testing {

// bf16 in, out, and in what the backward kernels multiply.
constexpr double kTolerance = 1e-2;
constexpr int kLayers = 3;

int GpuCount();

// Whether all ranks share one GPU, or each has its own, with NCCL between them. Under
// tests/gpu/hosts.sh the latter are dealt out to processes, which may share GPUs.
enum class Gpus { kShared, kOneEach };

// One sequence in bf16, on the CPU, and the gradient of its output.
struct Sequence {
  torch::Tensor q, k, v, d_out;
  Sequence(int64_t tokens, int heads, int kv_heads, int head_dim);
};

struct Result {
  torch::Tensor out, dq, dk, dv;      // of the whole sequence, float32 on the CPU
  std::vector<AttentionStats> stats;  // by rank
  std::vector<HostIndex> index;
  std::vector<torch::Tensor> rows;  // of this process's ranks; empty: all are here

  uint64_t TotalTiles() const;
};

// Three layers forward, then backward, as a step does: their buffers are the same. The result is
// the first layer's. Under Mask::kPrefixLm a third of each document, or of the sequence, is its
// prefix.
Result RunOnGpu(const Sequence& sequence, const patterns::AttentionOptions& options,
                Gpus gpus = Gpus::kShared, const std::vector<int64_t>& documents = {},
                float move = 1.0f);
// The same with hops that carry all rows, whoever attends to them.
Result RunWithAllRows(const Sequence& sequence, const patterns::AttentionOptions& options,
                      const std::vector<int64_t>& documents);
// The index of layer 0 in the forwards of one engine on one GPU, each of which is `dense` or not.
std::vector<HostIndex> IndicesOnGpu(const Sequence& sequence,
                                    const patterns::AttentionOptions& options,
                                    const std::vector<bool>& dense);
Result RunOnCpu(const Sequence& sequence, patterns::AttentionOptions options,
                const std::vector<int64_t>& documents = {}, float move = 1.0f);
// Softmax attention in double precision over what the index of one rank and the documents say, and
// its gradients.
Result MaskedAttention(const Sequence& s, const HostIndex& index);

// By head, the mean share of the attention of the queries at `positions`, in double precision, that
// the same say is visited.
std::vector<double> VisitedShares(const Sequence& s, const HostIndex& index,
                                  const std::vector<int64_t>& positions);

double RelativeError(const torch::Tensor& actual, const torch::Tensor& expected);
void ExpectNear(const Result& actual, const Result& expected, double tolerance = kTolerance);

}  // namespace ringleader::attention::testing
