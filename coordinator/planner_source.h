// The lifecycle's plan source: the real planner, in threads of its own, with what running jobs
// taught.
#pragma once

#include <functional>
#include <memory>

#include "coordinator/lifecycle/plan_source.h"
#include "coordinator/planner/planner.h"

namespace ringleader {

struct PlannerOptions {
  // What the plan of one job may take: more fails the job, by name, and no other.
  double seconds = 10;  // of one core
  double bytes = 256.0 * 1024 * 1024;
  // Plans jobs in place of planner::MakePlan().
  std::function<decltype(planner::MakePlan)> make = planner::MakePlan;
};

// Destroy it after the controller that uses it.
std::unique_ptr<lifecycle::PlanSource> NewPlannerSource(const PlannerOptions& options = {});

}  // namespace ringleader
