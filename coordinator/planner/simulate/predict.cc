// Prices a plan: patterns → tiles per rank and owner → seconds per ring step → the step.
#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <set>

#include "base/status_macros.h"
#include "coordinator/planner/deal/micro_batches.h"
#include "coordinator/planner/planner.h"
#include "coordinator/planner/simulate/ring_simulator.h"
#include "jobspec/attention_spec.h"
#include "jobspec/jobspec.h"
#include "model_shape/model_config.h"
#include "patterns/pattern.h"
#include "ring/tile_loads.h"

namespace ringleader::planner {
namespace {

// Layers and heads that stand for all: more change predictions by less than patterns vary.
constexpr int kSampledLayers = 3;
constexpr int kSampledHeads = 4;
// Work grows with the square of the ranks, while layers look more and more alike.
constexpr int kManyRanks = 256;

// One layer, forward and backward.
struct LayerTimes {
  double seconds = 0;
  double busy = 0;
  double transfer = 0;
  double exposed = 0;
  double index = 0;
};

double OptimizerSeconds(const model::ModelConfig& model, const CostModel& cost_model) {
  return cost_model.Seconds(Phase::kOptimizer,
                            {.bytes = 8.0 * static_cast<double>(model.parameters()), .calls = 1});
}

class Predictor {
 public:
  // `attention` has the plan's layout, `ring` is the plan's.
  Predictor(const v1::JobSpec& spec, const model::ModelConfig& model, const ClusterShape& cluster,
            const CostModel& cost_model, const patterns::AttentionOptions& attention,
            const ring::RingShape& ring)
      : spec_(spec),
        model_(model),
        cluster_(cluster),
        cost_model_(cost_model),
        attention_(attention),
        ring_(ring),
        layout_(patterns::LayoutOf(attention, ring.ranks(), 0, 0)),
        ranks_(ring.ranks()),
        local_tokens_(static_cast<double>(spec.data().sequence_length()) / ranks_),
        blocks_((static_cast<int64_t>(spec.data().sequence_length()) + attention.tile - 1) /
                attention.tile) {
    layout_.tokens = blocks_ * attention.tile;
  }

  v1::Prediction Run(const patterns::PatternHints& hints) {
    const std::set<int> dense(attention_.dense_layers.begin(), attention_.dense_layers.end());
    const auto layers = static_cast<double>(model_.layers);
    const double dense_layers = attention_.pattern == patterns::Pattern::kDense
                                    ? layers
                                    : std::min(layers, static_cast<double>(dense.size()));
    if (dense_layers > 0) AddLayers(true, dense_layers, 0, {});
    const double sparse_layers = layers - dense_layers;
    const bool one_is_enough =
        patterns::DefinitionOf(attention_.pattern).is_known_before_data() || ranks_ > kManyRanks;
    const int samples = sparse_layers == 0 ? 0
                        : one_is_enough    ? 1
                                           : std::min<int>(kSampledLayers, sparse_layers);
    for (int i = 0; i < samples; ++i) AddLayers(false, sparse_layers / samples, i + 1, hints);
    return Finish();
  }

 private:
  // `count` layers that look like this one.
  void AddLayers(bool dense, double count, uint64_t seed, const patterns::PatternHints& hints) {
    const std::vector<ring::HeadPattern> heads =
        patterns::SampleLayer(attention_, dense, blocks_, kSampledHeads, hints, seed);
    ring::TileLoads loads(ranks_);
    const double weight = static_cast<double>(model_.heads) / heads.size();
    for (const ring::HeadPattern& head : heads) {
      loads.AddHead(head, layout_, attention_.tile, weight);
    }
    std::vector<double> totals = loads.RankTotals();
    double total = std::accumulate(totals.begin(), totals.end(), 0.0);
    double largest = *std::max_element(totals.begin(), totals.end());
    if (hints.density > 0 && total > 0) {
      const double factor = hints.density * CausalTiles() / total;
      loads.Scale(factor);
      total *= factor;
      largest *= factor;
    }

    const double index =
        dense ? 0 : cost_model_.Seconds(Phase::kIndex, {.rows = local_tokens_, .calls = 1});
    Play(loads, /*backward=*/false, index, count);
    Play(loads, /*backward=*/true, MlpBackwardSeconds(), count);
    times_.index += count * index;
    largest_tiles_ += count * largest;
    tiles_ += count * total;
    step_imbalance_ += count * StepImbalance(loads);
  }

  double CausalTiles() const {  // of a layer
    const auto blocks = static_cast<double>(blocks_);
    return static_cast<double>(model_.heads) * blocks * (blocks + 1) / 2;
  }

  RingSetup Setup(bool backward) const {
    const double element = cluster_.engine == v1::ResourcesSpec::CUDA ? 2 : 4;
    const double kv = local_tokens_ * 2.0 * static_cast<double>(model_.kv_heads * model_.head_dim);
    return {.shape = ring_,
            .group = GroupOf(cluster_, ranks_),
            .intra_node = cluster_.intra_node,
            .inter_node = cluster_.inter_node,
            .kv_bytes = kv * element,
            .gradient_bytes = backward ? kv * 4 : 0};
  }

  // Of a layer, with what it computes again.
  double MlpBackwardSeconds() const {
    const double share = static_cast<double>(model_.layers * model_.mlp_weights()) /
                         static_cast<double>(model_.weights_per_token());
    return 0.75 * share * cost_model_.Seconds(Phase::kLinear, {.rows = local_tokens_, .calls = 1});
  }

  // `lead`: what a rank computes between the start of the first hops and attention. On GPUs all of
  // backward's travel while the MLP is computed, of forward's those between nodes during the index.
  void Play(const ring::TileLoads& loads, bool backward, double lead, double count) {
    const bool during_index = ring_.kind != ring::RingKind::kFlat;
    if (cluster_.engine != v1::ResourcesSpec::CUDA || !(backward || during_index)) lead = 0;
    const Phase phase = backward ? Phase::kAttentionBackward : Phase::kAttentionForward;
    const double tile_seconds = cost_model_.Seconds(phase, {.tiles = 1});
    const double per_call = cost_model_.Seconds(
        phase, {.rows = local_tokens_ * static_cast<double>(model_.heads), .calls = 1});
    const RingTimes times = SimulateRing(
        Setup(backward), loads, {.per_tile = tile_seconds, .per_step = per_call, .lead = lead});
    times_.seconds += count * (times.seconds - lead);
    times_.busy += count * (times.busy_seconds - lead);
    times_.transfer += count * times.transfer_seconds;
    times_.exposed += count * times.exposed_seconds;
  }

  v1::Prediction Finish() const {
    const double sequences =
        static_cast<double>(spec_.training().global_batch()) / spec_.parallelism().data();
    const auto layers = static_cast<double>(model_.layers);
    const double linear =
        cost_model_.Seconds(Phase::kLinear, {.rows = local_tokens_ * layers, .calls = layers});
    const double optimizer = OptimizerSeconds(model_, cost_model_);
    v1::Prediction prediction;
    prediction.set_attention_seconds(sequences * times_.busy);
    prediction.set_linear_seconds(sequences * linear);
    prediction.set_communication_seconds(sequences * times_.transfer);
    prediction.set_exposed_communication_seconds(sequences * times_.exposed);
    prediction.set_step_seconds(sequences * (times_.seconds + times_.index + linear) + optimizer);
    prediction.set_worker_imbalance(tiles_ > 0 ? largest_tiles_ * ranks_ / tiles_ : 1.0);
    prediction.set_step_imbalance(step_imbalance_ / layers);
    const double tokens = static_cast<double>(spec_.data().sequence_length()) *
                          static_cast<double>(spec_.training().global_batch());
    prediction.set_tokens_per_second(tokens / prediction.step_seconds());
    prediction.set_density(tiles_ / (layers * CausalTiles()));
    return prediction;
  }

  const v1::JobSpec& spec_;
  const model::ModelConfig& model_;
  const ClusterShape& cluster_;
  const CostModel& cost_model_;
  const patterns::AttentionOptions& attention_;
  const ring::RingShape ring_;
  kernels::ShardLayout layout_;  // of whole tiles
  const int ranks_;
  const double local_tokens_;
  const int64_t blocks_;

  LayerTimes times_;  // summed over layers
  double tiles_ = 0;
  double largest_tiles_ = 0;
  double step_imbalance_ = 0;
};

absl::StatusOr<v1::Prediction> PredictEqual(const v1::JobSpec& spec,
                                            const model::ModelConfig& model,
                                            const ClusterShape& cluster,
                                            const CostModel& cost_model, const v1::StepPlan& plan,
                                            const patterns::PatternHints& hints) {
  ASSIGN_OR_RETURN(patterns::AttentionOptions attention,
                   jobspec::AttentionOptionsOf(spec.attention()));
  ASSIGN_OR_RETURN(attention.layout, jobspec::LayoutOf(plan.layout()));
  attention.stripe = static_cast<int>(plan.stripe());
  ring::RingShape ring = {.inner = static_cast<int>(plan.ring().inner()),
                          .outer = static_cast<int>(plan.ring().outer())};
  ASSIGN_OR_RETURN(ring.kind, jobspec::RingOf(plan.ring().kind()));
  RETURN_IF_ERROR(ring::ForwardSchedule(ring, 0).status());
  return Predictor(spec, model, cluster, cost_model, attention, ring).Run(hints);
}

// A step of sequences of unequal length lasts as long as its slowest group; phases are that
// group's, imbalance and density those of the longest sequence, which is most of the work.
absl::StatusOr<v1::Prediction> PredictUnequal(const v1::JobSpec& spec,
                                              const model::ModelConfig& model,
                                              const ClusterShape& cluster,
                                              const CostModel& cost_model, const v1::StepPlan& plan,
                                              const patterns::PatternHints& hints) {
  const double optimizer = OptimizerSeconds(model, cost_model);
  std::map<uint64_t, v1::Prediction> of_one;  // by length: one sequence a group
  patterns::PatternHints of_any_length = hints;
  of_any_length.density = 0;  // shorter sequences are denser, by how much is not measured
  double step_tokens = 0;
  for (const uint64_t length : jobspec::SequenceLengths(spec)) {
    step_tokens += static_cast<double>(length);
    if (of_one.contains(length)) continue;
    v1::JobSpec one = spec;
    one.mutable_data()->clear_sequence_lengths();
    one.mutable_data()->set_sequence_length(length);
    one.mutable_training()->set_global_batch(spec.parallelism().data());
    ASSIGN_OR_RETURN(of_one[length],
                     PredictEqual(one, model, cluster, cost_model, plan, of_any_length));
  }
  const v1::Prediction& longest = of_one.rbegin()->second;
  v1::Prediction slowest;
  for (uint32_t group = 0; group < spec.parallelism().data(); ++group) {
    v1::Prediction sum;
    sum.set_step_seconds(optimizer);
    ASSIGN_OR_RETURN(const std::vector<uint64_t> lengths, LengthsOfGroup(spec, plan, group));
    for (const uint64_t length : lengths) {
      const v1::Prediction& part = of_one.at(length);
      sum.set_step_seconds(sum.step_seconds() + part.step_seconds() - optimizer);
      sum.set_attention_seconds(sum.attention_seconds() + part.attention_seconds());
      sum.set_linear_seconds(sum.linear_seconds() + part.linear_seconds());
      sum.set_communication_seconds(sum.communication_seconds() + part.communication_seconds());
      sum.set_exposed_communication_seconds(sum.exposed_communication_seconds() +
                                            part.exposed_communication_seconds());
    }
    if (sum.step_seconds() > slowest.step_seconds()) slowest = sum;
  }
  slowest.set_worker_imbalance(longest.worker_imbalance());
  slowest.set_step_imbalance(longest.step_imbalance());
  slowest.set_density(longest.density());
  slowest.set_tokens_per_second(step_tokens / slowest.step_seconds());
  return slowest;
}

}  // namespace

absl::StatusOr<v1::Prediction> Predict(const v1::JobSpec& spec, const model::ModelConfig& model,
                                       const ClusterShape& cluster, const CostModel& cost_model,
                                       const v1::StepPlan& plan,
                                       const patterns::PatternHints& hints) {
  return (spec.data().sequence_lengths().empty() ? PredictEqual : PredictUnequal)(
      spec, model, cluster, cost_model, plan, hints);
}

patterns::PatternHints HintsFrom(std::span<const v1::StepReport> recent) {
  patterns::PatternHints sum;
  double count = 0;
  for (const v1::StepReport& report : recent) {
    for (const v1::LayerReport& layer : report.layers()) {
      if (layer.slashes() <= 0) continue;
      sum.slashes += layer.slashes();
      sum.verticals += layer.verticals();
      sum.density += layer.density();
      ++count;
    }
  }
  if (count == 0) return {};
  return {.slashes = sum.slashes / count,
          .verticals = sum.verticals / count,
          .density = sum.density / count};
}

}  // namespace ringleader::planner
