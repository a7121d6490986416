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

bool TaskThreads::TryRun(std::function<void()> task) {
  absl::MutexLock lock(&mutex_);
  if (tasks_.size() >= max_queued_) return false;
  tasks_.push_back(std::move(task));
  return true;
}

void TaskThreads::Work() {
  while (true) {
    std::function<void()> task;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(this, &TaskThreads::Ready));
      if (tasks_.empty()) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
  }
}

}  // namespace ringleader
