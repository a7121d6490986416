// The model that a job file names, as far as plans go by it.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "model_shape/memory_estimate.h"
#include "model_shape/model_config.h"
#include "model_shape/precision.h"
#include "ringleader/v1/job.pb.h"
#include "ringleader/v1/job_spec.pb.h"

namespace ringleader::jobspec {

// The path of the model's config.json: model.config, or that of the folder in model.init.
std::string ModelConfigPath(const v1::ModelSpec& model);

// Reads the shape. Errors are those of model::LoadModelConfig(), and DEADLINE_EXCEEDED where the
// file does not answer within `limit` (base/process/time_limit.h).
absl::StatusOr<v1::ModelShape> ReadModelShape(const v1::ModelSpec& model, const std::string& client,
                                              absl::Duration limit);

// What a job's record keeps of a config.json, and back. ModelOf() leaves the rest at its defaults.
v1::ModelShape ShapeOf(const model::ModelConfig& config);
model::ModelConfig ModelOf(const v1::ModelShape& shape);

// resources.recompute and resources.offload.
absl::StatusOr<model::MemoryWishes> MemoryWishesOf(const v1::ResourcesSpec& resources);

// training.precision.
absl::StatusOr<model::Precision> PrecisionOf(const v1::TrainingSpec& training);
// Whether the model's heads go with those that the job shares out and with its pattern, whose
// defaults are filled in.
absl::Status CheckModelsHeads(const v1::JobSpec& spec, const model::ModelConfig& model);
// What the estimate of a rank's memory needs to know of it, in a shape of whatever else.
absl::Status SetPrecision(const v1::JobSpec& spec, model::TrainingShape* shape);

}  // namespace ringleader::jobspec
