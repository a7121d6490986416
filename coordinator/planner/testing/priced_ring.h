// What a job's plan sends around its ring, for the planner's tests.
#pragma once

#include <utility>

#include "absl/status/statusor.h"
#include "base/status_macros.h"
#include "coordinator/planner/simulate/pricer.h"
#include "coordinator/planner/testing/planner_problems.h"

namespace ringleader::planner {

struct PricedRing {
  v1::StepPlan plan;
  RingBytes bytes;  // of a trainer in a step, as a mean
};

// Of the three billion parameters' model.
inline absl::StatusOr<PricedRing> PriceRing(const v1::JobSpec& spec, const ClusterShape& cluster) {
  const model::ModelConfig model = ThreeBillion();
  const CostModel costs(spec, model, cluster);
  ASSIGN_OR_RETURN(v1::StepPlan plan, MakePlan(spec, model, cluster, costs));
  const patterns::PatternHints none;
  Pricer pricer(spec, model, cluster, none);
  RETURN_IF_ERROR(pricer.Price(plan, costs).status());
  return PricedRing{.plan = std::move(plan), .bytes = pricer.ring_bytes()};
}

}  // namespace ringleader::planner
