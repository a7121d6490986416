#include "worker/comm/nccl/device_event_pool.h"

#include <utility>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"

namespace ringleader::comm {

absl::Status CudaError(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return absl::OkStatus();
  const std::string message =
      absl::StrFormat("%s: %s (%s)", what, cudaGetErrorName(error), cudaGetErrorString(error));
  return error == cudaErrorMemoryAllocation ? absl::ResourceExhaustedError(message)
                                            : absl::InternalError(message);
}

DeviceEventPool::Event::Event(std::shared_ptr<DeviceEventPool> pool, cudaEvent_t event)
    : pool_(std::move(pool)), event_(event) {}

DeviceEventPool::Event::~Event() {
  pool_->Return(event_);
}

absl::Status DeviceEventPool::Event::Order(cudaStream_t stream) const {
  return CudaError(cudaStreamWaitEvent(stream, event_, 0), "waiting for a transfer");
}

absl::StatusOr<bool> DeviceEventPool::Event::reached() const {
  const cudaError_t result = cudaEventQuery(event_);
  if (result == cudaErrorNotReady) return false;
  RETURN_IF_ERROR(CudaError(result, "asking after a transfer"));
  return true;
}

absl::StatusOr<std::shared_ptr<const DeviceEventPool::Event>> DeviceEventPool::Record(
    cudaStream_t stream) {
  cudaEvent_t event = nullptr;
  {
    absl::MutexLock lock(&mutex_);
    if (!free_.empty()) {
      event = free_.back();
      free_.pop_back();
    }
  }
  if (event == nullptr) {
    RETURN_IF_ERROR(
        CudaError(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "creating an event"));
  }
  auto point = std::make_shared<const Event>(shared_from_this(), event);
  RETURN_IF_ERROR(CudaError(cudaEventRecord(event, stream), "recording an event"));
  return point;
}

void DeviceEventPool::Return(cudaEvent_t event) {
  absl::MutexLock lock(&mutex_);
  free_.push_back(event);
}

DeviceEventPool::~DeviceEventPool() {
  absl::MutexLock lock(&mutex_);
  for (const cudaEvent_t event : free_) cudaEventDestroy(event);
}

}  // namespace ringleader::comm
