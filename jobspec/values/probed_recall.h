// What a step's reports say of the recall that its probe found.
#pragma once

#include <optional>

#include "ringleader/v1/telemetry.pb.h"

namespace ringleader::jobspec {

// nullopt where no layer of the merged report was probed.
std::optional<v1::ProbedRecall> ProbedRecallOf(const v1::StepReport& report);

}  // namespace ringleader::jobspec
