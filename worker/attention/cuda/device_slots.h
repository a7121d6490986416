// The slots of a ring schedule in device memory, and the hops that move their contents: the
// device's TravellingBuffers. A stream computes on the slots; hops run on the communicator's
// streams, and events order the two.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <vector>

#include "absl/status/status.h"
#include "ring/ring_schedule.h"
#include "worker/attention/cuda/device_timers.h"
#include "worker/comm/device_communicator.h"

namespace ringleader::attention {

// The stream waits for the transfer, if there is one; how long goes to `timers`.
absl::Status AwaitTransfer(const absl::StatusOr<comm::DeviceTransfer>& transfer,
                           DeviceTimers& timers, cudaStream_t stream);

// Not thread-safe. One stream at a time, in order between calls.
class DeviceSlots {
 public:
  // What the stream waits for transfers goes to `timers`.
  DeviceSlots(comm::DeviceCommunicator* communicator, comm::Channel inner, comm::Channel outer,
              DeviceTimers* timers);

  // The memory of the slots, [slots, bytes_per_slot], until the next call; no transfer is in
  // flight. Where `wire` is not null, slots hold float32 and hops carry them in bfloat16, through
  // `wire`: [slots, bytes_per_slot / 2].
  void Use(void* memory, size_t bytes_per_slot, void* wire);

  // Uninitialised until something was received or written.
  void* data(int slot) const { return static_cast<char*>(memory_) + slot * bytes_per_slot_; }
  size_t bytes_per_slot() const { return bytes_per_slot_; }

  // The stream waits for transfers into the slot, before it reads it: some may still send it.
  absl::Status AwaitContent(int slot, cudaStream_t stream);
  // The stream waits for all transfers from and into the slot, before it overwrites it.
  absl::Status AwaitIdle(int slot, cudaStream_t stream);
  absl::Status AwaitAll(cudaStream_t stream);
  // Enqueues the hop behind the stream's work, the arrival of what it sends, and the transfers of
  // the slot that it receives into.
  absl::Status Start(const ring::RingHop& hop, cudaStream_t stream);
  // Enqueues a gather: slot r of every rank receives rank r's slot r.
  absl::Status StartAllGather(cudaStream_t stream);

 private:
  struct InFlight {
    int send_slot, receive_slot;  // -1: all
    comm::DeviceTransfer transfer;

    bool Brings(int slot) const { return receive_slot == slot || receive_slot < 0; }
    bool Touches(int slot) const { return Brings(slot) || send_slot == slot; }
  };

  char* wire(int slot) const { return static_cast<char*>(wire_) + slot * bytes_per_slot_ / 2; }
  template <typename Predicate>
  absl::Status AwaitIf(Predicate holds, cudaStream_t stream);
  // Waits for the transfer, and widens what came over the wire.
  absl::Status Arrive(const InFlight& flight, cudaStream_t stream);

  comm::DeviceCommunicator* const communicator_;
  const comm::Channel inner_, outer_;
  DeviceTimers* const timers_;
  void* memory_ = nullptr;
  void* wire_ = nullptr;
  size_t bytes_per_slot_ = 0;
  std::vector<InFlight> in_flight_;  // in the order of their start
};

}  // namespace ringleader::attention
