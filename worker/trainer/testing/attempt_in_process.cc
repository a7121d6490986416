#include "worker/trainer/testing/attempt_in_process.h"

#include <deque>
#include <memory>
#include <thread>

#include "worker/comm/testing/local_communicator.h"
#include "worker/trainer/testing/tiny_files.h"

namespace ringleader::trainer::testing {

namespace {

// A host that the attempt may keep for ever: the writer of its checkpoints may report one after a
// failed attempt has returned, when what the test owns is gone.
class LastingHost : public Host {
 public:
  explicit LastingHost(Host* host) : host_(host) {}
  void Detach() {
    absl::MutexLock lock(&mutex_);
    detached_ = true;
  }

  void ReportStep(const StepRecord& record) override { host_->ReportStep(record); }
  void ReportEval(const EvalRecord& record) override { host_->ReportEval(record); }
  void ReportCheckpoint(uint64_t step, const std::string& path, uint64_t bytes,
                        double seconds) override {
    absl::MutexLock lock(&mutex_);
    if (!detached_) host_->ReportCheckpoint(step, path, bytes, seconds);
  }
  void ReportModel(const std::string& path) override { host_->ReportModel(path); }
  const balance::MeasureRequest& measure() const override { return host_->measure(); }
  void ReportMeasurements(const balance::Measurements& measured) override {
    host_->ReportMeasurements(measured);
  }
  void SetPlace(uint64_t step, const char* phase) override { host_->SetPlace(step, phase); }
  bool stop_requested() const override { return host_->stop_requested(); }
  std::string TakePlan() override { return host_->TakePlan(); }
  uint32_t TakeProfileSteps() override { return host_->TakeProfileSteps(); }
  absl::StatusOr<Plan> ParsePlan(const std::string& bytes) const override {
    return host_->ParsePlan(bytes);
  }

 private:
  Host* const host_;
  absl::Mutex mutex_;
  bool detached_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace

void RecordingHost::ReportStep(const StepRecord& record) {
  steps.push_back(record);
  on_step(*this, record);
}

void RecordingHost::ReportCheckpoint(uint64_t step, const std::string& path, uint64_t bytes,
                                     double seconds) {
  on_checkpoint(step);
  absl::MutexLock lock(&mutex_);
  checkpoints.push_back({step, path, bytes, seconds});
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
  job.sequence_length = job.attention.sequence_length = kTinySequence;
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
                                              std::vector<RecordingHost>& hosts,
                                              const std::function<void(TrainingJob&)>& change) {
  // A rank that failed leaves what it held to the end of the process; so must what that refers to.
  auto& worlds = *new auto(comm::testing::LocalCommunicators(job.world_size));
  auto& jobs = *new std::vector<TrainingJob>(job.world_size, job);
  auto& lasting = *new std::deque<LastingHost>;
  for (RecordingHost& host : hosts) lasting.emplace_back(&host);
  std::vector<absl::StatusOr<Outcome>> outcomes(job.world_size);
  std::vector<std::thread> threads;
  threads.reserve(job.world_size);
  for (int rank = 0; rank < job.world_size; ++rank) {
    jobs[rank].rank = rank;
    change(jobs[rank]);
    threads.emplace_back(
        [&, rank] { outcomes[rank] = Run(jobs[rank], *worlds[rank], lasting[rank]); });
  }
  for (std::thread& thread : threads) thread.join();
  for (LastingHost& host : lasting) host.Detach();
  return outcomes;
}

}  // namespace ringleader::trainer::testing
