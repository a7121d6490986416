// Budgets of heads that follow the probe, from one step to the next and from one attempt to the
// next.
#include "patterns/index/head_budgets.h"

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/files.h"
#include "base/testing/temp_dir.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/checkpoint/checksummed_json.h"
#include "worker/trainer/testing/attempt_in_process.h"

namespace ringleader::trainer {
namespace {

using patterns::Pattern;
using testing::RecordingHost;

class HeadBudgetsTest : public ::testing::TestWithParam<Pattern> {
 protected:
  // Probes in steps 1, 2, 4 and 6.
  TrainingJob Job(const std::string& checkpoints, int context = 1, int data = 1) {
    TrainingJob job = testing::TinyTrainingJob(directory_.path().string(), context, data);
    job.attention.pattern = GetParam();
    job.attention.select = patterns::Select::kTopK;
    job.attention.budget = {.max_verticals = 64, .max_slashes = 6};
    job.attention.sink_tokens = job.attention.local_blocks = 0;
    // Recall is to be more than 0.8.
    job.attention.block_size = job.attention.tile;
    job.attention.topk_blocks = GetParam() == Pattern::kMoba ? 5 : 4;
    if (GetParam() != Pattern::kMoba) job.attention.density = 0.66;
    job.attention.adapt_heads = job.attention.adapt_by_probe = true;
    job.attention.probe_every = 2;
    job.checkpoint_directory += checkpoints;
    return job;
  }

  absl::StatusOr<Outcome> Run(const TrainingJob& job, uint64_t stop_after = 0) {
    hosts_ = std::vector<RecordingHost>(job.world_size);
    for (RecordingHost& host : hosts_) {
      host.on_step = [stop_after](RecordingHost& self, const StepRecord& record) {
        self.stop = record.step == stop_after;
      };
    }
    return testing::RunRanks(job, hosts_)[0];
  }
  std::vector<double> Losses() const {
    std::vector<double> losses;
    for (const StepRecord& step : hosts_[0].steps) losses.push_back(step.loss);
    return losses;
  }
  // What the checkpoint of step 6 holds; null: nothing.
  static nlohmann::json Saved(const TrainingJob& job) {
    std::ifstream file(job.checkpoint_directory + "/step-0000000006/manifest.json");
    const nlohmann::json state = nlohmann::json::parse(file).at("body").at("state");
    return state.value("head_budgets", nlohmann::json());
  }

  TempDir directory_;
  std::vector<RecordingHost> hosts_;
};

TEST_P(HeadBudgetsTest, HoldFromTheStepAfterTheProbe) {
  TrainingJob job = Job("");
  ASSERT_TRUE(Run(job).ok());
  const std::vector<double> losses = Losses();
  int moved = 0;
  for (const nlohmann::json& layer : Saved(job)) {
    for (const int halves : layer.at("halves")) moved += halves != 2 ? 1 : 0;
  }
  EXPECT_GT(moved, 0) << Saved(job);
  job = Job("-equal");
  job.attention.adapt_heads = job.attention.adapt_by_probe = false;
  ASSERT_TRUE(Run(job).ok());
  EXPECT_EQ(losses[0], Losses()[0]) << "nothing has been probed";
  EXPECT_NE(losses[1], Losses()[1]);
  EXPECT_TRUE(Saved(job).is_null());
}

TEST_P(HeadBudgetsTest, AreTheSameOnAnyRanksAndGroups) {
  TrainingJob job = Job("");
  ASSERT_TRUE(Run(job).ok());
  const nlohmann::json one = Saved(job);
  ASSERT_EQ(one.size(), 2u);
  for (const auto& [context, data] : {std::pair(2, 1), {4, 1}, {1, 2}, {2, 2}}) {
    SCOPED_TRACE(::testing::Message() << context << " ranks, " << data << " groups");
    job = Job(absl::StrCat("-", context, "-", data), context, data);
    ASSERT_TRUE(Run(job).ok());
    const nlohmann::json many = Saved(job);
    ASSERT_EQ(many.size(), 2u);
    for (size_t layer = 0; layer < 2; ++layer) {
      EXPECT_EQ(many[layer].at("halves"), one[layer].at("halves"));
      for (size_t head = 0; head < 4; ++head) {
        // Weights, of sums in another order, differ in their last bits; recall is in units of
        // 2^-22.
        EXPECT_NEAR(many[layer].at("recall")[head].get<double>(),
                    one[layer].at("recall")[head].get<double>(), 1 << 8);
      }
    }
  }
}

TEST_P(HeadBudgetsTest, GoOnAfterAnInterruption) {
  TrainingJob job = Job("", 2);
  ASSERT_TRUE(Run(job).ok());
  const std::vector<double> undisturbed = Losses();
  const nlohmann::json saved = Saved(job);
  job = Job("-2", 2);
  EXPECT_EQ(Run(job, 3).value(), Outcome::kStopped);
  EXPECT_EQ(Run(job).value(), Outcome::kCompleted);
  EXPECT_EQ(Losses(), std::vector<double>(undisturbed.begin() + 3, undisturbed.end()));
  EXPECT_EQ(Saved(job), saved);
  // On another number of ranks.
  job = Job("-3", 2);
  EXPECT_EQ(Run(job, 3).value(), Outcome::kStopped);
  EXPECT_EQ(Run(Job("-3", 1)).value(), Outcome::kCompleted);
  for (size_t step = 3; step < 6; ++step) EXPECT_NEAR(Losses()[step - 3], undisturbed[step], 1e-5);
}

TEST_P(HeadBudgetsTest, AreEqualAfterACheckpointThatHasNone) {
  TrainingJob job = Job("");
  job.attention.adapt_heads = job.attention.adapt_by_probe = false;
  ASSERT_TRUE(Run(job).ok());
  const std::vector<double> equal = Losses();
  job.checkpoint_directory += "-2";
  EXPECT_EQ(Run(job, 3).value(), Outcome::kStopped);
  job = Job("-2");
  EXPECT_EQ(Run(job).value(), Outcome::kCompleted);
  EXPECT_EQ(Losses()[0], equal[3]) << "step 4, which probes";
  EXPECT_NE(Losses()[1], equal[4]);
  EXPECT_EQ(Saved(job).size(), 2u);
}

TEST_P(HeadBudgetsTest, OfAnotherModelAreRefused) {
  TrainingJob job = Job("");
  ASSERT_TRUE(Run(job).ok());
  const std::string path = job.checkpoint_directory + "/step-0000000006/manifest.json";
  nlohmann::json manifest = nlohmann::json::parse(ReadFile(path).value());
  nlohmann::json& budgets = manifest.at("body").at("state").at("head_budgets");
  budgets.push_back(budgets.front());  // of a third layer
  manifest[checkpoint::kChecksumKey] = checkpoint::ChecksumOf(manifest);
  ASSERT_TRUE(WriteFileAtomically(path, manifest.dump()).ok());
  job.steps = 7;
  const absl::Status refused = Run(job).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kDataLoss) << refused;
  EXPECT_THAT(std::string(refused.message()), ::testing::HasSubstr("budgets are of another model"));
}

// Weights that do not change are evaluated otherwise once the budgets have moved.
TEST_P(HeadBudgetsTest, HoldInEvaluations) {
  TrainingJob job = Job("");
  job.schedule.peak = 0;
  job.steps = 1;
  ASSERT_TRUE(Run(job).ok());
  ASSERT_EQ(hosts_[0].evals.size(), 2u);
  EXPECT_NE(hosts_[0].evals[0].outcome.loss, hosts_[0].evals[1].outcome.loss);
  job.checkpoint_directory += "-equal";
  job.attention.adapt_heads = job.attention.adapt_by_probe = false;
  ASSERT_TRUE(Run(job).ok());
  EXPECT_EQ(hosts_[0].evals[0].outcome.loss, hosts_[0].evals[1].outcome.loss);
}

class KeyGroupBudgetsTest : public HeadBudgetsTest {};

// A checkpoint of heads that chose alone, gone on from with heads that choose in pairs.
TEST_P(KeyGroupBudgetsTest, HeadsThatCameToShareABudgetHaveTheSameOnes) {
  TrainingJob job = Job("");
  ASSERT_TRUE(Run(job).ok());
  const auto path = [&](int step) {
    return absl::StrFormat("%s/step-%010d/manifest.json", job.checkpoint_directory, step);
  };
  nlohmann::json manifest = nlohmann::json::parse(ReadFile(path(6)).value());
  nlohmann::json& budgets = manifest.at("body").at("state").at("head_budgets");
  ASSERT_EQ(budgets.size(), 2u);
  budgets[0]["halves"] = {1, 3, 2, 2};
  budgets[1]["halves"] = {3, 3, 1, 1};
  manifest[checkpoint::kChecksumKey] = checkpoint::ChecksumOf(manifest);
  ASSERT_TRUE(WriteFileAtomically(path(6), manifest.dump()).ok());
  job.attention.group_heads = 2;
  job.steps = 7;  // which does not probe
  ASSERT_TRUE(Run(job).ok());
  const nlohmann::json saved = nlohmann::json::parse(ReadFile(path(7)).value());
  const nlohmann::json& kept = saved.at("body").at("state").at("head_budgets");
  EXPECT_EQ(kept.at(0).at("halves"), nlohmann::json({2, 2, 2, 2}));
  EXPECT_EQ(kept.at(1).at("halves"), nlohmann::json({3, 3, 1, 1}));
}

INSTANTIATE_TEST_SUITE_P(Pattern, KeyGroupBudgetsTest, ::testing::Values(Pattern::kKeyGroups));
INSTANTIATE_TEST_SUITE_P(Patterns, HeadBudgetsTest,
                         ::testing::Values(Pattern::kVerticalSlash, Pattern::kAdaSpa,
                                           Pattern::kMoba, Pattern::kBlockTopK));

}  // namespace
}  // namespace ringleader::trainer
