// An attempt as a trace of OpenTelemetry, made from the records that the store keeps. Pure
// functions.
//
//   attempt                       the root: from when the job began to wait to the attempt's end
//     queue, place, start, load   one after the other, until the first step begins
//     recover                     after a failure: from the end of the failed attempt until steps
//                                 are trained again
//     step                        some of them
//     checkpoint                  each: from when it was begun until it was durable
//
// docs/observability.md lists what each span says. Ids follow from the job's uid, the attempt's
// number and what the span is of, so that a coordinator that was started anew goes on with the
// same trace.
#pragma once

#include <vector>

#include "opentelemetry/trace_service.pb.h"
#include "ringleader/v1/job.pb.h"
#include "ringleader/v1/telemetry.pb.h"

namespace ringleader::trace {

namespace otlp = ::opentelemetry::proto::collector::trace::v1;

// The spans of `attempt` that its record says to be over, but for steps and checkpoints. The root
// is the last one, and comes when the attempt has ended. `before`: the attempt before it; null if
// there was none, or the record has forgotten it.
std::vector<otlp::Span> FinishedSpans(const v1::Job& job, const v1::Attempt& attempt,
                                      const v1::Attempt* before);

// `step`: merged over ranks, of this attempt.
otlp::Span StepSpan(const v1::Job& job, const v1::Attempt& attempt, const v1::StepReport& step);

// `notice`: as the store has it, with its time and attempt.
otlp::Span CheckpointSpan(const v1::Job& job, const v1::CheckpointNotice& notice);

}  // namespace ringleader::trace
