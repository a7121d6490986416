// A trainer without a model: rank 0 never comes back from its step loop, and the others fail once
// it is there. In a job that is called kOwnErrorJob rank 0 hears of that, and returns an error that
// it found by itself. In one that is called kFailsWithJob nobody waits for anybody.
#include "worker/trainer/testing/stuck_trainer.h"

#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "worker/trainer/trainer_main.h"

namespace {

absl::StatusOr<ringleader::trainer::Outcome> Run(const ringleader::trainer::TrainingJob& job,
                                                 ringleader::comm::Communicator& world,
                                                 ringleader::trainer::Host& /*host*/) {
  absl::string_view number = job.name;
  int code = 0;
  if (absl::ConsumePrefix(&number, ringleader::trainer::testing::kFailsWithJob) &&
      absl::SimpleAtoi(number, &code)) {
    const absl::Status failure(static_cast<absl::StatusCode>(code), "it cannot go on");
    world.Abort(std::string(failure.message()));
    return failure;
  }
  const absl::Status together = world.Barrier();
  if (job.rank == 0 && job.name == ringleader::trainer::testing::kOwnErrorJob) {
    while (world.Barrier().ok()) {
    }
    return absl::InvalidArgumentError("its data are of another model");
  }
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
