// The slots of a ring schedule in memory, and the transfers that move their contents.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "ring/ring_schedule.h"
#include "worker/comm/communicator.h"

namespace ringleader::attention {

// Buffers of equal size that travel between ranks. Whoever reads a slot calls AwaitContent first,
// whoever overwrites it AwaitIdle. Not thread-safe.
class TravellingBuffers {
 public:
  // `exposed_seconds` grows by the time spent waiting.
  TravellingBuffers(comm::Communicator* communicator, int slots, size_t floats_per_slot,
                    comm::Channel inner, comm::Channel outer, double* exposed_seconds);
  // Transfers still in flight mean that something failed: aborts the communicator, so that none
  // touches the buffers any more.
  ~TravellingBuffers();
  TravellingBuffers(const TravellingBuffers&) = delete;
  TravellingBuffers& operator=(const TravellingBuffers&) = delete;

  // Uninitialised until something was received or written.
  float* data(int slot) { return storage_.get() + slot * floats_per_slot_; }
  size_t floats_per_slot() const { return floats_per_slot_; }

  // Waits for transfers into the slot; some may still send it.
  absl::Status AwaitContent(int slot);
  // Waits for all transfers from and into the slot.
  absl::Status AwaitIdle(int slot);
  // Awaits what it sends and where it receives, then starts the transfer.
  absl::Status Start(const ring::RingHop& hop);
  // Slot `to` += slot `from`.
  absl::Status Add(int to, int from);
  absl::Status AwaitAll();

 private:
  struct InFlight {
    ring::RingHop hop;
    std::unique_ptr<comm::Transfer> transfer;
  };

  template <typename Predicate>
  absl::Status AwaitIf(Predicate touches);

  comm::Communicator* const communicator_;
  const size_t floats_per_slot_;
  const comm::Channel inner_, outer_;
  double* const exposed_seconds_;
  std::unique_ptr<float[]> storage_;
  std::vector<InFlight> in_flight_;  // in the order of their start
};

}  // namespace ringleader::attention
