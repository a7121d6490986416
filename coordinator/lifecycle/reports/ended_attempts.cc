#include "coordinator/lifecycle/reports/ended_attempts.h"

#include <algorithm>

#include "base/status_macros.h"
#include "coordinator/lifecycle/job/job_machine.h"

namespace ringleader::lifecycle {

absl::StatusOr<EndedAttempt*> EndedAttempts::Find(store::ReadTransaction& transaction,
                                                  const std::string& node, const std::string& job,
                                                  uint32_t number) {
  const auto [entry, is_new] = attempts_.try_emplace({node, job, number});
  std::optional<EndedAttempt>& known = entry->second;
  if (!is_new) return known.has_value() ? &*known : nullptr;
  const absl::StatusOr<v1::Attempt> attempt = transaction.GetAttempt(job, number);
  if (absl::IsNotFound(attempt.status())) return nullptr;
  if (!attempt.ok()) return attempt.status();
  known = {.token = attempt->fencing_token(),
           .ranks = attempt->ranks_size(),
           .last_step = attempt->last_step(),
           .placement = {},
           .recorded = {}};
  if (const v1::Placement* const placement = PlacementOn(*attempt, node)) {
    known->placement = *placement;
  }
  return &*known;
}

absl::StatusOr<bool> EndedAttempts::Lacks(store::ReadTransaction& transaction,
                                          const std::string& job, const v1::StepReport& step,
                                          EndedAttempt* attempt) {
  if (step.step() <= attempt->last_step) return false;
  if (!attempt->recorded.has_value()) {
    ASSIGN_OR_RETURN(attempt->recorded, transaction.GetLastStep(job));
  }
  const uint64_t recorded = *attempt->recorded;
  if (step.step() < recorded) return true;
  return step.rank() == 0 && step.step() <= std::max(attempt->last_step, recorded) + kMostStepsLate;
}

}  // namespace ringleader::lifecycle
