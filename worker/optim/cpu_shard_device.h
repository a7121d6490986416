// Shards in a CPU rank's memory. Sums over ranks have a fixed order, and results do not depend on
// the number of threads: the same bits in every run.
#pragma once

#include <utility>
#include <vector>

#include "kernels/reference/math/thread_pool.h"
#include "worker/comm/communicator.h"
#include "worker/optim/shard_device.h"

namespace ringleader::optim {

// Collectives use Channel::kGradients. Those that bring something block; what is merely sent
// travels while the caller works on. A snapshot is copied at once.
class CpuShardDevice : public ShardDevice {
 public:
  // `comm` spans the ranks that share the model and must outlive this.
  CpuShardDevice(comm::Communicator& comm, int threads) : comm_(comm), pool_(threads) {}

  int rank() const override { return comm_.rank(); }
  int size() const override { return comm_.size(); }
  torch::Device device() const override { return torch::kCPU; }
  torch::ScalarType sum_type() const override { return torch::kDouble; }
  absl::StatusOr<ShardTransferPtr> ReduceSum(const torch::Tensor& data, const torch::Tensor& sum,
                                             int owner) override;
  absl::StatusOr<ShardTransferPtr> AllReduceSum(const torch::Tensor& data) override;
  absl::StatusOr<ShardTransferPtr> AllGather(const torch::Tensor& whole) override;
  absl::StatusOr<ShardTransferPtr> Broadcast(const torch::Tensor& data, int root) override;
  absl::Status SumOfSquares(const torch::Tensor& values, const torch::Tensor& sum) override;
  absl::Status Update(const AdamWOptions& options, const ShardUpdate& update) override;
  absl::Status ReadFigures(const torch::Tensor& figures) override;
  absl::StatusOr<std::array<double, 3>> TakeFigures() override { return figures_; }
  absl::StatusOr<ShardSource> Snapshot(int64_t begin, const torch::Tensor& master,
                                       const torch::Tensor& first_moment,
                                       const torch::Tensor& second_moment) override;
  double AwaitSnapshot() override { return 0.0; }
  void BeginUpdate() override { wait_ = &waits_.update; }
  absl::StatusOr<Waits> TakeWaits() override {
    wait_ = &waits_.model;
    return std::exchange(waits_, {});
  }

 private:
  comm::Communicator& comm_;
  kernels::reference::ThreadPool pool_;
  std::vector<float> received_;  // a peer's part of a sum
  std::array<double, 3> figures_ = {};
  Waits waits_;
  double* wait_ = &waits_.model;  // what the next one counts for
};

}  // namespace ringleader::optim
