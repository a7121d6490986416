// A time at which the kernel ends this process, whatever its threads do then.
#pragma once

#include <ctime>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace ringleader {

// A timer of the kernel's that sends this process SIGKILL. No thread has to run for it: it ends a
// process that is stopped (SIGSTOP), that hangs in a lock or in a driver, or whose machine was
// suspended meanwhile. Not thread-safe.
class ProcessEnd {
 public:
  // No end is set yet. RESOURCE_EXHAUSTED if the kernel has no timer left for this user.
  static absl::StatusOr<ProcessEnd> Create();

  ProcessEnd(ProcessEnd&& other) noexcept;
  ProcessEnd& operator=(ProcessEnd&&) = delete;
  ~ProcessEnd();  // takes the end back

  // In boot time (BootNow()); replaces the end before. One that has passed ends the process at
  // once.
  absl::Status Set(absl::Time end);

 private:
  explicit ProcessEnd(timer_t timer) : timer_(timer), owned_(true) {}

  timer_t timer_;
  bool owned_ = false;
};

}  // namespace ringleader
