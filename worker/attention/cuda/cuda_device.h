// A Hopper GPU as a device of the ring: kernels/sm90 over a DeviceCommunicator, bf16 with fp32
// sums. Enqueues on LibTorch's current stream and never waits for the device but in TakeStats. May
// throw c10::Error.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <tuple>
#include <vector>

#include "worker/attention/cuda/device_slots.h"
#include "worker/attention/cuda/device_stats.h"
#include "worker/attention/runner/attention_device.h"
#include "worker/comm/device_communicator.h"

namespace ringleader::attention {

class CudaAttentionDevice : public AttentionDevice, public RowTransport {
 public:
  struct Options {
    bool bf16_gradients = false;  // AttentionOptions'
    bool deterministic = false;
    bool overlaps_calls = false;  // keys and values of a call travel during the one before it
  };
  // `communicator` spans the ranks that share one sequence and outlives it.
  CudaAttentionDevice(comm::DeviceCommunicator* communicator, const Options& options)
      : options_(options), communicator_(*communicator), stats_(communicator->size()) {}

  int rank() const override { return communicator_.rank(); }
  int ranks() const override { return communicator_.size(); }
  double most_carried() const override { return kMostPacked; }
  absl::Status Begin(double AttentionSeconds::*phase) override;
  absl::Status End() override;
  LayerStats& StatsOf(int layer) override { return stats_.HostOf(layer); }
  void MarkMicroBatch() override { stats_.Mark(); }
  AttentionStats TakeStats(const ring::RingSchedule& forward) override {
    return stats_.Take(forward);
  }
  std::shared_ptr<const DeviceDocuments> Upload(std::shared_ptr<const SequenceDocuments> documents,
                                                const patterns::EstimateQueries& queries) override;

  const Options& options() const { return options_; }
  comm::DeviceCommunicator& communicator() { return communicator_; }
  DeviceStats& stats() { return stats_; }
  // Slots of `schedule` with room for `tokens` of `row` elements of keys, which serve all calls:
  // their memory is allocated when a call needs more.
  std::unique_ptr<DeviceSlots> KvSlots(const ring::RingSchedule& schedule, int64_t tokens,
                                       int64_t row);
  std::unique_ptr<DeviceSlots> GradientSlots(const ring::RingSchedule& schedule, int64_t tokens,
                                             int64_t row);
  std::shared_ptr<const RowPlaces> PlacesOf(
      std::shared_ptr<const std::vector<ring::HopRows>> rows) override;
  void* PackedMemory(SlotContent content, ring::RingLink link, bool is_received,
                     size_t bytes) override;
  // Tiles of a pattern that does not depend on the data: of `mine`'s queries and `owner`'s keys.
  int64_t BandTilesOf(const LayerIndex& index, const ring::Shard& mine, const ring::Shard& owner);

 private:
  struct RingMemory {
    std::shared_ptr<void> data;
    size_t bytes = 0;
  };
  // Makes room for at least `bytes`, for transfers of `channels`.
  void* Reserve(RingMemory& memory, size_t bytes, std::span<const comm::Channel> channels);

  const Options options_;
  comm::DeviceCommunicator& communicator_;
  DeviceStats stats_;
  RingMemory kv_memory_[2], gradient_memory_, wire_memory_;
  // By what, over which link and whether it is received.
  std::map<std::tuple<SlotContent, ring::RingLink, bool>, RingMemory> packed_memory_;
  std::vector<std::shared_ptr<const RowPlaces>> known_places_;
  int kv_turn_ = 0;  // of kv_memory_, which of them is the newest call's
  // What BandTilesOf found by (owner, tokens, window), for the documents `band_documents_`.
  std::map<std::tuple<int, int64_t, int64_t>, int64_t> band_tiles_;
  std::shared_ptr<const DeviceDocuments> band_documents_;
};

}  // namespace ringleader::attention
