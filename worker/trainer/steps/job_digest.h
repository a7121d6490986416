// What must not change under a checkpoint.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "model_shape/model_config.h"
#include "worker/checkpoint/checkpoint.h"
#include "worker/data/token_folder.h"
#include "worker/trainer/training_job.h"

namespace ringleader::trainer {

// What a digest knows beside the data's path: all of the data and where the weights began, or, as
// earlier releases had it, not where they began, nor of the data more than how much there is, or
// nothing.
enum class DigestOf { kDataAndInit, kContent, kCounts, kPath };

// Digests name, model, where its weights began, data, sequence length, batch and seed of a job;
// steps, rates and the number of ranks may change. `data`: what lies where the job reads.
std::string JobDigest(const TrainingJob& job, const model::ModelConfig& model,
                      const data::TokenFolder& data, DigestOf of = DigestOf::kDataAndInit);

// FAILED_PRECONDITION where `job` cannot go on from a checkpoint: another job's, one of more steps,
// or one at the last step that an earlier job of this name saved, so that nothing would be trained.
absl::Status CheckIsOf(const TrainingJob& job, const model::ModelConfig& model,
                       const data::TokenFolder& data, const checkpoint::CheckpointInfo& found);

}  // namespace ringleader::trainer
