// Trainers in a bench's own process: one rank, without a worker.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "worker/trainer/engine/step_engine.h"
#include "worker/trainer/host.h"

namespace ringleader::bench {

// Nobody is told of this attempt, and nobody stops it.
class QuietHost : public trainer::Host {
 public:
  void ReportStep(const trainer::StepRecord& /*record*/) override {}
  void ReportEval(const trainer::EvalRecord& /*record*/) override {}
  void ReportCheckpoint(uint64_t /*step*/, const std::string& /*path*/, uint64_t /*bytes*/,
                        double /*seconds*/) override {}
  void ReportModel(const std::string& /*path*/) override {}
  const balance::MeasureRequest& measure() const override { return nothing_; }
  void ReportMeasurements(const balance::Measurements& /*measured*/) override {}
  void SetPlace(uint64_t /*step*/, const char* /*phase*/) override {}
  bool stop_requested() const override { return false; }
  std::string TakePlan() override { return ""; }
  uint32_t TakeProfileSteps() override { return 0; }
  absl::StatusOr<trainer::Plan> ParsePlan(const std::string& /*bytes*/) const override {
    return absl::InvalidArgumentError("no plan travels here");
  }

 private:
  balance::MeasureRequest nothing_;
};

// How the engine has set itself up, for people.
void PrintSettings(const trainer::StepEngine& engine);

// Measures the job's attention, in `seconds` at most, into the file `measured`, unless it has that.
// `path`: the job file of `job`. Returns whether it measured.
absl::StatusOr<bool> MeasureOnce(const std::string& path, const trainer::TrainingJob& job,
                                 const std::string& measured, double seconds,
                                 trainer::StepEngine& engine);

}  // namespace ringleader::bench
