#include "worker/trainer/engine/device_timer.h"

#include <c10/cuda/CUDACachingAllocator.h>

namespace ringleader::trainer {

DeviceTimer::~DeviceTimer() {
  if (start_ == nullptr) return;
  cudaEventDestroy(start_);
  cudaEventDestroy(stop_);
}

// A failed event shows up as a failed step elsewhere: here it costs a figure.
void DeviceTimer::Start(cudaStream_t stream) {
  if (start_ == nullptr) {
    cudaEventCreate(&start_);
    cudaEventCreate(&stop_);
  }
  cudaEventRecord(start_, stream);
  stopped_ = false;
}

void DeviceTimer::Stop(cudaStream_t stream) {
  cudaEventRecord(stop_, stream);
  stopped_ = true;
}

double DeviceTimer::Seconds() {
  float milliseconds = 0;
  if (!stopped_ || cudaEventSynchronize(stop_) != cudaSuccess ||
      cudaEventElapsedTime(&milliseconds, start_, stop_) != cudaSuccess) {
    return 0;
  }
  stopped_ = false;
  return milliseconds / 1e3;
}

uint64_t PeakDeviceBytes(int device) {
  using c10::CachingAllocator::StatType;
  const auto stats =
      c10::cuda::CUDACachingAllocator::getDeviceStats(static_cast<c10::DeviceIndex>(device));
  return static_cast<uint64_t>(
      stats.allocated_bytes[static_cast<size_t>(StatType::AGGREGATE)].peak);
}

}  // namespace ringleader::trainer
