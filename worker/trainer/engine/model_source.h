// What engines on CPUs and on GPUs read from a job alike.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "model_shape/model_config.h"
#include "model_shape/parameter_layout.h"
#include "worker/trainer/training_job.h"

namespace ringleader::trainer {

bool HasRandomInit(const TrainingJob& job);
std::string ConfigPath(const TrainingJob& job);
absl::StatusOr<model::ModelConfig> LoadConfig(const TrainingJob& job);
// Draws elements [first, first + count) of a new model with random weights, the same whatever the
// range, by the job's threads: a billion take one thread half a minute.
void DrawWeights(const TrainingJob& job, const model::ModelConfig& config,
                 const model::ParameterLayout& layout, int64_t first, int64_t count, float* values);
// Returns the ranks of this rank's ring, which share its sequences.
std::vector<int> RingRanks(const TrainingJob& job);
// Returns the ranks with which this one shares out heads.
std::vector<int> HeadRanks(const TrainingJob& job);

}  // namespace ringleader::trainer
