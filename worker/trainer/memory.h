// What a rank needs and what its machine has.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "worker/model/model_config.h"
#include "worker/model/parameter_layout.h"

namespace ringleader::trainer {

// Bytes of one rank's CPU training step.
struct MemoryEstimate {
  uint64_t parameters = 0;   // weights and gradients, whole on every rank
  uint64_t optimizer = 0;    // this rank's shard: master weights, two moments, reduced gradient
  uint64_t activations = 0;  // kept from forward to backward
  uint64_t working = 0;      // the largest layer in flight, keys and values of the ring
  uint64_t total() const { return parameters + optimizer + activations + working; }
};

// `local_tokens` of a sequence on this rank; `recompute`: keep only what cannot be recomputed.
MemoryEstimate EstimateMemory(const model::ModelConfig& config,
                              const model::ParameterLayout& layout, int world_size,
                              uint64_t local_tokens, bool recompute);

// True: recompute activations; false: all of them fit. FAILED_PRECONDITION, with the arithmetic, if
// the job does not fit `available` bytes either way.
absl::StatusOr<bool> ChooseRecompute(const model::ModelConfig& config,
                                     const model::ParameterLayout& layout, int world_size,
                                     uint64_t local_tokens, uint64_t available);

// Memory that this machine, or the control group that the process is in, has left.
absl::StatusOr<uint64_t> AvailableMemoryBytes();

// The most that this process ever held; 0 where the system does not tell.
uint64_t PeakMemoryBytes();

// "3.2 GiB"
std::string FormatBytes(uint64_t bytes);

}  // namespace ringleader::trainer
