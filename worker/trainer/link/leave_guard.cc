#include "worker/trainer/link/leave_guard.h"

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"

namespace ringleader::trainer {
namespace {

constexpr absl::Duration kInterval = absl::Milliseconds(100);

}  // namespace

LeaveGuard::LeaveGuard(const comm::Communicator& world, absl::Duration patience,
                       std::function<void(const absl::Status&)> leave)
    : patience_(patience), leave_(std::move(leave)), thread_([this, &world] { Watch(world); }) {}

LeaveGuard::~LeaveGuard() {
  done_.Notify();
  thread_.join();
}

void LeaveGuard::Watch(const comm::Communicator& world) {
  absl::Time aborted_at = absl::InfiniteFuture();
  while (!done_.WaitForNotificationWithTimeout(std::min(kInterval, patience_))) {
    const absl::Status status = world.status();
    if (!status.ok()) aborted_at = std::min(aborted_at, absl::Now());
    if (absl::Now() - aborted_at >= patience_) leave_(status);
  }
}

}  // namespace ringleader::trainer
