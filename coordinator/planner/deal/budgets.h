// Moves attention budget between layers so that their work evens out: heavy layers give up a
// bounded share of estimated mass, light ones use the time to keep more. (SparseBalance, arXiv
// 2604.13847, dynamic sparsity tuning with the mean as anchor; here the unit is a layer, because
// all ranks of a ring meet at every layer.)
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "ringleader/v1/job_spec.pb.h"
#include "ringleader/v1/plan.pb.h"
#include "ringleader/v1/telemetry.pb.h"

namespace ringleader::planner {

// Budgets for all layers, or nullopt when none would change noticeably. Only with a positive
// attention.balance_tolerance, where that fits the job's pattern, and only from reports of the
// current plan. Density is taken to grow like -ln(1 - mass); a layer's mass stays within the
// tolerance of the job's. Depends on densities alone, not on any clock.
std::optional<std::vector<v1::LayerBudget>> TuneBudgets(const v1::JobSpec& spec,
                                                        const v1::StepPlan& current,
                                                        std::span<const v1::StepReport> recent);

}  // namespace ringleader::planner
