// The lifecycle's plan source: the real planner, in threads of its own, with what running jobs
// taught.
#pragma once

#include <functional>
#include <memory>

#include "coordinator/lifecycle/planning/plan_source.h"
#include "coordinator/planner/planner.h"

namespace ringleader {

struct PlannerOptions {
  // What the plan of one job may take: more fails the job, by name, and no other.
  double seconds = 10;  // of one core
  double bytes = 256.0 * 1024 * 1024;
  // What trainers may take, before the first step, to measure machines and attention that no table
  // knows; the CPU engine, whose jobs are shorter, a tenth. 0: nothing is measured.
  double measure_seconds = 20;
  // Plans jobs in place of planner::MakePlan().
  std::function<decltype(planner::MakePlan)> make = planner::MakePlan;
};

// Destroy it after the controller that uses it.
std::unique_ptr<lifecycle::PlanSource> NewPlannerSource(const PlannerOptions& options = {});

}  // namespace ringleader
