// Seconds of attention's phases on the device: events recorded around the work as it is enqueued,
// read when the step is done.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <deque>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/attention/stats/attention_stats.h"

namespace ringleader::attention {

// Times one stream at a time; what the streams of successive calls do must be in order. Not
// thread-safe.
class DeviceTimers {
 public:
  using Phase = double AttentionSeconds::*;

  DeviceTimers() = default;
  ~DeviceTimers();
  DeviceTimers(const DeviceTimers&) = delete;
  DeviceTimers& operator=(const DeviceTimers&) = delete;

  // What is enqueued between Begin and End belongs to `phase`, less the waits in it. Phases do not
  // nest.
  absl::Status Begin(Phase phase, cudaStream_t stream);
  absl::Status End(cudaStream_t stream);
  // What passes between these calls is exposed communication: the stream waits for a transfer.
  absl::Status BeginWait(cudaStream_t stream);
  absl::Status EndWait(cudaStream_t stream);

  // The sum since the last call. Waits for the device.
  absl::StatusOr<AttentionSeconds> Take();

 private:
  struct Interval {
    Phase phase = nullptr;
    Phase within = nullptr;  // of a wait: the phase that it interrupts
    cudaEvent_t begin = nullptr, end = nullptr;
  };

  absl::StatusOr<cudaEvent_t> Record(cudaStream_t stream);
  // Keeps an interval that has ended; of very many, those that the device is through with are read.
  absl::Status Keep(const Interval& interval);
  // Adds up the intervals at the front that the device is through with; all of them if `wait`.
  absl::Status Harvest(bool wait);

  std::vector<cudaEvent_t> free_;
  std::deque<Interval> intervals_;  // ended ones, in the order of their end
  Interval phase_, wait_;           // begun ones
  AttentionSeconds seconds_;
};

}  // namespace ringleader::attention
