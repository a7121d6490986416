#include "base/process/task_threads.h"

#include <utility>

namespace ringleader {

TaskThreads::TaskThreads(int threads, size_t max_queued) : max_queued_(max_queued) {
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Work(); });
}

TaskThreads::~TaskThreads() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  for (std::thread& thread : threads_) thread.join();
}

bool TaskThreads::TryRun(const std::string& client, std::function<void()> task) {
  absl::MutexLock lock(&mutex_);
  if (tasks_.TasksOf(client) >= max_queued_) return false;
  tasks_.Push(client, std::move(task));
  return true;
}

void TaskThreads::Work() {
  while (true) {
    std::function<void()> task;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(this, &TaskThreads::Ready));
      if (tasks_.empty()) return;
      task = tasks_.Pop();
    }
    task();
  }
}

}  // namespace ringleader
