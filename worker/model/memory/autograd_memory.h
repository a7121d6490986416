// How much memory training takes, before anything is allocated.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "model_shape/model_config.h"

namespace ringleader::model {

// Of one trainer, in bytes.
struct MemoryEstimate {
  int64_t weights = 0;      // parameters and gradients, whole on every rank
  int64_t optimizer = 0;    // this rank's shard: master weights, two moments, the reduced gradient
  int64_t snapshot = 0;     // the copy of the shard that a checkpoint is written from
  int64_t activations = 0;  // what forward keeps, and the largest layer or loss chunk in work
  int64_t total() const { return weights + optimizer + snapshot + activations; }
};

// `ranks` share the model; this one holds `tokens` of a sequence. fp32 throughout. Without what the
// attention pattern, the communicator and the program itself take.
MemoryEstimate EstimateMemory(const ModelConfig& config, int ranks, int64_t tokens,
                              Recompute recompute);

// RESOURCE_EXHAUSTED, saying where the bytes go and what to change, unless the estimate fits in
// `available_bytes`.
absl::Status CheckMemory(const MemoryEstimate& estimate, int64_t available_bytes);

}  // namespace ringleader::model
