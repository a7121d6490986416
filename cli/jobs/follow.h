// Follows a job to its end: a progress bar on a terminal, a line a step elsewhere.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "cli/client.h"
#include "cli/context.h"
#include "ringleader/v1/job.pb.h"

namespace ringleader::cli {

// Returns the exit code that the job's final state stands for. `after_step`: steps up to it are not
// shown. In JSON every step, every evaluation and every state of the job is a line, in YAML a
// document.
absl::StatusOr<int> FollowJob(const Context& context, Client* client, const std::string& name,
                              uint64_t after_step);

// "[####----] 12/40  loss 3.2140  ETA 1m20s  12,345 tokens/s  imbalance 1.010", in at most
// `columns`: what is behind goes first, then the bar.
std::string ProgressBar(const v1::Job& job, const v1::StepReport& step, int columns);

}  // namespace ringleader::cli
