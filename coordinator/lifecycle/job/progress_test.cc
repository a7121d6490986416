// What a job's record makes of its ranks' reports.
#include <limits>

#include "base/testing/equals_text.h"
#include "coordinator/lifecycle/testing/machine_test.h"

namespace ringleader::lifecycle {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class ProgressTest : public testing::MachineTest {
 protected:
  // All ranks have as many tiles, but meet in ring steps of which one has twice the mean.
  void Report(uint64_t step, double seconds, double loss) {
    const std::vector<std::vector<uint64_t>> tiles = {{4, 0}, {2, 2}, {2, 2}, {0, 4}};
    for (int rank = 0; rank < 4; ++rank) {
      v1::StepReport report;
      report.set_step(step);
      report.set_rank(rank);
      report.set_step_seconds(seconds);
      report.set_tokens(100);
      report.set_loss(loss);
      report.mutable_time()->set_seconds(1'000'010);
      v1::LayerReport* const layer = report.add_layers();
      layer->mutable_tiles_per_ring_step()->Add(tiles[rank].begin(), tiles[rank].end());
      machine_.OnStep(report, {"node", "incarnation", step});
    }
  }
  static v1::SlowRank Slow(uint32_t rank, uint64_t step) {
    v1::SlowRank slow;
    slow.set_rank(rank);
    slow.set_ratio(1.5);
    slow.set_step(step);
    return slow;
  }
};

TEST_F(ProgressTest, FieldByField) {
  Run();
  Report(1, 2, 3);
  EXPECT_THAT(machine_.job().progress(), EqualsText(R"(
    step: 1 total_steps: 10 tokens: 100 loss: 3 first_loss: 3 worker_imbalance: 1 ring_imbalance: 2
    tokens_per_second: 50 eta_seconds: 18)"));
  const Effects effects = machine_.Take();
  EXPECT_EQ(effects.steps.size(), 1u);
  EXPECT_THAT(effects.changed_attempts, ElementsAre(1u));
  EXPECT_THAT(effects.nodes_that_served, ElementsAre("nodes/a", "nodes/b"));
  EXPECT_EQ(effects.released.size(), 4u);
  Report(2, 12, 2);  // a fifth of what it took longer
  EXPECT_THAT(machine_.job().progress(), EqualsText(R"(
    step: 2 total_steps: 10 tokens: 200 loss: 2 first_loss: 3 worker_imbalance: 1 ring_imbalance: 2
    tokens_per_second: 25 eta_seconds: 32)"));
  EXPECT_EQ(attempt().first_step(), 0u);
  EXPECT_EQ(attempt().last_step(), 2u);
  EXPECT_EQ(attempt().train_time().seconds(), 1'000'008) << "when its first step began";
}

// Steps of samples have tokens of their own, and steps may be trained again.
TEST_F(ProgressTest, TokensAreThoseOfTheStepsThatCount) {
  Run();
  const auto step = [&](uint64_t number, uint64_t tokens) {
    for (int rank = 0; rank < 4; ++rank) {
      v1::StepReport report;
      report.set_step(number);
      report.set_rank(rank);
      report.set_step_seconds(1);
      report.set_tokens(tokens);
      machine_.OnStep(report, {"node", "incarnation", 10 * number + tokens});
    }
    return machine_.job().progress().tokens();
  };
  EXPECT_EQ(step(1, 1533), 1533u);
  EXPECT_EQ(step(2, 792), 2325u);
  EXPECT_EQ(step(3, 514), 2839u);
  EXPECT_NEAR(machine_.job().progress().tokens_per_second(), 1200, 250);
  v1::CheckpointNotice checkpoint;
  checkpoint.set_step(2);
  machine_.OnCheckpoint(checkpoint);
  for (uint32_t rank = 0; rank < 4; ++rank) Exit(rank, v1::TrainerExited::FAILED);
  Pass(options_.max_retry_backoff);
  Run();
  EXPECT_EQ(step(3, 514), 2839u);
  EXPECT_EQ(step(4, 891), 3730u);
  EXPECT_EQ(step(std::numeric_limits<uint64_t>::max(), 1), (uint64_t{1} << 62) + 1);
}

TEST_F(ProgressTest, BeyondItsStepsNothingIsLeft) {
  Run();
  Report(12, 2, 3);
  EXPECT_EQ(machine_.job().progress().eta_seconds(), 0);
}

TEST_F(ProgressTest, AStepThatTookNoTimeHasNoPace) {
  Run();
  Report(1, 0, 3);
  EXPECT_EQ(machine_.job().progress().tokens_per_second(), 0);
}

TEST_F(ProgressTest, SlowRanksAreThoseOfNow) {
  machine_.NameSlowRanks({Slow(1, 50)});  // there is no attempt yet
  Run();
  machine_.NameSlowRanks({Slow(1, 50), Slow(2, 50), Slow(9, 50)});
  EXPECT_THAT(machine_.Take().changed_attempts, ElementsAre(1u));
  ASSERT_EQ(attempt().slow_ranks_size(), 2) << "there is no rank 9";
  EXPECT_THAT(attempt().slow_ranks(1), EqualsText("rank: 2 node: 'nodes/b' ratio: 1.5 step: 50"));
  EXPECT_THAT(machine_.SlowNodes(), ElementsAre("a", "b"));
  machine_.NameSlowRanks({Slow(1, 50), Slow(2, 50)});
  EXPECT_THAT(machine_.Take().changed_attempts, IsEmpty());
  machine_.NameSlowRanks({Slow(1, 50), Slow(2, 60)});
  EXPECT_THAT(machine_.Take().changed_attempts, ElementsAre(1u));
  EXPECT_EQ(attempt().slow_ranks(1).step(), 60u);
  machine_.NameSlowRanks({Slow(1, 50)});
  EXPECT_THAT(machine_.SlowNodes(), ElementsAre("a"));
  machine_.NameSlowRanks({});
  EXPECT_THAT(machine_.SlowNodes(), IsEmpty());
}

// A worker may report what it likes, and dashboards read the record.
TEST_F(ProgressTest, NoStepBeganBeforeAllTimes) {
  Run();
  Report(1, 1e300, 3);
  ASSERT_TRUE(attempt().has_train_time());
  EXPECT_THAT(attempt().train_time(), EqualsText(""));
}

TEST_F(ProgressTest, TokensOfBeforeARestartLieOnALine) {
  Run();
  for (uint64_t step = 1; step <= 4; ++step) Step(step);
  for (uint32_t rank = 0; rank < 4; ++rank) Exit(rank, v1::TrainerExited::FAILED);
  JobMachine successor(machine_.job(), &options_);
  successor.Place({On("nodes/a", 0)}, {}, ++token_, now_);
  for (int rank = 0; rank < 2; ++rank) {
    v1::StepReport report;
    report.set_step(3);  // from a checkpoint of step 2
    report.set_rank(rank);
    report.set_tokens(70);
    successor.OnStep(report, {});
  }
  EXPECT_EQ(successor.job().progress().tokens(), 270u);
}

}  // namespace
}  // namespace ringleader::lifecycle
