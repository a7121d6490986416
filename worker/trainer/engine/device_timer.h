// Time on the device between two points of a stream, and the device's memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace ringleader::trainer {

// One interval at a time. Start and Stop enqueue; Seconds waits for the device.
class DeviceTimer {
 public:
  ~DeviceTimer();
  void Start(cudaStream_t stream);
  void Stop(cudaStream_t stream);
  // Returns the last interval's time, once; 0 if there was none since the last call.
  double Seconds();

 private:
  cudaEvent_t start_ = nullptr, stop_ = nullptr;  // created with the first interval
  bool stopped_ = false;
};

// Returns the most that LibTorch's allocator ever held for tensors on the device.
uint64_t PeakDeviceBytes(int device);

}  // namespace ringleader::trainer
