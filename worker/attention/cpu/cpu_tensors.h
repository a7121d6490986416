// The CPU engine's border to LibTorch: float32 tensors on the CPU.
#pragma once

#include <memory>

#include "worker/attention/runner/ring_attention.h"
#include "worker/comm/communicator.h"

namespace ringleader::attention {

// `communicator` outlives it; `threads` of this rank's engine.
std::unique_ptr<TensorDevice> MakeCpuTensorDevice(comm::Communicator* communicator, int threads);

}  // namespace ringleader::attention
