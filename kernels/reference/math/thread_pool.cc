#include "kernels/reference/math/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace ringleader::kernels::reference {

struct ThreadPool::State {
  std::mutex mutex;
  std::condition_variable work_ready;
  std::condition_variable work_done;
  // Guarded by mutex; the loop's fields do not change while workers run it.
  uint64_t generation = 0;
  int running = 0;
  bool stopping = false;
  const std::function<void(int64_t, int)>* body = nullptr;
  int64_t count = 0;
  std::atomic<int64_t> next{0};
  std::vector<std::thread> workers;

  void Drain(int worker) {
    for (int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) (*body)(i, worker);
  }

  void Work(int worker) {
    uint64_t seen = 0;
    std::unique_lock lock(mutex);
    for (;;) {
      work_ready.wait(lock, [&] { return stopping || generation != seen; });
      if (stopping) return;
      seen = generation;
      lock.unlock();
      Drain(worker);
      lock.lock();
      if (--running == 0) work_done.notify_one();
    }
  }
};

ThreadPool::ThreadPool(int threads)
    : threads_(std::max(1, threads)), state_(std::make_unique<State>()) {
  for (int worker = 1; worker < threads_; ++worker) {
    state_->workers.emplace_back([state = state_.get(), worker] { state->Work(worker); });
  }
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(state_->mutex);
    state_->stopping = true;
  }
  state_->work_ready.notify_all();
  for (std::thread& worker : state_->workers) worker.join();
}

void ThreadPool::For(int64_t count, const std::function<void(int64_t, int)>& body) {
  if (count <= 0) return;
  if (threads_ == 1 || count == 1) {
    for (int64_t i = 0; i < count; ++i) body(i, 0);
    return;
  }
  {
    std::lock_guard lock(state_->mutex);
    state_->body = &body;
    state_->count = count;
    state_->next.store(0);
    state_->running = threads_ - 1;
    ++state_->generation;
  }
  state_->work_ready.notify_all();
  state_->Drain(0);
  std::unique_lock lock(state_->mutex);
  state_->work_done.wait(lock, [&] { return state_->running == 0; });
}

}  // namespace ringleader::kernels::reference
