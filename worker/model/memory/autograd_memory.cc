#include "worker/model/memory/autograd_memory.h"

#include <algorithm>

#include "absl/strings/str_format.h"
#include "model_shape/parameter_layout.h"

namespace ringleader::model {
namespace {

constexpr int64_t kFloat = sizeof(float);

double GiB(int64_t bytes) {
  return static_cast<double>(bytes) / (int64_t{1} << 30);
}

}  // namespace

MemoryEstimate EstimateMemory(const ModelConfig& config, int ranks, int64_t tokens,
                              Recompute recompute) {
  const ParameterLayout layout = MakeParameterLayout(config);
  const int64_t shard = layout.ShardElements(ranks) * kFloat;
  MemoryEstimate estimate{.weights = 2 * layout.PaddedElements(ranks) * kFloat,
                          .optimizer = 4 * shard,
                          .snapshot = 3 * shard};

  // Floats a token, following layer_ops.cc.
  const int64_t hidden = config.hidden_size, inner = config.intermediate_size;
  const int64_t qkv = (config.heads + 2 * config.kv_heads) * config.head_dim;
  const int64_t attended = config.heads * config.head_dim;
  const int64_t always = hidden + qkv + attended;   // layer input, q, k, v, attention output
  const int64_t products = 3 * hidden + 2 * inner;  // both norms' outputs, h, gate and up
  const int64_t kept = always + (recompute == Recompute::kNone ? products : 0);
  const int64_t layer_in_work = products + 4 * inner + 2 * (hidden + qkv);
  constexpr int64_t kLossChunk = 2 * (int64_t{8} << 20);  // logits and their gradient
  const int64_t loss_in_work =
      std::max(kLossChunk, 2 * config.vocab_size) + tokens * hidden + config.vocab_size * hidden;
  estimate.activations = kFloat * (tokens * (config.layers * kept + 2 * hidden) +
                                   std::max(tokens * layer_in_work, loss_in_work));
  return estimate;
}

absl::Status CheckMemory(const MemoryEstimate& estimate, int64_t available_bytes) {
  if (estimate.total() <= available_bytes) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrFormat(
      "the model does not fit: a trainer needs %.2f GiB (weights and gradients %.2f, optimizer "
      "%.2f, checkpoint copy %.2f, activations %.2f) and has %.2f; use a smaller model or "
      "data.sequence_length, or more resources.trainers on other nodes",
      GiB(estimate.total()), GiB(estimate.weights), GiB(estimate.optimizer), GiB(estimate.snapshot),
      GiB(estimate.activations), GiB(available_bytes)));
}

}  // namespace ringleader::model
