#include "model_shape/memory_estimate.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "model_shape/parameter_layout.h"

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
  explicit Widths(const ModelConfig& config, int head_ranks = 1)
      : hidden(config.hidden_size),
        inner(config.intermediate_size),
        attended(config.heads * config.head_dim),
        kv(2 * config.kv_heads * config.head_dim),
        shared_kv(2 * std::max<int64_t>(config.kv_heads, head_ranks) * config.head_dim) {}
  int64_t hidden, inner, attended, kv;
  int64_t shared_kv;  // where there are more ranks than KV heads, several have the same one
  int64_t packed() const { return attended + kv; }
};

// The most that is alive besides what is kept, following layer_passes.cc.
int64_t WorkingBytes(const ModelConfig& config, const TrainingShape& shape) {
  const Widths w(config, shape.head_ranks);
  const int64_t n = shape.tokens, element = shape.element_bytes;
  const int64_t chunk = std::min(shape.mlp_chunk_tokens, n);
  // Upstream gradient, the norm's sum and the gradient of its rows.
  int64_t mlp = 3 * n * w.hidden * element;
  // The stream's gradient, q, k and v, the output's gradient, dq, dk, dv; dq and its conversion in
  // fp32; keys, values and their gradients that visit or travel.
  int64_t attention = n * ((w.hidden + 2 * w.packed() + w.attended) * element +
                           2 * w.attended * kFloat + 4 * w.shared_kv * kFloat);
  if (shape.head_ranks > 1) {
    // Sent and received: keys and values while the MLP is computed; with them queries, the output
    // and its gradient before backward.
    mlp += 2 * n * w.shared_kv * element;
    attention += 2 * n * (3 * w.attended + w.shared_kv) * element;
  }
  // Gate, up and activation of a chunk.
  const int64_t chunk_values = 3 * chunk * w.inner * element;
  // A layer that is not cast, as all are in steps that read no casts: with the norm's rows.
  const int64_t norm = n * w.hidden * element;
  int64_t layer = std::max(mlp + norm + chunk_values, attention + norm);
  if (CastLayersOf(config.layers, shape.precision).count() > 0) {
    // What a weight's gradient sums over, turned, and the sum before it is added.
    const int64_t summed = std::min(n, kWeightGradientTokens);
    const int64_t turned = summed * (w.hidden + 2 * w.inner) + kFloat * w.hidden * 2 * w.inner;
    // A byte an element of a chunk's activation and its gradient of gate and up, whose values are
    // gone before these are turned if no bias reads them; the CPU engine decodes codes before it
    // multiplies. (Those of dq, dk and dv, and what is turned for their weights, take less than
    // attention did.)
    const int64_t codes = 3 * chunk * w.inner;
    const bool values_stay = config.mlp_bias || shape.device_is_host;
    const int64_t of_chunk =
        codes + (values_stay ? chunk_values + turned : std::max(chunk_values, turned));
    // The norm's rows, in the MLP with the upstream gradient; its weights, turned. Attention's go
    // before it works.
    layer = std::max({layer, mlp + 2 * n * w.hidden + of_chunk + config.mlp_weights(),
                      attention + n * w.hidden});
  }
  const int64_t loss = 2 * n * w.hidden * element +
                       std::min(shape.loss_chunk_tokens, n) * config.vocab_size * element;
  return std::max(layer, loss);
}

// Full recomputation unless another is asked for: what a richer policy keeps would have to travel.
std::vector<RecomputePlan> OffloadPlans(const ModelConfig& config, const MemoryWishes& wishes) {
  std::vector<RecomputePlan> plans;
  const int64_t most = wishes.offload == Offload::kHost ? std::min(kStagedLayers, config.layers - 1)
                                                        : config.layers - 1;
  for (int64_t on_device = most; on_device >= 1; --on_device) {
    plans.push_back({.recompute = wishes.recompute.value_or(Recompute::kFull),
                     .host_layers = config.layers - on_device});
  }
  return plans;
}

std::vector<RecomputePlan> DevicePlans(const ModelConfig& config, const MemoryWishes& wishes) {
  if (wishes.recompute.has_value()) return {{.recompute = *wishes.recompute}};
  std::vector<RecomputePlan> plans;
  // q, k and v of all layers first: a byte of them saves a little more than one of gate and up.
  for (int64_t kept = config.layers; kept >= 0; --kept) {
    plans.push_back({.recompute = Recompute::kAttentionOnly, .kept_layers = kept});
  }
  plans.push_back({.recompute = Recompute::kFull});
  return plans;
}

// Sets what ranks hold of the model to read it.
void CountParameters(const ParameterLayout& layout, const ModelConfig& config,
                     const TrainingShape& shape, ParameterSharding sharding,
                     TrainingMemory* memory) {
  const std::vector<ParameterBlock>& blocks = layout.blocks;
  const int64_t cast = CastLayersOf(config.layers, shape.precision).count();
  const int64_t layer = blocks[1].elements;
  const bool is_whole = sharding == ParameterSharding::kWhole;
  if (!is_whole) {
    const bool only_casts = cast == config.layers && shape.always_casts;
    memory->parameters =
        shape.element_bytes * (blocks.front().elements + blocks.back().elements) +
        2 * layer * (only_casts ? 1 : shape.element_bytes);  // in layers' two places
  } else if (cast == 0 || !shape.always_casts) {
    // Steps that cast hold less.
    memory->parameters = shape.element_bytes * layout.PaddedElements(shape.ranks);
    return;
  } else {
    memory->parameters = shape.element_bytes * (layout.elements - cast * layer);
  }
  if (cast == 0) return;
  // A byte an element, of this rank's own or all; of all layers the rows' scales, norms and biases.
  const Widths w(config);
  const int64_t weights = w.hidden * (w.packed() + w.attended) + config.mlp_weights();
  const int64_t rows = w.packed() + 2 * w.hidden + 2 * w.inner;
  memory->casts =
      is_whole ? cast * layer : std::min(cast * layer, layout.ShardElements(shape.ranks));
  memory->casts += cast * (rows * kFloat + (layer - weights) * shape.element_bytes);
}

TrainingMemory EstimateWith(const ParameterLayout& layout, const ModelConfig& config,
                            const TrainingShape& shape, const RecomputePlan& plan,
                            ParameterSharding sharding) {
  const std::vector<ParameterBlock>& blocks = layout.blocks;
  // What is not there once a rank: embedding, two layers, final block.
  const int64_t in_use = blocks.front().elements + 2 * blocks[1].elements + blocks.back().elements;
  TrainingMemory memory;
  CountParameters(layout, config, shape, sharding, &memory);
  memory.optimizer = 4 * layout.ShardElements(shape.ranks) * kFloat;
  if (shape.ranks > 1) {
    memory.buckets = kFloat * in_use;
    // The owner's part of a block as a peer sends it; between GPUs, NCCL adds it up on its way.
    const int64_t largest = std::ranges::max(blocks, {}, &ParameterBlock::elements).elements;
    if (shape.device_is_host) {
      memory.buckets += kFloat * std::min(largest, layout.ShardElements(shape.ranks));
    }
  }
  const int64_t kept = std::min(plan.kept_layers, config.layers);
  const int64_t away = std::min(plan.host_layers, config.layers - kept);
  const int64_t whole = KeptBytesPerToken(config, shape.element_bytes, Recompute::kNone);
  const int64_t layer = KeptBytesPerToken(config, shape.element_bytes, plan.recompute);
  memory.saved = shape.tokens * (kept * whole + (config.layers - kept - away) * layer);
  memory.saved += shape.choice_bytes;
  memory.host_saved = shape.tokens * away * layer;
  const int64_t copies = 3 * layout.ShardElements(shape.ranks) * kFloat +
                         layout.elements * kFloat / shape.ranks_per_node;
  if (shape.device_is_host) memory.copies = copies;
  if (away > 0) memory.host_copies = copies;
  memory.working = WorkingBytes(config, shape) + shape.choice_working_bytes;
  return memory;
}

// Searches, and remembers what came nearest for the error.
class Planner {
 public:
  Planner(const ModelConfig& config, const TrainingShape& shape, const MemoryWishes& wishes,
          const MemoryLimits& limits)
      : config_(config),
        shape_(shape),
        wishes_(wishes),
        limits_(limits),
        comfortable_(static_cast<int64_t>(ComfortableShare(shape.device_is_host) *
                                          static_cast<double>(limits.device))) {}

  std::optional<TrainingPlan> OnDevice() {
    const std::vector<RecomputePlan> plans = DevicePlans(config_, wishes_);
    for (const RecomputePlan& plan : plans) {
      const bool last = &plan == &plans.back();
      device_ = Make(plan, ParameterSharding::kWhole);
      if (device_->memory.total() <= (last ? limits_.device : comfortable_)) return device_;
    }
    if (shape_.ranks == 1) return std::nullopt;  // nobody to share with
    device_ = Make(plans.back(), ParameterSharding::kShard);
    return device_->memory.total() <= limits_.device ? device_ : std::nullopt;
  }

  std::optional<TrainingPlan> WithHost() {
    const std::vector<RecomputePlan> plans = OffloadPlans(config_, wishes_);
    for (const auto sharding : {ParameterSharding::kWhole, ParameterSharding::kShard}) {
      if (sharding == ParameterSharding::kShard && shape_.ranks == 1) continue;
      for (const int64_t device : {comfortable_, limits_.device}) {
        for (const RecomputePlan& plan : plans) {
          const TrainingPlan candidate = Make(plan, sharding);
          const bool fits = candidate.memory.total() <= device;
          if (fits && candidate.memory.host_total() <= limits_.host) return candidate;
          // Among those that fit the device, the one with the least on the host says most.
          const bool told = host_.has_value() && host_->memory.total() <= limits_.device;
          if (!told) host_ = candidate;
        }
      }
    }
    return std::nullopt;
  }

  bool MayUseHost() const { return !shape_.device_is_host; }

  absl::Status Refusal() const {
    std::string text = "the job does not fit: ";
    if (device_.has_value()) {
      absl::StrAppendFormat(
          &text, "a trainer needs %s with recompute %s and %d tokens a rank, and %s",
          DescribeMemory(device_->memory), DescribeRecompute(config_, device_->recompute),
          shape_.tokens, There(limits_.device));
    }
    if (MayUseHost() && wishes_.offload != Offload::kNone && !host_.has_value()) {
      absl::StrAppend(&text, device_.has_value() ? "; " : "",
                      "a model of one layer has nothing to keep in host memory");
    } else if (host_.has_value()) {
      absl::StrAppendFormat(&text,
                            "%sa trainer needs %s with %s and %d tokens a rank, and %s, and as its "
                            "share of the host's memory (%d trainers a node) %.1f GiB",
                            device_.has_value() ? "; " : "", DescribeMemory(host_->memory),
                            DescribeKept(config_, host_->recompute), shape_.tokens,
                            There(limits_.device), shape_.ranks_per_node, GiB(limits_.host));
    }
    absl::StrAppend(&text,
                    "; use more resources.trainers, a smaller data.sequence_length or model");
    if (wishes_.recompute.value_or(Recompute::kFull) != Recompute::kFull) {
      absl::StrAppend(&text, ", or resources.recompute: auto");
    }
    if (MayUseHost() && wishes_.offload != Offload::kAuto)
      absl::StrAppend(&text, ", or resources.offload: auto");
    return absl::FailedPreconditionError(text);
  }

 private:
  static std::string There(int64_t bytes) {
    return absl::StrFormat("%.1f GiB are there", GiB(bytes));
  }
  TrainingPlan Make(const RecomputePlan& plan, ParameterSharding sharding) const {
    return {.recompute = plan,
            .sharding = sharding,
            .memory = EstimateWith(layout_, config_, shape_, plan, sharding)};
  }

  const ModelConfig& config_;
  const TrainingShape& shape_;
  const MemoryWishes& wishes_;
  const MemoryLimits& limits_;
  const int64_t comfortable_;
  const ParameterLayout layout_ = MakeParameterLayout(config_);  // one for all plans
  std::optional<TrainingPlan> device_, host_;
};

}  // namespace

int64_t ReservedBytes(int64_t total) {
  constexpr double kShare = 0.08, kMostShare = 0.14, kFewest = 7.0 * (int64_t{1} << 30);
  const auto bytes = static_cast<double>(total);
  return static_cast<int64_t>(std::max(kShare * bytes, std::min(kFewest, kMostShare * bytes)));
}

int64_t KeptBytesPerToken(const ModelConfig& config, int64_t element_bytes, Recompute recompute) {
  const Widths w(config);
  // Input, output, log-sum-exp.
  int64_t bytes = (w.hidden + w.attended) * element_bytes + config.heads * kFloat;
  if (recompute != Recompute::kFull) bytes += w.packed() * element_bytes;
  if (recompute == Recompute::kNone) bytes += (w.hidden + 2 * w.inner) * element_bytes;
  return bytes;
}

TrainingMemory EstimateMemory(const ModelConfig& config, const TrainingShape& shape,
                              const RecomputePlan& plan, ParameterSharding sharding) {
  return EstimateWith(MakeParameterLayout(config), config, shape, plan, sharding);
}

absl::StatusOr<TrainingPlan> PlanTraining(const ModelConfig& config, const TrainingShape& shape,
                                          const MemoryWishes& wishes, const MemoryLimits& limits) {
  Planner planner(config, shape, wishes, limits);
  if (wishes.offload != Offload::kHost || !planner.MayUseHost()) {
    if (const auto plan = planner.OnDevice(); plan.has_value()) return *plan;
  }
  if (wishes.offload != Offload::kNone && planner.MayUseHost()) {
    if (const auto plan = planner.WithHost(); plan.has_value()) return *plan;
  }
  return planner.Refusal();
}

std::string DescribeRecompute(const ModelConfig& config, const RecomputePlan& plan) {
  if (plan.kept_layers == 0 || plan.recompute == Recompute::kNone) return Name(plan.recompute);
  if (plan.kept_layers >= config.layers) return Name(Recompute::kNone);
  return absl::StrFormat("%s, %d of %d layers kept whole", Name(plan.recompute), plan.kept_layers,
                         config.layers);
}

std::string DescribeKept(const ModelConfig& config, const RecomputePlan& plan) {
  std::string text = "layer input, attention output, log-sum-exp";
  if (plan.recompute != Recompute::kFull) text += ", q, k, v";
  if (plan.recompute == Recompute::kNone) text += ", the stream after attention, gate and up";
  if (plan.host_layers == 0) return absl::StrCat(text, ": of all layers");
  absl::StrAppendFormat(&text, ": of %d layers on the device, of %d in host memory",
                        config.layers - plan.host_layers, plan.host_layers);
  return text;
}

std::string DescribeMemory(const TrainingMemory& memory) {
  std::string text = absl::StrFormat(
      "%.1f GiB (parameters %.1f%s, optimizer %.1f, gradient buckets %.1f, kept for backward %.1f, "
      "a "
      "layer in work %.1f%s)",
      GiB(memory.total()), GiB(memory.parameters),
      memory.casts > 0 ? absl::StrFormat(", weights in e4m3 %.1f", GiB(memory.casts)) : "",
      GiB(memory.optimizer), GiB(memory.buckets), GiB(memory.saved), GiB(memory.working),
      memory.copies > 0 ? absl::StrFormat(", checkpoint and export %.1f", GiB(memory.copies)) : "");
  if (memory.host_saved > 0) {
    absl::StrAppendFormat(&text,
                          " and %.1f GiB of host memory (kept for backward %.1f, checkpoint and "
                          "export %.1f)",
                          GiB(memory.host_total()), GiB(memory.host_saved),
                          GiB(memory.host_copies));
  }
  return text;
}

}  // namespace ringleader::model
