// What the sharded optimizer asks of the device that its tensors lie on, and of the ranks that
// share the model: the seam between the optimizer's arithmetic of shards and blocks, which is the
// same everywhere, and CPUs (cpu_shard_device.h) or GPUs (cuda_shard_device.h).
#pragma once

#include <torch/types.h>

#include <array>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/optim/adamw.h"

namespace ringleader::optim {

// A collective that may still be under way. Its tensors must be left alone, and alive, until then.
class ShardTransfer {
 public:
  virtual ~ShardTransfer() = default;
  // What the caller enqueues from here on, or computes, comes after the transfer.
  virtual absl::Status Await() = 0;
};
using ShardTransferPtr = std::unique_ptr<ShardTransfer>;  // null: done

// A range of a shard, in the device's memory, that is decayed as a whole or not.
struct ShardUpdate {
  float* master = nullptr;             // [count]
  float* first_moment = nullptr;       // [count]
  float* second_moment = nullptr;      // [count]
  const float* gradient = nullptr;     // [count]
  at::BFloat16* parameters = nullptr;  // [count], the new master weights rounded; or null
  int64_t count = 0;
  torch::Tensor scale;  // of the gradient: scalar of sum_type(); not finite: nothing changes
  double learning_rate = 0.0;
  double weight_decay = 0.0;  // 0: not decayed
  int64_t step = 1;           // from 1
};

// Tensors are dense. On a GPU calls enqueue on LibTorch's current stream and wait for nothing, but
// for what says so. One thread at a time; all ranks make the same calls. Errors name the ranks.
class ShardDevice {
 public:
  virtual ~ShardDevice() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual torch::Device device() const = 0;
  // The type of sums over a shard and over ranks: fp32 or fp64.
  virtual torch::ScalarType sum_type() const = 0;

  // data: [count] fp32 of all ranks, summed into `owner`'s sum, which may be data and is ignored
  // elsewhere.
  virtual absl::StatusOr<ShardTransferPtr> ReduceSum(const torch::Tensor& data,
                                                     const torch::Tensor& sum, int owner) = 0;
  // data: [count] of sum_type(), in place.
  virtual absl::StatusOr<ShardTransferPtr> AllReduceSum(const torch::Tensor& data) = 0;
  // whole: [size() * n] of any type; rank r's n elements lie at r * n.
  virtual absl::StatusOr<ShardTransferPtr> AllGather(const torch::Tensor& whole) = 0;
  virtual absl::StatusOr<ShardTransferPtr> Broadcast(const torch::Tensor& data, int root) = 0;

  // sum: scalar of sum_type() = the sum of values[i]^2 (values: fp32), the same bits every time.
  virtual absl::Status SumOfSquares(const torch::Tensor& values, const torch::Tensor& sum) = 0;
  virtual absl::Status Update(const AdamWOptions& options, const ShardUpdate& update) = 0;

  // figures: [3] of sum_type(), on their way to the host; TakeFigures waits for them.
  virtual absl::Status ReadFigures(const torch::Tensor& figures) = 0;
  virtual absl::StatusOr<std::array<double, 3>> TakeFigures() = 0;

  // A copy of the tensors, [elements] fp32 each, as they are now. May outlive this. What changes
  // them comes after AwaitSnapshot, which returns the seconds that it waited.
  virtual absl::StatusOr<ShardSource> Snapshot(int64_t begin, const torch::Tensor& master,
                                               const torch::Tensor& first_moment,
                                               const torch::Tensor& second_moment) = 0;
  virtual double AwaitSnapshot() = 0;

  // Seconds in which what was computed waited for transfers, since the last call: in forward and
  // backward, and from BeginUpdate() on. Waits for the device.
  struct Waits {
    double model = 0, update = 0;
  };
  virtual void BeginUpdate() = 0;
  virtual absl::StatusOr<Waits> TakeWaits() = 0;
};

}  // namespace ringleader::optim
