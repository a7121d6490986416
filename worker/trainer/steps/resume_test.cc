// What an attempt takes up from the one before it, and what it refuses to.
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/testing/temp_dir.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/trainer/testing/attempt_in_process.h"
#include "worker/trainer/testing/tiny_files.h"

namespace ringleader::trainer {
namespace {

using ::testing::HasSubstr;
using testing::RecordingHost;

class ResumeTest : public ::testing::Test {
 protected:
  TempDir directory_;
  std::vector<RecordingHost> hosts_;

  TrainingJob Job() { return testing::TinyTrainingJob(directory_.path().string(), 1); }

  absl::StatusOr<Outcome> Run(const TrainingJob& job, uint64_t stop_after = 0) {
    hosts_ = std::vector<RecordingHost>(1);
    hosts_[0].on_step = [stop_after](RecordingHost& host, const StepRecord& record) {
      host.stop = record.step == stop_after;
    };
    return testing::RunRanks(job, hosts_)[0];
  }
  std::vector<double> Losses() const {
    std::vector<double> losses;
    for (const StepRecord& step : hosts_[0].steps) losses.push_back(step.loss);
    return losses;
  }
};

TEST_F(ResumeTest, GoesOnWhereItStoppedAndEvaluatesNoMoreThanThat) {
  TrainingJob job = Job();
  ASSERT_TRUE(Run(job).ok());
  const std::vector<double> undisturbed = Losses();
  job.checkpoint_directory += "-2";
  EXPECT_EQ(Run(job, 3).value(), Outcome::kStopped);
  EXPECT_EQ(Run(job).value(), Outcome::kCompleted);
  EXPECT_EQ(Losses(), std::vector<double>(undisturbed.begin() + 3, undisturbed.end()));
  ASSERT_EQ(hosts_[0].evals.size(), 1u) << "the start was evaluated by the first attempt";
  EXPECT_EQ(hosts_[0].evals[0].step, 6u);
}

TEST_F(ResumeTest, ACheckpointCountsOverAllAttempts) {
  TrainingJob job = Job();
  EXPECT_EQ(Run(job, 3).value(), Outcome::kStopped);
  ASSERT_TRUE(Run(job).ok());
  std::ifstream file(job.checkpoint_directory + "/step-0000000006/manifest.json");
  const nlohmann::json state = nlohmann::json::parse(file).at("body").at("state");
  EXPECT_EQ(state.at("step"), 6);
  EXPECT_EQ(state.at("updates"), 6);
  EXPECT_EQ(state.at("skipped_steps"), 0);
  EXPECT_EQ(state.at("tokens"), 6 * 2 * testing::kTinySequence);
  EXPECT_EQ(state.at("data_position"), 6 * 2);
  EXPECT_EQ(state.at("seed"), 1);
}

TEST_F(ResumeTest, AJobThatIsDoneExportsItsModelAgain) {
  const TrainingJob job = Job();
  ASSERT_TRUE(Run(job).ok());
  std::filesystem::remove_all(hosts_[0].model);
  EXPECT_EQ(Run(job).value(), Outcome::kCompleted);
  EXPECT_TRUE(hosts_[0].steps.empty());
  EXPECT_TRUE(hosts_[0].checkpoints.empty());
  EXPECT_TRUE(std::filesystem::exists(hosts_[0].model + "/model.safetensors"));
}

TEST_F(ResumeTest, StepsRatesAndSavingMayChange) {
  TrainingJob job = Job();
  ASSERT_TRUE(Run(job).ok());
  job.steps = job.schedule.total_steps = 8;
  job.schedule.peak = 1e-3;
  job.checkpoint_every_steps = 1;
  job.eval_sequences = 1;
  job.attempt = 2;
  EXPECT_EQ(Run(job).value(), Outcome::kCompleted);
  ASSERT_EQ(hosts_[0].steps.size(), 2u);
  EXPECT_EQ(hosts_[0].steps[0].step, 7u);
}

TEST_F(ResumeTest, AnotherJobsCheckpointIsRefused) {
  const TrainingJob job = Job();
  ASSERT_TRUE(Run(job).ok());
  const std::string other_data = directory_.File("other");
  std::filesystem::copy(job.train_data, other_data, std::filesystem::copy_options::recursive);
  std::vector<TrainingJob> others(6, job);
  others[0].name = "other";
  others[1].train_data = other_data;
  others[2].sequence_length = 256;
  others[3].global_batch = 1;
  others[4].seed = 2;
  others[5].batching = {.samples = true, .overlong = data::Overlong::kSplit};
  // The folder's owner is asked before its checkpoints are.
  EXPECT_THAT(std::string(Run(others[0]).status().message()), HasSubstr("belongs to jobs/tiny"));
  for (size_t i = 0; i < others.size(); ++i) {
    std::filesystem::remove(job.checkpoint_directory + "/owner.json");
    const absl::Status refused = Run(others[i]).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << i << " " << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("step-0000000006 is of another job"));
  }
  EXPECT_TRUE(Run(job).ok());
}

TEST_F(ResumeTest, SkippedStepsAreCountedOnThroughAStop) {
  TrainingJob job = Job();
  // The first update throws the weights so far that every gradient after it is infinite.
  job.schedule = {.peak = 1e30, .total_steps = 50};
  job.steps = 50;
  job.max_skipped_steps = 3;
  job.checkpoint_every_steps = 0;  // or one is still being written when the attempt fails
  EXPECT_EQ(Run(job, 3).value(), Outcome::kStopped);
  EXPECT_FALSE(hosts_[0].steps[0].skipped);
  EXPECT_TRUE(hosts_[0].steps[1].skipped);
  EXPECT_TRUE(hosts_[0].steps[2].skipped);
  const absl::Status failed = Run(job).status();
  EXPECT_EQ(hosts_[0].steps.size(), 1u) << "two before the stop, one after it, and the fourth ends";
  EXPECT_EQ(failed.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(failed.message()), HasSubstr("step 5: the gradient is NaN or infinite"));
  EXPECT_THAT(std::string(failed.message()), HasSubstr("as in the 3 steps before it"));
}

TEST_F(ResumeTest, AnEmptyFolderIsABeginningOnlyWhereNothingWasSaved) {
  TrainingJob job = Job();
  job.steps = 1;
  job.checkpoint_step = 4;
  const absl::Status missing = Run(job).status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kUnavailable) << missing;
  job.checkpoint_step = 0;
  EXPECT_TRUE(Run(job).ok());
}

}  // namespace
}  // namespace ringleader::trainer
