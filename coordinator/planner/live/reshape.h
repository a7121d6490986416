// Whether a running job would be better off in another layout or ring.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "coordinator/planner/cost/cost_model.h"
#include "coordinator/planner/cost/shapes.h"
#include "coordinator/planner/plan_cost.h"
#include "model_shape/model_config.h"
#include "patterns/sample.h"
#include "ringleader/v1/job_spec.pb.h"
#include "ringleader/v1/plan.pb.h"
#include "ringleader/v1/telemetry.pb.h"

namespace ringleader::planner {

// What a job's last steps took, in seconds a step: one that a rank stopped in for a minute says
// nothing of the others, nor does one that was skipped.
struct StepsTaken {
  double seconds = 0;
  double exposed_communication = 0;
};
StepsTaken MedianOf(std::span<const v1::StepReport> recent);

// Documents of a sequence of `tokens` tokens, in the proportions of the reports, the longest first;
// empty where nothing is known of them, or one fills a sequence.
std::vector<int64_t> DocumentsFrom(std::span<const v1::StepReport> recent, uint64_t tokens);

// What a change costs, in seconds: of the layout alone, or of the ring with whatever else.
struct ChangeCosts {
  double layout = 0;
  double ring = 0;
};

struct ReshapeRequest {
  v1::JobSpec spec;
  model::ModelConfig model;
  ClusterShape cluster;
  CostModel costs;
  patterns::PatternHints hints = {};  // of the last steps
  v1::StepPlan plan = {};             // in force
  StepsTaken taken = {};              // under it
  // What steps took over what was predicted, by the shapes (NameOf) that were in force so far.
  std::map<std::string, double> misses = {};
  int link_halvings = 0;    // what the last look found
  uint64_t steps_left = 0;  // that a change announced now would have
  ChangeCosts change_costs = {};
};

struct Reshaping {
  double miss = 1;  // of the plan in force: what steps took over what is predicted of it
  // How often the speed of links had to be halved to explain what was waited for; where the plan in
  // force sends too little to tell, what was found under one that did.
  int link_halvings = 0;
  // Another shape, with the weights of samples or documents that go with it, its prediction and the
  // reason. Nullopt: none is worth the change.
  std::optional<v1::StepPlan> better = {};
};

// Prices all shapes that the job file allows at the fitted costs, on links that explain the
// communication that was seen, and corrects them by how far predictions were off. A shape is better
// if what it gains over the next 100 steps exceeds twice what the change costs, and is more than
// chance. Errors are those of MakePlan().
absl::StatusOr<Reshaping> Reshape(const ReshapeRequest& request, const PlanLimits& limits);

}  // namespace ringleader::planner
