// Threads of one CPU engine.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace ringleader::kernels::reference {

// Runs loops over a fixed number of threads, the caller's among them. One loop at a time.
class ThreadPool {
 public:
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return threads_; }

  // body(index, worker) for index in [0, count), started in ascending order, worker in
  // [0, threads()). Returns when all are done. The body must not throw.
  void For(int64_t count, const std::function<void(int64_t, int)>& body);

 private:
  struct State;
  const int threads_;
  std::unique_ptr<State> state_;
};

}  // namespace ringleader::kernels::reference
