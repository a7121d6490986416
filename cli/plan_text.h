// Plans as people read them.
#pragma once

#include <iosfwd>

#include "ringleader/v1/plan.pb.h"

namespace ringleader::cli {

void WritePlan(std::ostream& out, const v1::StepPlan& plan);

}  // namespace ringleader::cli
