// What training_bench derives from a step's report: rates and shares, with their formulas.
#pragma once

#include <string>

#include "model_shape/model_config.h"
#include "ringleader/v1/telemetry.pb.h"

namespace ringleader::bench {

struct TrainingCase {
  int gpus = 1;
  int64_t tokens = 0;                  // of the one sequence of a step
  std::string mode = "dense";          // dense, sparse, or a pattern's name
  std::string precision = "bfloat16";  // training.precision
};

struct TrainingFigures {
  double density = 0;  // of causal tiles, mean over layers
  double recall = -1;  // mean over the layers that estimate it; -1 where none does
  double step_seconds = 0;
  double tokens_per_second = 0;
  // Model FLOPs a second and GPU over the GPU's peak. FLOPs of a token: 6 for each parameter it
  // meets (matrices; a tied head counts once, the lookup not), and 12 heads d for each visited pair
  // of query and key and layer (4 forward, 8 backward). Nothing recomputed is counted.
  double mfu = 0;
  // 6 FLOPs a parameter and token over all time that is not attention or index, a GPU: TFLOP/s.
  double token_wise_tflops = 0;
  double exposed_share = 0;  // of the step
  double peak_gib = 0;       // of the worst rank
};

// `report` is merged over ranks (lifecycle::MergeSteps).
TrainingFigures Derive(const model::ModelConfig& config, const TrainingCase& run,
                       const v1::StepReport& report, double peak_tflops);

}  // namespace ringleader::bench
