// Plans as people read them.
#pragma once

#include <iosfwd>
#include <string>

#include "ringleader/v1/job_spec.pb.h"
#include "ringleader/v1/plan.pb.h"

namespace ringleader::cli {

// "striped, stripes of 64 tokens" and "hierarchical, 4 inner rings of 8".
std::string LayoutText(const v1::StepPlan& plan);
std::string RingText(const v1::StepPlan& plan);

// `plan` of the job `spec`; the rows below "step" add up to it. On a terminal of `columns` reasons
// are wrapped at its width; 0: no terminal.
void WritePlan(std::ostream& out, const v1::JobSpec& spec, const v1::StepPlan& plan, int columns);

}  // namespace ringleader::cli
