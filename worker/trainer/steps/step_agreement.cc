#include "worker/trainer/steps/step_agreement.h"

#include <string>
#include <utility>

#include "base/status_macros.h"

namespace ringleader::trainer {

absl::StatusOr<Agreement> Agree(comm::Communicator& world, Host& host) {
  std::string plan = world.rank() == 0 ? host.TakePlan() : std::string();
  const uint32_t profile_steps = world.rank() == 0 ? host.TakeProfileSteps() : 0;
  // One collective in the usual case: whether to stop, how long a plan follows, how many steps to
  // trace. fp64 holds all of them exactly.
  double request[3] = {host.stop_requested() ? 1.0 : 0.0, static_cast<double>(plan.size()),
                       static_cast<double>(profile_steps)};
  RETURN_IF_ERROR(world.AllReduceSum(comm::Channel::kControl, request, 3));

  Agreement agreement;
  agreement.stop = request[0] > 0;
  agreement.profile_steps = static_cast<uint32_t>(request[2]);
  if (request[1] > 0) {
    plan.resize(static_cast<size_t>(request[1]));
    RETURN_IF_ERROR(world.Broadcast(comm::Channel::kControl, plan.data(), plan.size(), 0));
    absl::StatusOr<Plan> parsed = host.ParsePlan(plan);
    if (parsed.ok()) {
      agreement.plan = *std::move(parsed);
      agreement.plan_bytes = std::move(plan);
    } else {
      agreement.refused_plan = std::string(parsed.status().message());
    }
  }
  return agreement;
}

}  // namespace ringleader::trainer
