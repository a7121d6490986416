// The steps of a job, as the coordinator keeps them.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "absl/status/statusor.h"
#include "cli/client.h"
#include "ringleader/v1/job.pb.h"
#include "ringleader/v1/telemetry.pb.h"

namespace ringleader::cli {

struct JobSteps {
  v1::Job job;
  // By number. A step that was trained again after a failure counts once, as it was trained last.
  std::map<uint64_t, v1::StepReport> steps;
  std::map<uint64_t, v1::EvalReport> evals;  // by the step after which they were
};

// Those of the job `name` up to now, whether it goes on or has ended. NOT_FOUND without the job.
absl::StatusOr<JobSteps> ReadSteps(Client* client, const std::string& name);

// Mean share of causal tiles visited, over layers; 0 where the record has no layers.
double MeanDensity(const v1::StepReport& step);
double TokensPerSecond(const v1::StepReport& step);

}  // namespace ringleader::cli
