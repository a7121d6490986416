// What training_bench derives from a step's report: rates and shares, with their formulas.
#pragma once

#include <string>

#include "bench/training_case.h"
#include "model_shape/model_config.h"
#include "ringleader/v1/telemetry.pb.h"

namespace ringleader::bench {

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
  // What ranks sent in a step, GiB: all of them in the hops of rings, and the one that sent most to
  // share out heads.
  double ring_gib = 0, head_gib = 0;
};

// `report` is merged over ranks (lifecycle::MergeSteps).
TrainingFigures Derive(const model::ModelConfig& config, const TrainingCase& run,
                       const v1::StepReport& report, double peak_tflops);

}  // namespace ringleader::bench
