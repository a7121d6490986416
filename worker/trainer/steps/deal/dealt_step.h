// How a step's sequences or samples are dealt to a job's data-parallel groups.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "balance/dealing.h"
#include "balance/sample_weights.h"
#include "worker/data/samples.h"
#include "worker/trainer/training_job.h"

namespace ringleader::trainer {

// Deals these sequences or samples to the groups that train or score them, in micro-batches that
// lie as `shape` has it. `group_permille`: DealingRules'. A pure function, as balance::Deal is.
balance::Dealing DealStep(const TrainingJob& job, const PlanShape& shape,
                          std::span<const data::Sample> samples,
                          const balance::SampleWeights& weights,
                          const std::vector<uint32_t>& group_permille);

// Returns the micro-batch's of a step's samples.
std::vector<data::Sample> SamplesOf(const balance::MicroBatch& batch,
                                    std::span<const data::Sample> samples);

}  // namespace ringleader::trainer
