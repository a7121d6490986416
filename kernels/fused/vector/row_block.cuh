// Kernels in which a block holds one row in registers: how many threads, and vectors a thread.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/fused/vector/vec.cuh"

namespace ringleader::kernels::fused {

inline constexpr int kMaxRowThreads = 512;

// launch(std::integral_constant<int, V>, threads) with threads * V vectors of kVec for a row of dim
// elements, at most kMaxCastDim: few idle threads, and as many rows in flight as fit.
template <typename Launch>
void LaunchRows(int64_t dim, Launch launch) {
  const auto vectors = static_cast<int>(dim / kVec);
  const auto threads = [&](int v) { return (vectors + v * 32 - 1) / (v * 32) * 32; };
  if (vectors <= 2 * 128) {
    launch(std::integral_constant<int, 2>(), threads(2));
  } else if (vectors <= 4 * kMaxRowThreads) {
    launch(std::integral_constant<int, 4>(), threads(4));
  } else {
    launch(std::integral_constant<int, 8>(), threads(8));
  }
}

}  // namespace ringleader::kernels::fused
