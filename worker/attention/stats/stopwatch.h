// Adds the lifetime of a scope to a counter of seconds.
#pragma once

#include <chrono>

namespace ringleader::attention {

class Stopwatch {
 public:
  explicit Stopwatch(double* seconds)
      : seconds_(seconds), start_(std::chrono::steady_clock::now()) {}
  ~Stopwatch() {
    *seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  double* const seconds_;
  const std::chrono::steady_clock::time_point start_;
};

}  // namespace ringleader::attention
