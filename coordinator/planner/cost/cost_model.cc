#include "coordinator/planner/cost/cost_model.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/numbers/ceil_div.h"
#include "coordinator/planner/cost/memory.h"
#include "jobspec/values/attention_spec.h"
#include "jobspec/values/model_spec.h"
#include "model_shape/model_config.h"
#include "model_shape/precision.h"
#include "patterns/pattern.h"

namespace ringleader::planner {
namespace {

using Vector = NonNegativeRegression::Vector;

// Sustained rates of one Hopper GPU in bf16, and of one CPU thread in fp32. Only where the fit
// starts: a few reports replace them. The GPU's are of steps of 262,144 tokens and more on four
// H200 (bench/results/compare_peer.json), of linear layers, norms and the loss included, of 65,536
// and 131,072 tokens on one (bench/results/fp8_1gpu.csv), too.
struct Rates {
  double attention_forward_flops;
  double attention_backward_flops;
  double linear_flops;
  double memory_bytes;
  double seconds_per_call;
};

Rates RatesOf(const ClusterShape& cluster) {
  if (cluster.engine == v1::ResourcesSpec::CUDA) {
    return {.attention_forward_flops = 540e12,
            .attention_backward_flops = 470e12,
            .linear_flops = 608e12,
            .memory_bytes = 3.5e12,
            .seconds_per_call = 12e-6};
  }
  const double threads = std::max(1.0, cluster.threads_per_trainer);
  return {.attention_forward_flops = 30e9 * threads,
          .attention_backward_flops = 30e9 * threads,
          .linear_flops = 37.5e9 * threads,
          .memory_bytes = 4e9 * threads,
          .seconds_per_call = 30e-6};
}

// What attention and products take more on a GPU of several than on one by itself, where NCCL has
// some of its blocks and, its links being awake, some of its power (bench/results/trainer_gpu.md,
// "Where weak scaling goes").
constexpr double kAttentionBesideTransfers = 1.03, kProductsBesideTransfers = 1.02;

bool IsBesideTransfers(const v1::JobSpec& spec, const ClusterShape& cluster) {
  return cluster.engine == v1::ResourcesSpec::CUDA && spec.resources().trainers() > 1;
}

// Gradients there and parameters back, to all other trainers. On GPUs gradients, three quarters of
// the bytes, travel while backward goes on.
double ExchangePerByte(const v1::JobSpec& spec, const ClusterShape& cluster) {
  const Link& link = cluster.nodes > 1 ? cluster.inter_node : cluster.intra_node;
  const double exposed = cluster.engine == v1::ResourcesSpec::CUDA ? 0.25 : 1;
  const double trainers = std::max(1u, spec.resources().trainers());
  return exposed * (trainers - 1) / trainers / link.bytes_per_second;
}

// A weight's and token's operations, at the rate of the model's type: forward 2, backward 4,
// forward 2 again of what is recomputed. On a Hopper GPU those of layers in FP8 take 1 / 1.43 of
// the time, casts counted (docs/precision.md); a CPU decodes e4m3 before it multiplies.
double LinearOperations(const v1::JobSpec& spec, const model::ModelConfig& model,
                        const ClusterShape& cluster) {
  const double operations = 6 + 2 * RecomputedShare(spec, model, cluster);
  const auto precision = jobspec::PrecisionOf(spec.training());
  if (!precision.ok()) return operations;  // MakePlan() refuses it
  const double layers = static_cast<double>(std::max<int64_t>(1, model.layers));
  const double cast =
      static_cast<double>(model::CastLayersOf(model.layers, *precision).count()) / layers;
  const double of_cast = spec.resources().engine() == v1::ResourcesSpec::CUDA ? 1 / 1.43 : 2;
  return operations * (1 - cast + cast * of_cast);
}

struct PatternCosts {
  double pair_operations = 0, tile_factor = 1, backward_factor = 1;
};

PatternCosts CostsOf(const v1::JobSpec& spec, const model::ModelConfig& model,
                     const ClusterShape& cluster, double head_dim) {
  auto attention = jobspec::AttentionOptionsOf(spec.attention());
  if (!attention.ok()) return {};  // MakePlan() refuses them
  const patterns::PatternDefinition& pattern = patterns::DefinitionOf(attention->pattern);
  attention->sequence_length = static_cast<int64_t>(spec.data().sequence_length());
  attention->group_heads = model.known()
                               ? patterns::HeadsTogether(*attention, model.heads, model.kv_heads)
                               : std::max(1, attention->group_heads);
  PatternCosts costs;
  if (pattern.backward_factor != nullptr) {
    costs.backward_factor = pattern.backward_factor(attention->group_heads);
  }
  if (pattern.gpu_tile_factor != nullptr && cluster.engine == v1::ResourcesSpec::CUDA) {
    costs.tile_factor = pattern.gpu_tile_factor(*attention);
  }
  if (pattern.pair_operations != nullptr) {
    costs.pair_operations = pattern.pair_operations(*attention, static_cast<int64_t>(head_dim));
  }
  return costs;
}

std::array<NonNegativeRegression, kPhases> Priors(const v1::JobSpec& spec,
                                                  const model::ModelConfig& model,
                                                  const ClusterShape& cluster) {
  const Rates rates = RatesOf(cluster);
  const double tile = spec.attention().tile() > 0 ? spec.attention().tile() : 64;
  const double d = model.known() ? model.head_dim : 64;
  const double layers = model.known() ? model.layers : 8;
  const double weights = model.known() ? model.weights_per_token() : 4e6;
  // QKᵀ and PV, 2 t² d each; backward has five such products. A row is rescaled and written once a
  // call: 4 bytes, read and written.
  const PatternCosts costs = CostsOf(spec, model, cluster, d);
  const double forward_flops = 4 * tile * tile * d * costs.tile_factor;
  const double row_seconds = 8 * d / rates.memory_bytes;
  const double call = rates.seconds_per_call;
  const double backward_seconds =
      2.5 * costs.backward_factor * forward_flops / rates.attention_backward_flops;
  return {
      NonNegativeRegression(
          Vector{forward_flops / rates.attention_forward_flops, row_seconds, 0, call}),
      NonNegativeRegression(Vector{backward_seconds, 2 * row_seconds, 0, call}),
      NonNegativeRegression(
          Vector{tile * tile * costs.pair_operations / rates.attention_forward_flops, row_seconds,
                 0, call}),
      NonNegativeRegression(
          Vector{0,
                 LinearOperations(spec, model, cluster) * weights / layers / rates.linear_flops *
                     (IsBesideTransfers(spec, cluster) ? kProductsBesideTransfers : 1),
                 0, call}),
      NonNegativeRegression(
          Vector{0, 0, ExchangePerByte(spec, cluster) + 1 / rates.memory_bytes, call}),
  };
}

Vector Features(const Work& work) {
  return {work.tiles, work.rows, work.bytes, work.calls};
}

// `prior` fitted to one direction of the rows. No part of it becomes nothing, which later reports
// could not change.
Vector FitRows(const Vector& prior, const balance::LatencyTable& measured, bool backward) {
  constexpr double kLeast = 1e-3;
  NonNegativeRegression fit(prior, /*prior_observations=*/0.01, /*forgetting=*/1);
  for (const balance::Row& row : measured.rows) {
    const double heads = row.heads;
    const double blocks = std::ceil(static_cast<double>(row.tokens) / row.tile);
    const Work work = {.tiles = row.density * heads * blocks * (blocks + 1) / 2,
                       .rows = static_cast<double>(row.tokens) * heads,
                       .calls = 1};
    const double ms = backward ? row.p50_ms - row.forward_p50_ms : row.forward_p50_ms;
    fit.Observe(Features(work), ms / 1e3);
  }
  Vector start = fit.coefficients();
  for (size_t k = 0; k < start.size(); ++k) start[k] = std::max(start[k], kLeast * prior[k]);
  return start;
}

}  // namespace

CostModel::CostModel(const v1::JobSpec& spec, const model::ModelConfig& model,
                     const ClusterShape& cluster, const balance::LatencyTable& measured)
    : phases_(Priors(spec, model, cluster)), measured_(measured) {
  const bool beside = IsBesideTransfers(spec, cluster);
  for (const Phase phase : {Phase::kAttentionForward, Phase::kAttentionBackward}) {
    NonNegativeRegression& fit = phases_[static_cast<int>(phase)];
    Vector start = FitRows(fit.coefficients(), measured, phase == Phase::kAttentionBackward);
    if (beside && !measured.rows.empty()) {
      for (double& seconds : start) seconds *= kAttentionBesideTransfers;
    }
    fit = NonNegativeRegression(start);
  }
  const double exchange = ExchangePerByte(spec, cluster);
  exchange_share_ = exchange / coefficients(Phase::kOptimizer)[2];
}

CostModel CostModel::Unfitted() const {
  CostModel start = *this;
  for (NonNegativeRegression& phase : start.phases_) phase = phase.Unfitted();
  return start;
}

double CostModel::Seconds(Phase phase, const Work& work) const {
  return phases_[static_cast<int>(phase)].Predict(Features(work));
}

void CostModel::Observe(Phase phase, const Work& work, double seconds) {
  phases_[static_cast<int>(phase)].Observe(Features(work), seconds);
}

const Vector& CostModel::coefficients(Phase phase) const {
  return phases_[static_cast<int>(phase)].coefficients();
}

int CostModel::observations() const {
  return phases_[static_cast<int>(Phase::kAttentionForward)].observations();
}

namespace {

// What choosing works on where it goes by all pairs of tiles: those that dense attention would
// visit.
Work IndexWork(const v1::JobSpec& spec, const model::ModelConfig& model,
               const v1::StepReport& report, const Work& per_token) {
  Work work = per_token;
  const double ranks = std::max(1u, spec.parallelism().context()) *
                       static_cast<double>(std::max(1u, spec.parallelism().data()));
  if (spec.data().batching() == v1::DataSpec::SAMPLES) {
    for (const v1::LengthReport& length : report.lengths()) {
      work.tiles += static_cast<double>(length.causal_tiles()) / ranks;
    }
    return work;
  }
  const double tile = spec.attention().tile() > 0 ? spec.attention().tile() : 64;
  const double blocks = std::ceil(static_cast<double>(spec.data().sequence_length()) / tile);
  work.tiles = static_cast<double>(model.layers * model.heads) * blocks * (blocks + 1) / 2 *
               spec.training().global_batch() / ranks;
  return work;
}

}  // namespace

void CostModel::ObserveStep(const v1::JobSpec& spec, const model::ModelConfig& model,
                            const v1::StepReport& report) {
  if (report.skipped() || report.most_tiles() == 0 || !model.known()) return;
  const bool samples = spec.data().batching() == v1::DataSpec::SAMPLES;
  if (samples && report.group_tokens() == 0) return;
  const double context = std::max(1u, spec.parallelism().context());
  const double ring = std::max(1u, jobspec::RingRanks(spec.parallelism()));
  // Phases are the slowest rank's, so they belong to the rank with the most tiles and tokens.
  const double tiles = static_cast<double>(report.most_tiles());
  const uint32_t groups = std::max(1u, spec.parallelism().data());
  const auto sequences = static_cast<double>(
      samples ? report.group_micro_batches() : CeilDiv(spec.training().global_batch(), groups));
  const double tokens = (samples ? static_cast<double>(report.group_tokens())
                                 : sequences * static_cast<double>(spec.data().sequence_length())) /
                        context;
  const double ring_steps = ring * model.layers * sequences;
  const Work attention = {
      .tiles = tiles, .rows = tokens * model.heads * model.layers * ring, .calls = ring_steps};
  const v1::PhaseSeconds& phases = report.phases();
  const Work per_token = {.rows = tokens * model.layers,
                          .calls = static_cast<double>(model.layers) * sequences};
  Observe(Phase::kAttentionForward, attention, phases.attention_forward());
  Observe(Phase::kAttentionBackward, attention, phases.attention_backward());
  Observe(Phase::kIndex, IndexWork(spec, model, report, per_token), phases.index());
  Observe(Phase::kLinear, per_token, phases.linear());
  Observe(Phase::kOptimizer, {.bytes = 8.0 * model.parameters(), .calls = 1},
          phases.optimizer() + phases.exposed_exchange());
}

}  // namespace ringleader::planner
