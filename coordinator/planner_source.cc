#include "coordinator/planner_source.h"

#include <algorithm>

namespace ringleader {
namespace {

class PlannerSource : public lifecycle::PlanSource {
 public:
  absl::StatusOr<v1::StepPlan> Plan(const v1::JobSpec& spec,
                                    const std::vector<v1::Placement>& placements,
                                    const std::vector<v1::NodeInventory>& nodes) override {
    v1::StepPlan plan;
    plan.set_version(1);
    plan.set_effective_step(1);
    const v1::ParallelismSpec& wanted = spec.parallelism();
    plan.mutable_ring()->set_kind(wanted.ring() == v1::ParallelismSpec::RING_UNSPECIFIED
                                      ? v1::ParallelismSpec::FLAT
                                      : wanted.ring());
    plan.mutable_ring()->set_inner(wanted.context());
    plan.mutable_ring()->set_outer(1);
    plan.set_layout(wanted.layout() == v1::ParallelismSpec::LAYOUT_UNSPECIFIED
                        ? v1::ParallelismSpec::STRIPED
                        : wanted.layout());
    plan.set_stripe(wanted.stripe() != 0 ? wanted.stripe()
                                         : std::max(64u, spec.attention().tile()));
    return plan;
  }
  std::optional<v1::StepPlan> Observe(const v1::Job&, const v1::StepReport&) override {
    return std::nullopt;
  }
  void Forget(const v1::Job&) override {}
};

}  // namespace

std::unique_ptr<lifecycle::PlanSource> NewPlannerSource() {
  return std::make_unique<PlannerSource>();
}

}  // namespace ringleader
