#include "coordinator/planner/memory.h"

#include <algorithm>

#include "absl/strings/str_format.h"

namespace ringleader::planner {
namespace {

constexpr double kGiB = 1024.0 * 1024 * 1024;

double LocalTokens(const v1::JobSpec& spec) {
  return static_cast<double>(spec.data().sequence_length()) / spec.parallelism().context();
}

// Elements of a token that a layer keeps at the least.
double KeptWidth(const v1::JobSpec& spec, const ModelShape& model,
                 v1::ResourcesSpec::Engine engine) {
  const auto hidden = static_cast<double>(model.hidden);
  const auto attended = static_cast<double>(model.heads * model.head_dim);
  const auto packed = attended + static_cast<double>(2 * model.kv_heads * model.head_dim);
  // The CPU engine keeps q, k and v whatever it recomputes.
  if (engine != v1::ResourcesSpec::CUDA) return hidden + attended + packed;
  switch (spec.resources().recompute()) {
    case v1::ResourcesSpec::NONE:
      return hidden + attended + packed + hidden + 2 * static_cast<double>(model.intermediate);
    case v1::ResourcesSpec::ATTENTION_ONLY:
      return hidden + attended + packed;
    default:
      return hidden + attended;
  }
}

}  // namespace

MemoryEstimate EstimateMemory(const v1::JobSpec& spec, const ModelShape& model,
                              const ClusterShape& cluster, v1::ParallelismSpec::Ring ring) {
  const double element = cluster.engine == v1::ResourcesSpec::CUDA ? 2 : 4;
  const auto parameters = static_cast<double>(model.parameters());
  const double trainers = spec.resources().trainers();
  const double tokens = LocalTokens(spec);
  const auto kv_width = static_cast<double>(2 * model.kv_heads * model.head_dim);
  MemoryEstimate estimate;
  estimate.weights = element * parameters;
  // Gradients are summed in shards; at least the shard stays.
  estimate.gradients = 4 * parameters / trainers;
  estimate.optimizer = 12 * parameters / trainers;
  const double layer =
      element * KeptWidth(spec, model, cluster.engine) + 4.0 * static_cast<double>(model.heads);
  const auto layers = static_cast<double>(model.layers);
  // The last layer's is used at once: it stays.
  const bool moves = cluster.engine == v1::ResourcesSpec::CUDA &&
                     spec.resources().offload() != v1::ResourcesSpec::OFFLOAD_NONE;
  const double stay = moves ? std::min(1.0, layers) : layers;
  estimate.activations = tokens * stay * layer;
  estimate.movable = tokens * (layers - stay) * layer;
  const double copies = ring == v1::ParallelismSpec::ALL_GATHER ? spec.parallelism().context() : 2;
  estimate.keys_and_values = tokens * copies * kv_width * element;
  return estimate;
}

double HostBytes(const MemoryEstimate& estimate, const v1::JobSpec& spec,
                 const ClusterShape& cluster) {
  if (spec.resources().offload() == v1::ResourcesSpec::OFFLOAD_HOST) return estimate.movable;
  const auto memory = static_cast<double>(cluster.memory_bytes_per_trainer);
  if (memory <= 0) return 0;
  return std::clamp(estimate.total() + estimate.movable - memory, 0.0, estimate.movable);
}

absl::Status CheckMemory(const MemoryEstimate& estimate, const v1::JobSpec& spec,
                         const ModelShape& model, const ClusterShape& cluster) {
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
