// Steps whose documents are samples: what a sample is predicted to take, by which trainers deal
// them (balance/dealing.h), and what steps of given lengths then take. docs/balance.md.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/statusor.h"
#include "coordinator/planner/cost/cost_model.h"
#include "coordinator/planner/simulate/pricer.h"
#include "model_shape/model_config.h"
#include "ringleader/v1/job_spec.pb.h"
#include "ringleader/v1/plan.pb.h"

namespace ringleader::planner {

// What a job's layers that are not dense visit, of the causal tiles, where all layers visit
// `density`; 0 if all are dense.
double SparseDensity(const v1::JobSpec& spec, const model::ModelConfig& model, double density);

// Sets the plan's weights of samples: what one is predicted to take as a micro-batch of its own, by
// the pattern's assumed density, and where attention of the job's shape was measured at what it
// took there; of documents that are laid out by themselves, what one takes to travel, too. Nothing
// unless documents are samples or laid out so.
absl::Status WeighSamples(const v1::JobSpec& spec, const model::ModelConfig& model,
                          const CostModel& cost_model, Pricer& pricer, v1::StepPlan* plan);

// The mean of steps of training.global_batch samples, of `lengths` drawn with training.seed, dealt
// by the plan's weights: of each what its slowest group takes. Memory is the plan's.
// INVALID_ARGUMENT where there is no length, or one is 0 or more than data.sequence_length.
absl::StatusOr<v1::Prediction> PredictSamples(const v1::JobSpec& spec, const CostModel& cost_model,
                                              const v1::StepPlan& plan,
                                              std::span<const uint64_t> lengths, Pricer& pricer);

}  // namespace ringleader::planner
