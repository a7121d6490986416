// Means, and how uneven loads are.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <span>

namespace ringleader {

struct Mean {
  double sum = 0;
  int count = 0;
  void Add(double value) {
    sum += value;
    ++count;
  }
  double value() const { return count > 0 ? sum / count : 0; }
};

// The largest of `loads` over their mean; 1 where there is no load at all, because then nobody
// waits for anybody.
inline double MaxOverMean(std::span<const uint64_t> loads) {
  const uint64_t sum = std::accumulate(loads.begin(), loads.end(), uint64_t{0});
  if (sum == 0) return 1;
  const uint64_t max = *std::max_element(loads.begin(), loads.end());
  return static_cast<double>(max) * static_cast<double>(loads.size()) / static_cast<double>(sum);
}

}  // namespace ringleader
