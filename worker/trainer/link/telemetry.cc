#include "worker/trainer/link/telemetry.h"

#include <algorithm>
#include <numeric>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace ringleader::trainer {
namespace {

// max/mean over ring steps of this rank's tiles, all layers together; 1 where there are none.
double StepImbalance(const std::vector<attention::LayerStats>& layers) {
  std::vector<uint64_t> tiles;
  for (const attention::LayerStats& layer : layers) {
    tiles.resize(std::max(tiles.size(), layer.tiles_per_ring_step.size()));
    for (size_t i = 0; i < layer.tiles_per_ring_step.size(); ++i) {
      tiles[i] += layer.tiles_per_ring_step[i];
    }
  }
  const double total = std::accumulate(tiles.begin(), tiles.end(), 0.0);
  if (total == 0.0) return 1.0;
  const double largest = static_cast<double>(*std::max_element(tiles.begin(), tiles.end()));
  return largest * static_cast<double>(tiles.size()) / total;
}

}  // namespace

v1::StepReport ToProto(const StepRecord& record, int rank) {
  v1::StepReport report;
  report.set_step(record.step);
  report.set_rank(rank);
  report.set_loss(record.loss);
  report.set_gradient_norm(record.gradient_norm);
  report.set_learning_rate(record.learning_rate);
  report.set_tokens(record.tokens);
  report.set_step_seconds(record.step_seconds);
  v1::PhaseSeconds* phases = report.mutable_phases();
  phases->set_data(record.phases.data);
  phases->set_index(record.phases.index);
  phases->set_attention_forward(record.phases.attention_forward);
  phases->set_attention_backward(record.phases.attention_backward);
  phases->set_linear(record.phases.linear);
  phases->set_exposed_communication(record.phases.exposed_communication);
  phases->set_optimizer(record.phases.optimizer);
  phases->set_checkpoint(record.phases.checkpoint);
  phases->set_evaluation(record.phases.evaluation);
  phases->set_exposed_offload(record.phases.exposed_offload);
  report.set_peak_memory_bytes(record.peak_memory_bytes);
  for (size_t i = 0; i < record.layers.size(); ++i) {
    const attention::LayerStats& layer = record.layers[i];
    v1::LayerReport* out = report.add_layers();
    out->set_layer(static_cast<uint32_t>(i));
    out->set_density(layer.density);
    out->set_verticals(layer.verticals);
    out->set_slashes(layer.slashes);
    out->set_recall(layer.recall);
    out->mutable_tiles_per_ring_step()->Add(layer.tiles_per_ring_step.begin(),
                                            layer.tiles_per_ring_step.end());
    out->set_column_tiles(layer.column_tiles);
  }
  report.set_step_imbalance(StepImbalance(record.layers));
  report.set_skipped(record.skipped);
  report.set_plan_version(record.plan_version);
  const absl::Time now = absl::Now();
  report.mutable_time()->set_seconds(absl::ToUnixSeconds(now));
  report.mutable_time()->set_nanos(static_cast<int32_t>(
      absl::ToInt64Nanoseconds(now - absl::FromUnixSeconds(absl::ToUnixSeconds(now)))));
  return report;
}

v1::EvalReport ToProto(const EvalRecord& record) {
  v1::EvalReport report;
  report.set_step(record.step);
  report.set_loss(record.loss);
  report.set_tokens(record.tokens);
  report.set_seconds(record.seconds);
  return report;
}

}  // namespace ringleader::trainer
