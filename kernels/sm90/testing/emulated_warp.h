// Device code of one warp on a CPU. For code that walks and masks; what
// needs tensor cores or the copy engine only compiles. Included before any .cuh, by a program of
// its own, which has no other device code.
#pragma once

#include <cuda_bf16.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

// NOLINTBEGIN(bugprone-reserved-identifier): CUDA's names.
#define __CUDACC__ 1
#undef __device__
#undef __global__
#undef __host__
#undef __forceinline__
#define __device__
#define __global__
#define __host__
#define __forceinline__ inline

struct EmulatedIndex {
  unsigned x = 0;
};
inline EmulatedIndex threadIdx;
inline EmulatedIndex gridDim{132}, blockIdx;
using std::max;
using std::min;

namespace ringleader::kernels::sm90 {

// Lanes are coroutines of the calling thread, which runs each in turn up to its next collective.
class EmulatedWarp {
 public:
  static constexpr int kLanes = 32;
  // What a lane gives to a collective; all lanes get all of it.
  static std::array<uint64_t, kLanes> Exchange(uint64_t value) {
    EmulatedWarp& warp = *current_;
    const unsigned lane = threadIdx.x;
    // Two in turn: nobody writes the one that others may still read.
    auto& values = warp.values_[warp.turns_[lane] ^= 1];
    values[lane] = value;
    swapcontext(&warp.lanes_[lane].context, &warp.caller_);
    threadIdx.x = lane;
    return values;
  }
  // Runs `lane` as every lane of a warp. Lanes that have returned take part in no more collectives:
  // the others must not wait for them.
  template <typename Lane>
  static void Run(const Lane& lane) {
    EmulatedWarp warp([&lane] { lane(); });
    current_ = &warp;
    for (int left = kLanes; left > 0;) {
      left = 0;
      for (unsigned i = 0; i < kLanes; ++i) {
        if (warp.lanes_[i].is_done) continue;
        threadIdx.x = i;
        swapcontext(&warp.caller_, &warp.lanes_[i].context);
        left += warp.lanes_[i].is_done ? 0 : 1;
      }
      if (left != 0 && left != kLanes) std::abort();  // a collective that not all lanes come to
    }
    current_ = nullptr;
  }

 private:
  static constexpr size_t kStackBytes = size_t{64} << 10;
  struct LaneState {
    ucontext_t context;
    std::vector<std::byte> stack;
    bool is_done = false;
  };

  explicit EmulatedWarp(std::function<void()> lane) : lane_(std::move(lane)), lanes_(kLanes) {
    for (LaneState& state : lanes_) {
      state.stack.resize(kStackBytes);
      getcontext(&state.context);
      state.context.uc_stack.ss_sp = state.stack.data();
      state.context.uc_stack.ss_size = state.stack.size();
      state.context.uc_link = &caller_;
      makecontext(&state.context, &EmulatedWarp::Enter, 0);
    }
  }
  static void Enter() {
    EmulatedWarp& warp = *current_;
    const unsigned lane = threadIdx.x;
    warp.lane_();
    warp.lanes_[lane].is_done = true;
  }

  static inline EmulatedWarp* current_ = nullptr;
  const std::function<void()> lane_;
  std::vector<LaneState> lanes_;
  ucontext_t caller_ = {};
  std::array<uint64_t, kLanes> values_[2] = {};
  std::array<int, kLanes> turns_ = {};
};

}  // namespace ringleader::kernels::sm90

inline unsigned __ballot_sync(unsigned, bool holds) {
  const auto all = ringleader::kernels::sm90::EmulatedWarp::Exchange(holds);
  unsigned bits = 0;
  for (size_t i = 0; i < all.size(); ++i) bits |= static_cast<unsigned>(all[i]) << i;
  return bits;
}
inline bool __any_sync(unsigned mask, bool holds) {
  return __ballot_sync(mask, holds) != 0;
}
template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(value));
  const auto all = ringleader::kernels::sm90::EmulatedWarp::Exchange(bits);
  std::memcpy(&value, &all[lane], sizeof(value));
  return value;
}
inline void __syncwarp() {
  ringleader::kernels::sm90::EmulatedWarp::Exchange(0);
}
inline int __popc(unsigned bits) {
  return std::popcount(bits);
}
inline int __ffs(unsigned bits) {
  return bits == 0 ? 0 : std::countr_zero(bits) + 1;
}
// What is only compiled.
float __shfl_xor_sync(unsigned, float value, int lanes);
size_t __cvta_generic_to_shared(const void* pointer);
// NOLINTEND(bugprone-reserved-identifier)
