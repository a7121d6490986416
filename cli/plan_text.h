// Plans as people read them.
#pragma once

#include <iosfwd>

#include "ringleader/v1/job_spec.pb.h"
#include "ringleader/v1/plan.pb.h"

namespace ringleader::cli {

// `plan` of the job `spec`; the rows below "step" add up to it.
void WritePlan(std::ostream& out, const v1::JobSpec& spec, const v1::StepPlan& plan);

}  // namespace ringleader::cli
