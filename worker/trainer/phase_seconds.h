// The phases of a step on the side of the trainer that sees no protobuf, by the names of the
// message PhaseSeconds (telemetry.proto), whose comments say what each counts.
#pragma once

#include <array>
#include <utility>

namespace ringleader::trainer {

// Where a step's time went, this rank.
struct PhaseSeconds {
  double data = 0;
  double index = 0;
  double attention_forward = 0;
  double attention_backward = 0;
  double linear = 0;  // everything else in forward and backward
  double exposed_communication = 0;
  double exposed_offload = 0;  // waiting for kept activations on their way to or from host memory
  double optimizer = 0;
  double checkpoint = 0;        // time that the step loop was held up, before this step
  double evaluation = 0;        // the same
  double exposed_exchange = 0;  // waiting for sums of gradients and for gathered parameters
};

// Each field of the message with its member here; a test compares the two.
inline constexpr std::array kPhases = {
    std::pair("data", &PhaseSeconds::data),
    std::pair("index", &PhaseSeconds::index),
    std::pair("attention_forward", &PhaseSeconds::attention_forward),
    std::pair("attention_backward", &PhaseSeconds::attention_backward),
    std::pair("linear", &PhaseSeconds::linear),
    std::pair("exposed_communication", &PhaseSeconds::exposed_communication),
    std::pair("exposed_offload", &PhaseSeconds::exposed_offload),
    std::pair("optimizer", &PhaseSeconds::optimizer),
    std::pair("checkpoint", &PhaseSeconds::checkpoint),
    std::pair("evaluation", &PhaseSeconds::evaluation),
    std::pair("exposed_exchange", &PhaseSeconds::exposed_exchange),
};
static_assert(sizeof(PhaseSeconds) == kPhases.size() * sizeof(double));

}  // namespace ringleader::trainer
