// Ring attention on the CPU, of LibTorch's float32 tensors.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "patterns/attention_options.h"
#include "worker/attention/runner/context_attention.h"
#include "worker/comm/communicator.h"

namespace ringleader::attention {

// `communicator` spans the ranks that share one sequence and must outlive the result and all
// records; its size is ring.inner * ring.outer. INVALID_ARGUMENT, naming the option, where options
// do not fit each other; a sequence length that does not fit surfaces from Forward.
absl::StatusOr<std::unique_ptr<ContextAttention>> CreateCpuRingAttention(
    const patterns::AttentionOptions& options, comm::Communicator* communicator);

}  // namespace ringleader::attention
