// What it costs to make a plan, known before it is begun: the coordinator refuses a job whose plan
// would cost too much, instead of finding out.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>

#include "absl/status/status.h"
#include "model_shape/model_config.h"
#include "ringleader/v1/job_spec.pb.h"

namespace ringleader::planner {

struct PlanLimits {
  double seconds = std::numeric_limits<double>::infinity();  // of one core
  double bytes = std::numeric_limits<double>::infinity();
  // Asked between the parts of a plan, each of which takes a fraction of a second for a thousand
  // ranks: true ends the work with CANCELLED. Null: never.
  std::function<bool()> stop = nullptr;
};

// Estimates from above.
struct PlanCost {
  int64_t rank_steps = 0;  // Pricer::rank_steps()
  int64_t blocks = 0;      // of sampled heads, in each layout
  int64_t tiles = 0;       // that sampled heads list one by one, in each layout
  double bytes = 0;

  double seconds() const;  // of one core
  PlanCost& operator+=(const PlanCost& other);
};

// What it takes to plan in `layouts` layouts, of which `compared` are compared on rings that are
// walked (all-gather's are not), and to price one. `spec` has been validated.
PlanCost CostOf(const v1::JobSpec& spec, const model::ModelConfig& model, int layouts,
                int compared);

// RESOURCE_EXHAUSTED says what the plan would take, what it may take, and which fields to change.
absl::Status CheckCost(const PlanCost& cost, const v1::JobSpec& spec, const PlanLimits& limits);

}  // namespace ringleader::planner
