#include "coordinator/api/calls/executor.h"

#include <algorithm>
#include <utility>

namespace ringleader::api {

Executor::Executor(int threads)
    : max_slow_(std::max(1, threads / 2)), max_slow_of_a_client_(std::max(1, max_slow_ / 2)) {
  threads_.reserve(static_cast<size_t>(threads));
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Work(); });
}

Executor::~Executor() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  for (std::thread& thread : threads_) thread.join();
}

void Executor::Run(const std::string& client, Pace pace, std::function<void()> task) {
  absl::MutexLock lock(&mu_);
  lane(pace).Push(client, std::move(task));
}

void Executor::Begin(const std::string& client) {
  ++slow_running_;
  if (++slow_running_of_[client] == max_slow_of_a_client_) lane(Pace::kSlow).Hold(client);
}

void Executor::End(const std::string& client) {
  --slow_running_;
  lane(Pace::kSlow).Release(client);
  const auto running = slow_running_of_.find(client);
  if (--running->second == 0) slow_running_of_.erase(running);
}

void Executor::Work() {
  bool ran_slow = false;
  std::string client;
  while (true) {
    std::function<void()> task;
    {
      absl::MutexLock lock(&mu_);
      if (std::exchange(ran_slow, false)) End(client);
      mu_.Await(absl::Condition(this, &Executor::Ready));
      const bool quick = !lane(Pace::kQuick).empty();
      const bool slow = MayRunSlow();
      if (!quick && !slow) return;
      ran_slow = slow && (slow_is_next_ || !quick);
      slow_is_next_ = !ran_slow;
      task = lane(ran_slow ? Pace::kSlow : Pace::kQuick).Pop(&client);
      if (ran_slow) Begin(client);
    }
    task();
  }
}

}  // namespace ringleader::api
