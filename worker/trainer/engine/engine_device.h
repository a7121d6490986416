// What the step engine asks of the device that a rank computes on: the seam that keeps steps the
// same on CPU (cpu_engine_device.cc) and GPU (cuda_engine_device.cc).
#pragma once

#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "balance/measurements.h"
#include "base/process/version.h"
#include "model_shape/memory_estimate.h"
#include "worker/attention/runner/context_attention.h"
#include "worker/comm/communicator.h"
#include "worker/model/memory/saved_layers.h"
#include "worker/model/token_ops/token_ops.h"
#include "worker/optim/shard_device.h"
#include "worker/trainer/host.h"
#include "worker/trainer/training_job.h"

namespace ringleader::trainer {

// The build that measures, as latency tables name it. The number grows where what trainers of the
// same version measured before would mislead: since 2 a link's messages of a size have one memory.
inline std::string MeasuringBuild() {
  return std::string(kVersion) + "-2";
}

// Used from one thread. LibTorch's exceptions pass through. What it hands out by reference lives as
// long as the device does.
class EngineDevice {
 public:
  virtual ~EngineDevice() = default;

  // "CPU, fp32, 2 threads each"
  virtual std::string Describe() const = 0;
  // The type of parameters and activations.
  virtual torch::ScalarType type() const = 0;
  virtual bool is_host() const = 0;
  // Returns what this rank may plan with; asked before any rank has taken any of it.
  virtual absl::StatusOr<model::MemoryLimits> FreeMemory() = 0;

  virtual const model::TokenOps& token_ops() const = 0;
  virtual attention::ContextAttention& attention() = 0;
  // Replaces it by one of other options; all that it computed is done. All ranks do so alike.
  virtual absl::Status SetAttention(const patterns::AttentionOptions& options) = 0;
  // Makes attention over the ranks that share this rank's sequences.
  virtual absl::StatusOr<std::unique_ptr<attention::ContextAttention>> MakeRing(
      const patterns::AttentionOptions& options) = 0;
  // Makes attention of this rank to its own tokens alone, with options of a ring of one. No other
  // rank takes part.
  virtual absl::StatusOr<std::unique_ptr<attention::ContextAttention>> MakeAttentionAlone(
      const patterns::AttentionOptions& options) = 0;
  // Returns the seconds, `times` of them, in which this rank and `partner`, which calls it too,
  // send each other `bytes` through the transport of the ring's hops, each time from and to the
  // same memory. The first time also makes the connection, and makes that memory known to the
  // transport.
  virtual absl::StatusOr<std::vector<double>> Exchange(int partner, size_t bytes, int times) = 0;
  // Returns the kind of machine for which measurements on this device hold.
  virtual balance::MachineKind Machine() const = 0;
  // Makes the device of the optimizer's tensors, over all ranks. Called once.
  virtual absl::StatusOr<std::unique_ptr<optim::ShardDevice>> MakeShardDevice() = 0;
  // Pins host memory for what `layers` layers save, `layer_bytes` each. Called once, if the plan
  // keeps that there. RESOURCE_EXHAUSTED where the system does not give it.
  virtual absl::StatusOr<model::HostCopies*> PinHostMemory(int64_t layers, int64_t layer_bytes) = 0;

  // Returns [n] int64. May read `values` until the sequence's forward and backward are enqueued.
  virtual torch::Tensor Upload(const std::vector<int64_t>& values) = 0;

  // These take the device's time between Begin and End, which enqueue, for one interval of each
  // kind at a time. TakeSeconds waits for the device and returns the last interval's time once.
  enum class Interval { kModel, kUpdate };
  virtual void Begin(Interval interval) = 0;
  virtual void End(Interval interval) = 0;
  virtual double TakeSeconds(Interval interval) = 0;
  // Returns the seconds since the last call in which the device waited for the host's memory.
  virtual double TakeOffloadSeconds() = 0;
  // Returns the most bytes that this rank held since the start.
  virtual uint64_t PeakBytes() const = 0;
};

// Makes attention as the options ask for it, of what the device makes. This rank is number `rank`
// of those that share its sequences.
absl::StatusOr<std::unique_ptr<attention::ContextAttention>> AttentionOf(
    const patterns::AttentionOptions& options, int rank, EngineDevice& device);

// These find the device, set LibTorch up for it and connect the ranks. `job`, `world` and `host`
// outlive what is returned. FAILED_PRECONDITION where this trainer was built without CUDA or the
// machine has no GPU.
absl::StatusOr<std::unique_ptr<EngineDevice>> CreateCpuDevice(const TrainingJob& job,
                                                              comm::Communicator& world,
                                                              Host& host);
absl::StatusOr<std::unique_ptr<EngineDevice>> CreateCudaDevice(const TrainingJob& job,
                                                               comm::Communicator& world,
                                                               Host& host);

}  // namespace ringleader::trainer
