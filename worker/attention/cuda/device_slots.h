// The slots of a ring schedule in a GPU's memory. LibTorch's current stream computes on the slots;
// hops run on the communicator's streams, and events order the two.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "worker/attention/cuda/device_timers.h"
#include "worker/attention/runner/ring_slots.h"
#include "worker/comm/device_communicator.h"

namespace ringleader::attention {

// The stream waits for the transfer, if there is one; how long goes to `timers`.
absl::Status AwaitTransfer(const absl::StatusOr<comm::DeviceTransfer>& transfer,
                           DeviceTimers& timers, cudaStream_t stream);

// The memory of the slots, which outlives their transfers: [slots, bytes_per_slot]. Where `wire` is
// not null, slots hold float32 and hops carry them in bfloat16, through `wire`: [slots,
// bytes_per_slot / 2].
struct SlotMemory {
  void* slots = nullptr;
  size_t bytes_per_slot = 0;
  void* wire = nullptr;
};

class DeviceSlots : public RingSlots {
 public:
  // What the stream waits for transfers goes to `timers`.
  DeviceSlots(comm::DeviceCommunicator* communicator, comm::Channel inner, comm::Channel outer,
              DeviceTimers* timers, const SlotMemory& memory)
      : communicator_(*communicator),
        inner_(inner),
        outer_(outer),
        timers_(*timers),
        memory_(memory) {}

  void* memory(int slot) const override {
    return static_cast<char*>(memory_.slots) + slot * memory_.bytes_per_slot;
  }
  // Enqueues a gather: slot r of every rank receives rank r's slot r.
  absl::Status StartAllGather();

 protected:
  absl::StatusOr<Arrival> Send(const ring::RingHop& hop) override;
  absl::Status ZeroSlot(int slot) override;
  absl::Status AddSlot(int to, int from) override;
  // What is on the wire was written for an earlier hop.
  absl::Status AwaitBeforeSend(int slot) override {
    return memory_.wire == nullptr ? AwaitContent(slot) : AwaitIdle(slot);
  }

 private:
  void* wire(int slot) const {
    return static_cast<char*>(memory_.wire) + slot * memory_.bytes_per_slot / 2;
  }
  // Waits for the transfer, and widens what came over the wire.
  Arrival ArrivalOf(comm::DeviceTransfer transfer, int receive_slot);

  comm::DeviceCommunicator& communicator_;
  const comm::Channel inner_, outer_;
  DeviceTimers& timers_;
  const SlotMemory memory_;
};

}  // namespace ringleader::attention
