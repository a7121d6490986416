// Data-parallel groups of whole attempts: real ringleader-trainer processes on a tiny model.
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "worker/trainer/testing/attempt_test.h"

namespace ringleader::trainer {
namespace {

using testing::Losses;
using testing::RankLog;
using testing::TinyPlan;
using TrainerGroupsTest = testing::AttemptTest;

// Two groups train the samples that one rank trains, with different numbers of micro-batches: the
// ranks of a group that has come to its end take part in the sums of the others' gradients.
TEST_F(TrainerGroupsTest, GroupsMayTrainDifferentNumbersOfMicroBatches) {
  std::vector<std::vector<double>> losses;
  for (const int groups : {1, 2}) {
    v1::JobSpec spec = Job(1, groups);
    UseCheckpoints(&spec, Path(std::to_string(groups)));
    spec.mutable_data()->set_batching(v1::DataSpec::SAMPLES);
    spec.mutable_data()->set_overlong(v1::DataSpec::SPLIT);
    spec.mutable_training()->set_global_batch(4);
    v1::StepPlan plan = TinyPlan(spec);
    // By these weights one full sample takes longer than all others, and makes a group's step.
    for (const auto& [tokens, milliseconds] : {std::pair(480, 1.0), std::pair(512, 10.0)}) {
      v1::SampleWeight* const row = plan.add_sample_weights();
      row->set_tokens(tokens);
      row->set_milliseconds(milliseconds);
    }
    const std::vector<RankLog> logs = Start(spec, plan)->Finish();
    losses.push_back(Losses(logs[0]));
    ASSERT_EQ(losses.back().size(), 6u) << Output();
    for (const v1::StepReport& step : logs[0].steps) {
      EXPECT_EQ(step.samples(), 4u);
      EXPECT_EQ(step.micro_batches(), 4u) << "vertical-slash is chosen for one sample";
      EXPECT_GT(step.overlong_documents(), 0u);
    }
  }
  for (size_t i = 0; i < losses[0].size(); ++i) {
    EXPECT_NEAR(losses[1][i], losses[0][i], 1e-4 * losses[0][i]) << i;
  }
}

// Two rings of two, whose ranks share out heads in pairs over gRPC.
TEST_F(TrainerGroupsTest, RanksThatShareHeadsTrainWhatOneRankTrains) {
  std::vector<std::vector<double>> losses;
  for (const int context : {1, 4}) {
    v1::JobSpec spec = Job(context);
    UseCheckpoints(&spec, Path(std::to_string(context)));
    if (context > 1) spec.mutable_parallelism()->set_heads(2);
    const std::vector<RankLog> logs = RunToEnd(spec);
    losses.push_back(Losses(logs[0]));
    ASSERT_EQ(losses.back().size(), 6u) << Output();
    for (const v1::StepReport& step : logs.back().steps) {
      EXPECT_EQ(step.head_bytes() > 0, context > 1);
      EXPECT_EQ(step.ring_bytes() > 0, context > 1);
    }
  }
  for (size_t i = 0; i < losses[0].size(); ++i) {
    EXPECT_NEAR(losses[1][i], losses[0][i], 1e-4 * losses[0][i]) << i;
  }
}

}  // namespace
}  // namespace ringleader::trainer
