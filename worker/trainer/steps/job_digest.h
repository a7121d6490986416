// What must not change under a checkpoint.
#pragma once

#include <string>

#include "model_shape/model_config.h"
#include "worker/data/token_folder.h"
#include "worker/trainer/training_job.h"

namespace ringleader::trainer {

// What a digest knows of the data, beside its path: all of it, or, as earlier releases had it, how
// much there is, or nothing.
enum class DataKnownBy { kContent, kCounts, kPath };

// Digests name, model, data, sequence length, batch and seed of a job; steps, rates and the number
// of ranks may change. `data`: what lies where the job reads.
std::string JobDigest(const TrainingJob& job, const model::ModelConfig& model,
                      const data::TokenFolder& data, DataKnownBy by = DataKnownBy::kContent);

}  // namespace ringleader::trainer
