#include "worker/attention/cuda/device_slots.h"

#include <utility>

#include "base/status_macros.h"
#include "kernels/fused/attention_rows.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/ops/cuda_call.h"

namespace ringleader::attention {

namespace fused = kernels::fused;
using kernels::ops::Stream;

absl::Status AwaitTransfer(const absl::StatusOr<comm::DeviceTransfer>& transfer,
                           DeviceTimers& timers, cudaStream_t stream) {
  RETURN_IF_ERROR(transfer.status());
  if (*transfer == nullptr) return absl::OkStatus();
  RETURN_IF_ERROR(timers.BeginWait(stream));
  RETURN_IF_ERROR((*transfer)->Order(stream));
  return timers.EndWait(stream);
}

RingSlots::Arrival DeviceSlots::ArrivalOf(comm::DeviceTransfer transfer, int receive_slot) {
  return [this, receive_slot, transfer = std::move(transfer)]() -> absl::Status {
    RETURN_IF_ERROR(AwaitTransfer(transfer, timers_, Stream()));
    if (memory_.wire == nullptr || receive_slot == kEverySlot) return absl::OkStatus();
    return fused::WidenToFloat(static_cast<const __nv_bfloat16*>(wire(receive_slot)),
                               static_cast<float*>(memory(receive_slot)),
                               static_cast<int64_t>(memory_.bytes_per_slot / sizeof(float)),
                               Stream());
  };
}

absl::StatusOr<RingSlots::Arrival> DeviceSlots::Send(const ring::RingHop& hop) {
  const void* send = memory(hop.send_slot);
  void* receive = memory(hop.receive_slot);
  size_t bytes = memory_.bytes_per_slot;
  if (memory_.wire != nullptr) {
    RETURN_IF_ERROR(fused::RoundToBf16(static_cast<const float*>(send),
                                       static_cast<__nv_bfloat16*>(wire(hop.send_slot)),
                                       static_cast<int64_t>(bytes / sizeof(float)), Stream()));
    send = wire(hop.send_slot);
    receive = wire(hop.receive_slot);
    bytes /= 2;
  }
  ASSIGN_OR_RETURN(
      comm::DeviceTransfer transfer,
      communicator_.SendReceive(hop.link == ring::RingLink::kInner ? inner_ : outer_, send, bytes,
                                hop.to, receive, bytes, hop.from, Stream()));
  return ArrivalOf(std::move(transfer), hop.receive_slot);
}

absl::Status DeviceSlots::StartAllGather() {
  const int rank = communicator_.rank();
  ASSIGN_OR_RETURN(comm::DeviceTransfer transfer,
                   communicator_.AllGather(inner_, memory(rank), memory_.bytes_per_slot,
                                           memory_.slots, Stream()));
  Track(rank, kEverySlot, ArrivalOf(std::move(transfer), kEverySlot));
  return absl::OkStatus();
}

absl::Status DeviceSlots::ZeroSlot(int slot) {
  RETURN_IF_CUDA_ERROR(cudaMemsetAsync(memory(slot), 0, memory_.bytes_per_slot, Stream()),
                       "attention: memset");
  return absl::OkStatus();
}

absl::Status DeviceSlots::AddSlot(int to, int from) {
  return fused::AddFloats(static_cast<float*>(memory(to)), static_cast<const float*>(memory(from)),
                          static_cast<int64_t>(memory_.bytes_per_slot / sizeof(float)), Stream());
}

}  // namespace ringleader::attention
