// How far this process, which is a rank, is with what takes long and has no steps of its own:
// reading and writing large files, evaluating. Its pulses carry the count, and whoever judges
// whether it hangs takes any change for progress.
#pragma once

#include <atomic>
#include <cstdint>

namespace ringleader {

// Thread-safe.
class Progress {
 public:
  // Another part is done: seconds of work at the most.
  static void Tick() { count_.fetch_add(1, std::memory_order_relaxed); }

  static uint64_t count() { return count_.load(std::memory_order_relaxed); }

  // While one exists, this rank waits for others that may have much more to do: it is they who may
  // hang, and their own counts tell.
  class Waiting {
   public:
    Waiting() { waiting_.fetch_add(1, std::memory_order_relaxed); }
    ~Waiting() { waiting_.fetch_sub(1, std::memory_order_relaxed); }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;
  };
  static bool waiting() { return waiting_.load(std::memory_order_relaxed) > 0; }

 private:
  static inline std::atomic<uint64_t> count_ = 0;
  static inline std::atomic<int> waiting_ = 0;
};

}  // namespace ringleader
