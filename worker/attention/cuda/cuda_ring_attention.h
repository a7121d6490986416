// Ring attention on GPUs: RingAttention over the Hopper kernels and a DeviceCommunicator, with the
// CPU's options, schedules and index.
//
// A step enqueues work and never waits for the device. Transfers run beside computation, ordered by
// events; the buffers that travel are allocated once and serve all layers. Selected columns are
// gathered once a call and attended to outside the ring. Output and gradients accumulate in float32
// over the hops.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "patterns/attention_options.h"
#include "worker/attention/runner/context_attention.h"

namespace ringleader::comm {
class DeviceCommunicator;
}

namespace ringleader::attention {

// Works on the current device, a Hopper GPU, and loads LibTorch's CUDA half, which no program
// links. `communicator` spans the ranks of the ring, which share one sequence, ring.inner *
// ring.outer of them, and is theirs alone for its KV, dKV and control channels; `heads` is
// CreateCpuRingAttention's, and theirs alone for its KV channel. Both must outlive the result and
// all records.
//
// Tensors are bfloat16 on that device, head_dim 64 or 128, and work is enqueued on the stream that
// LibTorch has current. `options.threads` is not used. INVALID_ARGUMENT names an option that does
// not fit; UNAVAILABLE says that LibTorch's CUDA half does not load; FAILED_PRECONDITION that the
// GPU is no Hopper.
absl::StatusOr<std::unique_ptr<ContextAttention>> CreateCudaRingAttention(
    const patterns::AttentionOptions& options, comm::DeviceCommunicator* communicator,
    comm::DeviceCommunicator* heads = nullptr);

}  // namespace ringleader::attention
