#include "worker/trainer/link/leave_guard.h"

#include <algorithm>
#include <utility>

#include "base/boot_clock.h"
#include "base/wait/timed_wait.h"

namespace ringleader::trainer {
namespace {

constexpr absl::Duration kInterval = absl::Milliseconds(100);

}  // namespace

LeaveGuard::LeaveGuard(const comm::Communicator& world, absl::Duration patience,
                       std::function<void(const absl::Status&)> leave)
    : patience_(patience), leave_(std::move(leave)), thread_([this, &world] { Watch(world); }) {}

LeaveGuard::~LeaveGuard() {
  {
    absl::MutexLock lock(&mutex_);
    done_ = true;
  }
  thread_.join();
}

bool LeaveGuard::IsDoneWithin(absl::Duration patience) {
  absl::MutexLock lock(&mutex_);
  return AwaitFor(mutex_, absl::Condition(&done_), patience);
}

void LeaveGuard::Watch(const comm::Communicator& world) {
  absl::Time aborted_at = absl::InfiniteFuture();
  while (!IsDoneWithin(std::min(kInterval, patience_))) {
    const absl::Status status = world.status();
    if (!status.ok()) aborted_at = std::min(aborted_at, BootNow());
    if (BootNow() - aborted_at >= patience_) leave_(status);
  }
}

}  // namespace ringleader::trainer
