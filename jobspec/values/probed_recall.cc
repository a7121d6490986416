#include "jobspec/values/probed_recall.h"

namespace ringleader::jobspec {

std::optional<v1::ProbedRecall> ProbedRecallOf(const v1::StepReport& report) {
  v1::ProbedRecall probe;
  for (const v1::LayerReport& layer : report.layers()) {
    if (layer.probed_recall_by_head().empty()) continue;
    v1::ProbedLayer* const probed = probe.add_layers();
    probed->set_layer(layer.layer());
    *probed->mutable_by_head() = layer.probed_recall_by_head();
  }
  if (probe.layers().empty()) return std::nullopt;
  probe.set_step(report.step());
  return probe;
}

}  // namespace ringleader::jobspec
