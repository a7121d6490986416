#include "base/process/process_end.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <utility>

namespace ringleader {

absl::StatusOr<ProcessEnd> ProcessEnd::Create() {
  sigevent event{};
  event.sigev_notify = SIGEV_SIGNAL;
  event.sigev_signo = SIGKILL;
  timer_t timer{};
  if (timer_create(CLOCK_BOOTTIME, &event, &timer) != 0) {
    return absl::ErrnoToStatus(
        errno, "timer_create (a raised limit on pending signals, ulimit -i, allows more timers)");
  }
  return ProcessEnd(timer);
}

ProcessEnd::ProcessEnd(ProcessEnd&& other) noexcept
    : timer_(other.timer_), owned_(std::exchange(other.owned_, false)) {}

ProcessEnd::~ProcessEnd() {
  if (owned_) timer_delete(timer_);
}

absl::Status ProcessEnd::Set(absl::Time end) {
  itimerspec when{};
  // All zeros would take the end back.
  when.it_value = absl::ToTimespec(std::max(end, absl::UnixEpoch() + absl::Nanoseconds(1)));
  if (timer_settime(timer_, TIMER_ABSTIME, &when, nullptr) != 0) {
    return absl::ErrnoToStatus(errno, "timer_settime");
  }
  return absl::OkStatus();
}

}  // namespace ringleader
