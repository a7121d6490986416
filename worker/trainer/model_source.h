// What engines read from a job alike.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "worker/attention/attention_options.h"
#include "worker/model/model_config.h"
#include "worker/trainer/training_job.h"

namespace ringleader::trainer {

bool HasRandomInit(const TrainingJob& job);
absl::StatusOr<model::ModelConfig> LoadConfig(const TrainingJob& job);
// The ranks that share this rank's sequences.
std::vector<int> ContextRanks(const TrainingJob& job);
// The job's, with the plan's layout and ring.
attention::AttentionOptions AttentionOptionsOf(const TrainingJob& job);

}  // namespace ringleader::trainer
