// The trainer's process around its step loop: flags, signals, the worker, the other ranks. Sees
// neither protobuf nor LibTorch, whose include folder has another fmt than spdlog's.
#pragma once

#include "absl/status/statusor.h"
#include "worker/comm/communicator.h"
#include "worker/trainer/host.h"
#include "worker/trainer/steps/run.h"
#include "worker/trainer/training_job.h"

namespace ringleader::trainer {

// Run() of run.h, handed in so that this side does not link LibTorch. Throws nothing.
using RunFunction = absl::StatusOr<Outcome> (*)(const TrainingJob& job, comm::Communicator& world,
                                                Host& host);

// main()'s work; does not return when the attempt has begun.
int RunProcess(int argc, char** argv, RunFunction run);

}  // namespace ringleader::trainer
