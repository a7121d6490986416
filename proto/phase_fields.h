// The phases of a step (PhaseSeconds), by the message's descriptor: whoever sums, merges or prints
// them meets each once, in the order of telemetry.proto.
#pragma once

#include <google/protobuf/descriptor.h>

#include <string>

#include "ringleader/v1/telemetry.pb.h"

namespace ringleader {

// Calls `visit(name, seconds)` for each phase.
template <typename Visit>
void ForEachPhase(const v1::PhaseSeconds& phases, const Visit& visit) {
  const google::protobuf::Descriptor& type = *v1::PhaseSeconds::descriptor();
  for (int i = 0; i < type.field_count(); ++i) {
    visit(type.field(i)->name(), phases.GetReflection()->GetDouble(phases, type.field(i)));
  }
}

// Sets each phase of `phases` to `combine(its own seconds, those of `other`)`.
template <typename Combine>
void CombinePhases(const v1::PhaseSeconds& other, const Combine& combine,
                   v1::PhaseSeconds* phases) {
  const google::protobuf::Reflection& fields = *phases->GetReflection();
  const google::protobuf::Descriptor& type = *v1::PhaseSeconds::descriptor();
  for (int i = 0; i < type.field_count(); ++i) {
    const google::protobuf::FieldDescriptor* const field = type.field(i);
    fields.SetDouble(phases, field,
                     combine(fields.GetDouble(*phases, field), fields.GetDouble(other, field)));
  }
}

}  // namespace ringleader
