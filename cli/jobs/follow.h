// Follows a job to its end: a progress bar on a terminal, a line a step elsewhere.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "cli/client.h"
#include "cli/context.h"
#include "ringleader/v1/job.pb.h"

namespace ringleader::cli {

// Returns the exit code that the job's final state stands for. `after_step`: steps up to it are not
// shown. In JSON and YAML every update is a document of its own.
absl::StatusOr<int> FollowJob(const Context& context, Client* client, const std::string& name,
                              uint64_t after_step);

// "[####----] 12/40  loss 3.2140  12,345 tokens/s  ETA 1m20s  imbalance 1.010"
std::string ProgressBar(const v1::Job& job, const v1::StepReport& step);

}  // namespace ringleader::cli
