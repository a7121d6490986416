// The planner as the lifecycle sees it.
#pragma once

#include <memory>

#include "coordinator/lifecycle/plan_source.h"

namespace ringleader {

std::unique_ptr<lifecycle::PlanSource> NewPlannerSource();

}  // namespace ringleader
