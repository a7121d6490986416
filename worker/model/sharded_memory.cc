#include "worker/model/sharded_memory.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_format.h"
#include "worker/model/parameter_layout.h"

namespace ringleader::model {
namespace {

constexpr int64_t kFloat = sizeof(float);

double GiB(int64_t bytes) {
  return static_cast<double>(bytes) / (int64_t{1} << 30);
}

const char* Name(Recompute recompute) {
  switch (recompute) {
    case Recompute::kNone:
      return "none";
    case Recompute::kAttentionOnly:
      return "attention_only";
    case Recompute::kFull:
      return "full";
  }
  return "";
}

// Elements a token of the tensors that layers pass around.
struct Widths {
  explicit Widths(const ModelConfig& config)
      : hidden(config.hidden_size),
        inner(config.intermediate_size),
        attended(config.heads * config.head_dim),
        kv(2 * config.kv_heads * config.head_dim) {}
  int64_t hidden, inner, attended, kv;
  int64_t packed() const { return attended + kv; }
};

// Bytes a token that one layer keeps.
int64_t SavedBytes(const ModelConfig& config, int64_t element, Recompute recompute) {
  const Widths w(config);
  int64_t bytes = (w.hidden + w.attended) * element + config.heads * kFloat;  // input, output, LSE
  if (recompute != Recompute::kFull) bytes += w.packed() * element;
  if (recompute == Recompute::kNone) bytes += (w.hidden + 2 * w.inner) * element;
  return bytes;
}

// The most that is alive besides what is kept, following layer_passes.cc.
int64_t WorkingBytes(const ModelConfig& config, const ShardedShape& shape) {
  const Widths w(config);
  const int64_t n = shape.tokens, element = shape.element_bytes;
  const int64_t chunk = std::min(shape.mlp_chunk_tokens, n);
  // Upstream gradient, the norm's sum and rows, their gradient; gate, up and activation of a chunk.
  const int64_t mlp = (4 * n * w.hidden + 3 * chunk * w.inner) * element;
  // The stream's gradient, the norm's rows and sum, q, k and v, the output's gradient, dq, dk, dv;
  // dq and its conversion in fp32; keys, values and their gradients that visit or travel.
  const int64_t attention = n * ((3 * w.hidden + 2 * w.packed() + w.attended) * element +
                                 2 * w.attended * kFloat + 4 * w.kv * kFloat);
  const int64_t loss = 2 * n * w.hidden * element +
                       std::min(shape.loss_chunk_tokens, n) * config.vocab_size * element;
  return std::max({mlp, attention, loss});
}

}  // namespace

ShardedMemory EstimateShardedMemory(const ModelConfig& config, const ShardedShape& shape,
                                    const RecomputePlan& plan, ParameterSharding sharding) {
  const ParameterLayout layout = MakeParameterLayout(config);
  const std::vector<ParameterBlock>& blocks = layout.blocks;
  // What is not there once a rank: embedding, two layers, final block.
  const int64_t in_use = blocks.front().elements + 2 * blocks[1].elements + blocks.back().elements;
  ShardedMemory memory;
  memory.parameters = shape.element_bytes * (sharding == ParameterSharding::kWhole
                                                 ? layout.PaddedElements(shape.ranks)
                                                 : layout.ShardElements(shape.ranks) + in_use);
  memory.optimizer = 4 * layout.ShardElements(shape.ranks) * kFloat;
  if (shape.ranks > 1) memory.buckets = in_use * kFloat;
  const int64_t kept = std::min(plan.kept_layers, config.layers);
  memory.saved = shape.tokens *
                 (kept * SavedBytes(config, shape.element_bytes, Recompute::kNone) +
                  (config.layers - kept) * SavedBytes(config, shape.element_bytes, plan.recompute));
  memory.working = WorkingBytes(config, shape);
  return memory;
}

absl::StatusOr<TrainingPlan> PlanTraining(const ModelConfig& config, const ShardedShape& shape,
                                          std::optional<Recompute> wanted, int64_t available) {
  std::vector<RecomputePlan> policies;
  if (wanted.has_value()) {
    policies.push_back({.recompute = *wanted});
  } else {
    // q, k and v of all layers first: a byte of them saves a little more than one of gate and up.
    for (int64_t kept = config.layers; kept >= 0; --kept) {
      policies.push_back({.recompute = Recompute::kAttentionOnly, .kept_layers = kept});
    }
    policies.push_back({.recompute = Recompute::kFull});
  }
  TrainingPlan plan;
  const auto fits = [&](const RecomputePlan& policy, ParameterSharding sharding, int64_t bytes) {
    plan = {.recompute = policy,
            .sharding = sharding,
            .memory = EstimateShardedMemory(config, shape, policy, sharding)};
    return plan.memory.total() <= bytes;
  };
  const auto comfortable = static_cast<int64_t>(kComfortableShare * static_cast<double>(available));
  for (const RecomputePlan& policy : policies) {
    const bool last = &policy == &policies.back();
    if (fits(policy, ParameterSharding::kWhole, last ? available : comfortable)) return plan;
  }
  // One rank has nobody to share with.
  if (shape.ranks > 1 && fits(policies.back(), ParameterSharding::kShard, available)) return plan;
  return absl::FailedPreconditionError(absl::StrFormat(
      "the job does not fit a GPU: with recompute %s and %d tokens a rank it needs %s, and %.1f "
      "GiB "
      "are there; use more resources.trainers, a smaller data.sequence_length or model%s",
      DescribeRecompute(config, plan.recompute), shape.tokens, DescribeMemory(plan.memory),
      GiB(available),
      plan.recompute.recompute == Recompute::kFull ? "" : ", or resources.recompute: auto"));
}

std::string DescribeRecompute(const ModelConfig& config, const RecomputePlan& plan) {
  if (plan.kept_layers == 0 || plan.recompute == Recompute::kNone) return Name(plan.recompute);
  if (plan.kept_layers >= config.layers) return Name(Recompute::kNone);
  return absl::StrFormat("%s, %d of %d layers kept whole", Name(plan.recompute), plan.kept_layers,
                         config.layers);
}

std::string DescribeMemory(const ShardedMemory& memory) {
  return absl::StrFormat(
      "%.1f GiB (parameters %.1f, optimizer %.1f, gradient buckets %.1f, kept for backward %.1f, a "
      "layer in work %.1f)",
      GiB(memory.total()), GiB(memory.parameters), GiB(memory.optimizer), GiB(memory.buckets),
      GiB(memory.saved), GiB(memory.working));
}

}  // namespace ringleader::model
