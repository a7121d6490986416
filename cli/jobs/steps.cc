#include "cli/jobs/steps.h"

#include "base/status_macros.h"
#include "proto/states.h"

namespace ringleader::cli {

absl::StatusOr<JobSteps> ReadSteps(Client* client, const std::string& name) {
  v1::GetJobRequest get;
  get.set_name(JobName(name));
  JobSteps result;
  ASSIGN_OR_RETURN(result.job, client->GetJob(get));
  const bool goes_on = !IsTerminal(result.job.state());
  const uint64_t newest = result.job.progress().step();
  v1::WatchJobRequest watch;
  watch.set_name(result.job.name());
  watch.set_include_steps(true);
  // A watch of a job that goes on follows it: it is left at the step that was the newest.
  RETURN_IF_ERROR(client->WatchJob(watch, [&](const v1::WatchJobResponse& response) {
    for (const v1::StepReport& step : response.steps()) result.steps[step.step()] = step;
    for (const v1::EvalReport& eval : response.evals()) result.evals[eval.step()] = eval;
    if (response.has_job()) result.job = response.job();
    // Steps come in the order in which they were written: those that were trained again, last. The
    // newest is not there where it is too old to be kept.
    return !goes_on ||
           (newest != 0 && !result.steps.contains(newest) && !response.has_all_reports());
  }));
  // What an attempt trained beyond the checkpoint from which the next went on is not the job's.
  const uint64_t end = goes_on ? newest : result.job.progress().step();
  if (end > 0) {
    result.steps.erase(result.steps.upper_bound(end), result.steps.end());
    result.evals.erase(result.evals.upper_bound(end), result.evals.end());
  }
  return result;
}

double MeanDensity(const v1::StepReport& step) {
  double sum = 0;
  for (const v1::LayerReport& layer : step.layers()) sum += layer.density();
  return step.layers().empty() ? 0 : sum / step.layers_size();
}

double TokensPerSecond(const v1::StepReport& step) {
  return step.step_seconds() > 0 ? static_cast<double>(step.tokens()) / step.step_seconds() : 0;
}

}  // namespace ringleader::cli
