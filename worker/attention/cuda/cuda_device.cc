#include "worker/attention/cuda/cuda_device.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/types.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "kernels/ops/cuda_call.h"

namespace ringleader::attention {

using kernels::ops::Stream;
using torch::Tensor;

namespace {

// The channels of a ring inside a node and between nodes. Gradients between nodes take a channel on
// which nothing that an inner ring waits for can be ahead of them.
constexpr std::array kKvChannels = {comm::Channel::kKvInner, comm::Channel::kKvOuter};
constexpr std::array kGradientChannels = {comm::Channel::kGradKv, comm::Channel::kKvOuter};
// Passes whose places are remembered.
constexpr size_t kMostKnownPlaces = 16;

template <typename T>
DeviceArray<T> UploadArray(const std::vector<T>& values) {
  if (values.empty()) return {};
  return {.memory = UploadBytes(values.data(), static_cast<int64_t>(values.size() * sizeof(T))),
          .size = static_cast<int64_t>(values.size())};
}

}  // namespace

DeviceMemory UploadBytes(const void* values, int64_t bytes) {
  Tensor pinned =
      torch::empty({bytes}, torch::TensorOptions().dtype(torch::kByte).pinned_memory(true));
  std::memcpy(pinned.mutable_data_ptr(), values, bytes);
  auto copy = std::make_shared<Tensor>(pinned.to(torch::kCUDA, /*non_blocking=*/true));
  void* const data = copy->mutable_data_ptr();
  return {std::move(copy), data};
}

absl::Status CudaAttentionDevice::Begin(double AttentionSeconds::*phase) {
  return stats_.timers().Begin(phase, Stream());
}

absl::Status CudaAttentionDevice::End() {
  return stats_.timers().End(Stream());
}

std::shared_ptr<const DeviceDocuments> CudaAttentionDevice::Upload(
    std::shared_ptr<const SequenceDocuments> documents, const patterns::EstimateQueries& queries) {
  return std::make_shared<DeviceDocuments>(
      DeviceDocuments{.host = documents,
                      .local_starts = UploadArray(documents->local_starts),
                      .key_starts = UploadArray(documents->key_starts),
                      .visible = UploadArray(documents->visible),
                      .visible_in_window = UploadArray(documents->visible_in_window),
                      .estimate_positions = UploadArray(queries.positions),
                      .estimate_starts = UploadArray(queries.starts),
                      .longest_without = queries.longest_without});
}

void* CudaAttentionDevice::Reserve(RingMemory& memory, size_t bytes,
                                   std::span<const comm::Channel> channels) {
  if (memory.bytes >= bytes) return memory.data.get();
  memory = {};  // before the larger one is allocated
  absl::StatusOr<std::shared_ptr<void>> data = communicator_.Allocate(bytes, channels);
  if (absl::IsResourceExhausted(data.status())) {
    c10::cuda::CUDACachingAllocator::emptyCache();  // LibTorch may hold what it does not use
    data = communicator_.Allocate(bytes, channels);
  }
  TORCH_CHECK_WITH(OutOfMemoryError, !absl::IsResourceExhausted(data.status()),
                   std::string(data.status().message()));
  kernels::ops::Check(data.status());
  memory = {*std::move(data), bytes};
  return memory.data.get();
}

std::shared_ptr<const RowPlaces> CudaAttentionDevice::PlacesOf(
    std::shared_ptr<const std::vector<ring::HopRows>> rows) {
  for (const auto& known : known_places_) {
    if (known->rows == rows) return known;
  }
  if (known_places_.size() >= kMostKnownPlaces) known_places_.clear();
  known_places_.push_back(std::make_shared<const RowPlaces>(UploadPlaces(std::move(rows))));
  return known_places_.back();
}

void* CudaAttentionDevice::PackedMemory(SlotContent content, ring::RingLink link, bool is_received,
                                        size_t bytes) {
  const bool is_keys = content == SlotContent::kKeys;
  return Reserve(packed_memory_[{content, link, is_received}], bytes,
                 is_keys ? kKvChannels : kGradientChannels);
}

std::unique_ptr<DeviceSlots> CudaAttentionDevice::KvSlots(const ring::RingSchedule& schedule,
                                                          int64_t tokens, int64_t row) {
  const size_t bytes_per_slot = 2 * tokens * row * sizeof(c10::BFloat16);
  SlotMemory memory{.bytes_per_slot = bytes_per_slot, .row = row};
  if (schedule.ranks > 1) {
    if (options_.overlaps_calls) kv_turn_ = 1 - kv_turn_;
    memory.slots = Reserve(kv_memory_[kv_turn_], schedule.kv_slots * bytes_per_slot, kKvChannels);
  }
  return std::make_unique<DeviceSlots>(&communicator_, kKvChannels[0], kKvChannels[1],
                                       &stats_.timers(), memory, this);
}

std::unique_ptr<DeviceSlots> CudaAttentionDevice::GradientSlots(const ring::RingSchedule& schedule,
                                                                int64_t tokens, int64_t row) {
  const size_t bytes_per_slot = 2 * tokens * row * sizeof(float);
  const size_t bytes = schedule.grad_slots * bytes_per_slot;
  SlotMemory memory{.slots = Reserve(gradient_memory_, bytes, kGradientChannels),
                    .bytes_per_slot = bytes_per_slot,
                    .content = SlotContent::kGradients,
                    .row = row};
  if (options_.bf16_gradients && schedule.ranks > 1 && !Gathers(schedule)) {
    memory.wire = Reserve(wire_memory_, bytes / 2, kGradientChannels);
  }
  return std::make_unique<DeviceSlots>(&communicator_, kGradientChannels[0], kGradientChannels[1],
                                       &stats_.timers(), memory, this);
}

int64_t CudaAttentionDevice::BandTilesOf(const LayerIndex& index, const ring::Shard& mine,
                                         const ring::Shard& owner) {
  if (band_documents_ != index.documents) {
    band_tiles_.clear();
    band_documents_ = index.documents;
  }
  const auto [known, inserted] =
      band_tiles_.try_emplace({owner.layout.rank, mine.layout.tokens, index.window}, int64_t{0});
  if (inserted) {
    kernels::TileSelection tiles = index.Tiles();
    if (tiles.document_starts != nullptr) {
      tiles.document_starts = index.documents->host->local_starts.data();
    }
    if (tiles.intervals != nullptr) {
      const SequenceDocuments& host = *index.documents->host;
      tiles.intervals = (index.window > 0 ? host.visible_in_window : host.visible).data();
    }
    known->second = index.count_tiles(tiles, mine, owner);
  }
  return known->second;
}

}  // namespace ringleader::attention
