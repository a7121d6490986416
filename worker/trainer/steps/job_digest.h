// What must not change under a checkpoint.
#pragma once

#include <string>

#include "model_shape/model_config.h"
#include "worker/data/token_folder.h"
#include "worker/trainer/training_job.h"

namespace ringleader::trainer {

// Digests name, model, data, sequence length, batch and seed of a job; steps, rates and the number
// of ranks may change. `data`: what lies where the job reads; null: as releases did that went by
// the path alone.
std::string JobDigest(const TrainingJob& job, const model::ModelConfig& model,
                      const data::Manifest* data);

}  // namespace ringleader::trainer
