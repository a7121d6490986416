// CUDA events that mark points on streams, used over and over.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "worker/comm/device_communicator.h"

namespace ringleader::comm {

// OK, or INTERNAL (RESOURCE_EXHAUSTED for memory) with the error and what was being done.
absl::Status CudaError(cudaError_t error, const char* what);

// Thread-safe. Events of the device that is current where Record is called first.
class DeviceEventPool : public std::enable_shared_from_this<DeviceEventPool> {
 public:
  ~DeviceEventPool();

  // A point on a stream. Its CUDA event goes back to the pool with it.
  class Event : public DeviceEvent {
   public:
    Event(std::shared_ptr<DeviceEventPool> pool, cudaEvent_t event);
    ~Event() override;
    absl::Status Order(cudaStream_t stream) const override;
    // Whether the stream has got there; an error if the device failed.
    absl::StatusOr<bool> reached() const;

   private:
    const std::shared_ptr<DeviceEventPool> pool_;
    const cudaEvent_t event_;
  };

  // Marks what is enqueued on `stream` up to now.
  absl::StatusOr<std::shared_ptr<const Event>> Record(cudaStream_t stream);

 private:
  void Return(cudaEvent_t event);

  absl::Mutex mutex_;
  std::vector<cudaEvent_t> free_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ringleader::comm
