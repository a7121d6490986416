// Shards in a GPU's memory, on LibTorch's current device and stream. Nothing waits for the device
// but TakeFigures, AwaitSnapshot and what a snapshot's source does on its own thread.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "absl/status/statusor.h"
#include "worker/attention/cuda/device_timers.h"
#include "worker/comm/device_communicator.h"
#include "worker/optim/shard_copier.h"
#include "worker/optim/shard_device.h"

namespace ringleader::optim {

class CudaShardDevice : public ShardDevice {
 public:
  // `comm` spans the ranks that share the model and must outlive this; null for one rank.
  static absl::StatusOr<std::unique_ptr<CudaShardDevice>> Create(comm::DeviceCommunicator* comm);
  ~CudaShardDevice() override;

  int rank() const override { return comm_ == nullptr ? 0 : comm_->rank(); }
  int size() const override { return comm_ == nullptr ? 1 : comm_->size(); }
  torch::Device device() const override { return torch::kCUDA; }
  torch::ScalarType sum_type() const override { return torch::kDouble; }
  absl::StatusOr<ShardTransferPtr> ReduceSum(const torch::Tensor& data, const torch::Tensor& sum,
                                             int owner) override;
  absl::StatusOr<ShardTransferPtr> AllReduceSum(const torch::Tensor& data) override;
  absl::StatusOr<ShardTransferPtr> AllGather(const torch::Tensor& whole) override;
  absl::StatusOr<ShardTransferPtr> Broadcast(const torch::Tensor& data, int root) override;
  absl::Status SumOfSquares(const torch::Tensor& values, const torch::Tensor& sum) override;
  absl::Status Update(const AdamWOptions& options, const ShardUpdate& update) override;
  absl::Status ReadFigures(const torch::Tensor& figures) override;
  absl::StatusOr<std::array<double, 3>> TakeFigures() override;
  // The copy passes through pinned memory on a stream of its own.
  absl::StatusOr<ShardSource> Snapshot(int64_t begin, const torch::Tensor& master,
                                       const torch::Tensor& first_moment,
                                       const torch::Tensor& second_moment) override;
  double AwaitSnapshot() override { return copier_->Wait(); }
  void BeginUpdate() override { timers_ = &update_timers_; }
  absl::StatusOr<Waits> TakeWaits() override;

 private:
  absl::StatusOr<ShardTransferPtr> Wrap(absl::StatusOr<comm::DeviceTransfer> transfer);

  explicit CudaShardDevice(comm::DeviceCommunicator* comm) : comm_(comm) {}

  comm::DeviceCommunicator* const comm_;
  torch::Tensor norm_workspace_, figures_;  // figures: [3] fp64, pinned
  cudaEvent_t figures_ready_ = nullptr;
  attention::DeviceTimers model_timers_, update_timers_;
  attention::DeviceTimers* timers_ = &model_timers_;  // of the next wait
  std::shared_ptr<ShardCopier> copier_ = std::make_shared<ShardCopier>();
};

}  // namespace ringleader::optim
