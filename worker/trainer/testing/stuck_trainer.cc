// A trainer without a model: rank 0 never comes back from its step loop, and the others fail once
// it is there.
#include "absl/time/clock.h"
#include "worker/trainer/trainer_main.h"

namespace {

absl::StatusOr<ringleader::trainer::Outcome> Run(const ringleader::trainer::TrainingJob& job,
                                                 ringleader::comm::Communicator& world,
                                                 ringleader::trainer::Host& /*host*/) {
  const absl::Status together = world.Barrier();
  while (job.rank == 0) absl::SleepFor(absl::Hours(1));
  if (!together.ok()) return together;
  const absl::Status failure = absl::ResourceExhaustedError("it is out of memory");
  world.Abort(std::string(failure.message()));
  return failure;
}

}  // namespace

int main(int argc, char** argv) {
  return ringleader::trainer::RunProcess(argc, argv, &Run);
}
