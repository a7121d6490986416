// Training with FP8 products, whole attempts on the CPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "base/files.h"
#include "base/testing/temp_dir.h"
#include "worker/trainer/testing/attempt_in_process.h"

namespace ringleader::trainer {
namespace {

using testing::RecordingHost;

class Fp8TrainingTest : public ::testing::Test {
 protected:
  TrainingJob Job(int context = 1, int data = 1) {
    TrainingJob job = testing::TinyTrainingJob(directory_.path().string(), context, data);
    job.precision = model::Precision::kFp8AllLayers;
    job.checkpoint_directory = directory_.File("fp8-" + std::to_string(++jobs_));
    return job;
  }

  // Rank 0's losses.
  std::vector<double> Train(const TrainingJob& job, Outcome expected = Outcome::kCompleted,
                            uint64_t stop_after = 0) {
    hosts_ = std::vector<RecordingHost>(job.world_size);
    for (RecordingHost& host : hosts_) {
      host.on_step = [stop_after](RecordingHost& self, const StepRecord& record) {
        self.stop = record.step == stop_after;
      };
    }
    for (const auto& outcome : testing::RunRanks(job, hosts_)) {
      EXPECT_TRUE(outcome.ok() && *outcome == expected) << outcome.status();
    }
    std::vector<double> losses;
    for (const StepRecord& step : hosts_[0].steps) losses.push_back(step.loss);
    return losses;
  }

  TempDir directory_;
  std::vector<RecordingHost> hosts_;
  int jobs_ = 0;
};

TEST_F(Fp8TrainingTest, LearnsAsWithoutIt) {
  TrainingJob job = Job();
  job.schedule.total_steps = job.steps = 12;
  const std::vector<double> fp8 = Train(job);
  EXPECT_LT(fp8.back(), 0.9 * fp8.front());
  const std::string exported = hosts_[0].model;
  job.precision = model::Precision::kModelType;
  job.checkpoint_directory = directory_.File("fp32");
  const std::vector<double> fp32 = Train(job);
  ASSERT_EQ(fp8.size(), fp32.size());
  for (size_t i = 0; i < fp8.size(); ++i) {
    EXPECT_NE(fp8[i], fp32[i]) << "nothing was cast";
    EXPECT_NEAR(fp8[i], fp32[i], 0.01 * fp32[i]) << i;
  }
  // The header names tensors, their types, shapes and places, and has a checksum.
  const auto header = [](const std::string& folder) {
    const std::string bytes = ReadFile(folder + "/model.safetensors").value();
    uint64_t header_bytes = 0;
    std::memcpy(&header_bytes, bytes.data(), sizeof(header_bytes));
    nlohmann::json json = nlohmann::json::parse(bytes.substr(sizeof(header_bytes), header_bytes));
    json.erase("__metadata__");
    return json;
  };
  EXPECT_EQ(header(exported), header(hosts_[0].model)) << "models are exported alike";
}

// Steps that read no casts need the weights in the model's type.
TEST_F(Fp8TrainingTest, TheEstimateIsOfWhatAllStepsRead) {
  for (const uint64_t last : {uint64_t{1}, Job().steps}) {
    TrainingJob job = Job();
    job.last_cast_step = last;
    ::testing::internal::CaptureStdout();
    Train(job);
    const std::string settings = ::testing::internal::GetCapturedStdout();
    EXPECT_THAT(settings, ::testing::HasSubstr("memory of a rank"));
    EXPECT_EQ(settings.find("weights in e4m3") != std::string::npos, last > 1) << settings;
  }
}

TEST_F(Fp8TrainingTest, ResumesToTheLastBit) {
  const std::vector<double> undisturbed = Train(Job());
  const TrainingJob job = Job();
  Train(job, Outcome::kStopped, 3);
  EXPECT_EQ(Train(job), std::vector<double>(undisturbed.begin() + 3, undisturbed.end()));
}

// Steps before the first and after the last read the model's type, whoever trains them.
TEST_F(Fp8TrainingTest, OnlyTheStepsThatAreToReadCastsDo) {
  TrainingJob plain = Job();
  plain.precision = model::Precision::kModelType;
  const std::vector<double> fp32 = Train(plain), fp8 = Train(Job());
  ASSERT_EQ(fp32.size(), 6);
  TrainingJob late = Job();
  late.first_cast_step = 4;
  const std::vector<double> from_four = Train(late);
  ASSERT_EQ(from_four.size(), fp32.size());
  for (size_t i = 0; i < fp32.size(); ++i) {
    EXPECT_EQ(from_four[i] == fp32[i], i < 3) << "step " << i + 1;
  }
  TrainingJob early = Job();
  early.last_cast_step = 2;
  const std::vector<double> to_two = Train(early);
  ASSERT_EQ(to_two.size(), fp8.size());
  EXPECT_EQ(to_two[0], fp8[0]);
  EXPECT_EQ(to_two[1], fp8[1]);
  EXPECT_NE(to_two[2], fp8[2]);
  // An attempt that goes on in between knows which step it is.
  TrainingJob resumed = Job();
  resumed.first_cast_step = 2;
  resumed.last_cast_step = 4;
  const std::vector<double> undisturbed = Train(resumed);
  resumed.checkpoint_directory = directory_.File("resumed");
  Train(resumed, Outcome::kStopped, 3);
  EXPECT_EQ(Train(resumed), std::vector<double>(undisturbed.begin() + 3, undisturbed.end()));
}

// One before the first step as that step, and one that an earlier attempt did not come to as the
// step that attempt trained.
TEST_F(Fp8TrainingTest, AnEvaluationReadsWhatItsStepRead) {
  const auto held_out = [this] {
    std::vector<double> losses;
    for (const EvalRecord& eval : hosts_[0].evals) losses.push_back(eval.outcome.loss);
    return losses;
  };
  TrainingJob plain = Job();
  plain.precision = model::Precision::kModelType;
  plain.eval_every_steps = 2;
  Train(plain);
  const std::vector<double> fp32 = held_out();
  ASSERT_EQ(fp32.size(), 4) << "at steps 0, 2, 4 and 6";
  TrainingJob late = Job();
  late.first_cast_step = 4;
  late.eval_every_steps = 2;
  Train(late, Outcome::kStopped, 2);
  EXPECT_EQ(held_out(), std::vector<double>(fp32.begin(), fp32.begin() + 2));
  Train(late);
  const std::vector<double> resumed = held_out();
  ASSERT_EQ(resumed.size(), 3);
  EXPECT_EQ(resumed[0], fp32[1]);
  EXPECT_NE(resumed[1], fp32[2]) << "nothing was cast";
}

// A checkpoint holds fp32 master weights either way.
TEST_F(Fp8TrainingTest, CheckpointsGoFromEachPrecisionToTheOther) {
  const std::vector<double> undisturbed = Train(Job());
  for (const auto first : {model::Precision::kModelType, model::Precision::kFp8AllLayers}) {
    TrainingJob job = Job();
    job.precision = first;
    Train(job, Outcome::kStopped, 3);
    job.precision = first == model::Precision::kModelType ? model::Precision::kFp8AllLayers
                                                          : model::Precision::kModelType;
    const std::vector<double> rest = Train(job);
    ASSERT_EQ(rest.size(), undisturbed.size() - 3);
    for (size_t i = 0; i < rest.size(); ++i) {
      EXPECT_NEAR(rest[i], undisturbed[i + 3], 0.01 * undisturbed[i + 3]);
    }
  }
}

// Scales of tokens need no other rank, and those of weights are the same on all. What differs is
// the order of sums, which now and then moves a value across the middle between two codes.
TEST_F(Fp8TrainingTest, RanksEqualOne) {
  const std::vector<double> one = Train(Job());
  for (const auto& [context, data] : {std::pair{2, 1}, {1, 2}, {4, 1}}) {
    const std::vector<double> several = Train(Job(context, data));
    ASSERT_EQ(several.size(), one.size());
    for (size_t i = 0; i < one.size(); ++i) {
      EXPECT_NEAR(several[i], one[i], 1e-4 * one[i]) << context << " x " << data << ", step " << i;
    }
  }
}

}  // namespace
}  // namespace ringleader::trainer
