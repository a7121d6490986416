// A few threads for work that may wait: gRPC's own threads must not.
#pragma once

#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace ringleader::api {

// Thread-safe. The destructor runs what is queued, then joins.
class Executor {
 public:
  // `max_queued`: tasks that may wait for a thread.
  Executor(int threads, size_t max_queued);
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // False, without having taken the task, when the queue is full.
  [[nodiscard]] bool TryRun(std::function<void()> task) ABSL_LOCKS_EXCLUDED(mu_);
  // For tasks whose number is bounded elsewhere: takes the task however full the queue is.
  void Run(std::function<void()> task) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  bool Ready() const ABSL_SHARED_LOCKS_REQUIRED(mu_) { return stopping_ || !tasks_.empty(); }
  void Work();

  const size_t max_queued_;
  absl::Mutex mu_;
  std::deque<std::function<void()>> tasks_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace ringleader::api
