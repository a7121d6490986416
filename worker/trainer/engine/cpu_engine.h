// The CPU's engine: fp32, autograd, bit for bit the same in every run.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "worker/trainer/engine/step_engine.h"

namespace ringleader::trainer {

// Loads or draws the model. `job`, `world` and `host` outlive the engine. FAILED_PRECONDITION with
// the arithmetic if the job does not fit this machine.
absl::StatusOr<std::unique_ptr<StepEngine>> CreateCpuEngine(const TrainingJob& job,
                                                            comm::Communicator& world, Host& host);

}  // namespace ringleader::trainer
