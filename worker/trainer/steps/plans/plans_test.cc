// Plans of a running attempt: when they begin, what they change, and which are refused.
#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "base/testing/temp_dir.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/trainer/testing/attempt_in_process.h"

namespace ringleader::trainer {
namespace {

using ::testing::ElementsAre;
using testing::RecordingHost;
using ::testing::SizeIs;
using ::testing::StartsWith;

class PlansTest : public ::testing::Test {
 protected:
  PlansTest() {
    job_.steps = 6;
    job_.checkpoint_every_steps = 0;
    job_.eval_sequences = 0;
  }

  TempDir directory_;
  TrainingJob job_ = testing::TinyTrainingJob(directory_.path().string(), 1);
  std::vector<RecordingHost> hosts_;

  // The plan that the job started with, as version 2 from a step on.
  Plan Next(uint64_t effective_step) const {
    Plan plan = job_.plan;
    plan.version = 2;
    plan.effective_step = effective_step;
    return plan;
  }
  // plans[i] arrives during step i + 1. Returns each step's version on rank 0.
  std::vector<uint64_t> Run(const std::vector<Plan>& plans) {
    hosts_ = std::vector<RecordingHost>(job_.world_size);
    for (RecordingHost& host : hosts_) {
      for (size_t i = 0; i < plans.size(); ++i) host.plans[std::to_string(i)] = plans[i];
    }
    hosts_[0].on_step = [&](RecordingHost& host, const StepRecord& record) {
      if (record.step <= plans.size()) host.plan_bytes = std::to_string(record.step - 1);
    };
    for (const auto& outcome : testing::RunRanks(job_, hosts_)) {
      EXPECT_TRUE(outcome.ok()) << outcome.status();
    }
    std::filesystem::remove_all(job_.checkpoint_directory);
    std::vector<uint64_t> versions;
    for (const StepRecord& step : hosts_[0].steps) versions.push_back(step.plan_version);
    for (const RecordingHost& host : hosts_) {
      for (size_t i = 0; i < versions.size(); ++i) {
        EXPECT_EQ(host.steps.at(i).plan_version, versions[i]);
      }
    }
    return versions;
  }
};

TEST_F(PlansTest, BeginAtTheirStepOrAtOnce) {
  EXPECT_THAT(Run({Next(4)}), ElementsAre(1, 1, 1, 2, 2, 2));
  EXPECT_THAT(Run({Next(2)}), ElementsAre(1, 2, 2, 2, 2, 2));
  EXPECT_THAT(Run({Next(1)}), ElementsAre(1, 2, 2, 2, 2, 2));
  EXPECT_THAT(Run({Next(7)}), ElementsAre(1, 1, 1, 1, 1, 1));
}

TEST_F(PlansTest, ANewerOneReplacesOneThatHasNotBegun) {
  Plan newer = Next(5);
  newer.version = 3;
  EXPECT_THAT(Run({Next(4), newer}), ElementsAre(1, 1, 1, 1, 3, 3));
}

// A worker that connects again may tell an earlier one once more.
TEST_F(PlansTest, AnOlderOneTakesNothingBack) {
  Plan newer = Next(5);
  newer.version = 3;
  EXPECT_THAT(Run({newer, Next(2)}), ElementsAre(1, 1, 1, 1, 3, 3));
  EXPECT_THAT(Run({Next(2), job_.plan}), ElementsAre(1, 2, 2, 2, 2, 2));
}

TEST_F(PlansTest, ARefusedOneLeavesTheLastInForce) {
  std::vector<Plan> wrong(5, Next(2));
  wrong[0].layout = kernels::LayoutKind::kContiguous;
  wrong[1].stripe = 128;
  wrong[2].ring.kind = ring::RingKind::kAllGather;
  wrong[3].ring.inner = 2;
  wrong[4].ring.outer = 2;
  for (size_t i = 0; i < wrong.size(); ++i) {
    EXPECT_THAT(Run({wrong[i]}), ElementsAre(1, 1, 1, 1, 1, 1)) << i;
  }
}

// A resume would train it otherwise than it was trained.
TEST_F(PlansTest, OneThatDealsATrainedStepOtherwiseIsRefused) {
  job_.steps = 3;
  Plan weights = Next(2), speeds = Next(2);
  weights.sample_weights = *balance::SampleWeights::Create({{100, 1}, {512, 9}});
  speeds.group_permille = {500};
  for (Plan& plan : std::vector<Plan>{weights, speeds}) {
    EXPECT_THAT(Run({plan}), ElementsAre(1, 1, 1));
    plan.weights_from_step = 2;
    plan.earlier_weights = {{.from_step = 1, .weights = {}}};
    EXPECT_THAT(Run({plan}), ElementsAre(1, 2, 2)) << "what deals the next steps alone";
  }
}

TEST_F(PlansTest, AStripeThatIsLeftOpenIsOneTile) {
  job_ = testing::TinyTrainingJob(directory_.path().string(), 2);
  job_.steps = 2;
  Run({});
  const std::vector<StepRecord> of_a_tile = hosts_[1].steps;
  job_.plan.stripe = job_.attention.stripe = 0;
  Run({});
  for (size_t i = 0; i < of_a_tile.size(); ++i) {
    EXPECT_EQ(hosts_[1].steps.at(i).loss, of_a_tile[i].loss);
    EXPECT_EQ(hosts_[1].steps[i].layers.at(0).tiles_per_ring_step,
              of_a_tile[i].layers.at(0).tiles_per_ring_step);
  }
}

// In the job's log, where whoever changed the job looks: once, whatever the number of ranks.
TEST_F(PlansTest, WhyOneIsRefusedIsSaidOnce) {
  job_ = testing::TinyTrainingJob(directory_.path().string(), 2);
  job_.steps = 3;
  Plan wrong = Next(2);
  wrong.ring.inner = 4;
  hosts_ = std::vector<RecordingHost>(job_.world_size);
  for (RecordingHost& host : hosts_) host.plans["wrong"] = wrong;
  hosts_[0].on_step = [](RecordingHost& host, const StepRecord& record) {
    host.plan_bytes = record.step == 1 ? "nonsense" : record.step == 2 ? "wrong" : "";
  };
  ::testing::internal::CaptureStdout();
  for (const auto& outcome : testing::RunRanks(job_, hosts_)) {
    EXPECT_TRUE(outcome.ok()) << outcome.status();
  }
  const std::string said = ::testing::internal::GetCapturedStdout();
  const std::vector<std::string> parts = absl::StrSplit(said, "refused a plan: ");
  ASSERT_THAT(parts, SizeIs(3)) << said;
  EXPECT_THAT(parts[1], StartsWith("no plan: nonsense\n"));
  EXPECT_THAT(parts[2], StartsWith("plan 2: "));
}

class ChosenTilesTest : public PlansTest {
 protected:
  ChosenTilesTest() {
    job_.attention.pattern = patterns::Pattern::kVerticalSlash;
    job_.attention.select = patterns::Select::kTopK;
    job_.attention.budget = {.max_verticals = 16, .max_slashes = 2};
    job_.attention.sink_tokens = 0;
    job_.attention.local_blocks = 0;
    job_.steps = 2;
  }
};

TEST_F(ChosenTilesTest, LayersThatTheJobKeepsDenseStaySo) {
  job_.attention.dense_layers = {0};
  job_.attention.probe_every = 1;
  Run({Next(2)});
  for (const StepRecord& step : hosts_[0].steps) {
    ASSERT_EQ(step.probed_recall.size(), 2u);
    EXPECT_EQ(step.probed_recall[0], -1.0) << "there is nothing to probe";
    EXPECT_GT(step.probed_recall[1], 0.0);
    EXPECT_EQ(step.layers.at(0).density, 1.0);
    EXPECT_LT(step.layers.at(1).density, 1.0);
  }
}

TEST_F(ChosenTilesTest, ADenseEvaluationLeavesTheStepsTheirChoice) {
  job_.eval_attention = EvalAttention::kBoth;
  job_.eval_sequences = 1;
  job_.eval_every_steps = 1;
  Run({});
  ASSERT_EQ(hosts_[0].evals.size(), 3u);
  for (const StepRecord& step : hosts_[0].steps) {
    EXPECT_LT(step.layers.at(0).density, 1.0) << step.step;
    EXPECT_EQ(step.layers.at(0).slashes, hosts_[0].steps[0].layers.at(0).slashes);
    EXPECT_EQ(step.layers.at(0).slashes, 2);
  }
}

// By head in the steps that probe, and their mean from then on; evaluations between them change
// nothing.
TEST_F(ChosenTilesTest, ProbesAreReportedByHeadAndStandUntilTheNext) {
  job_.attention.probe_every = 4;
  job_.steps = 6;
  Run({});
  const std::vector<StepRecord>& steps = hosts_[0].steps;
  for (const StepRecord& step : steps) {
    const bool probes = step.step == 1 || step.step == 4;
    ASSERT_EQ(step.probed_recall.size(), 2u);
    for (int layer = 0; layer < 2; ++layer) {
      const std::vector<double>& heads = step.layers.at(layer).probed_recall;
      EXPECT_EQ(heads.empty(), !probes) << step.step;
      EXPECT_GT(step.probed_recall[layer], 0.0);
      EXPECT_LE(step.probed_recall[layer], 1.0);
      for (const double head : heads) EXPECT_LE(head, 1.0);
      if (!probes) continue;
      ASSERT_EQ(heads.size(), 4u);
      EXPECT_NEAR(step.probed_recall[layer], (heads[0] + heads[1] + heads[2] + heads[3]) / 4, 1e-9);
    }
  }
  EXPECT_EQ(steps.at(2).probed_recall, steps.at(0).probed_recall);
  EXPECT_EQ(steps.at(5).probed_recall, steps.at(3).probed_recall);
  EXPECT_NE(steps.at(3).probed_recall, steps.at(0).probed_recall);
}

}  // namespace
}  // namespace ringleader::trainer
