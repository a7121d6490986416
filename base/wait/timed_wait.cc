#include "base/wait/timed_wait.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>

namespace ringleader {
namespace {

using Clock = std::chrono::steady_clock;

// What cannot be told from for ever, and keeps sums of times within their range.
constexpr absl::Duration kLongest = absl::Hours(24 * 365);
// Until a wait is looked at again that is over and whose mutex somebody had.
constexpr auto kAgain = std::chrono::milliseconds(1);

// Has waits notice that their time is over. Their condition says so itself, and whoever unlocks
// their mutex has it looked at: this one's thread does, as nobody else may.
class Waker {
 public:
  using Wait = std::multimap<Clock::time_point, absl::Mutex*>::iterator;

  Waker() {
    std::thread([this] { Run(); }).detach();
  }

  // `mutex` is there until Remove(), which its holder may call.
  Wait Add(Clock::time_point end, absl::Mutex* mutex) {
    const std::lock_guard lock(mutex_);
    const Wait wait = waits_.emplace(end, mutex);
    if (end < next_look_) changed_.notify_one();
    return wait;
  }
  void Remove(Wait wait) {
    const std::lock_guard lock(mutex_);
    waits_.erase(wait);
  }

 private:
  [[noreturn]] void Run() {
    std::unique_lock lock(mutex_);
    while (true) {
      const Clock::time_point now = Clock::now();
      next_look_ = waits_.empty() ? Clock::time_point::max() : waits_.begin()->first;
      if (next_look_ > now) {
        if (waits_.empty()) {
          changed_.wait(lock);
        } else {
          changed_.wait_until(lock, next_look_);
        }
        continue;
      }
      for (auto wait = waits_.begin(); wait != waits_.end() && wait->first <= now; ++wait) {
        // Its holder may be about to call Add() or Remove(), and is not waited for.
        if (wait->second->TryLock()) wait->second->Unlock();
      }
      next_look_ = now + kAgain;
      changed_.wait_until(lock, next_look_);
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::multimap<Clock::time_point, absl::Mutex*> waits_;  // by their ends
  Clock::time_point next_look_ = Clock::time_point::max();
};

Waker& TheWaker() {
  static auto* const waker = new Waker;  // threads may wait while the process ends
  return *waker;
}

}  // namespace

bool AwaitFor(absl::Mutex& mutex, const absl::Condition& condition, absl::Duration patience) {
  if (condition.Eval()) return true;
  if (patience <= absl::ZeroDuration()) return false;
  const Clock::time_point end =
      Clock::now() + absl::ToChronoNanoseconds(std::min(patience, kLongest));
  const auto over = [&] { return condition.Eval() || Clock::now() >= end; };
  const Waker::Wait wait = TheWaker().Add(end, &mutex);
  mutex.Await(absl::Condition(&over));
  TheWaker().Remove(wait);
  return condition.Eval();
}

}  // namespace ringleader
