// Weights of samples that follow what a running job's micro-batches really visited.
#pragma once

#include <cstdint>
#include <optional>

#include "balance/latency_table.h"
#include "balance/length_densities.h"
#include "model_shape/model_config.h"
#include "ringleader/v1/job_spec.pb.h"
#include "ringleader/v1/plan.pb.h"
#include "ringleader/v1/telemetry.pb.h"

namespace ringleader::planner {

// Adds what one merged report says of its micro-batches by length.
void ObserveLengths(const v1::JobSpec& spec, const model::ModelConfig& model,
                    const v1::StepReport& report, balance::LengthDensities* densities);

// The next plan of a running attempt, in effect some steps after that of the merged report `last`,
// or nullopt when no weight would change by a tenth. Attention at another density takes what
// `measured`, of the job's shape, says of the two or, where it is empty, time in proportion. The
// plan says what dealt the steps before it, so that a resumed attempt deals them alike: the last
// few changes, which are at least half of checkpoint.every_steps apart.
std::optional<v1::StepPlan> ReplanWeights(const v1::JobSpec& spec, const v1::StepPlan& current,
                                          const v1::StepReport& last,
                                          const balance::LengthDensities& densities,
                                          const balance::LatencyTable& measured);

}  // namespace ringleader::planner
