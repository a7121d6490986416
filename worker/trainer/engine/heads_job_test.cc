// Jobs whose ranks share out heads: on any number of ranks, with and without a ring around them,
// they train what one rank trains, and go on bit for bit where they stopped.
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/files.h"
#include "base/testing/temp_dir.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/trainer/testing/attempt_in_process.h"

namespace ringleader::trainer {
namespace {

using patterns::Pattern;
using ::testing::HasSubstr;
using testing::RecordingHost;

class HeadsJobTest : public ::testing::Test {
 protected:
  // A model of eight heads over `kv_heads`; `context` ranks, of which `heads` share.
  TrainingJob Job(int context, int heads, Pattern pattern = Pattern::kVerticalSlash,
                  int kv_heads = 2) {
    TrainingJob job = testing::TinyTrainingJob(directory_.path().string(), context);
    nlohmann::json config = nlohmann::json::parse(std::ifstream(job.model_config));
    config["num_attention_heads"] = 8;
    config["num_key_value_heads"] = kv_heads;
    job.model_config = directory_.File("config-" + std::to_string(kv_heads) + ".json");
    std::ofstream(job.model_config) << config;
    job.attention.pattern = pattern;
    job.attention.budget = {.vertical_mass = 0.7, .slash_mass = 0.7, .max_verticals = 16};
    job.attention.block_size = 64;
    job.attention.topk_blocks = 1;
    job.attention.head_ranks = heads;
    job.attention.ring.inner = job.plan.ring.inner = context / heads;
    job.checkpoint_directory = directory_.File("checkpoints-" + std::to_string(++jobs_));
    return job;
  }
  std::vector<absl::StatusOr<Outcome>> Run(const TrainingJob& job, uint64_t stop_after = 0) {
    hosts_ = std::vector<RecordingHost>(job.world_size);
    for (RecordingHost& host : hosts_) {
      host.on_step = [stop_after](RecordingHost& self, const StepRecord& record) {
        self.stop = record.step == stop_after;
      };
    }
    return testing::RunRanks(job, hosts_);
  }
  void Complete(const TrainingJob& job) {
    for (const auto& outcome : Run(job)) ASSERT_TRUE(outcome.ok()) << outcome.status();
  }
  std::vector<double> Losses() const {
    std::vector<double> losses;
    for (const StepRecord& step : hosts_[0].steps) losses.push_back(step.loss);
    return losses;
  }

  TempDir directory_;
  int jobs_ = 0;
  std::vector<RecordingHost> hosts_;
};

TEST_F(HeadsJobTest, AnyNumberOfRanksTrainsWhatOneRankTrains) {
  for (const Pattern pattern : {Pattern::kDense, Pattern::kVerticalSlash, Pattern::kBlockTopK}) {
    Complete(Job(1, 1, pattern));
    const std::vector<StepRecord> alone = hosts_[0].steps;
    const std::vector<EvalRecord> evals = hosts_[0].evals;
    ASSERT_EQ(alone.size(), 6u);
    for (const auto& [context, heads] : {std::pair{2, 2}, {4, 4}, {4, 2}}) {
      Complete(Job(context, heads, pattern));
      for (size_t step = 0; step < alone.size(); ++step) {
        const StepRecord& record = hosts_[0].steps.at(step);
        EXPECT_EQ(record.tokens, alone[step].tokens);
        EXPECT_NEAR(record.loss, alone[step].loss, 1e-5 * alone[step].loss) << context << heads;
        EXPECT_GT(record.head_bytes, 0u);
      }
      ASSERT_EQ(hosts_[0].evals.size(), evals.size());
      EXPECT_NEAR(hosts_[0].evals.back().outcome.loss, evals.back().outcome.loss,
                  1e-5 * evals.back().outcome.loss);
    }
  }
}

TEST_F(HeadsJobTest, HeadsThatAreGatheredInGroupsTrainTheSameBits) {
  for (const Pattern pattern : {Pattern::kDense, Pattern::kVerticalSlash}) {
    std::vector<double> losses;
    for (const int groups : {1, 2, 4}) {
      TrainingJob job = Job(2, 1, pattern, /*kv_heads=*/4);
      job.attention.ring.kind = job.plan.ring.kind = ring::RingKind::kAllGather;
      job.attention.head_groups = groups;
      job.memory.recompute = model::Recompute::kFull;  // whose backward starts ahead
      Complete(job);
      if (losses.empty()) losses = Losses();
      EXPECT_EQ(Losses(), losses) << groups;
    }
  }
}

TEST_F(HeadsJobTest, WhateverIsKeptForBackward) {
  std::vector<double> losses;
  for (const model::Recompute recompute :
       {model::Recompute::kNone, model::Recompute::kAttentionOnly, model::Recompute::kFull}) {
    TrainingJob job = Job(4, 2);
    job.memory.recompute = recompute;
    Complete(job);
    if (losses.empty()) losses = Losses();
    EXPECT_EQ(Losses(), losses);
  }
}

TEST_F(HeadsJobTest, SamplesAndDocumentsAreKeptApart) {
  for (const bool samples : {false, true}) {
    const auto job_of = [&](int context, int heads) {
      TrainingJob job = Job(context, heads, Pattern::kDense);
      job.document_mask = true;
      job.batching = {.samples = samples, .overlong = data::Overlong::kSplit};
      job.global_batch = samples ? 6 : 2;
      job.steps = 3;
      return job;
    };
    Complete(job_of(1, 1));
    const std::vector<double> alone = Losses();
    for (const auto& [context, heads] : {std::pair{4, 4}, {4, 2}}) {
      Complete(job_of(context, heads));
      for (size_t step = 0; step < alone.size(); ++step) {
        EXPECT_NEAR(Losses().at(step), alone[step], 1e-5 * alone[step]) << context << heads;
      }
    }
  }
}

TEST_F(HeadsJobTest, AResumedJobGoesOnBitForBitAndExportsTheSameModel) {
  const auto model_of = [&] { return ReadFile(hosts_[0].model + "/model.safetensors").value(); };
  TrainingJob job = Job(4, 2);
  Complete(job);
  const std::vector<double> undisturbed = Losses();
  const std::string model = model_of();
  job.checkpoint_directory = directory_.File("again");
  for (const auto& outcome : Run(job, 3)) EXPECT_EQ(outcome.value(), Outcome::kStopped);
  Complete(job);
  EXPECT_EQ(Losses(), std::vector<double>(undisturbed.begin() + 3, undisturbed.end()));
  EXPECT_EQ(model_of(), model);
}

TEST_F(HeadsJobTest, HeadsThatDoNotDivideEndTheJobByName) {
  TrainingJob job = Job(2, 2, Pattern::kDense, /*kv_heads=*/1);
  nlohmann::json config = nlohmann::json::parse(std::ifstream(job.model_config));
  config["num_attention_heads"] = 1;
  std::ofstream(job.model_config) << config;
  for (const auto& outcome : Run(job)) {
    EXPECT_EQ(outcome.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(outcome.status().message()),
                HasSubstr("parallelism.heads: 2 trainers cannot share out 1 heads"));
  }
}

}  // namespace
}  // namespace ringleader::trainer
