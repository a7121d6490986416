// Builds without CUDA have this in place of a GPU engine: an error.
#include "worker/trainer/engine/engine_device.h"

namespace ringleader::trainer {

absl::StatusOr<std::unique_ptr<EngineDevice>> CreateCudaDevice(const TrainingJob&,
                                                               comm::Communicator&, Host&) {
  return absl::FailedPreconditionError(
      "resources.engine is cuda, but this trainer was built with the CPU engine only; set "
      "resources.engine: cpu");
}

}  // namespace ringleader::trainer
