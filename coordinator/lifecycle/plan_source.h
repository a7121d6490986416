// What the lifecycle asks of the planner: a seam, so that tests need no cost model.
#pragma once

#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "ringleader/v1/job.pb.h"
#include "ringleader/v1/node.pb.h"
#include "ringleader/v1/plan.pb.h"

namespace ringleader::lifecycle {

// Called on the controller's thread only; must not block.
class PlanSource {
 public:
  virtual ~PlanSource() = default;

  // The plan with which an attempt of `spec` starts on `placements`. `nodes`: the inventory of each
  // placement, in order. INVALID_ARGUMENT: no plan can ever work, e.g. a layout that does not
  // divide.
  virtual absl::StatusOr<v1::StepPlan> Plan(const v1::JobSpec& spec,
                                            const std::vector<v1::Placement>& placements,
                                            const std::vector<v1::NodeInventory>& nodes) = 0;

  // An attempt of `job`, its last, begins under `plan`. Plans that were made for a preview never
  // come to this.
  virtual void Started(const v1::Job& job, const v1::StepPlan& plan,
                       const std::vector<v1::NodeInventory>& nodes) {}

  // One completed step of a running job, merged over ranks. Returns a plan for later steps when it
  // is worth a change.
  virtual std::optional<v1::StepPlan> Observe(const v1::Job& job, const v1::StepReport& merged) = 0;
  // The job ended: forget what was learned for it alone.
  virtual void Forget(const v1::Job& job) = 0;
};

}  // namespace ringleader::lifecycle
