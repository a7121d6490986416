// Turns the step loop's records into the messages that go up.
#pragma once

#include "ringleader/v1/telemetry.pb.h"
#include "worker/trainer/host.h"

namespace ringleader::trainer {

v1::StepReport ToProto(const StepRecord& record, int rank);
v1::EvalReport ToProto(const EvalRecord& record);

}  // namespace ringleader::trainer
