// Turns the step loop's records into the messages that go up.
#pragma once

#include "balance/measurements.h"
#include "ringleader/v1/latency.pb.h"
#include "ringleader/v1/telemetry.pb.h"
#include "worker/trainer/host.h"

namespace ringleader::trainer {

v1::StepReport ToProto(const StepRecord& record, int rank);
v1::EvalReport ToProto(const EvalRecord& record);
v1::Measurements ToProto(const balance::Measurements& measured);

}  // namespace ringleader::trainer
