// A few threads for work that may wait: gRPC's own threads must not. Clients take turns, so that
// one who asks for much waits behind nobody but itself.
#pragma once

#include <array>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "base/process/turn_queue.h"

namespace ringleader::api {

// How long a task may take: kSlow ones, which look at files or at much of the store, may take
// seconds. They get half of the threads at most, and those of one client half of that.
enum class Pace { kQuick, kSlow };

// Thread-safe. Takes every task: how many there are is limited elsewhere (coordinator/limits).
class Executor {
 public:
  explicit Executor(int threads);
  // Runs what is queued, then joins.
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // `client`: whose turn it is (limits::ClientOf).
  void Run(const std::string& client, Pace pace, std::function<void()> task)
      ABSL_LOCKS_EXCLUDED(mu_);

 private:
  TurnQueue& lane(Pace pace) ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return lanes_[static_cast<size_t>(pace)];
  }
  bool MayRunSlow() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return !lane(Pace::kSlow).empty() && slow_running_ < max_slow_;
  }
  bool Ready() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return !lane(Pace::kQuick).empty() || MayRunSlow() || (stopping_ && lane(Pace::kSlow).empty());
  }
  // A slow task of this client begins, or has ended.
  void Begin(const std::string& client) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void End(const std::string& client) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Work();

  const int max_slow_;
  const int max_slow_of_a_client_;
  absl::Mutex mu_;
  std::array<TurnQueue, 2> lanes_ ABSL_GUARDED_BY(mu_);
  int slow_running_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<std::string, int> slow_running_of_ ABSL_GUARDED_BY(mu_);  // by client; none is 0
  bool slow_is_next_ ABSL_GUARDED_BY(mu_) = false;  // neither pace keeps the other waiting for ever
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace ringleader::api
