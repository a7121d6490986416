// One attempt of one rank, from the assignment to the exported model.
#pragma once

#include "absl/status/statusor.h"
#include "worker/comm/communicator.h"
#include "worker/trainer/host.h"
#include "worker/trainer/training_job.h"

namespace ringleader::trainer {

enum class Outcome {
  kCompleted,  // all steps; the model has been exported
  kStopped,    // a checkpoint was written, as asked
};

// Trains. All ranks of `world` call it with the same job but for `rank` and `threads`. Resumes from
// the newest whole checkpoint of the job's directory. An error says what to change; ABORTED, and
// world.aborted_by_peer(), where another rank failed first. FAILED_PRECONDITION, INVALID_ARGUMENT
// and OUT_OF_RANGE would fail the same way again. After an error what it held, threads included, is
// left to the end of the process, which must not destroy `world` before.
absl::StatusOr<Outcome> Run(const TrainingJob& job, comm::Communicator& world, Host& host);

}  // namespace ringleader::trainer
