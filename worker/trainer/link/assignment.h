// Turns the worker's protobuf messages into the plain structs that the torch side trains with.
#pragma once

#include "absl/status/statusor.h"
#include "balance/measurements.h"
#include "ringleader/v1/plan.pb.h"
#include "ringleader/v1/trainer_link.pb.h"
#include "worker/trainer/training_job.h"

namespace ringleader::trainer {

// Defaults are filled in first. INVALID_ARGUMENT names what does not fit: the number of ranks, the
// rank, the plan's shape, a sequence that does not divide, an enumerator that this program does not
// know.
absl::StatusOr<TrainingJob> ToTrainingJob(const v1::TrainerAssignment& assignment);

// `context` ranks share a sequence, and of them `heads` at a time share out heads: a ring has as
// many ranks as there are such groups. A plan that leaves its ring or layout open gets the flat
// ring or stripes. INVALID_ARGUMENT if the plan's ring is of another number of ranks, or of a kind
// that this program does not know.
absl::StatusOr<Plan> ToPlan(const v1::StepPlan& plan, int context, int heads = 1);

balance::MeasureRequest ToMeasureRequest(const v1::MeasureRequest& request);

}  // namespace ringleader::trainer
