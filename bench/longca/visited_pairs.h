// Which keys ranks attend to, found from outside: of values that are one for a key and nothing for
// others, a query's output is the weight that it gives that key.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "bench/longca/problem.h"

namespace ringleader::bench {

class VisitedPairs {
 public:
  explicit VisitedPairs(int64_t tokens) : tokens_(tokens), visited_(kHeads * tokens * tokens, 0) {}

  // `problem` with values by which its kHeadDim keys from `first` on are told apart.
  static Problem Probe(Problem problem, int64_t first);
  // Learns from the output of Probe(..., first) who visits these keys.
  void Learn(const kernels::reference::testing::Tensor& out, int64_t first);

  bool operator()(int head, int64_t query, int64_t key) const {
    return visited_[(head * tokens_ + query) * tokens_ + key] != 0;
  }
  bool operator==(const VisitedPairs&) const = default;
  // Whether every pair that is visited is `shown`, [tokens, tokens].
  bool IsWithin(std::span<const char> shown) const;

 private:
  int64_t tokens_;
  std::vector<char> visited_;  // [heads, tokens, tokens]
};

}  // namespace ringleader::bench
