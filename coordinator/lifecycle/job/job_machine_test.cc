#include "coordinator/lifecycle/job/job_machine.h"

#include "coordinator/lifecycle/testing/machine_test.h"

namespace ringleader::lifecycle {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using v1::Attempt;
using v1::Job;
using v1::RankStatus;
using v1::TrainerExited;

using JobMachineTest = testing::MachineTest;

TEST_F(JobMachineTest, StartsConnectsAndSucceeds) {
  Place();
  EXPECT_EQ(state(), Job::STARTING);
  EXPECT_THAT(Commands(), ElementsAre("a:start", "b:start"));
  for (const uint32_t rank : {3, 0, 1}) Ready(rank);
  EXPECT_THAT(Commands(), IsEmpty());
  Ready(2);
  const Effects effects = machine_.Take();
  ASSERT_EQ(effects.commands.size(), 2u);
  EXPECT_THAT(effects.commands[1].command.connect().addresses(),
              ElementsAre("host:1000", "host:1001", "host:1002", "host:1003"));
  EXPECT_EQ(state(), Job::RUNNING);
  Step(1);
  EXPECT_EQ(machine_.job().progress().tokens(), 100);
  EXPECT_EQ(machine_.job().progress().tokens_per_second(), 50);
  EXPECT_EQ(machine_.job().progress().eta_seconds(), 18);
  for (uint32_t rank = 0; rank < 3; ++rank) Exit(rank, TrainerExited::COMPLETED);
  EXPECT_EQ(state(), Job::RUNNING);
  Exit(3, TrainerExited::COMPLETED);
  EXPECT_EQ(state(), Job::SUCCEEDED);
  EXPECT_EQ(attempt().state(), Attempt::SUCCEEDED);
  EXPECT_TRUE(machine_.Finished());
}

// Trainers are told how many share out heads; the job's record says that the planner picks.
TEST_F(JobMachineTest, TrainersGetTheHeadsThatThePlanPicked) {
  for (const bool picks : {true, false}) {
    v1::Job job = NewJob();
    job.mutable_spec()->mutable_parallelism()->set_heads(picks ? 0 : 2);
    JobMachine machine(job, &options_);
    v1::StepPlan plan;
    plan.set_heads(picks ? 4 : 0);
    machine.Place({On("nodes/a", 0)}, plan, 7, now_);
    const Effects effects = machine.Take();
    ASSERT_EQ(effects.commands.size(), 1u);
    const v1::StartTrainers& start = effects.commands[0].command.start();
    EXPECT_EQ(start.spec().parallelism().heads(), picks ? 4u : 2u);
    EXPECT_EQ(machine.job().spec().parallelism().heads(), picks ? 0u : 2u);
  }
}

TEST_F(JobMachineTest, ARunningJobIsProfiledThroughRankZero) {
  EXPECT_EQ(machine_.Profile(2).code(), absl::StatusCode::kFailedPrecondition);
  Run();
  EXPECT_TRUE(machine_.Profile(2).ok());
  ASSERT_EQ(machine_.effects().commands.size(), 1u);
  EXPECT_EQ(machine_.effects().commands[0].command.profile().steps(), 2u);
  EXPECT_THAT(Commands(), ElementsAre("a:profile"));
  EXPECT_EQ(state(), Job::RUNNING);
}

TEST_F(JobMachineTest, NamesTheRankAtFaultAndAbortsTheOthers) {
  Run();
  Exit(0, TrainerExited::FAILED, /*collateral=*/true);
  EXPECT_THAT(Commands(), ElementsAre("a:ABORT", "b:ABORT"));
  EXPECT_EQ(attempt().state(), Attempt::STOPPING);
  Exit(3, TrainerExited::FAILED);
  EXPECT_THAT(Commands(), IsEmpty()) << "they were told";
  Exit(1, TrainerExited::FAILED, true);
  EXPECT_EQ(state(), Job::RUNNING);  // rank 2 may still run
  Exit(2, TrainerExited::FAILED, true);
  EXPECT_EQ(attempt().state(), Attempt::FAILED);
  EXPECT_EQ(attempt().failure().rank(), 3);
  EXPECT_EQ(attempt().failure().node(), "nodes/b");
  EXPECT_EQ(state(), Job::RETRYING);
  EXPECT_THAT(machine_.job().state_reason(), HasSubstr("rank 3 on nodes/b: out of memory"));
  Pass(options_.retry_backoff - absl::Milliseconds(1));
  EXPECT_EQ(state(), Job::RETRYING);
  Pass(absl::Milliseconds(1));
  EXPECT_EQ(state(), Job::PENDING);
}

TEST_F(JobMachineTest, ANewAttemptIsToldWhatWasSaved) {
  Run();
  v1::CheckpointNotice checkpoint;
  checkpoint.set_step(5);
  machine_.OnCheckpoint(checkpoint);
  for (const uint32_t rank : {0, 1, 2, 3}) Exit(rank, TrainerExited::FAILED);
  Pass(options_.retry_backoff);
  machine_.Take();
  Place();
  for (const Effects::NodeCommand& effect : machine_.Take().commands) {
    EXPECT_EQ(effect.command.start().checkpoint_step(), 5u);
  }
}

TEST_F(JobMachineTest, TheFirstOfSeveralIsToBlame) {
  Run();
  Exit(2, TrainerExited::FAILED);
  Exit(1, TrainerExited::FAILED);
  for (const uint32_t rank : {0, 3}) Exit(rank, TrainerExited::FAILED, true);
  EXPECT_EQ(attempt().failure().rank(), 2);
}

TEST_F(JobMachineTest, RetriesDoubleTheirBackOffAndRunOut) {
  for (int retry = 1; retry <= 2; ++retry) {
    Run();
    for (uint32_t rank = 0; rank < 4; ++rank) Exit(rank, TrainerExited::FAILED, rank > 0);
    ASSERT_EQ(state(), Job::RETRYING);
    Pass(options_.retry_backoff * retry - absl::Milliseconds(1));
    EXPECT_EQ(state(), Job::RETRYING);
    Pass(absl::Milliseconds(1));
    EXPECT_EQ(state(), Job::PENDING);
  }
  Run();
  for (uint32_t rank = 0; rank < 4; ++rank) Exit(rank, TrainerExited::FAILED, rank > 0);
  EXPECT_EQ(state(), Job::FAILED);
  EXPECT_THAT(machine_.job().state_reason(), HasSubstr("no retries left"));
}

TEST_F(JobMachineTest, OnlyNewStepsRefillTheBudget) {
  const auto fail = [&] {
    for (uint32_t rank = 0; rank < 4; ++rank) Exit(rank, TrainerExited::FAILED, rank > 0);
    Pass(absl::Minutes(1));
  };
  Run();
  Step(1);
  Step(2);
  fail();
  EXPECT_EQ(machine_.job().retries_used(), 1);
  Run();
  Step(2);  // again
  EXPECT_EQ(machine_.job().retries_used(), 1);
  fail();
  EXPECT_EQ(machine_.job().retries_used(), 2);
  Run();
  Step(3);
  EXPECT_EQ(machine_.job().retries_used(), 0);
}

TEST_F(JobMachineTest, WhatNoRetryMendsEndsTheJob) {
  Run();
  Exit(1, TrainerExited::FAILED, false, /*retryable=*/false);
  for (const uint32_t rank : {0, 2, 3}) Exit(rank, TrainerExited::FAILED, true);
  EXPECT_EQ(state(), Job::FAILED);
}

TEST_F(JobMachineTest, OutOfSightIsUnknownAndBackIsRunning) {
  Run();
  machine_.OnSight("nodes/b", now_, now_ + options_.lease);
  EXPECT_EQ(state(), Job::UNKNOWN);
  EXPECT_EQ(attempt().state(), Attempt::UNKNOWN);
  EXPECT_THAT(Commands(), IsEmpty());
  Pass(options_.adoption_timeout - absl::Seconds(1));
  EXPECT_EQ(state(), Job::UNKNOWN);
  machine_.OnSight("nodes/b", std::nullopt, now_);
  EXPECT_EQ(state(), Job::RUNNING);
  Pass(options_.adoption_timeout);
  EXPECT_EQ(state(), Job::RUNNING);
}

TEST_F(JobMachineTest, PastTheTimeOutItIsFencedAndTheOthersMustBeDeadFirst) {
  Run();
  machine_.OnSight("nodes/b", now_, now_);
  Pass(options_.adoption_timeout);
  EXPECT_THAT(Commands(), ElementsAre("a:ABORT"));
  EXPECT_EQ(attempt().ranks(2).state(), RankStatus::LOST);
  EXPECT_EQ(attempt().state(), Attempt::STOPPING);
  Pass(absl::Hours(1));
  EXPECT_EQ(attempt().state(), Attempt::STOPPING);  // node a is in sight, and has not said yet
  Exit(0, TrainerExited::FAILED, true);
  Exit(1, TrainerExited::FAILED, true);
  EXPECT_EQ(attempt().state(), Attempt::FENCED);
  EXPECT_EQ(attempt().failure().rank(), 2);
  EXPECT_EQ(state(), Job::RETRYING);
  Pass(options_.retry_backoff);
  EXPECT_EQ(state(), Job::PENDING);
}

TEST_F(JobMachineTest, ALostNodeIsNamedAtOnceAndReplacedOnlyWhenItIsDead) {
  Run();
  Exit(0, TrainerExited::FAILED, true);
  Exit(1, TrainerExited::FAILED, true);
  machine_.OnSight("nodes/b", now_, now_ + options_.lease);
  Pass(options_.lease);
  EXPECT_EQ(attempt().state(), Attempt::FAILED);
  EXPECT_EQ(attempt().failure().rank(), 2);
  EXPECT_THAT(attempt().failure().message(), HasSubstr("contact with its node was lost"));
  EXPECT_EQ(state(), Job::RETRYING);
  EXPECT_THAT(machine_.job().state_reason(), HasSubstr("trainers on nodes/b are known to be dead"));
  Pass(options_.adoption_timeout - options_.lease - absl::Seconds(1));
  EXPECT_EQ(state(), Job::RETRYING);
  Pass(absl::Seconds(1));
  EXPECT_EQ(state(), Job::PENDING);
}

TEST_F(JobMachineTest, AReplacedWorkerTookItsTrainersAlong) {
  Run();
  machine_.OnWorkerDied("nodes/b", "its worker died", now_);
  EXPECT_THAT(Commands(), ElementsAre("a:ABORT"));
  Exit(0, TrainerExited::FAILED, true);
  Exit(1, TrainerExited::FAILED, true);
  EXPECT_EQ(attempt().state(), Attempt::FAILED);
  EXPECT_EQ(attempt().failure().rank(), 2);
  EXPECT_EQ(attempt().failure().node(), "nodes/b");
}

TEST_F(JobMachineTest, PauseWritesACheckpointAndResumeStartsAnAttempt) {
  Run();
  ASSERT_TRUE(machine_.Pause(now_).ok());
  EXPECT_EQ(state(), Job::PAUSING);
  EXPECT_THAT(Commands(), ElementsAre("a:CHECKPOINT", "b:CHECKPOINT"));
  EXPECT_TRUE(machine_.Pause(now_).ok());
  EXPECT_THAT(Commands(), IsEmpty());
  EXPECT_TRUE(absl::IsFailedPrecondition(machine_.Resume(now_)));
  // The first to leave takes the connections of the others along.
  Exit(0, TrainerExited::STOPPED);
  Exit(1, TrainerExited::FAILED, true);
  Exit(2, TrainerExited::STOPPED);
  Exit(3, TrainerExited::STOPPED);
  EXPECT_EQ(state(), Job::PAUSED);
  EXPECT_EQ(attempt().state(), Attempt::PAUSED);
  ASSERT_TRUE(machine_.Resume(now_).ok());
  EXPECT_EQ(state(), Job::PENDING);
  EXPECT_EQ(machine_.job().retries_used(), 0);
}

TEST_F(JobMachineTest, ATrainerThatFailsWhilePausingLeavesThePauseStanding) {
  Run();
  ASSERT_TRUE(machine_.Pause(now_).ok());
  machine_.Take();
  Exit(1, TrainerExited::FAILED);
  EXPECT_EQ(machine_.job().state_reason(), "writing a checkpoint");
  EXPECT_THAT(Commands(), ElementsAre("a:ABORT", "b:ABORT"));
  for (const uint32_t rank : {0, 2, 3}) Exit(rank, TrainerExited::FAILED, true);
  EXPECT_EQ(attempt().state(), Attempt::FAILED);
  EXPECT_EQ(state(), Job::PAUSED);
}

TEST_F(JobMachineTest, CancelWaitsForEveryTrainerToBeDead) {
  Run();
  ASSERT_TRUE(machine_.Cancel(now_).ok());
  EXPECT_THAT(Commands(), ElementsAre("a:ABORT", "b:ABORT"));
  machine_.OnSight("nodes/b", now_, now_);
  Exit(0, TrainerExited::FAILED, true);
  Exit(1, TrainerExited::FAILED, true);
  EXPECT_EQ(state(), Job::CANCELLING);
  Pass(options_.adoption_timeout);
  EXPECT_EQ(state(), Job::CANCELLED);
  EXPECT_EQ(attempt().state(), Attempt::CANCELLED);
  EXPECT_TRUE(machine_.Cancel(now_).ok());
  EXPECT_THAT(std::string(machine_.Pause(now_).message()), HasSubstr("CANCELLED"));
}

TEST_F(JobMachineTest, CancelMayWaitForACheckpointAndNeedNot) {
  Run();
  ASSERT_TRUE(machine_.Cancel(now_, /*checkpoint=*/true).ok());
  EXPECT_THAT(Commands(), ElementsAre("a:CHECKPOINT", "b:CHECKPOINT"));
  EXPECT_EQ(state(), Job::CANCELLING);
  machine_.OnCheckpoint([] {
    v1::CheckpointNotice notice;
    notice.set_step(3);
    return notice;
  }());
  for (const uint32_t rank : {0, 1}) Exit(rank, TrainerExited::STOPPED);
  machine_.Take();
  // Somebody does not want to wait for the others.
  ASSERT_TRUE(machine_.Cancel(now_, /*checkpoint=*/true).ok());
  EXPECT_THAT(Commands(), IsEmpty());
  ASSERT_TRUE(machine_.Cancel(now_).ok());
  EXPECT_EQ(machine_.job().state_reason(), "cancelled by a user");
  EXPECT_THAT(Commands(), ElementsAre("b:ABORT"));
  for (const uint32_t rank : {2, 3}) Exit(rank, TrainerExited::FAILED, true);
  EXPECT_EQ(state(), Job::CANCELLED);
  EXPECT_EQ(attempt().state(), Attempt::CANCELLED);
  EXPECT_EQ(machine_.job().progress().checkpoint_step(), 3u);
}

TEST_F(JobMachineTest, ACancelledJobSaysWhichCheckpointItLeaves) {
  Run();
  ASSERT_TRUE(machine_.Cancel(now_, /*checkpoint=*/true).ok());
  EXPECT_EQ(machine_.job().state_reason(), "cancelled by a user; a last checkpoint is written");
  for (const uint32_t rank : {0, 1}) Exit(rank, TrainerExited::STOPPED);
  v1::CheckpointNotice notice;
  notice.set_step(3);
  machine_.OnCheckpoint(notice);
  for (const uint32_t rank : {2, 3}) Exit(rank, TrainerExited::STOPPED);
  EXPECT_EQ(state(), Job::CANCELLED);
  EXPECT_EQ(machine_.job().state_reason(),
            "cancelled by a user; the newest checkpoint is of step 3");
}

TEST_F(JobMachineTest, ACancelledJobThatLeavesNoCheckpointSaysSo) {
  Run();
  ASSERT_TRUE(machine_.Cancel(now_, /*checkpoint=*/true).ok());
  for (const uint32_t rank : {0, 1, 2, 3}) Exit(rank, TrainerExited::STOPPED);
  EXPECT_EQ(state(), Job::CANCELLED);
  EXPECT_EQ(machine_.job().state_reason(), "cancelled by a user; no checkpoint was written");
}

TEST_F(JobMachineTest, AFailedJobIsNotResumedBesideItsTrainers) {
  Run();
  machine_.OnSight("nodes/b", now_, now_);
  Exit(0, TrainerExited::FAILED, /*collateral=*/false, /*retryable=*/false);
  Exit(1, TrainerExited::FAILED, true);
  Pass(options_.blame_window);
  ASSERT_EQ(state(), Job::FAILED);
  EXPECT_THAT(std::string(machine_.Resume(now_).message()),
              HasSubstr("wait until its trainers are known to be dead"));
  Pass(options_.adoption_timeout);
  EXPECT_TRUE(machine_.Resume(now_).ok());
  EXPECT_EQ(state(), Job::PENDING);
}

TEST_F(JobMachineTest, CancelWithoutAnAttempt) {
  ASSERT_TRUE(machine_.Cancel(now_).ok());
  EXPECT_EQ(state(), Job::CANCELLED);
  EXPECT_TRUE(machine_.Finished());
}

TEST_F(JobMachineTest, MovingOffANodeCostsNoRetry) {
  Run();
  machine_.MoveOff("nodes/c", "elsewhere");
  EXPECT_EQ(attempt().state(), Attempt::RUNNING);
  machine_.MoveOff("nodes/a", "it is being drained");
  EXPECT_THAT(Commands(), ElementsAre("a:CHECKPOINT", "b:CHECKPOINT"));
  for (uint32_t rank = 0; rank < 4; ++rank) Exit(rank, TrainerExited::STOPPED);
  EXPECT_EQ(state(), Job::PENDING);
  EXPECT_EQ(machine_.job().retries_used(), 0);
}

TEST_F(JobMachineTest, WhoIsNotReadyInTimeIsNamed) {
  Place();
  for (const uint32_t rank : {0, 1, 3}) Ready(rank);
  machine_.Take();
  Pass(options_.start_timeout);
  EXPECT_THAT(Commands(), ElementsAre("a:ABORT", "b:ABORT"));
  for (uint32_t rank = 0; rank < 4; ++rank) Exit(rank, TrainerExited::FAILED, true);
  EXPECT_EQ(attempt().failure().rank(), 2);
  EXPECT_THAT(attempt().failure().message(), HasSubstr("not ready"));
}

TEST_F(JobMachineTest, ARefusedStartIsAFailureThatCanBeRetried) {
  Place();
  machine_.OnStartRefused("nodes/b", "2 of 2 trainers are taken", now_);
  Exit(0, TrainerExited::FAILED, true);
  Exit(1, TrainerExited::FAILED, true);
  EXPECT_EQ(state(), Job::RETRYING);
  EXPECT_THAT(machine_.job().state_reason(), HasSubstr("2 of 2 trainers are taken"));
}

// Whatever state a coordinator dies in, its successor takes the job up from the record alone.
TEST_F(JobMachineTest, TakesUpAFailingAttempt) {
  Run();
  Exit(3, TrainerExited::FAILED);
  JobMachine successor(machine_.job(), &options_);
  now_ += absl::Seconds(1);
  successor.Tick(now_);
  EXPECT_EQ(successor.attempt()->state(), Attempt::STOPPING);
  for (const uint32_t rank : {0, 1, 2}) {
    TrainerExited exited;
    exited.set_rank(rank);
    exited.set_outcome(TrainerExited::FAILED);
    exited.set_collateral(true);
    successor.OnExit(exited, now_);
  }
  EXPECT_EQ(successor.attempt()->failure().rank(), 3);
  EXPECT_EQ(successor.job().state(), Job::RETRYING);
}

TEST_F(JobMachineTest, EveryTransitionChangesTheEtag) {
  const std::string first = machine_.job().etag();
  Place();
  const std::string second = machine_.job().etag();
  EXPECT_NE(first, second);
  machine_.Wait("a new reason is no transition");
  EXPECT_EQ(machine_.job().etag(), second);
}

TEST_F(JobMachineTest, ReportsThatComeAfterTheEndFillTheRecord) {
  Run();
  Step(1);
  machine_.OnSight("nodes/a", now_, now_);
  machine_.OnSight("nodes/b", now_, now_);
  Pass(options_.adoption_timeout + options_.retry_backoff);
  Pass(options_.retry_backoff);
  machine_.OnSight("nodes/a", std::nullopt, now_);
  machine_.OnSight("nodes/b", std::nullopt, now_);
  Run();
  Step(4);  // from a checkpoint of step 3, which the first attempt wrote while out of sight
  machine_.Take();
  const auto late = [&](uint64_t step) {
    v1::StepReport report;
    report.set_step(step);
    machine_.OnLateStep(1, report);
  };
  for (const uint64_t step : {1, 2, 3, 4}) late(step);
  std::vector<uint64_t> recorded;
  for (const v1::StepReport& step : machine_.Take().steps) recorded.push_back(step.step());
  EXPECT_THAT(recorded, ElementsAre(2, 3));
  EXPECT_EQ(machine_.job().progress().step(), 4);
}

TEST_F(JobMachineTest, ReportsThatComeBeforeTheNextAttemptTrainsFillTheRecord) {
  Run();
  Step(1);
  for (uint32_t rank = 0; rank < 4; ++rank) Exit(rank, TrainerExited::FAILED, rank > 0);
  Pass(options_.retry_backoff);
  Run();
  v1::StepReport report;
  report.set_step(2);
  machine_.OnLateStep(1, report);
  EXPECT_EQ(machine_.Take().steps.size(), 1u);
}

TEST_F(JobMachineTest, WhenItIsTriedAgainIsSaidUntilItIs) {
  Run();
  for (uint32_t rank = 0; rank < 4; ++rank) Exit(rank, TrainerExited::FAILED, rank > 0);
  EXPECT_TRUE(machine_.job().has_retry_time());
  Pass(options_.retry_backoff);
  Run();
  EXPECT_FALSE(machine_.job().has_retry_time());
}

TEST_F(JobMachineTest, TheSameReasonToWaitIsNoChange) {
  machine_.Wait("no node is free");
  EXPECT_TRUE(machine_.Take().job_changed);
  machine_.Wait("no node is free");
  EXPECT_FALSE(machine_.Take().any());
}

}  // namespace
}  // namespace ringleader::lifecycle
