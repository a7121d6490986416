// Attempts in this process that run, end and fail as a test says.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/testing/temp_dir.h"
#include "gtest/gtest.h"
#include "worker/trainer/testing/attempt_in_process.h"

namespace ringleader::trainer::testing {

template <typename Record>
std::vector<uint64_t> StepsOf(const std::vector<Record>& records) {
  std::vector<uint64_t> steps;
  for (const Record& record : records) steps.push_back(record.step);
  return steps;
}

class RunTest : public ::testing::Test {
 protected:
  TempDir directory_;
  std::vector<RecordingHost> hosts_;

  TrainingJob Job(int context = 1, int data = 1) {
    return TinyTrainingJob(directory_.path().string(), context, data);
  }
  std::string Path(const std::string& name) const { return directory_.File(name); }
  // Returns fresh hosts, which a test tells what comes before the attempt.
  std::vector<RecordingHost>& NewHosts(const TrainingJob& job) {
    return hosts_ = std::vector<RecordingHost>(job.world_size);
  }
  // Every rank's end is `expected`.
  void Run(const TrainingJob& job, Outcome expected = Outcome::kCompleted) {
    for (const auto& outcome : RunRanks(job, hosts_)) {
      ASSERT_TRUE(outcome.ok()) << outcome.status();
      EXPECT_EQ(*outcome, expected);
    }
  }
  void RunAnew(const TrainingJob& job, Outcome expected = Outcome::kCompleted) {
    NewHosts(job);
    Run(job, expected);
  }
  absl::Status Failure(const TrainingJob& job) {
    NewHosts(job);
    return RunRanks(job, hosts_)[0].status();
  }
  static std::vector<double> Losses(const RecordingHost& host) {
    std::vector<double> losses;
    for (const StepRecord& step : host.steps) losses.push_back(step.loss);
    return losses;
  }
};

}  // namespace ringleader::trainer::testing
