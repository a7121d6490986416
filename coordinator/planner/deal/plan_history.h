// What a plan says of the steps before its newest change, by which a resumed attempt trains them
// again as they were.
#pragma once

#include <cstdint>

#include "ringleader/v1/job_spec.pb.h"
#include "ringleader/v1/plan.pb.h"

namespace ringleader::planner {

// Steps from the report that asks for a change to the first that it changes: reports travel up and
// the plan down while steps go on.
uint64_t LeadSteps(double step_seconds);

// The fewest steps between two changes. The last few together reach back beyond two checkpoints.
uint64_t StepsBetweenChanges(const v1::JobSpec& spec);

// Make the weights, or the shape, of `current` the newest of what `next`, which is in effect later,
// knows of earlier steps, and date its own from there on.
void DateWeights(const v1::StepPlan& current, v1::StepPlan* next);
void DateShape(const v1::StepPlan& current, v1::StepPlan* next);

}  // namespace ringleader::planner
