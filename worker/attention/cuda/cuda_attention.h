// A Hopper GPU as a device of the ring: kernels/sm90 over a DeviceCommunicator, bf16 with fp32
// sums. Enqueues on LibTorch's current stream and never waits for the device but in TakeStats. May
// throw c10::Error.
#pragma once

#include <torch/torch.h>

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <tuple>
#include <vector>

#include "kernels/sm90/columns.h"
#include "worker/attention/cuda/cuda_index.h"
#include "worker/attention/cuda/device_slots.h"
#include "worker/attention/runner/attention_device.h"
#include "worker/attention/runner/ring_attention.h"
#include "worker/attention/stats/device_stats.h"
#include "worker/comm/device_communicator.h"

namespace ringleader::attention {

class CudaAttentionDevice : public AttentionDevice {
 public:
  struct Options {
    bool bf16_gradients = false;  // AttentionOptions'
    bool deterministic = false;
  };
  // `communicator` spans the ranks that share one sequence and outlives it.
  CudaAttentionDevice(comm::DeviceCommunicator* communicator, const Options& options)
      : options_(options), communicator_(*communicator), stats_(communicator->size()) {}

  int rank() const override { return communicator_.rank(); }
  int ranks() const override { return communicator_.size(); }
  absl::Status Begin(double AttentionSeconds::*phase) override;
  absl::Status End() override;
  LayerStats& StatsOf(int layer) override { return stats_.HostOf(layer); }
  AttentionStats TakeStats(const ring::RingSchedule& forward) override {
    return stats_.Take(forward);
  }
  std::shared_ptr<const DeviceDocuments> Upload(std::shared_ptr<const SequenceDocuments> documents,
                                                int estimate_queries) override;

  const Options& options() const { return options_; }
  comm::DeviceCommunicator& communicator() { return communicator_; }
  DeviceStats& stats() { return stats_; }
  // Slots of `schedule`, which serve all calls: their memory is allocated when a call needs more.
  std::unique_ptr<DeviceSlots> KvSlots(const ring::RingSchedule& schedule, size_t bytes_per_slot);
  std::unique_ptr<DeviceSlots> GradientSlots(const ring::RingSchedule& schedule,
                                             size_t bytes_per_slot);
  // Tiles of a pattern that does not depend on the data: of `mine`'s queries and `owner`'s keys.
  int64_t BandTilesOf(const LayerIndex& index, const kernels::ShardLayout& mine,
                      const kernels::ShardLayout& owner);

 private:
  struct RingMemory {
    std::shared_ptr<void> data;
    size_t bytes = 0;
  };
  // At least `bytes` of it, for transfers of `channels`.
  void* Reserve(RingMemory& memory, size_t bytes, std::span<const comm::Channel> channels);

  const Options options_;
  comm::DeviceCommunicator& communicator_;
  DeviceStats stats_;
  RingMemory kv_memory_, gradient_memory_, wire_memory_;
  // By (owner, tokens, window), of `band_documents_`.
  std::map<std::tuple<int, int64_t, int64_t>, int64_t> band_tiles_;
  std::shared_ptr<const DeviceDocuments> band_documents_;
};

class CudaKeys : public CallKeys {
 public:
  CudaKeys(CudaAttentionDevice* device, torch::Tensor k, torch::Tensor v)
      : device_(*device), k_(std::move(k)), v_(std::move(v)) {}
  absl::StatusOr<std::unique_ptr<RingSlots>> Place(const ring::RingSchedule& schedule) override;

  // Part 0: the keys, part 1: the values that a step attends to.
  kernels::TokenMajor<const __nv_bfloat16> At(const StepKeys& keys, int part) const;

 private:
  CudaAttentionDevice& device_;
  const torch::Tensor k_, v_;
};

// q, k, v: bf16, aligned to 16 bytes. Sets out, bf16, and lse, fp32, of `output`.
class CudaForward : public ForwardCall {
 public:
  CudaForward(CudaAttentionDevice* device, const torch::Tensor& q, const torch::Tensor& k,
              const torch::Tensor& v, AttentionOutput* output);

  CallShape shape() const override { return shape_; }
  CallKeys& keys() override { return keys_; }
  IndexDevice& ForIndex(int layer) override;
  absl::Status StartOutput(const LayerIndex& index, const kernels::ShardLayout& mine) override;
  absl::Status GatherColumns(const StepKeys& keys) override;
  absl::Status Attend(const StepKeys& keys) override;
  absl::Status AttendColumns() override;
  absl::Status Finish() override;

 private:
  absl::Status CountTiles(const StepKeys& keys, const kernels::TileSelection& tiles);

  CudaAttentionDevice& device_;
  const torch::Tensor q_, k_;
  const CallShape shape_;
  CudaKeys keys_;
  AttentionOutput& output_;
  std::optional<CudaIndex> index_device_;
  int layer_ = 0;
  const LayerIndex* index_ = nullptr;
  kernels::ShardLayout mine_;
  torch::Tensor sums_;  // [n, heads, d] fp32, read only where lse says it was written
};

// Sets dense bf16 `gradients`.
class CudaBackward : public BackwardCall {
 public:
  CudaBackward(CudaAttentionDevice* device, const AttentionTensors& tensors,
               AttentionGradients* gradients);

  CallShape shape() const override { return shape_; }
  CallKeys& keys() override { return keys_; }
  absl::StatusOr<std::unique_ptr<RingSlots>> PlaceGradients(
      const ring::RingSchedule& schedule) override;
  absl::Status StartGradients(const LayerIndex& index, const kernels::ShardLayout& mine) override;
  absl::Status ColumnsBackward() override;
  absl::Status AttendBackward(const StepKeys& keys, void* slot) override;
  absl::Status ScatterColumns(const StepKeys& keys, void* slot) override;
  absl::Status FinishQueries() override;
  absl::Status ReturnGradients(const ring::RingSchedule& schedule, RingSlots& slots) override;

 private:
  // Part 0 of a gradient slot: of keys, part 1: of values.
  kernels::TokenMajor<float> SlotPart(void* slot, int part) const;

  CudaAttentionDevice& device_;
  const AttentionTensors tensors_;
  const CallShape shape_;
  CudaKeys keys_;
  AttentionGradients& gradients_;
  const LayerIndex* index_ = nullptr;
  kernels::ShardLayout mine_;
  torch::Tensor dq_sums_;    // [n, heads, d] fp32
  torch::Tensor delta_;      // [heads, n] fp32
  torch::Tensor d_columns_;  // [2, heads, max_columns, d] fp32: of keys, of values
};

}  // namespace ringleader::attention
