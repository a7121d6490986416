#include "worker/attention/cpu/travelling_buffers.h"

#include "base/status_macros.h"
#include "worker/attention/stats/stopwatch.h"

namespace ringleader::attention {

TravellingBuffers::TravellingBuffers(comm::Communicator* communicator, int slots,
                                     size_t floats_per_slot, comm::Channel inner,
                                     comm::Channel outer, double* exposed_seconds)
    : communicator_(communicator),
      floats_per_slot_(floats_per_slot),
      inner_(inner),
      outer_(outer),
      exposed_seconds_(exposed_seconds),
      storage_(new float[slots * floats_per_slot]) {}

TravellingBuffers::~TravellingBuffers() {
  if (in_flight_.empty()) return;
  communicator_->Abort("attention stopped with transfers in flight");
  AwaitAll().IgnoreError();
}

template <typename Predicate>
absl::Status TravellingBuffers::AwaitIf(Predicate touches) {
  const Stopwatch watch(exposed_seconds_);
  absl::Status first_error;
  std::erase_if(in_flight_, [&](InFlight& flight) {
    if (!touches(flight.hop)) return false;
    first_error.Update(flight.transfer->Wait());
    return true;
  });
  return first_error;
}

absl::Status TravellingBuffers::AwaitContent(int slot) {
  return AwaitIf([&](const ring::RingHop& hop) { return hop.receive_slot == slot; });
}

absl::Status TravellingBuffers::AwaitIdle(int slot) {
  return AwaitIf(
      [&](const ring::RingHop& hop) { return hop.receive_slot == slot || hop.send_slot == slot; });
}

absl::Status TravellingBuffers::Start(const ring::RingHop& hop) {
  RETURN_IF_ERROR(AwaitContent(hop.send_slot));
  RETURN_IF_ERROR(AwaitIdle(hop.receive_slot));
  const size_t bytes = floats_per_slot_ * sizeof(float);
  in_flight_.push_back(
      {hop, communicator_->SendReceive(hop.link == ring::RingLink::kInner ? inner_ : outer_,
                                       data(hop.send_slot), bytes, hop.to, data(hop.receive_slot),
                                       bytes, hop.from)});
  return absl::OkStatus();
}

absl::Status TravellingBuffers::Add(int to, int from) {
  RETURN_IF_ERROR(AwaitIdle(to));
  RETURN_IF_ERROR(AwaitContent(from));
  float* const sum = data(to);
  const float* const added = data(from);
  for (size_t i = 0; i < floats_per_slot_; ++i) sum[i] += added[i];
  return absl::OkStatus();
}

absl::Status TravellingBuffers::AwaitAll() {
  const Stopwatch watch(exposed_seconds_);
  absl::Status first_error;
  for (InFlight& flight : in_flight_) first_error.Update(flight.transfer->Wait());
  in_flight_.clear();
  return first_error;
}

}  // namespace ringleader::attention
