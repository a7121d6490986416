// The slots of a ring schedule, and the order of the transfers that move their contents: written
// once for all devices. A device adds the memory and the transfers themselves
// (cpu/travelling_buffers.h, cuda/device_slots.h).
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ring/ring_schedule.h"
#include "ring/travelling_rows.h"

namespace ringleader::attention {

// Buffers of equal size that travel between ranks. Whoever reads a slot calls AwaitContent first;
// what overwrites one (Start, Zero, Add) awaits its transfers itself. On the CPU awaiting blocks;
// on GPUs it orders the stream after the transfer. Not thread-safe.
class RingSlots {
 public:
  virtual ~RingSlots() = default;

  // A slot's place in the device's memory; uninitialised until something was received or written.
  virtual void* memory(int slot) const = 0;

  // Awaits transfers into the slot; some may still send it.
  absl::Status AwaitContent(int slot);
  // Awaits all transfers from and into the slot.
  absl::Status AwaitIdle(int slot);
  absl::Status AwaitAll();

  // The rows that hops carry, in the order in which they start: [hop]. Not called: all of them.
  virtual void Carry(std::shared_ptr<const std::vector<ring::HopRows>> rows) {
    rows_ = std::move(rows);
  }
  // Awaits what it sends and where it receives, then starts the transfer.
  absl::Status Start(const ring::RingHop& hop);
  absl::Status Zero(int slot);
  // Slot `to` += slot `from`, of which the rows that came.
  absl::Status Add(int to, int from);

 protected:
  // Awaits a transfer that was started.
  using Arrival = absl::AnyInvocable<absl::Status()>;
  static constexpr int kEverySlot = -1;

  virtual absl::StatusOr<Arrival> Send(const ring::RingHop& hop) = 0;
  virtual absl::Status ZeroSlot(int slot) = 0;
  virtual absl::Status AddSlot(int to, int from) = 0;
  // Of some rows alone, which lie in what Carry was given; asked of devices that carry them
  // (AttentionDevice::most_carried).
  virtual absl::StatusOr<Arrival> SendRows(const ring::RingHop& hop, const ring::HopRows& rows);
  virtual absl::Status AddRows(int to, int from, const ring::HopRows& brought);
  // Called before the slot is sent: awaits its content, and what else a device needs.
  virtual absl::Status AwaitBeforeSend(int slot) { return AwaitContent(slot); }

  // Awaits the hops over `link`.
  absl::Status AwaitLink(ring::RingLink link);
  // Remembers a transfer that was started without Start. receive_slot may be kEverySlot.
  void Track(int send_slot, int receive_slot, Arrival arrival,
             ring::RingLink link = ring::RingLink::kInner);
  bool in_flight() const { return !in_flight_.empty(); }

 private:
  struct InFlight {
    int send_slot, receive_slot;
    Arrival arrive;
    ring::RingLink link;

    bool Brings(int slot) const { return receive_slot == slot || receive_slot == kEverySlot; }
    bool Touches(int slot) const { return Brings(slot) || send_slot == slot; }
  };

  // Awaits those for which `holds`, in the order of their start, all of them even if one fails.
  template <typename Predicate>
  absl::Status AwaitIf(Predicate holds);

  std::vector<InFlight> in_flight_;                         // in the order of their start
  std::shared_ptr<const std::vector<ring::HopRows>> rows_;  // null: hops carry all
  size_t started_ = 0;                                      // hops
  std::map<int, const ring::HopRows*> arrived_;             // by slot: of its last hop
};

}  // namespace ringleader::attention
