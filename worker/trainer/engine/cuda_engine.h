// The GPU's engine: bf16 with fp32 accumulation and master weights, NCCL between ranks, one wait
// for the device a step.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "worker/trainer/engine/step_engine.h"

namespace ringleader::trainer {

// Loads or draws the model on this rank's GPU and connects the ranks' GPUs. `job`, `world` and
// `host` outlive the engine. FAILED_PRECONDITION where this trainer was built without CUDA, the
// machine has no GPU, or, with the arithmetic, the job does not fit it.
absl::StatusOr<std::unique_ptr<StepEngine>> CreateCudaEngine(const TrainingJob& job,
                                                             comm::Communicator& world, Host& host);

}  // namespace ringleader::trainer
