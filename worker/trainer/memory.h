// What a rank needs and what its machine has.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "worker/model/memory.h"
#include "worker/model/model_config.h"

namespace ringleader::trainer {

// The least recomputation with which a rank's part of the model and of a sequence fits `available`
// bytes. FAILED_PRECONDITION, with the arithmetic, if none does.
absl::StatusOr<model::Recompute> ChooseRecompute(const model::ModelConfig& config, int world_size,
                                                 int64_t local_tokens, uint64_t available);

// Memory that this machine, or the control group that the process is in, has left.
absl::StatusOr<uint64_t> AvailableMemoryBytes();

// The most that this process ever held; 0 where the system does not tell.
uint64_t PeakMemoryBytes();

// "3.2 GiB"
std::string FormatBytes(uint64_t bytes);

}  // namespace ringleader::trainer
