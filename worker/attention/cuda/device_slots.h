// The slots of a ring schedule in a GPU's memory. LibTorch's current stream computes on the slots;
// hops run on the communicator's streams, and events order the two.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/fused/rows/attention_rows.h"
#include "patterns/index/device_array.h"
#include "worker/attention/cuda/device_timers.h"
#include "worker/attention/runner/ring_slots.h"
#include "worker/comm/device_communicator.h"

namespace ringleader::attention {

using patterns::DeviceMemory;

// `bytes` of the host's memory on the GPU, as soon as the stream gets there.
DeviceMemory UploadBytes(const void* values, int64_t bytes);

// The stream waits for the transfer, if there is one; how long goes to `timers`.
absl::Status AwaitTransfer(const absl::StatusOr<comm::DeviceTransfer>& transfer,
                           DeviceTimers& timers, cudaStream_t stream);

// What slots hold, and what becomes of it where it arrives.
enum class SlotContent {
  kKeys,       // keys and values in bfloat16, which are read in the slot
  kGradients,  // their gradients in float32, which are added to another slot
};

// The memory of the slots, which outlives their transfers: [slots, bytes_per_slot]. Where `wire` is
// not null, slots hold float32 and hops carry them in bfloat16, through `wire`: [slots,
// bytes_per_slot / 2].
struct SlotMemory {
  void* slots = nullptr;
  size_t bytes_per_slot = 0;
  void* wire = nullptr;
  SlotContent content = SlotContent::kKeys;
  int64_t row = 0;  // elements of a token's keys

  int64_t row_bytes() const {  // of keys alone, in a slot
    return row * static_cast<int64_t>(content == SlotContent::kKeys ? 2 : sizeof(float));
  }
};
// The largest share of a shard's rows that is packed; of more, hops carry all.
inline constexpr double kMostPacked = 0.5;

// Where rows that hops carry lie among those that are packed, on the device: PackedRows::places of
// what each hop sends and receives.
struct RowPlaces {
  std::shared_ptr<const std::vector<ring::HopRows>> rows;
  DeviceMemory memory;
  std::vector<const int32_t*> sent = {}, received = {};  // [hop]
};
RowPlaces UploadPlaces(std::shared_ptr<const std::vector<ring::HopRows>> rows);

// What a pass whose hops carry some rows alone needs of its device.
class RowTransport {
 public:
  virtual ~RowTransport() = default;
  virtual std::shared_ptr<const RowPlaces> PlacesOf(
      std::shared_ptr<const std::vector<ring::HopRows>> rows) = 0;
  // Room for packed rows on their way, kMostPacked of a slot: what is sent over a link and, of
  // keys, what is received.
  virtual void* PackedMemory(SlotContent content, ring::RingLink link, bool is_received,
                             size_t bytes) = 0;
};

class DeviceSlots : public RingSlots {
 public:
  // What the stream waits for transfers goes to `timers`.
  DeviceSlots(comm::DeviceCommunicator* communicator, comm::Channel inner, comm::Channel outer,
              DeviceTimers* timers, const SlotMemory& memory, RowTransport* transport)
      : communicator_(*communicator),
        inner_(inner),
        outer_(outer),
        timers_(*timers),
        memory_(memory),
        transport_(*transport) {}

  void* memory(int slot) const override {
    return static_cast<char*>(memory_.slots) + slot * memory_.bytes_per_slot;
  }
  // Enqueues a gather: slot r of every rank receives rank r's slot r.
  absl::Status StartAllGather();
  void Carry(std::shared_ptr<const std::vector<ring::HopRows>> rows) override;

 protected:
  absl::StatusOr<Arrival> Send(const ring::RingHop& hop) override;
  absl::Status ZeroSlot(int slot) override;
  absl::Status AddSlot(int to, int from) override;
  // A shard of which all rows travel goes from slot to slot; others are packed on their way. What
  // has come of keys is spread over the slot, the rest of which becomes zero: a kernel may load a
  // tile that it does not visit. Gradients stay packed, in the slot or in `wire`, until they are
  // added.
  absl::StatusOr<Arrival> SendRows(const ring::RingHop& hop, const ring::HopRows& rows) override;
  absl::Status AddRows(int to, int from, const ring::HopRows& brought) override;
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
  comm::Channel ChannelOf(const ring::RingHop& hop) const {
    return hop.link == ring::RingLink::kInner ? inner_ : outer_;
  }
  size_t HopOf(const ring::HopRows& rows) const { return &rows - places_->rows->data(); }
  kernels::fused::PackedRows Packed(const ring::RowRuns& runs, int64_t shard,
                                    const int32_t* places) const {
    return {.places = places, .rows = shard, .packed = ring::CountRows(runs), .row = memory_.row};
  }
  // On the way: of so many rows, keys and values or their gradients.
  size_t WireBytes(int64_t rows) const {
    return 2 * rows * memory_.row_bytes() / (memory_.wire == nullptr ? 1 : 2);
  }
  void* PackedMemory(const ring::RingHop& hop, bool is_received) const {
    return transport_.PackedMemory(memory_.content, hop.link, is_received,
                                   static_cast<size_t>(kMostPacked * memory_.bytes_per_slot));
  }
  // Where what a hop sends of a slot lies, and where what it receives will: enqueues its packing.
  absl::StatusOr<const void*> PackSent(const ring::RingHop& hop, const ring::HopRows& rows);
  void* PlaceReceived(const ring::RingHop& hop, const ring::HopRows& rows) const;

  comm::DeviceCommunicator& communicator_;
  const comm::Channel inner_, outer_;
  DeviceTimers& timers_;
  const SlotMemory memory_;
  RowTransport& transport_;
  std::shared_ptr<const RowPlaces> places_;  // null: hops carry all
};

}  // namespace ringleader::attention
