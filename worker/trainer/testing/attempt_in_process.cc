#include "worker/trainer/testing/attempt_in_process.h"

#include <memory>
#include <thread>

#include "worker/comm/testing/local_communicator.h"
#include "worker/trainer/testing/tiny_files.h"

namespace ringleader::trainer::testing {

void RecordingHost::ReportStep(const StepRecord& record) {
  steps.push_back(record);
  on_step(*this, record);
}

void RecordingHost::ReportCheckpoint(uint64_t step, const std::string& path, uint64_t bytes,
                                     double /*seconds*/) {
  absl::MutexLock lock(&mutex_);
  checkpoints.push_back({step, path, bytes});
}

absl::StatusOr<Plan> RecordingHost::ParsePlan(const std::string& bytes) const {
  const auto plan = plans.find(bytes);
  if (plan == plans.end()) return absl::InvalidArgumentError("no plan: " + bytes.substr(0, 20));
  return plan->second;
}

TrainingJob TinyTrainingJob(const std::string& directory, int context, int data) {
  WriteTinyFiles(directory);
  TrainingJob job;
  job.name = "tiny";
  job.attempt = 1;
  job.world_size = job.ranks_per_node = context * data;
  job.context = context;
  job.data = data;
  job.model_config = directory + "/config.json";
  job.model_init = "random";
  job.train_data = directory + "/tokens/train";
  job.eval_data = directory + "/tokens/eval";
  job.sequence_length = kTinySequence;
  job.attention.tile = job.attention.stripe = 64;
  job.attention.ring.inner = context;
  job.plan.version = job.plan.effective_step = 1;
  job.plan.ring = job.attention.ring;
  job.plan.stripe = job.attention.stripe;
  job.steps = 6;
  job.global_batch = 2;
  job.schedule = {.peak = 3e-3, .warmup_steps = 2, .total_steps = 6};
  job.seed = 1;
  job.eval_sequences = 2;
  job.checkpoint_directory = directory + "/checkpoints";
  job.checkpoint_every_steps = 2;
  return job;
}

std::vector<absl::StatusOr<Outcome>> RunRanks(const TrainingJob& job,
                                              std::vector<RecordingHost>& hosts) {
  // A rank that failed leaves what it held to the end of the process; so must what that refers to.
  auto& worlds = *new auto(comm::testing::LocalCommunicators(job.world_size));
  auto& jobs = *new std::vector<TrainingJob>(job.world_size, job);
  std::vector<absl::StatusOr<Outcome>> outcomes(job.world_size);
  std::vector<std::thread> threads;
  threads.reserve(job.world_size);
  for (int rank = 0; rank < job.world_size; ++rank) {
    jobs[rank].rank = rank;
    threads.emplace_back(
        [&, rank] { outcomes[rank] = Run(jobs[rank], *worlds[rank], hosts[rank]); });
  }
  for (std::thread& thread : threads) thread.join();
  return outcomes;
}

}  // namespace ringleader::trainer::testing
