// Measures a job's attention on this rank's device, for the latency table (docs/latency.md).
#pragma once

#include <vector>

#include "balance/measurements.h"
#include "model_shape/model_config.h"
#include "worker/trainer/engine/engine_device.h"
#include "worker/trainer/host.h"
#include "worker/trainer/training_job.h"

namespace ringleader::trainer {

// Times one layer's attention, forward and backward, over queries and keys of the job's shape that
// are drawn at random, at a grid of lengths and densities, and with documents where the job keeps
// them apart. Takes `budget_seconds` at most, less where the host asks the attempt to stop. No
// other rank takes part. Empty where nothing could be measured in time.
std::vector<balance::Row> MeasureAttention(const TrainingJob& job, const model::ModelConfig& config,
                                           double budget_seconds, EngineDevice& device,
                                           const Host& host);

}  // namespace ringleader::trainer
