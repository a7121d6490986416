#include "worker/attention/cuda/device_slots.h"

#include <utility>

#include "base/status_macros.h"
#include "worker/attention/cuda/row_kernels.h"

namespace ringleader::attention {

absl::Status AwaitTransfer(const absl::StatusOr<comm::DeviceTransfer>& transfer,
                           DeviceTimers& timers, cudaStream_t stream) {
  RETURN_IF_ERROR(transfer.status());
  if (*transfer == nullptr) return absl::OkStatus();
  RETURN_IF_ERROR(timers.BeginWait(stream));
  RETURN_IF_ERROR((*transfer)->Order(stream));
  return timers.EndWait(stream);
}

DeviceSlots::DeviceSlots(comm::DeviceCommunicator* communicator, comm::Channel inner,
                         comm::Channel outer, DeviceTimers* timers)
    : communicator_(communicator), inner_(inner), outer_(outer), timers_(timers) {}

void DeviceSlots::Use(void* memory, size_t bytes_per_slot, void* wire) {
  in_flight_.clear();
  memory_ = memory;
  wire_ = wire;
  bytes_per_slot_ = bytes_per_slot;
}

absl::Status DeviceSlots::Arrive(const InFlight& flight, cudaStream_t stream) {
  RETURN_IF_ERROR(AwaitTransfer(flight.transfer, *timers_, stream));
  if (wire_ == nullptr || flight.receive_slot < 0) return absl::OkStatus();
  return WidenToFloat(reinterpret_cast<const __nv_bfloat16*>(wire(flight.receive_slot)),
                      static_cast<float*>(data(flight.receive_slot)),
                      static_cast<int64_t>(bytes_per_slot_ / sizeof(float)), stream);
}

template <typename Predicate>
absl::Status DeviceSlots::AwaitIf(Predicate holds, cudaStream_t stream) {
  for (size_t i = 0; i < in_flight_.size();) {
    if (!holds(in_flight_[i])) {
      ++i;
      continue;
    }
    const InFlight flight = std::move(in_flight_[i]);
    in_flight_.erase(in_flight_.begin() + static_cast<std::ptrdiff_t>(i));
    RETURN_IF_ERROR(Arrive(flight, stream));
  }
  return absl::OkStatus();
}

absl::Status DeviceSlots::AwaitContent(int slot, cudaStream_t stream) {
  return AwaitIf([&](const InFlight& flight) { return flight.Brings(slot); }, stream);
}

absl::Status DeviceSlots::AwaitIdle(int slot, cudaStream_t stream) {
  return AwaitIf([&](const InFlight& flight) { return flight.Touches(slot); }, stream);
}

absl::Status DeviceSlots::AwaitAll(cudaStream_t stream) {
  for (const InFlight& flight : std::exchange(in_flight_, {})) {
    RETURN_IF_ERROR(Arrive(flight, stream));
  }
  return absl::OkStatus();
}

absl::Status DeviceSlots::Start(const ring::RingHop& hop, cudaStream_t stream) {
  // What is on the wire was written for an earlier hop.
  RETURN_IF_ERROR(wire_ == nullptr ? AwaitContent(hop.send_slot, stream)
                                   : AwaitIdle(hop.send_slot, stream));
  RETURN_IF_ERROR(AwaitIdle(hop.receive_slot, stream));
  const void* send = data(hop.send_slot);
  void* receive = data(hop.receive_slot);
  size_t bytes = bytes_per_slot_;
  if (wire_ != nullptr) {
    RETURN_IF_ERROR(RoundToBf16(static_cast<const float*>(send),
                                reinterpret_cast<__nv_bfloat16*>(wire(hop.send_slot)),
                                static_cast<int64_t>(bytes / sizeof(float)), stream));
    send = wire(hop.send_slot);
    receive = wire(hop.receive_slot);
    bytes /= 2;
  }
  ASSIGN_OR_RETURN(
      comm::DeviceTransfer transfer,
      communicator_->SendReceive(hop.link == ring::RingLink::kInner ? inner_ : outer_, send, bytes,
                                 hop.to, receive, bytes, hop.from, stream));
  in_flight_.push_back({hop.send_slot, hop.receive_slot, std::move(transfer)});
  return absl::OkStatus();
}

absl::Status DeviceSlots::StartAllGather(cudaStream_t stream) {
  ASSIGN_OR_RETURN(comm::DeviceTransfer transfer,
                   communicator_->AllGather(inner_, data(communicator_->rank()), bytes_per_slot_,
                                            memory_, stream));
  in_flight_.push_back({-1, -1, std::move(transfer)});
  return absl::OkStatus();
}

}  // namespace ringleader::attention
