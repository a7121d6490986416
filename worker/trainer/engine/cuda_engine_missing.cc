// In builds without CUDA.
#include "worker/trainer/engine/cuda_engine.h"

namespace ringleader::trainer {

absl::StatusOr<std::unique_ptr<StepEngine>> CreateCudaEngine(const TrainingJob&,
                                                             comm::Communicator&, Host&) {
  return absl::FailedPreconditionError(
      "resources.engine is cuda, but this trainer was built with the CPU engine only; set "
      "resources.engine: cpu");
}

}  // namespace ringleader::trainer
