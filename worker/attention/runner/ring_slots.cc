#include "worker/attention/runner/ring_slots.h"

#include <utility>

#include "base/status_macros.h"

namespace ringleader::attention {

template <typename Predicate>
absl::Status RingSlots::AwaitIf(Predicate holds) {
  absl::Status first_error;
  std::erase_if(in_flight_, [&](InFlight& flight) {
    if (!holds(flight)) return false;
    first_error.Update(flight.arrive());
    return true;
  });
  return first_error;
}

absl::Status RingSlots::AwaitContent(int slot) {
  return AwaitIf([&](const InFlight& flight) { return flight.Brings(slot); });
}

absl::Status RingSlots::AwaitIdle(int slot) {
  return AwaitIf([&](const InFlight& flight) { return flight.Touches(slot); });
}

absl::Status RingSlots::AwaitAll() {
  return AwaitIf([](const InFlight&) { return true; });
}

absl::Status RingSlots::AwaitLink(ring::RingLink link) {
  return AwaitIf([&](const InFlight& flight) { return flight.link == link; });
}

void RingSlots::Track(int send_slot, int receive_slot, Arrival arrival, ring::RingLink link) {
  in_flight_.push_back({send_slot, receive_slot, std::move(arrival), link});
}

absl::Status RingSlots::Start(const ring::RingHop& hop) {
  RETURN_IF_ERROR(AwaitBeforeSend(hop.send_slot));
  RETURN_IF_ERROR(AwaitIdle(hop.receive_slot));
  if (rows_ == nullptr) {
    ASSIGN_OR_RETURN(Arrival arrival, Send(hop));
    Track(hop.send_slot, hop.receive_slot, std::move(arrival), hop.link);
    return absl::OkStatus();
  }
  const ring::HopRows& rows = rows_->at(started_++);
  arrived_[hop.receive_slot] = &rows;
  ASSIGN_OR_RETURN(Arrival arrival, SendRows(hop, rows));
  Track(hop.send_slot, hop.receive_slot, std::move(arrival), hop.link);
  return absl::OkStatus();
}

// Nobody asks for rows where AttentionDevice::most_carried is 0.
absl::StatusOr<RingSlots::Arrival> RingSlots::SendRows(const ring::RingHop&, const ring::HopRows&) {
  return absl::InternalError("some rows of a slot were to be sent by a device that sends them all");
}

absl::Status RingSlots::AddRows(int, int, const ring::HopRows&) {
  return absl::InternalError("some rows of a slot were to be added by a device that adds them all");
}

absl::Status RingSlots::Zero(int slot) {
  RETURN_IF_ERROR(AwaitIdle(slot));
  return ZeroSlot(slot);
}

absl::Status RingSlots::Add(int to, int from) {
  RETURN_IF_ERROR(AwaitIdle(to));
  RETURN_IF_ERROR(AwaitContent(from));
  return rows_ == nullptr ? AddSlot(to, from) : AddRows(to, from, *arrived_.at(from));
}

}  // namespace ringleader::attention
