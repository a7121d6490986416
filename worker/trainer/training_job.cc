#include "worker/trainer/training_job.h"

#include "absl/strings/str_format.h"

namespace ringleader::trainer {

absl::Status CheckMicroBatches(bool ranks_step_alike, const Plan& plan) {
  if (!ranks_step_alike) return absl::OkStatus();
  for (size_t g = 1; g < plan.micro_batches.size(); ++g) {
    if (plan.micro_batches[g].size() == plan.micro_batches[0].size()) continue;
    return absl::InvalidArgumentError(absl::StrFormat(
        "plan %d gives %d sequences to group 0 and %d to group %d; where parameters are sharded, "
        "every group must get as many",
        plan.version, plan.micro_batches[0].size(), plan.micro_batches[g].size(), g));
  }
  return absl::OkStatus();
}

}  // namespace ringleader::trainer
