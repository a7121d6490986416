// Whole attempts on a tiny model, a thread a rank: the torch side of a trainer beside a host that
// the test plays.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "worker/trainer/host.h"
#include "worker/trainer/steps/run.h"
#include "worker/trainer/training_job.h"

namespace ringleader::trainer::testing {

// Keeps what a rank reports. A test sets what the rank is told before the attempt, or in `on_step`.
// Thread-safe where Host is; read when the attempt is over.
class RecordingHost : public Host {
 public:
  struct Checkpoint {
    uint64_t step = 0;
    std::string path;
    uint64_t bytes = 0;
    double seconds = 0;
  };
  std::vector<StepRecord> steps;
  std::vector<EvalRecord> evals;
  std::vector<Checkpoint> checkpoints;
  std::string model;
  std::vector<std::pair<uint64_t, std::string>> places;

  // After every step of this rank, on its thread.
  std::function<void(RecordingHost&, const StepRecord&)> on_step = [](auto&, const auto&) {};
  // Where this rank comes to, on its thread; an exception is its failure there.
  std::function<void(const std::string& phase)> on_place = [](const auto&) {};
  // After every checkpoint that was saved, on a thread of its own; rank 0.
  std::function<void(uint64_t step)> on_checkpoint = [](uint64_t) {};
  // Once the model is in its place, on this rank's thread; rank 0.
  std::function<void()> on_model = [] {};
  bool stop = false;
  uint32_t profile_steps = 0;
  // Plans as they travel between ranks: a plan is what ParsePlan makes of `plan_bytes`.
  std::string plan_bytes;
  std::map<std::string, Plan> plans = {};
  balance::MeasureRequest to_measure = {};
  std::vector<balance::Measurements> measured = {};

  void ReportStep(const StepRecord& record) override;
  void ReportEval(const EvalRecord& record) override { evals.push_back(record); }
  void ReportCheckpoint(uint64_t step, const std::string& path, uint64_t bytes,
                        double seconds) override;
  void ReportModel(const std::string& path) override {
    model = path;
    on_model();
  }
  const balance::MeasureRequest& measure() const override { return to_measure; }
  void ReportMeasurements(const balance::Measurements& reported) override {
    measured.push_back(reported);
  }
  void SetPlace(uint64_t step, const char* phase) override {
    on_place(places.emplace_back(step, phase).second);
  }
  bool stop_requested() const override { return stop; }
  std::string TakePlan() override { return std::exchange(plan_bytes, ""); }
  uint32_t TakeProfileSteps() override { return std::exchange(profile_steps, 0); }
  // INVALID_ARGUMENT for bytes that stand for no plan.
  absl::StatusOr<Plan> ParsePlan(const std::string& bytes) const override;

 private:
  absl::Mutex mutex_;  // checkpoints are reported from a thread of their own
};

// As TinyJob (tiny_job.h), in the files that this writes into `directory`, but with dense
// attention.
TrainingJob TinyTrainingJob(const std::string& directory, int context, int data = 1);

// Runs the job's ranks, hosts[rank] each, and returns how each ended. `change` makes of the job
// what one rank is told of it.
std::vector<absl::StatusOr<Outcome>> RunRanks(
    const TrainingJob& job, std::vector<RecordingHost>& hosts,
    const std::function<void(TrainingJob&)>& change = [](TrainingJob&) {});

}  // namespace ringleader::trainer::testing
