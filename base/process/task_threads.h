// Threads for work that nobody who asks for it may wait for.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "base/process/turn_queue.h"

namespace ringleader {

// Takes the tasks of one client in order, and clients in turn. Thread-safe. The destructor runs
// what is queued, then joins.
class TaskThreads {
 public:
  // `max_queued`: tasks of one client that may wait for a thread.
  TaskThreads(int threads, size_t max_queued);
  ~TaskThreads();
  TaskThreads(const TaskThreads&) = delete;
  TaskThreads& operator=(const TaskThreads&) = delete;

  // False, without having taken the task, when the client's queue is full.
  [[nodiscard]] bool TryRun(const std::string& client, std::function<void()> task)
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  bool Ready() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return stopping_ || !tasks_.empty(); }
  void Work();

  const size_t max_queued_;
  absl::Mutex mutex_;
  TurnQueue tasks_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace ringleader
