// Ring attention on the CPU, of LibTorch's float32 tensors.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "patterns/attention_options.h"
#include "worker/attention/runner/context_attention.h"
#include "worker/comm/communicator.h"

namespace ringleader::attention {

// `communicator` spans the ranks of the ring, which share one sequence, ring.inner * ring.outer of
// them; `heads` those that share out the heads of this one's tokens, in the order of their tokens:
// options.head_ranks of them; null: this rank has all. Both must outlive the result and all
// records. INVALID_ARGUMENT, naming the option, where options do not fit each other; a sequence
// length that does not fit surfaces from Forward.
absl::StatusOr<std::unique_ptr<ContextAttention>> CreateCpuRingAttention(
    const patterns::AttentionOptions& options, comm::Communicator* communicator,
    comm::Communicator* heads = nullptr);

}  // namespace ringleader::attention
