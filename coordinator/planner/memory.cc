#include "coordinator/planner/memory.h"

#include "absl/strings/str_format.h"

namespace ringleader::planner {
namespace {

constexpr double kGiB = 1024.0 * 1024 * 1024;

double LocalTokens(const v1::JobSpec& spec) {
  return static_cast<double>(spec.data().sequence_length()) / spec.parallelism().context();
}

}  // namespace

MemoryEstimate EstimateMemory(const v1::JobSpec& spec, const ModelShape& model,
                              const ClusterShape& cluster, v1::ParallelismSpec::Ring ring) {
  const double element = cluster.engine == v1::ResourcesSpec::CUDA ? 2 : 4;
  const auto parameters = static_cast<double>(model.parameters());
  const double trainers = spec.resources().trainers();
  const double tokens = LocalTokens(spec);
  const auto heads_width = static_cast<double>(model.heads * model.head_dim);
  const auto kv_width = static_cast<double>(2 * model.kv_heads * model.head_dim);
  MemoryEstimate estimate;
  estimate.weights = element * parameters;
  // Gradients are summed in shards; at least the shard stays.
  estimate.gradients = 4 * parameters / trainers;
  estimate.optimizer = 12 * parameters / trainers;
  // A layer's input, its attention's q, k, v and output, and the LSE; the rest is recomputed.
  const double kept = element * (static_cast<double>(model.hidden) + 2 * heads_width + kv_width) +
                      4.0 * static_cast<double>(model.heads);
  estimate.activations = tokens * static_cast<double>(model.layers) * kept;
  const double copies = ring == v1::ParallelismSpec::ALL_GATHER ? spec.parallelism().context() : 2;
  estimate.keys_and_values = tokens * copies * kv_width * element;
  return estimate;
}

absl::Status CheckMemory(const MemoryEstimate& estimate, const v1::JobSpec& spec,
                         const ModelShape& model, const ClusterShape& cluster) {
  const auto memory = static_cast<double>(cluster.memory_bytes_per_trainer);
  if (memory <= 0 || estimate.total() <= memory) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "the model does not fit: a trainer needs at least %.2f GiB (weights %.2f + gradients %.2f + "
      "optimizer %.2f of %.3g parameters over %d trainers, activations %.2f of %.0f tokens × %d "
      "layers, keys and values %.2f) and has %.2f GiB; raise resources.trainers and "
      "parallelism.context, or lower data.sequence_length",
      estimate.total() / kGiB, estimate.weights / kGiB, estimate.gradients / kGiB,
      estimate.optimizer / kGiB, static_cast<double>(model.parameters()),
      spec.resources().trainers(), estimate.activations / kGiB, LocalTokens(spec), model.layers,
      estimate.keys_and_values / kGiB, memory / kGiB));
}

}  // namespace ringleader::planner
