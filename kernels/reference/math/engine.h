// What one CPU rank computes with: its threads, the arithmetic for its processor, and scratch
// memory kept between calls.
#pragma once

#include <memory>
#include <vector>

#include "kernels/reference/math/thread_pool.h"
#include "kernels/reference/math/tile_math.h"

namespace ringleader::kernels::reference {

// Uninitialised float memory on a cache line that only ever grows.
class Scratch {
 public:
  // Valid until the next call; the content is undefined.
  float* Reserve(size_t floats);

 private:
  struct Free {
    void operator()(float* p) const;
  };
  std::unique_ptr<float[], Free> data_;
  size_t capacity_ = 0;
};

// One call at a time. Results do not depend on the number of threads.
class Engine {
 public:
  explicit Engine(int threads, const TileMath& math = BestTileMath())
      : math_(math), pool_(threads), worker_scratch_(pool_.threads()) {}

  const TileMath& math() const { return math_; }
  ThreadPool& pool() { return pool_; }

  // Shared by all threads of a call, and one for each worker.
  Scratch& shared_scratch() { return shared_scratch_; }
  Scratch& worker_scratch(int worker) { return worker_scratch_[worker]; }

 private:
  const TileMath& math_;
  ThreadPool pool_;
  Scratch shared_scratch_;
  std::vector<Scratch> worker_scratch_;
};

}  // namespace ringleader::kernels::reference
