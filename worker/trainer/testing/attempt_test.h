// Whole attempts on a tiny model: real ringleader-trainer processes under a worker played by the
// test. The binary is $RINGLEADER_TRAINER, or lies beside the test.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/testing/temp_dir.h"
#include "gtest/gtest.h"
#include "worker/trainer/testing/fake_agent.h"
#include "worker/trainer/testing/tiny_job.h"

namespace ringleader::trainer::testing {

std::vector<double> Losses(const RankLog& log);
bool AllReachedStep(const std::vector<RankLog>& logs, uint64_t step);

class AttemptTest : public ::testing::Test {
 protected:
  TempDir directory_;
  int attempts_ = 0;
  uint64_t checkpoint_step_ = 0;                // that trainers are told was saved
  uint64_t fencing_token_ = FakeAgent::kToken;  // under which they change the checkpoint folder
  std::string owner_;                           // of the job

  std::string Path(const std::string& name) { return directory_.File(name); }
  v1::JobSpec Job(int context, int data = 1) {
    return TinyJob(directory_.path().string(), context, data);
  }
  // A checkpoint folder of its own for a job that must not resume another's.
  static void UseCheckpoints(v1::JobSpec* spec, const std::string& path) {
    spec->mutable_checkpoint()->set_directory(path);
  }

  // What NCCL takes this many ranks for: FakeAgent::Spawn.
  virtual int Hosts(int /*ranks*/) const { return 1; }

  std::unique_ptr<FakeAgent> Start(const v1::JobSpec& spec, const v1::StepPlan& plan);
  std::unique_ptr<FakeAgent> Start(const v1::JobSpec& spec) { return Start(spec, TinyPlan(spec)); }

  // What all ranks printed in the last attempt: shown with failures.
  std::string Output() const;

  // Ends the test as failed by an exception, from however deep: what it would look at is not there.
  [[noreturn]] void EndTest(const std::string& why) const;

  // Waits until all ranks have done this step, or ends the test.
  void AwaitStep(FakeAgent& agent, uint64_t step) const;

  // Returns what all ranks said until they completed, or ends the test.
  std::vector<RankLog> RunToEnd(const v1::JobSpec& spec);

  // Starts the job, and tells it to stop once all ranks have done two steps. Each is to leave with
  // a checkpoint, before the job's last step, or it ends the test.
  std::vector<RankLog> StopEarly(const v1::JobSpec& spec);

  // How a job that cannot run ends on the lowest rank that failed by itself. All may find the same
  // fault, and whoever is second may be told of the first before it has finished looking.
  v1::TrainerResult Failure(const v1::JobSpec& spec);

 private:
  std::string log_directory_;
};

}  // namespace ringleader::trainer::testing
