#include "bench/training_figures.h"

#include <cstdint>

namespace ringleader::bench {
namespace {

// The parameters of all matrices that a token is multiplied with.
double MatrixParameters(const model::ModelConfig& config) {
  const double projections =
      static_cast<double>(2 * config.heads + 2 * config.kv_heads) * config.head_dim;
  const double layer = config.hidden_size * (projections + 3.0 * config.intermediate_size);
  return layer * config.layers + static_cast<double>(config.vocab_size) * config.hidden_size;
}

}  // namespace

TrainingFigures Derive(const model::ModelConfig& config, const TrainingCase& run,
                       const v1::StepReport& report, double peak_tflops) {
  TrainingFigures figures;
  int estimated = 0;
  double recall = 0;
  for (const v1::LayerReport& layer : report.layers()) {
    figures.density += layer.density() / report.layers_size();
    if (layer.recall() < 0) continue;
    recall += layer.recall();
    ++estimated;
  }
  if (estimated > 0) figures.recall = recall / estimated;

  const double tokens = static_cast<double>(report.tokens());
  const v1::PhaseSeconds& phases = report.phases();
  figures.step_seconds = report.step_seconds();
  figures.tokens_per_second = tokens / report.step_seconds();
  figures.exposed_share =
      (phases.exposed_communication() + phases.exposed_exchange()) / report.step_seconds();
  const auto gib = [](uint64_t bytes) { return static_cast<double>(bytes) / (1 << 30); };
  figures.peak_gib = gib(report.peak_memory_bytes());
  figures.ring_gib = gib(report.ring_bytes());
  figures.head_gib = gib(report.head_bytes());

  const double token_wise = 6.0 * MatrixParameters(config) * tokens / run.gpus;
  const double pairs = figures.density * tokens * static_cast<double>(run.tokens) / 2 / run.gpus;
  const double attention = 12.0 * config.heads * config.head_dim * config.layers * pairs;
  figures.mfu = (token_wise + attention) / report.step_seconds() / (peak_tflops * 1e12);
  const double token_wise_seconds = report.step_seconds() - phases.index() -
                                    phases.attention_forward() - phases.attention_backward();
  figures.token_wise_tflops = token_wise / token_wise_seconds / 1e12;
  return figures;
}

}  // namespace ringleader::bench
