#include "coordinator/planner/cost/memory.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_format.h"
#include "jobspec/values/attention_spec.h"
#include "jobspec/values/model_spec.h"
#include "model_shape/memory_estimate.h"
#include "model_shape/model_config.h"
#include "patterns/pattern.h"
#include "ring/document_layout.h"
#include "ring/head_shares.h"

namespace ringleader::planner {
namespace {

constexpr double kGiB = 1024.0 * 1024 * 1024;

double LocalTokens(const v1::JobSpec& spec) {
  const double even =
      static_cast<double>(spec.data().sequence_length()) / spec.parallelism().context();
  const bool is_apart = jobspec::IsByDocuments(spec.parallelism().layout()) &&
                        spec.attention().pattern() != v1::AttentionSpec::DENSE;
  return is_apart ? static_cast<double>(ring::MostLocalTokensApart(static_cast<int64_t>(even)))
                  : even;
}

// What the job asks for, or else the policy that keeps least.
model::Recompute LeastKept(const v1::JobSpec& spec) {
  switch (spec.resources().recompute()) {
    case v1::ResourcesSpec::NONE:
      return model::Recompute::kNone;
    case v1::ResourcesSpec::ATTENTION_ONLY:
      return model::Recompute::kAttentionOnly;
    case v1::ResourcesSpec::FULL:
    case v1::ResourcesSpec::RECOMPUTE_UNSPECIFIED:  // auto
    default:                                        // MakePlan() has refused them
      return model::Recompute::kFull;
  }
}

ring::HeadShares SharesOf(const v1::JobSpec& spec, const model::ModelConfig& model) {
  return {.ranks = static_cast<int>(jobspec::HeadRanks(spec.parallelism())),
          .heads = model.heads,
          .kv_heads = model.kv_heads};
}

// Ranks' keys and values that one holds where they are gathered: where that is done in groups of
// heads, two groups of all.
double GatheredShards(const v1::ParallelismSpec& parallelism) {
  const double ranks = jobspec::RingRanks(parallelism), groups = jobspec::HeadGroups(parallelism);
  return groups > 1 ? 2 * ranks / groups : ranks;
}

}  // namespace

patterns::IndexMemory ChoiceMemory(const v1::JobSpec& spec, const model::ModelConfig& model,
                                   int64_t element_bytes) {
  auto attention = jobspec::AttentionOptionsOf(spec.attention());
  if (!attention.ok()) return {};  // MakePlan() refuses them
  attention->by_documents = jobspec::IsByDocuments(spec.parallelism().layout());
  const ring::HeadShares shares = SharesOf(spec, model);
  return patterns::IndexMemoryOf(
      *attention,
      {.tokens = static_cast<int64_t>(spec.data().sequence_length()),
       .ranks = static_cast<int>(std::max(1u, jobspec::RingRanks(spec.parallelism()))),
       .heads = shares.local_heads(),
       .kv_heads = shares.local_kv_heads(),
       .head_dim = model.head_dim,
       .element_bytes = element_bytes},
      model.layers);
}

namespace {

model::TrainingShape ShapeOfRank(const v1::JobSpec& spec, const model::ModelConfig& model,
                                 bool cuda) {
  const patterns::IndexMemory choice = ChoiceMemory(spec, model, cuda ? 2 : 4);
  model::TrainingShape shape = {.ranks = static_cast<int>(spec.resources().trainers()),
                                .tokens = static_cast<int64_t>(LocalTokens(spec)),
                                .element_bytes = cuda ? 2 : 4,
                                .device_is_host = !cuda,
                                .choice_bytes = choice.kept,
                                .choice_working_bytes = choice.working,
                                .head_ranks = SharesOf(spec, model).ranks};
  jobspec::SetPrecision(spec, &shape).IgnoreError();  // MakePlan() refuses what it does not take
  return shape;
}

}  // namespace

double RecomputedShare(const v1::JobSpec& spec, const model::ModelConfig& model,
                       const ClusterShape& cluster) {
  constexpr auto kUsual = static_cast<int64_t>(139 * kGiB);  // an H200's, where memory is not given
  if (!model.known()) return 0;
  const bool cuda = cluster.engine == v1::ResourcesSpec::CUDA;
  const auto given = static_cast<int64_t>(cluster.memory_bytes_per_trainer);
  const auto host = static_cast<double>(cluster.host_memory_bytes_per_trainer);
  const auto wishes = jobspec::MemoryWishesOf(spec.resources());
  if (!wishes.ok()) return 0;  // MakePlan() refuses them
  model::TrainingShape shape = ShapeOfRank(spec, model, cuda);
  shape.head_ranks = 1;  // which number the planner picks by these costs
  model::RecomputePlan chosen = {.recompute = wishes->recompute.value_or(model::Recompute::kNone)};
  if (cuda) {
    const int64_t total = given > 0 ? given : kUsual;
    const auto plan = model::PlanTraining(
        model, shape, *wishes,
        {.device = total - model::ReservedBytes(total),
         .host = host > 0 ? static_cast<int64_t>(host) : std::numeric_limits<int64_t>::max() / 2});
    // What does not fit is for CheckMemory() to say.
    chosen = plan.ok() ? plan->recompute
                       : model::RecomputePlan{.recompute = LeastKept(spec), .host_layers = 1};
  }
  const int64_t rows = model.hidden_size * model.head_dim;
  const int64_t gates = model.mlp_weights() / 3 * 2;
  int64_t again = 0;  // weights of a layer
  switch (chosen.recompute) {
    case model::Recompute::kNone:
      break;
    case model::Recompute::kFull:
      again = rows * (2 * model.heads + 2 * model.kv_heads) + gates;
      break;
    case model::Recompute::kAttentionOnly:
      again = rows * model.heads + gates;
      break;
  }
  return static_cast<double>(again * (model.layers - chosen.kept_layers)) /
         static_cast<double>(model.weights_per_token());
}

MemoryEstimate EstimateMemory(const v1::JobSpec& spec, const model::ModelConfig& model,
                              const ClusterShape& cluster, v1::ParallelismSpec::Ring ring) {
  const bool cuda = cluster.engine == v1::ResourcesSpec::CUDA;
  const int trainers = static_cast<int>(spec.resources().trainers());
  const model::TrainingShape shape = ShapeOfRank(spec, model, cuda);
  // The last layer's is used at once: it stays.
  const bool moves = cuda && spec.resources().offload() != v1::ResourcesSpec::OFFLOAD_NONE;
  const model::RecomputePlan plan = {.recompute = LeastKept(spec),
                                     .host_layers = moves ? model.layers - 1 : 0};
  const ring::HeadShares shares = SharesOf(spec, model);
  const double copies =
      ring == v1::ParallelismSpec::ALL_GATHER ? GatheredShards(spec.parallelism()) : 2;
  const auto lower_bound = [&](model::ParameterSharding sharding) {
    const model::TrainingMemory memory = model::EstimateMemory(model, shape, plan, sharding);
    MemoryEstimate estimate;
    estimate.weights = static_cast<double>(memory.parameters + memory.casts);
    // Gradients are summed in shards; at least the shard stays.
    estimate.gradients = static_cast<double>(memory.optimizer) / 4;
    estimate.optimizer = static_cast<double>(memory.optimizer) * 3 / 4;
    estimate.activations = static_cast<double>(memory.saved);
    estimate.movable = static_cast<double>(memory.host_saved);
    // Of the tokens of a rank of the ring, which those that share out heads hold together.
    estimate.keys_and_values =
        static_cast<double>(shape.tokens * shares.ranks * shape.element_bytes * 2 *
                            shares.local_kv_heads() * model.head_dim) *
        copies;
    return estimate;
  };
  const MemoryEstimate whole = lower_bound(model::ParameterSharding::kWhole);
  const auto available = static_cast<double>(cluster.memory_bytes_per_trainer);
  if (trainers == 1 || available <= 0 || whole.total() <= available) return whole;
  const MemoryEstimate sharded = lower_bound(model::ParameterSharding::kShard);
  return sharded.total() < whole.total() ? sharded : whole;
}

double HostBytes(const MemoryEstimate& estimate, const v1::JobSpec& spec,
                 const ClusterShape& cluster) {
  if (spec.resources().offload() == v1::ResourcesSpec::OFFLOAD_HOST) return estimate.movable;
  const auto memory = static_cast<double>(cluster.memory_bytes_per_trainer);
  if (memory <= 0) return 0;
  return std::clamp(estimate.total() + estimate.movable - memory, 0.0, estimate.movable);
}

absl::Status CheckMemory(const MemoryEstimate& estimate, const v1::JobSpec& spec,
                         const model::ModelConfig& model, const ClusterShape& cluster) {
  const auto memory = static_cast<double>(cluster.memory_bytes_per_trainer);
  if (memory > 0 && estimate.total() > memory) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "the model does not fit: a trainer needs at least %.2f GiB (weights %.2f + gradients %.2f "
        "+ optimizer %.2f of %.3g parameters over %d trainers, activations %.2f of %.0f tokens × "
        "%d layers%s, keys and values %.2f) and has %.2f GiB; raise resources.trainers and "
        "parallelism.context, or lower data.sequence_length",
        estimate.total() / kGiB, estimate.weights / kGiB, estimate.gradients / kGiB,
        estimate.optimizer / kGiB, static_cast<double>(model.parameters()),
        spec.resources().trainers(), estimate.activations / kGiB, LocalTokens(spec), model.layers,
        estimate.movable > 0
            ? absl::StrFormat(" with %.2f more in host memory", estimate.movable / kGiB)
            : "",
        estimate.keys_and_values / kGiB, memory / kGiB));
  }
  const auto host = static_cast<double>(cluster.host_memory_bytes_per_trainer);
  const double wanted = HostBytes(estimate, spec, cluster);
  if (host > 0 && wanted > host) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "the model does not fit: a trainer has to keep at least %.2f GiB of what %d layers keep of "
        "%.0f tokens in host memory, and its share of that is %.2f GiB; raise resources.trainers "
        "and parallelism.context, or lower data.sequence_length",
        wanted / kGiB, model.layers, LocalTokens(spec), host / kGiB));
  }
  return absl::OkStatus();
}

}  // namespace ringleader::planner
