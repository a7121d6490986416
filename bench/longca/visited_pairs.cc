#include "bench/longca/visited_pairs.h"

#include <algorithm>

namespace ringleader::bench {

using kernels::reference::testing::Tensor;

Problem VisitedPairs::Probe(Problem problem, int64_t first) {
  std::ranges::fill(problem.v.data, 0.0f);
  for (int i = 0; i < kHeadDim; ++i) {
    for (int head = 0; head < kKvHeads; ++head) problem.v.at(first + i, head, i) = 1;
  }
  return problem;
}

void VisitedPairs::Learn(const Tensor& out, int64_t first) {
  for (int head = 0; head < kHeads; ++head) {
    for (int64_t query = 0; query < tokens_; ++query) {
      char* const keys = visited_.data() + (head * tokens_ + query) * tokens_ + first;
      for (int i = 0; i < kHeadDim; ++i) keys[i] = out.at(query, head, i) > 0 ? 1 : 0;
    }
  }
}

bool VisitedPairs::IsWithin(std::span<const char> shown) const {
  for (size_t pair = 0; pair < visited_.size(); ++pair) {
    if (visited_[pair] > shown[pair % shown.size()]) return false;
  }
  return true;
}

}  // namespace ringleader::bench
