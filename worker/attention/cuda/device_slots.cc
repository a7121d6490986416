#include "worker/attention/cuda/device_slots.h"

#include <utility>

#include "base/status_macros.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/fused/rows/attention_rows.h"
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
  ASSIGN_OR_RETURN(comm::DeviceTransfer transfer,
                   communicator_.SendReceive(ChannelOf(hop), send, bytes, hop.to, receive, bytes,
                                             hop.from, Stream()));
  return ArrivalOf(std::move(transfer), hop.receive_slot);
}

RowPlaces UploadPlaces(std::shared_ptr<const std::vector<ring::HopRows>> rows) {
  std::vector<int32_t> places;
  const auto add = [&](const ring::RowRuns& runs, int64_t shard) {
    constexpr int64_t kUnit = fused::kPackedUnit;
    const size_t first = places.size();
    places.resize(first + (shard + kUnit - 1) / kUnit, -1);
    int64_t packed = 0;
    for (const ring::RowRun& run : runs) {  // of whole tiles, which are whole units
      for (int64_t row = run.begin; row < run.end; row += kUnit) {
        places[first + row / kUnit] = static_cast<int32_t>(packed + row - run.begin);
      }
      packed += run.end - run.begin;
    }
    return first;
  };
  std::vector<size_t> firsts;
  for (const ring::HopRows& hop : *rows) {
    firsts.push_back(add(hop.sent, hop.sent_shard));
    firsts.push_back(add(hop.received, hop.received_shard));
  }
  RowPlaces uploaded = {
      .rows = std::move(rows),
      .memory = UploadBytes(places.data(), static_cast<int64_t>(places.size() * sizeof(int32_t)))};
  const auto* const data = static_cast<const int32_t*>(uploaded.memory.get());
  for (size_t i = 0; i < firsts.size(); i += 2) {
    uploaded.sent.push_back(data + firsts[i]);
    uploaded.received.push_back(data + firsts[i + 1]);
  }
  return uploaded;
}

void DeviceSlots::Carry(std::shared_ptr<const std::vector<ring::HopRows>> rows) {
  places_ = transport_.PlacesOf(rows);
  RingSlots::Carry(std::move(rows));
}

absl::StatusOr<const void*> DeviceSlots::PackSent(const ring::RingHop& hop,
                                                  const ring::HopRows& rows) {
  const void* const slot = memory(hop.send_slot);
  if (rows.sent.empty()) return slot;
  const auto* const floats = static_cast<const float*>(slot);
  if (memory_.wire != nullptr) {
    auto* const to = static_cast<__nv_bfloat16*>(wire(hop.send_slot));
    if (rows.sends_all()) {
      RETURN_IF_ERROR(fused::RoundToBf16(floats, to, 2 * rows.sent_shard * memory_.row, Stream()));
    } else {
      RETURN_IF_ERROR(fused::GatherRows(
          Packed(rows.sent, rows.sent_shard, places_->sent[HopOf(rows)]), floats, to, Stream()));
    }
    return to;
  }
  if (rows.sends_all()) return slot;
  void* const to = PackedMemory(hop, /*is_received=*/false);
  const auto packed = Packed(rows.sent, rows.sent_shard, places_->sent[HopOf(rows)]);
  switch (memory_.content) {
    case SlotContent::kKeys:
      RETURN_IF_ERROR(fused::GatherRows(packed, static_cast<const __nv_bfloat16*>(slot),
                                        static_cast<__nv_bfloat16*>(to), Stream()));
      break;
    case SlotContent::kGradients:
      RETURN_IF_ERROR(fused::GatherRows(packed, floats, static_cast<float*>(to), Stream()));
      break;
  }
  return to;
}

void* DeviceSlots::PlaceReceived(const ring::RingHop& hop, const ring::HopRows& rows) const {
  if (memory_.wire != nullptr) return wire(hop.receive_slot);
  const bool is_spread =
      memory_.content == SlotContent::kKeys && !rows.received.empty() && !rows.receives_all();
  return is_spread ? PackedMemory(hop, /*is_received=*/true) : memory(hop.receive_slot);
}

absl::StatusOr<RingSlots::Arrival> DeviceSlots::SendRows(const ring::RingHop& hop,
                                                         const ring::HopRows& rows) {
  // The rows of the link's hop before this one are still in its memory.
  RETURN_IF_ERROR(AwaitLink(hop.link));
  ASSIGN_OR_RETURN(const void* const sent, PackSent(hop, rows));
  void* const received = PlaceReceived(hop, rows);
  // Both ends know where nothing travels.
  ASSIGN_OR_RETURN(
      comm::DeviceTransfer transfer,
      communicator_.SendReceive(ChannelOf(hop), sent, WireBytes(ring::CountRows(rows.sent)),
                                rows.sent.empty() ? -1 : hop.to, received,
                                WireBytes(ring::CountRows(rows.received)),
                                rows.received.empty() ? -1 : hop.from, Stream()));
  return [this, &rows, received, transfer = std::move(transfer),
          slot = memory(hop.receive_slot)]() -> absl::Status {
    RETURN_IF_ERROR(AwaitTransfer(transfer, timers_, Stream()));
    const bool stays = memory_.content == SlotContent::kGradients || received == slot;
    if (stays || rows.received.empty()) return absl::OkStatus();
    return fused::SpreadRows(
        Packed(rows.received, rows.received_shard, places_->received[HopOf(rows)]),
        static_cast<const __nv_bfloat16*>(received), static_cast<__nv_bfloat16*>(slot), Stream());
  };
}

absl::Status DeviceSlots::AddRows(int to, int from, const ring::HopRows& brought) {
  if (brought.received.empty()) return absl::OkStatus();
  auto* const sum = static_cast<float*>(memory(to));
  const auto packed =
      Packed(brought.received, brought.received_shard, places_->received[HopOf(brought)]);
  if (memory_.wire != nullptr) {
    return fused::AddRows(packed, static_cast<const __nv_bfloat16*>(wire(from)), sum, Stream());
  }
  return fused::AddRows(packed, static_cast<const float*>(memory(from)), sum, Stream());
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
