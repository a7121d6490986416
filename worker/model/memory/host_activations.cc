#include "worker/model/memory/host_activations.h"

#include <utility>

#include "base/status_macros.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/ops/cuda_call.h"

namespace ringleader::model {

using kernels::ops::Check;

absl::StatusOr<std::unique_ptr<HostActivations>> HostActivations::Create(int64_t layers,
                                                                         int64_t layer_bytes) {
  ASSIGN_OR_RETURN(PinnedMemory arena, PinnedMemory::Allocate(layers * layer_bytes));
  auto copies =
      std::unique_ptr<HostActivations>(new HostActivations(std::move(arena), layers, layer_bytes));
  RETURN_IF_ERROR(copies->Prepare());
  return copies;
}

HostActivations::HostActivations(PinnedMemory arena, int64_t layers, int64_t layer_bytes)
    : arena_(std::move(arena)), layer_bytes_(layer_bytes), done_(layers) {}

absl::Status HostActivations::Prepare() {
  RETURN_IF_CUDA_ERROR(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking),
                       "host activations: stream");
  RETURN_IF_CUDA_ERROR(cudaEventCreateWithFlags(&ready_, cudaEventDisableTiming),
                       "host activations: event");
  for (cudaEvent_t& event : done_) {
    RETURN_IF_CUDA_ERROR(cudaEventCreateWithFlags(&event, cudaEventDisableTiming),
                         "host activations: event");
  }
  return absl::OkStatus();
}

HostActivations::~HostActivations() {
  // The arena must not go under a copy.
  if (stream_ != nullptr) cudaStreamSynchronize(stream_);
  for (const cudaEvent_t event : done_) {
    if (event != nullptr) cudaEventDestroy(event);
  }
  if (ready_ != nullptr) cudaEventDestroy(ready_);
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

void HostActivations::Start(int layer, std::span<const torch::Tensor> tensors,
                            cudaMemcpyKind kind) {
  TORCH_CHECK(layer >= 0 && layer < static_cast<int>(done_.size()), "layer ", layer,
              " has no place in host memory");
  const auto start = [&]() -> absl::Status {
    RETURN_IF_CUDA_ERROR(cudaEventRecord(ready_, kernels::ops::Stream()), "host activations");
    RETURN_IF_CUDA_ERROR(cudaStreamWaitEvent(stream_, ready_), "host activations");
    char* place = arena_.data() + layer * layer_bytes_;
    const char* const end = place + layer_bytes_;
    for (const torch::Tensor& tensor : tensors) {
      const auto bytes = static_cast<int64_t>(tensor.nbytes());
      TORCH_CHECK(tensor.is_contiguous() && bytes <= end - place, "layer ", layer,
                  " keeps more than its ", layer_bytes_, " bytes of host memory");
      const bool out = kind == cudaMemcpyDeviceToHost;
      void* const to = out ? static_cast<void*>(place) : tensor.mutable_data_ptr();
      const void* const from = out ? tensor.const_data_ptr() : static_cast<const void*>(place);
      RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(to, from, bytes, kind, stream_), "host activations");
      place += bytes;
    }
    RETURN_IF_CUDA_ERROR(cudaEventRecord(done_[layer], stream_), "host activations");
    return absl::OkStatus();
  };
  Check(start());
}

void HostActivations::StartOut(int layer, std::span<const torch::Tensor> tensors) {
  Start(layer, tensors, cudaMemcpyDeviceToHost);
}

void HostActivations::StartIn(int layer, std::span<const torch::Tensor> tensors) {
  Start(layer, tensors, cudaMemcpyHostToDevice);
}

void HostActivations::Await(int layer) {
  const auto await = [&]() -> absl::Status {
    const cudaStream_t stream = kernels::ops::Stream();
    RETURN_IF_ERROR(timers_.BeginWait(stream));
    RETURN_IF_CUDA_ERROR(cudaStreamWaitEvent(stream, done_[layer]), "host activations");
    return timers_.EndWait(stream);
  };
  Check(await());
}

void HostActivations::Drain() {
  cudaStreamSynchronize(stream_);
}

absl::StatusOr<double> HostActivations::TakeWaitSeconds() {
  ASSIGN_OR_RETURN(const attention::AttentionSeconds seconds, timers_.Take());
  return seconds.exposed_communication;
}

}  // namespace ringleader::model
