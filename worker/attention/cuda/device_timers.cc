#include "worker/attention/cuda/device_timers.h"

#include <utility>

#include "base/status_macros.h"
#include "kernels/fused/cuda_status.h"

namespace ringleader::attention {

namespace {

// Intervals that may wait to be read: a step of many micro-batches reads the first ones early.
constexpr size_t kMaxIntervals = 4096;

}  // namespace

DeviceTimers::~DeviceTimers() {
  for (const Interval& interval : intervals_) {
    free_.push_back(interval.begin);
    free_.push_back(interval.end);
  }
  free_.push_back(phase_.begin);
  free_.push_back(wait_.begin);
  for (const cudaEvent_t event : free_) {
    if (event != nullptr) cudaEventDestroy(event);
  }
}

absl::StatusOr<cudaEvent_t> DeviceTimers::Record(cudaStream_t stream) {
  cudaEvent_t event = nullptr;
  if (free_.empty()) {
    RETURN_IF_CUDA_ERROR(cudaEventCreate(&event), "attention timer");
  } else {
    event = free_.back();
    free_.pop_back();
  }
  const cudaError_t error = cudaEventRecord(event, stream);
  if (error != cudaSuccess) free_.push_back(event);
  RETURN_IF_CUDA_ERROR(error, "attention timer");
  return event;
}

absl::Status DeviceTimers::Begin(Phase phase, cudaStream_t stream) {
  // A call that failed on the way has left its beginning.
  if (phase_.begin != nullptr) free_.push_back(phase_.begin);
  phase_ = {};
  ASSIGN_OR_RETURN(phase_.begin, Record(stream));
  phase_.phase = phase;
  return absl::OkStatus();
}

absl::Status DeviceTimers::End(cudaStream_t stream) {
  ASSIGN_OR_RETURN(phase_.end, Record(stream));
  return Keep(std::exchange(phase_, {}));
}

absl::Status DeviceTimers::BeginWait(cudaStream_t stream) {
  if (wait_.begin != nullptr) free_.push_back(wait_.begin);
  wait_ = {.phase = &AttentionSeconds::exposed_communication, .within = phase_.phase};
  ASSIGN_OR_RETURN(wait_.begin, Record(stream));
  return absl::OkStatus();
}

absl::Status DeviceTimers::EndWait(cudaStream_t stream) {
  ASSIGN_OR_RETURN(wait_.end, Record(stream));
  return Keep(std::exchange(wait_, {}));
}

absl::Status DeviceTimers::Keep(const Interval& interval) {
  intervals_.push_back(interval);
  return intervals_.size() > kMaxIntervals ? Harvest(/*wait=*/false) : absl::OkStatus();
}

absl::Status DeviceTimers::Harvest(bool wait) {
  for (; !intervals_.empty(); intervals_.pop_front()) {
    const Interval& interval = intervals_.front();
    const cudaError_t error =
        wait ? cudaEventSynchronize(interval.end) : cudaEventQuery(interval.end);
    if (error == cudaErrorNotReady) {
      cudaGetLastError();  // no failure
      return absl::OkStatus();
    }
    RETURN_IF_CUDA_ERROR(error, "attention timer");
    float milliseconds = 0.0f;
    RETURN_IF_CUDA_ERROR(cudaEventElapsedTime(&milliseconds, interval.begin, interval.end),
                         "attention timer");
    seconds_.*interval.phase += milliseconds * 1e-3;
    if (interval.within != nullptr) seconds_.*interval.within -= milliseconds * 1e-3;
    free_.push_back(interval.begin);
    free_.push_back(interval.end);
  }
  return absl::OkStatus();
}

absl::StatusOr<AttentionSeconds> DeviceTimers::Take() {
  RETURN_IF_ERROR(Harvest(/*wait=*/true));
  return std::exchange(seconds_, {});
}

}  // namespace ringleader::attention
