#include "coordinator/planner/deal/plan_history.h"

#include <algorithm>
#include <cmath>

namespace ringleader::planner {
namespace {

constexpr double kLeadSeconds = 5;
constexpr uint64_t kLeastStepsBetween = 64;
constexpr int kKeptChanges = 5;

template <typename Earlier>
void KeepNewest(google::protobuf::RepeatedPtrField<Earlier>* earlier) {
  if (earlier->size() > kKeptChanges) earlier->DeleteSubrange(0, earlier->size() - kKeptChanges);
}

}  // namespace

uint64_t LeadSteps(double step_seconds) {
  constexpr double kLeast = 3, kMost = 200;
  return static_cast<uint64_t>(
      std::clamp(std::ceil(kLeadSeconds / std::max(step_seconds, 1e-3)), kLeast, kMost));
}

uint64_t StepsBetweenChanges(const v1::JobSpec& spec) {
  return std::max(kLeastStepsBetween, spec.checkpoint().every_steps() / 2);
}

void DateWeights(const v1::StepPlan& current, v1::StepPlan* next) {
  v1::EarlierWeights* const earlier = next->add_earlier_weights();
  earlier->set_from_step(current.weights_from_step());
  *earlier->mutable_sample_weights() = current.sample_weights();
  *earlier->mutable_group_permille() = current.group_permille();
  KeepNewest(next->mutable_earlier_weights());
  next->set_weights_from_step(next->effective_step());
}

void DateShape(const v1::StepPlan& current, v1::StepPlan* next) {
  v1::EarlierShape* const earlier = next->add_earlier_shapes();
  earlier->set_from_step(current.shape_from_step());
  *earlier->mutable_ring() = current.ring();
  earlier->set_layout(current.layout());
  earlier->set_stripe(current.stripe());
  KeepNewest(next->mutable_earlier_shapes());
  next->set_shape_from_step(next->effective_step());
}

}  // namespace ringleader::planner
