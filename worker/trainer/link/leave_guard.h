// Ends a trainer whose attempt is over and whose step loop does not come back: it may be stuck in a
// driver call that only the end of the process ends.
#pragma once

#include <functional>
#include <thread>

#include "absl/status/status.h"
#include "absl/synchronization/notification.h"
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

  const absl::Duration patience_;
  const std::function<void(const absl::Status&)> leave_;
  absl::Notification done_;
  std::thread thread_;
};

}  // namespace ringleader::trainer
