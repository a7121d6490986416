// What attention visited for the queries of a probe (patterns/probe.h), on the device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"
#include "ringleader/kernels/index.h"

namespace ringleader::kernels::index {

// visited[head] = the sum of VisitedShare over the queries that this rank has.
struct ProbeArgs {
  ShardLayout layout;
  int32_t heads = 0;
  int32_t queries = 0;                 // E
  const int64_t* positions = nullptr;  // [E]
  const float* row_max = nullptr;      // [heads, E], of all keys, as is row_sum
  const int64_t* row_sum = nullptr;    // [heads, E]
  const float* lse = nullptr;          // [heads, n], of what was visited
  int32_t* visited = nullptr;          // [heads], in units of 2^-kMassBits
};
absl::Status CountVisited(const ProbeArgs& args, cudaStream_t stream);

}  // namespace ringleader::kernels::index
