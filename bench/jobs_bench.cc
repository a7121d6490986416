// Steps of several jobs of one rank, one job after the other in one process, as trainers take them:
//
//   jobs_bench [--steps 6] [--measured FILE] [--measure-seconds 4] JOB.yaml ...
//
// Writes JOB.steps beside each JOB.yaml, a line a step as `ringctl watch -o json` prints it. All
// jobs have one model, recomputation and precision, and the first the longest sequences: each goes
// on with the weights of the one before, for what a step takes does not depend on them, and to
// start a trainer takes longer than the steps.
// Attention is measured first and kept in --measured, in the form of `ringctl latency -o json`,
// unless the file has it.
#include <CLI/CLI.hpp>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "base/process/config.h"
#include "base/status_macros.h"
#include "bench/in_process.h"
#include "bench/planned_job.h"
#include "worker/comm/testing/local_communicator.h"
#include "worker/data/loader.h"
#include "worker/trainer/engine/step_engine.h"
#include "worker/trainer/steps/step_loop.h"

namespace ringleader::bench {
namespace {

using trainer::StepEngine;
using trainer::TrainingJob;

struct Flags {
  std::vector<std::string> jobs;
  int steps = 6;
  std::string measured = "measured.json";
  double measure_seconds = 4;
};

class JobsBench {
 public:
  explicit JobsBench(const Flags& flags) : flags_(flags) {}

  absl::Status Run(const std::string& path);

 private:
  // Makes the engine with the first job, and sets it to the next ones.
  absl::Status TakeUp(TrainingJob job);

  const Flags& flags_;
  const std::vector<std::unique_ptr<comm::Communicator>> world_ =
      comm::testing::LocalCommunicators(1);
  QuietHost host_;
  TrainingJob job_;  // the engine refers to it
  std::unique_ptr<StepEngine> engine_;
  uint64_t longest_ = 0;  // tokens of its sequences
};

absl::Status JobsBench::TakeUp(TrainingJob job) {
  if (job.world_size != 1) {
    return absl::InvalidArgumentError(
        "jobs_bench trains jobs of one rank: set resources.trainers: 1");
  }
  job.threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  job.attention.threads = job.threads;
  const auto engine_of = [](const TrainingJob& of) {
    return std::tuple(of.model_config, of.model_init, of.engine, of.precision, of.memory.recompute);
  };
  const bool fits = engine_of(job) == engine_of(job_) && job.sequence_length <= longest_;
  if (engine_ != nullptr && !fits) {
    return absl::InvalidArgumentError(
        "it asks for another model, recomputation or precision than the first job, or for longer "
        "sequences; train it in a call of its own");
  }
  job_ = std::move(job);
  if (engine_ != nullptr) return engine_->device().SetAttention(job_.attention);
  longest_ = job_.sequence_length;
  ASSIGN_OR_RETURN(engine_, StepEngine::Create(job_, *world_.front(), host_));
  PrintSettings(*engine_);
  return absl::OkStatus();
}

absl::Status JobsBench::Run(const std::string& path) {
  ASSIGN_OR_RETURN(TrainingJob job, LoadPlannedJob(path, flags_.measured));
  RETURN_IF_ERROR(TakeUp(std::move(job)));
  RETURN_IF_ERROR(
      MeasureOnce(path, job_, flags_.measured, flags_.measure_seconds, *engine_).status());
  ASSIGN_OR_RETURN(
      const data::Loader train,
      data::Loader::Open(job_.train_data, job_.sequence_length, job_.seed,
                         static_cast<uint64_t>(engine_->config().vocab_size), job_.batching));
  trainer::StepLoop loop(
      job_,
      {.engine = engine_.get(), .train = &train, .world = world_.front().get(), .host = &host_});
  RETURN_IF_ERROR(loop.Apply(job_.plan, 0));
  std::ofstream out(path.substr(0, path.rfind('.')) + ".steps");
  for (int step = 1; step <= flags_.steps; ++step) {
    ASSIGN_OR_RETURN(const trainer::StepRecord record, loop.Train(static_cast<uint64_t>(step)));
    out << ToJson(record) << "\n";
  }
  if (!out.flush()) return absl::UnavailableError("cannot write the steps of " + path);
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  Flags flags;
  CLI::App app("Steps of several jobs of one rank, in this process.");
  app.add_option("jobs", flags.jobs, "job files")->required();
  app.add_option("--steps", flags.steps, "of each job")->check(CLI::PositiveNumber);
  app.add_option("--measured", flags.measured, "the latency table; written where it has no rows");
  app.add_option("--measure-seconds", flags.measure_seconds, "for measuring attention");
  if (const std::optional<int> code = ParseArguments(app, argc, argv)) return *code;
  // Left to the end of the process, as a trainer leaves its own.
  auto& bench = *new JobsBench(flags);
  for (const std::string& path : flags.jobs) {
    std::cerr << path << "\n";
    if (const absl::Status status = bench.Run(path); !status.ok()) {
      std::cerr << "jobs_bench: " << path << ": " << status.message() << "\n";
      std::_Exit(1);
    }
  }
  std::_Exit(0);
}

}  // namespace
}  // namespace ringleader::bench

int main(int argc, char** argv) {
  return ringleader::bench::Main(argc, argv);
}
