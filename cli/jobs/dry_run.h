// What a job would run as: every field, and what `auto` becomes.
#pragma once

#include "absl/status/statusor.h"
#include "cli/context.h"
#include "cli/jobs/job_check.h"

namespace ringleader::cli {

// Prints the job with all defaults and its plan, made here for nodes as they usually are, or by a
// coordinator that answers (`asks`), which knows its nodes and says whether the job would wait.
// Creates nothing. Returns the exit code.
absl::StatusOr<int> DryRun(const Context& context, const CheckedJob& job, bool asks);

}  // namespace ringleader::cli
