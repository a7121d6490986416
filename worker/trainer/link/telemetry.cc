#include "worker/trainer/link/telemetry.h"

#include <google/protobuf/descriptor.h>

#include <algorithm>

#include "absl/time/clock.h"
#include "base/numbers/mean.h"
#include "proto/timestamps.h"

namespace ringleader::trainer {
namespace {

// How unevenly this rank's tiles, all layers together, are spread over the steps of the ring.
double StepImbalance(const std::vector<attention::LayerStats>& layers) {
  std::vector<uint64_t> tiles;
  for (const attention::LayerStats& layer : layers) {
    tiles.resize(std::max(tiles.size(), layer.tiles_per_ring_step.size()));
    for (size_t i = 0; i < layer.tiles_per_ring_step.size(); ++i) {
      tiles[i] += layer.tiles_per_ring_step[i];
    }
  }
  return MaxOverMean(tiles);
}

v1::TaskAnswers ToProto(const TaskAnswers& task) {
  v1::TaskAnswers answers;
  answers.set_task(task.task);
  answers.set_asked(task.asked);
  answers.set_right(task.right);
  answers.set_loss(task.loss);
  return answers;
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
  for (const auto& [name, member] : kPhases) {
    phases->GetReflection()->SetDouble(
        phases, v1::PhaseSeconds::descriptor()->FindFieldByName(name), record.phases.*member);
  }
  report.set_peak_memory_bytes(record.peak_memory_bytes);
  for (size_t i = 0; i < record.layers.size(); ++i) {
    const attention::LayerStats& layer = record.layers[i];
    v1::LayerReport* out = report.add_layers();
    out->set_layer(static_cast<uint32_t>(i));
    out->set_density(layer.density);
    out->set_verticals(layer.verticals);
    out->set_slashes(layer.slashes);
    out->set_recall(layer.recall);
    out->set_first_head(static_cast<uint32_t>(layer.first_head));
    out->mutable_probed_recall_by_head()->Add(layer.probed_recall.begin(),
                                              layer.probed_recall.end());
    if (i < record.probed_recall.size() && record.probed_recall[i] >= 0) {
      out->set_probed_recall(record.probed_recall[i]);
    }
    out->set_verticals_at_budget(layer.verticals_at_budget);
    out->set_slashes_at_budget(layer.slashes_at_budget);
    out->mutable_tiles_per_ring_step()->Add(layer.tiles_per_ring_step.begin(),
                                            layer.tiles_per_ring_step.end());
    out->set_column_tiles(layer.column_tiles);
    out->set_balanced(layer.balanced);
    out->set_anchor_missed(layer.anchor_missed);
  }
  report.set_padding_tokens(record.padding_tokens);
  if (record.samples > 0) {
    report.set_samples(record.samples);
    report.set_micro_batches(record.micro_batches);
    report.set_dealt_imbalance(record.dealt_imbalance);
    report.set_group_micro_batches(record.group_micro_batches);
    report.set_group_tokens(record.group_tokens);
    for (const auto& [tokens, of_length] : record.lengths) {
      v1::LengthReport* const out = report.add_lengths();
      out->set_tokens(tokens);
      out->set_micro_batches(of_length.micro_batches);
      out->set_visited_tiles(of_length.tiles.visited);
      out->set_causal_tiles(of_length.tiles.causal);
    }
    report.set_overlong_documents(record.overlong.overlong);
    report.set_overlong_tokens(record.overlong.overlong_tokens);
  }
  report.set_group(record.group);
  report.set_rank_tokens(record.rank_tokens);
  for (const auto& [tokens, count] : record.documents) {
    v1::DocumentReport* const out = report.add_documents();
    out->set_tokens(tokens);
    out->set_count(count);
  }
  report.set_head_bytes(record.head_bytes);
  report.set_ring_bytes(record.ring_bytes.sent);
  report.set_whole_ring_bytes(record.ring_bytes.whole);
  report.set_step_imbalance(StepImbalance(record.layers));
  report.set_skipped(record.skipped);
  report.set_no_labels(!record.has_labels);
  report.set_plan_version(record.plan_version);
  SetTime(absl::Now(), report.mutable_time());
  return report;
}

v1::EvalReport ToProto(const EvalRecord& record) {
  v1::EvalReport report;
  report.set_step(record.step);
  report.set_loss(record.outcome.loss);
  report.set_tokens(record.outcome.tokens);
  report.set_seconds(record.seconds);
  for (const TaskAnswers& task : record.outcome.answers) *report.add_answers() = ToProto(task);
  if (record.dense.has_value()) {
    report.mutable_dense()->set_loss(record.dense->loss);
    for (const TaskAnswers& task : record.dense->answers) {
      *report.mutable_dense()->add_answers() = ToProto(task);
    }
  }
  return report;
}

v1::Measurements ToProto(const balance::Measurements& measured) {
  v1::Measurements proto;
  v1::MachineKind machine;
  machine.set_device(measured.machine.device);
  machine.set_clocks(measured.machine.clocks);
  machine.set_driver(measured.machine.driver);
  machine.set_build(measured.machine.build);
  for (const balance::LinkSpeed& link : measured.links) {
    v1::LinkSpeed* const out = proto.add_links();
    *out->mutable_machine() = machine;
    out->set_between_nodes(link.between_nodes);
    out->set_bytes_per_second(link.bytes_per_second);
    out->set_latency_seconds(link.latency_seconds);
  }
  if (measured.rows.empty()) return proto;
  v1::LatencyTable* const table = proto.mutable_layers();
  *table->mutable_machine() = machine;
  const balance::Row& shape = measured.rows.front();
  table->mutable_shape()->set_pattern(shape.pattern);
  table->mutable_shape()->set_tile(static_cast<uint32_t>(shape.tile));
  table->mutable_shape()->set_heads(static_cast<uint32_t>(shape.heads));
  table->mutable_shape()->set_kv_heads(static_cast<uint32_t>(shape.kv_heads));
  table->mutable_shape()->set_head_dim(static_cast<uint32_t>(shape.head_dim));
  for (const balance::Row& row : measured.rows) {
    v1::LatencyRow* const out = table->add_rows();
    out->set_tokens(static_cast<uint64_t>(row.tokens));
    out->set_document_tokens(static_cast<uint64_t>(row.document_tokens));
    out->set_density(row.density);
    out->set_p50_ms(row.p50_ms);
    out->set_p90_ms(row.p90_ms);
    out->set_forward_p50_ms(row.forward_p50_ms);
  }
  return proto;
}

}  // namespace ringleader::trainer
