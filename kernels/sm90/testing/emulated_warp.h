// Device code of one warp on a CPU: 32 threads are its lanes. For code that walks and masks; what
// needs tensor cores or the copy engine only compiles. Included before any .cuh, by a program of
// its own, which has no other device code.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <array>
#include <barrier>
#include <bit>
#include <cstdint>
#include <cstring>
#include <thread>
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
inline thread_local EmulatedIndex threadIdx;
inline EmulatedIndex gridDim{132}, blockIdx;
using std::max;
using std::min;

namespace ringleader::kernels::sm90 {

class EmulatedWarp {
 public:
  static constexpr int kLanes = 32;
  // What a lane gives to a collective; all lanes get all of it.
  static std::array<uint64_t, kLanes> Exchange(uint64_t value) {
    EmulatedWarp& warp = Instance();
    // Two in turn: nobody writes the one that others may still read.
    auto& values = warp.values_[turn_ ^= 1];
    values[threadIdx.x] = value;
    warp.barrier_.arrive_and_wait();
    return values;
  }
  // Runs `lane` as every lane of a warp.
  template <typename Lane>
  static void Run(const Lane& lane) {
    std::vector<std::jthread> lanes;
    for (unsigned i = 0; i < kLanes; ++i) {
      lanes.emplace_back([&lane, i] {
        threadIdx.x = i;
        lane();
      });
    }
  }

 private:
  static EmulatedWarp& Instance() {
    static EmulatedWarp warp;
    return warp;
  }
  static inline thread_local int turn_ = 0;
  std::array<uint64_t, kLanes> values_[2] = {};
  std::barrier<> barrier_{kLanes};
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
