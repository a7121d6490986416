// Ends a trainer whose attempt is over and whose step loop does not come back: it may be stuck in a
// driver call that only the end of the process ends.
#pragma once

#include <functional>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "worker/comm/communicator.h"

namespace ringleader::trainer {

class LeaveGuard {
 public:
  // Calls `leave` with the communicator's status, from a thread of its own and again until this
  // object is gone, once `world` has been aborted for `patience`. `world` outlives this.
  LeaveGuard(const comm::Communicator& world, absl::Duration patience,
             std::function<void(const absl::Status&)> leave);
  ~LeaveGuard();

 private:
  void Watch(const comm::Communicator& world);
  bool IsDoneWithin(absl::Duration patience);

  const absl::Duration patience_;
  const std::function<void(const absl::Status&)> leave_;
  absl::Mutex mutex_;
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace ringleader::trainer
