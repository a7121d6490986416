#include "worker/attention/cpu/travelling_buffers.h"

#include <algorithm>
#include <utility>

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
  if (!in_flight()) return;
  communicator_->Abort("attention stopped with transfers in flight");
  AwaitAll().IgnoreError();
}

absl::StatusOr<RingSlots::Arrival> TravellingBuffers::Send(const ring::RingHop& hop) {
  const size_t bytes = floats_per_slot_ * sizeof(float);
  return [transfer = communicator_->SendReceive(
              hop.link == ring::RingLink::kInner ? inner_ : outer_, data(hop.send_slot), bytes,
              hop.to, data(hop.receive_slot), bytes, hop.from),
          seconds = exposed_seconds_] {
    const Stopwatch watch(seconds);
    return transfer->Wait();
  };
}

void TravellingBuffers::StartAllGather() {
  const int rank = communicator_->rank(), ranks = communicator_->size();
  for (int distance = 1; distance < ranks; ++distance) {
    const ring::RingHop hop{.to = (rank + distance) % ranks,
                            .from = (rank - distance + ranks) % ranks,
                            .send_slot = rank,
                            .receive_slot = (rank - distance + ranks) % ranks};
    Track(hop.send_slot, hop.receive_slot, *Send(hop));
  }
}

absl::Status TravellingBuffers::ZeroSlot(int slot) {
  std::fill_n(data(slot), floats_per_slot_, 0.0f);
  return absl::OkStatus();
}

absl::Status TravellingBuffers::AddSlot(int to, int from) {
  float* const sum = data(to);
  const float* const added = data(from);
  for (size_t i = 0; i < floats_per_slot_; ++i) sum[i] += added[i];
  return absl::OkStatus();
}

}  // namespace ringleader::attention
