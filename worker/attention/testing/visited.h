// Which keys a query visited, from the indices that the ranks of a sequence built: for oracles of
// any pattern.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "patterns/index/layer_index.h"
#include "ringleader/kernels/shard_layout.h"

namespace ringleader::attention::testing {

class Visited {
 public:
  // `indices`: of the CPU engine, by rank; `layout` is of any rank. `firsts`: of the sequence's
  // documents; empty: one.
  Visited(std::vector<std::shared_ptr<const patterns::LayerIndex>> indices,
          const kernels::ShardLayout& layout, std::vector<int64_t> firsts);

  bool operator()(int head, int64_t query, int64_t key) const;

 private:
  const std::vector<std::shared_ptr<const patterns::LayerIndex>> indices_;
  const kernels::ShardLayout layout_;
  const std::vector<int64_t> firsts_;
};

}  // namespace ringleader::attention::testing
