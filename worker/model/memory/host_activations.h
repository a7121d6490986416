// A GPU's kept activations in pinned host memory: an arena that is allocated once, and a stream
// that copies beside the one that computes.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/attention/cuda/device_timers.h"
#include "worker/model/memory/pinned_memory.h"
#include "worker/model/memory/saved_layers.h"

namespace ringleader::model {

// Copies run on one stream, forward's out and backward's in, in the order of their start; events
// order them with the current stream, and the host waits for none. Not thread-safe.
class HostActivations : public HostCopies {
 public:
  // Places for `layers` layers of `layer_bytes` each, for LibTorch's current device.
  // RESOURCE_EXHAUSTED, with the numbers, where the host does not give the memory.
  static absl::StatusOr<std::unique_ptr<HostActivations>> Create(int64_t layers,
                                                                 int64_t layer_bytes);
  ~HostActivations() override;

  void StartOut(int layer, std::span<const torch::Tensor> tensors) override;
  void StartIn(int layer, std::span<const torch::Tensor> tensors) override;
  void Await(int layer) override;
  void Drain() override;

  // Seconds that the current stream waited in Await since the last call. Waits for the device.
  absl::StatusOr<double> TakeWaitSeconds();

 private:
  HostActivations(PinnedMemory arena, int64_t layers, int64_t layer_bytes);
  absl::Status Prepare();
  void Start(int layer, std::span<const torch::Tensor> tensors, cudaMemcpyKind kind);

  PinnedMemory arena_;
  const int64_t layer_bytes_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t ready_ = nullptr;     // the current stream's part is done
  std::vector<cudaEvent_t> done_;   // the layer's last copy is, by layer
  attention::DeviceTimers timers_;  // of waits
};

}  // namespace ringleader::model
