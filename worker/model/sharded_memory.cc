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
                                    const RecomputePlan& plan) {
  const ParameterLayout layout = MakeParameterLayout(config);
  ShardedMemory memory;
  memory.parameters = layout.PaddedElements(shape.ranks) * shape.element_bytes;
  memory.optimizer = 4 * layout.ShardElements(shape.ranks) * kFloat;
  if (shape.ranks > 1) {
    const std::vector<ParameterBlock>& blocks = layout.blocks;
    memory.buckets =
        (blocks.front().elements + 2 * blocks[1].elements + blocks.back().elements) * kFloat;
  }
  const int64_t kept = std::min(plan.kept_layers, config.layers);
  memory.saved = shape.tokens *
                 (kept * SavedBytes(config, shape.element_bytes, Recompute::kNone) +
                  (config.layers - kept) * SavedBytes(config, shape.element_bytes, plan.recompute));
  memory.working = WorkingBytes(config, shape);
  return memory;
}

absl::StatusOr<RecomputePlan> PlanRecompute(const ModelConfig& config, const ShardedShape& shape,
                                            std::optional<Recompute> wanted, int64_t available) {
  const auto bytes = [&](const RecomputePlan& plan) {
    return EstimateShardedMemory(config, shape, plan).total();
  };
  std::vector<RecomputePlan> plans;
  if (wanted.has_value()) {
    plans.push_back({.recompute = *wanted});
  } else {
    // q, k and v of all layers first: a byte of them saves a little more than one of gate and up.
    for (int64_t kept = config.layers; kept >= 0; --kept) {
      plans.push_back({.recompute = Recompute::kAttentionOnly, .kept_layers = kept});
    }
    plans.push_back({.recompute = Recompute::kFull});
  }
  for (const RecomputePlan& plan : plans) {
    if (bytes(plan) <= available) return plan;
  }
  const RecomputePlan& last = plans.back();
  return absl::FailedPreconditionError(absl::StrFormat(
      "the job does not fit a GPU: with recompute %s and %d tokens a rank it needs %s, and %.1f "
      "GiB "
      "are there; use more resources.trainers, a smaller data.sequence_length or model%s",
      DescribeRecompute(config, last), shape.tokens,
      DescribeMemory(EstimateShardedMemory(config, shape, last)), GiB(available),
      last.recompute == Recompute::kFull ? "" : ", or recompute: auto"));
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
