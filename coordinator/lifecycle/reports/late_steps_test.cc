// How far an attempt came is not for any one rank to say.
#include "coordinator/lifecycle/testing/controller_test.h"
#include "coordinator/lifecycle/testing/machine_test.h"

namespace ringleader::lifecycle {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

v1::StepReport Said(uint64_t step, int32_t rank) {
  v1::StepReport report;
  report.set_step(step);
  report.set_rank(rank);
  return report;
}

class LateStepsTest : public testing::MachineTest {
 protected:
  std::vector<uint64_t> Recorded() {
    std::vector<uint64_t> steps;
    for (const v1::StepReport& step : machine_.Take().steps) steps.push_back(step.step());
    return steps;
  }
  void Fail() {
    for (uint32_t rank = 0; rank < 4; ++rank) Exit(rank, v1::TrainerExited::FAILED, rank > 0);
  }
  void FailAndRunAgain() {
    Fail();
    Pass(options_.max_retry_backoff);
    Run();
  }
};

TEST_F(LateStepsTest, ARanksWordAloneMovesNoRecord) {
  Run();
  Step(1);
  FailAndRunAgain();
  for (const uint64_t step : {2, 3, 10}) machine_.OnLateStep(1, Said(step, 3));
  EXPECT_THAT(Recorded(), IsEmpty());
  EXPECT_EQ(machine_.job().attempts(0).last_step(), 1u);
  EXPECT_EQ(machine_.job().retries_used(), 1u);
  Step(2);
  EXPECT_EQ(machine_.job().retries_used(), 0u) << "it got further than ever";
}

TEST_F(LateStepsTest, BeforeTheNextAttemptTheyAreRankZeros) {
  Run();
  Step(1);
  Fail();
  machine_.Take();
  machine_.OnLateStep(1, Said(10, 3));
  EXPECT_EQ(machine_.job().progress().step(), 1u);
  for (const int32_t rank : {3, 0}) machine_.OnLateStep(1, Said(2, rank));
  EXPECT_THAT(Recorded(), ElementsAre(2));
  EXPECT_EQ(machine_.job().progress().step(), 2u);
}

// All ranks had trained what the next attempt began after.
TEST_F(LateStepsTest, BelowALaterAttemptsFirstStepAnyRanksWordWillDo) {
  Run();
  Step(1);
  FailAndRunAgain();
  Step(5);
  machine_.Take();
  for (const uint64_t step : {3, 4, 5}) machine_.OnLateStep(1, Said(step, 3));
  EXPECT_THAT(Recorded(), ElementsAre(3, 4));
}

TEST_F(LateStepsTest, AnAttemptThatEndsCameAStepFurtherThanAllSaidOrAsFarAsRankZeroSays) {
  Run();
  Step(1);
  machine_.Take();
  for (const uint64_t step : {2, 3, 9}) machine_.OnStep(Said(step, 3), {"b", "b.1", step});
  machine_.OnStep(Said(4, 0), {"a", "a.1", 1});
  Fail();
  EXPECT_EQ(machine_.effects().released.size(), 4u) << "nobody waits for them";
  EXPECT_THAT(Recorded(), ElementsAre(2, 4));
  EXPECT_EQ(attempt().last_step(), 4u);
  EXPECT_EQ(machine_.job().progress().step(), 4u);
}

TEST_F(LateStepsTest, AnAttemptThatEndsInItsFirstStepBeganAfterTheCheckpoint) {
  Run();
  v1::CheckpointNotice checkpoint;
  checkpoint.set_step(5);
  machine_.OnCheckpoint(checkpoint);
  FailAndRunAgain();
  for (const uint64_t step : {6, 7}) machine_.OnStep(Said(step, 3), {"b", "b.1", step});
  Fail();
  EXPECT_THAT(Recorded(), ElementsAre(6));
}

// Whoever trained past it says so: the next attempt does without.
TEST_F(LateStepsTest, AChangeThatARankTrainedPastIsMissed) {
  Run();
  v1::StepPlan plan;
  plan.set_version(2);
  plan.set_effective_step(4);
  machine_.Replan(plan);
  Step(1);
  v1::StepReport last = Said(4, 3);
  last.set_plan_version(1);
  machine_.OnStep(last, {});
  Fail();
  EXPECT_TRUE(machine_.Missed(2));
  EXPECT_EQ(attempt().last_step(), 1u);
}

// Job j of ranks 0 and 1 on node a, and 2 and 3 on b, of which all said step 1 before it failed for
// good.
class EndedStepsTest : public testing::ControllerTest {
 protected:
  EndedStepsTest() {
    a_ = Connect("a", "a.1");
    b_ = Connect("b", "b.1");
    v1::JobSpec spec = Spec("j", 4);
    spec.mutable_training()->set_steps(1'000'000'000'000);
    spec.mutable_scheduling()->set_max_retries(0);
    EXPECT_TRUE(Do([&] { return controller_->CreateJob(spec, {}); }).ok());
    controller_->RunOnce();
    token_ = Job().attempts(0).fencing_token();
    for (const uint32_t rank : {0, 1, 2, 3}) Tell(rank, Ready(rank));
    for (const int32_t rank : {0, 1, 2, 3}) Tell(rank, Step(1, rank));
    for (const uint32_t rank : {0, 1, 2, 3}) {
      v1::AttemptEvent event;
      event.mutable_trainer_exited()->set_rank(rank);
      event.mutable_trainer_exited()->set_outcome(v1::TrainerExited::FAILED);
      Tell(rank, event);
    }
    EXPECT_EQ(Job().state(), v1::Job::FAILED);
    EXPECT_THAT(Steps(), ElementsAre(1));
  }
  void Tell(int32_t rank, const v1::AttemptEvent& event) {
    if (rank < 2) {
      Say(a_, ++said_by_a_, event);
    } else {
      Say(b_, ++said_by_b_, event);
    }
  }

  std::shared_ptr<testing::FakeSession> a_, b_;
  uint64_t said_by_a_ = 0, said_by_b_ = 0;
};

TEST_F(EndedStepsTest, ARanksWordAloneIsNotRecorded) {
  for (const uint64_t step : {2, 64, 640'000'000}) Tell(3, Step(step, 3));
  EXPECT_THAT(Steps(), ElementsAre(1));
  EXPECT_EQ(b_->acknowledged(), said_by_b_);
}

TEST_F(EndedStepsTest, RankZerosIsAsFarAsReportsMayComeLate) {
  Tell(0, Step(100'002, 0));
  EXPECT_THAT(Steps(), ElementsAre(1));
  Tell(0, Step(100'001, 0));
  EXPECT_THAT(Steps(), ElementsAre(1, 100'001));
}

TEST_F(EndedStepsTest, AGapIsFilledByAnyRankAndKnownStepsStay) {
  Tell(0, Step(2, 0));
  Tell(0, Step(5, 0));
  for (const uint64_t step : {1, 3, 5, 6}) Tell(3, Step(step, 3));
  EXPECT_THAT(Steps(), ElementsAre(1, 2, 5, 3)) << "in the order in which they came";
}

}  // namespace
}  // namespace ringleader::lifecycle
