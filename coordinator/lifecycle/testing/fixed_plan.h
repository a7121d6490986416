// A plan source for tests of what surrounds the planner: version 1 for every attempt, never
// revised.
#pragma once

#include <optional>
#include <vector>

#include "coordinator/lifecycle/plan_source.h"

namespace ringleader::lifecycle::testing {

class FixedPlan : public PlanSource {
 public:
  absl::StatusOr<v1::StepPlan> Plan(const v1::JobSpec&, const std::vector<v1::Placement>&,
                                    const std::vector<v1::NodeInventory>&) override {
    v1::StepPlan plan;
    plan.set_version(1);
    return plan;
  }
  std::optional<v1::StepPlan> Observe(const v1::Job&, const v1::StepReport&) override {
    return std::nullopt;
  }
  void Forget(const v1::Job&) override {}
};

}  // namespace ringleader::lifecycle::testing
