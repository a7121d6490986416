// The planner as the lifecycle sees it: plans for attempts, a cost model per job that learns from
// its reports.
#pragma once

#include <memory>

#include "coordinator/lifecycle/plan_source.h"

namespace ringleader {

// Reads a model's config.json when a plan is made; where this machine does not see it, plans carry
// no prediction.
std::unique_ptr<lifecycle::PlanSource> NewPlannerSource();

}  // namespace ringleader
