// How attempts end, and what becomes of the job: the cases in which two things happen at once.
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

class OutcomeTest : public testing::MachineTest {
 protected:
  // What a coordinator that is started now makes of the record.
  void Restart() {
    successor_.emplace(machine_.job(), &options_);
    successor_->Tick(now_);
  }
  static TrainerExited Failed(uint32_t rank, bool collateral) {
    TrainerExited exited;
    exited.set_rank(rank);
    exited.set_outcome(TrainerExited::FAILED);
    exited.set_collateral(collateral);
    exited.set_retryable(true);
    return exited;
  }
  void Checkpoint(uint64_t step) {
    v1::CheckpointNotice checkpoint;
    checkpoint.set_step(step);
    machine_.OnCheckpoint(checkpoint);
  }

  std::optional<JobMachine> successor_;
};

TEST_F(OutcomeTest, AFailureDuringAnOrderlyStopIsAFailure) {
  Run();
  machine_.MoveOff("nodes/a", "it is being drained");
  Exit(0, TrainerExited::STOPPED);
  Exit(1, TrainerExited::FAILED);
  Exit(2, TrainerExited::STOPPED);
  Exit(3, TrainerExited::STOPPED);
  EXPECT_EQ(attempt().state(), Attempt::FAILED);
  EXPECT_EQ(attempt().failure().rank(), 1);
  EXPECT_EQ(state(), Job::RETRYING);
  EXPECT_EQ(machine_.job().retries_used(), 1u);
}

TEST_F(OutcomeTest, LosingAPeerThatLeftInOrderIsNone) {
  Run();
  machine_.MoveOff("nodes/a", "it is being drained");
  Exit(1, TrainerExited::FAILED, /*collateral=*/true);
  for (const uint32_t rank : {0, 2, 3}) Exit(rank, TrainerExited::STOPPED);
  EXPECT_EQ(attempt().state(), Attempt::PAUSED);
  EXPECT_FALSE(attempt().has_failure());
  EXPECT_EQ(state(), Job::PENDING);
  EXPECT_EQ(machine_.job().retries_used(), 0u);
}

TEST_F(OutcomeTest, WhereNobodyLeftInOrderACollateralFailureStands) {
  Run();
  for (uint32_t rank = 0; rank < 4; ++rank) Exit(rank, TrainerExited::FAILED, true);
  EXPECT_EQ(attempt().state(), Attempt::FAILED);
  EXPECT_EQ(attempt().failure().rank(), 0);
  EXPECT_EQ(state(), Job::RETRYING);
}

TEST_F(OutcomeTest, WhatFailedFirstIsNotFencedByWhatIsLostAfterIt) {
  Run();
  Exit(0, TrainerExited::FAILED);
  Exit(1, TrainerExited::FAILED, true);
  machine_.OnSight("nodes/b", now_, now_);
  now_ += options_.adoption_timeout;
  machine_.Tick(now_);
  EXPECT_EQ(attempt().state(), Attempt::FAILED);
  EXPECT_EQ(attempt().failure().rank(), 0);
  EXPECT_EQ(attempt().ranks(2).state(), RankStatus::LOST);
  EXPECT_EQ(attempt().ranks(0).state(), RankStatus::FAILED);
}

TEST_F(OutcomeTest, ANodeIsGivenUpTheMomentItsTimeIsOver) {
  Run();
  const absl::Time heard = now_;
  now_ += options_.lease;
  machine_.OnSight("nodes/a", heard, now_);
  machine_.OnSight("nodes/b", heard, now_);
  now_ = heard + options_.adoption_timeout - absl::Milliseconds(1);
  machine_.Tick(now_);
  EXPECT_EQ(attempt().state(), Attempt::UNKNOWN);
  Pass(absl::Milliseconds(1));
  EXPECT_EQ(attempt().state(), Attempt::FENCED);
  EXPECT_EQ(attempt().failure().rank(), 0);
  EXPECT_THAT(attempt().failure().message(), HasSubstr("out of sight for 2m"));
  EXPECT_TRUE(attempt().failure().retryable());
}

// The failing attempt's abort and its failure are in the record; what is missing is who is in
// sight.
TEST_F(OutcomeTest, ARestartInMidFailureDoesNotWaitForANodeOutOfSight) {
  Run();
  Exit(3, TrainerExited::FAILED);
  Restart();
  successor_->OnSight("nodes/b", now_, now_);
  successor_->OnExit(Failed(0, true), now_);
  EXPECT_EQ(successor_->attempt()->state(), Attempt::STOPPING) << "rank 1 is in sight";
  successor_->OnExit(Failed(1, true), now_);
  EXPECT_EQ(successor_->attempt()->state(), Attempt::FAILED);
  EXPECT_EQ(successor_->attempt()->failure().rank(), 3);
  EXPECT_EQ(successor_->job().state(), Job::RETRYING);
  EXPECT_THAT(successor_->job().state_reason(), HasSubstr("once the trainers on nodes/b"));
  // Nothing is placed beside rank 2, which may live.
  successor_->Tick(now_ + options_.adoption_timeout - absl::Seconds(1));
  EXPECT_EQ(successor_->job().state(), Job::RETRYING);
  successor_->Tick(now_ + options_.adoption_timeout);
  EXPECT_EQ(successor_->job().state(), Job::PENDING);
}

TEST_F(OutcomeTest, ARestartInMidFailureRepeatsNoOrderAndTakesNoneBack) {
  Run();
  Exit(3, TrainerExited::FAILED);
  Restart();
  EXPECT_THAT(successor_->Take().commands, IsEmpty());
  ASSERT_TRUE(successor_->Pause(now_).ok());
  EXPECT_THAT(successor_->Take().commands, IsEmpty()) << "a checkpoint of a broken ring";
}

TEST_F(OutcomeTest, APauseAfterAnAbortWaitsForTheEnd) {
  Run();
  Exit(3, TrainerExited::FAILED);
  EXPECT_THAT(Commands(), ElementsAre("a:ABORT", "b:ABORT"));
  ASSERT_TRUE(machine_.Pause(now_).ok());
  EXPECT_THAT(Commands(), IsEmpty());
  EXPECT_EQ(state(), Job::PAUSING);
  for (const uint32_t rank : {0, 1, 2}) Exit(rank, TrainerExited::FAILED, true);
  EXPECT_EQ(attempt().state(), Attempt::FAILED);
  EXPECT_EQ(state(), Job::PAUSED);
  EXPECT_EQ(machine_.job().retries_used(), 0u) << "nobody retries it";
}

TEST_F(OutcomeTest, WhatNoRetryMendsFailsAPausingJob) {
  Run();
  ASSERT_TRUE(machine_.Pause(now_).ok());
  Exit(1, TrainerExited::FAILED, false, /*retryable=*/false);
  for (const uint32_t rank : {0, 2, 3}) Exit(rank, TrainerExited::FAILED, true);
  EXPECT_EQ(state(), Job::FAILED);
}

TEST_F(OutcomeTest, ADrainOfANodeWhoseRanksAreDeadMovesNobody) {
  Run();
  Exit(2, TrainerExited::COMPLETED);
  Exit(3, TrainerExited::COMPLETED);
  machine_.MoveOff("nodes/b", "it is being drained");
  EXPECT_THAT(Commands(), IsEmpty());
  EXPECT_EQ(attempt().state(), Attempt::RUNNING);
  machine_.MoveOff("nodes/a", "it is being drained");
  EXPECT_THAT(Commands(), ElementsAre("a:CHECKPOINT")) << "nobody is left on b to be told";
}

TEST_F(OutcomeTest, ADrainSaysWhyAndIsNotRepeated) {
  Run();
  machine_.MoveOff("nodes/a", "it is being drained");
  EXPECT_EQ(machine_.job().state_reason(),
            "writing a checkpoint to move off nodes/a: it is being drained");
  machine_.Take();
  machine_.MoveOff("nodes/b", "that one, too");
  EXPECT_THAT(Commands(), IsEmpty());
}

TEST_F(OutcomeTest, AnAttemptThatWasStartingIsSoAgainWhenItsNodeIsBack) {
  Place();
  Ready(0);
  machine_.OnSight("nodes/b", now_, now_);
  EXPECT_EQ(attempt().state(), Attempt::UNKNOWN);
  EXPECT_EQ(state(), Job::UNKNOWN);
  EXPECT_THAT(attempt().state_reason(), HasSubstr("no word from nodes/b, where ranks 2-3 may"));
  machine_.OnSight("nodes/b", std::nullopt, now_);
  EXPECT_EQ(attempt().state(), Attempt::STARTING);
  EXPECT_EQ(state(), Job::STARTING);
  EXPECT_EQ(attempt().state_reason(), "");
  for (const uint32_t rank : {1, 2, 3}) Ready(rank);
  EXPECT_EQ(state(), Job::RUNNING);
}

TEST_F(OutcomeTest, ItStaysUnknownUntilTheLastNodeIsBack) {
  Run();
  machine_.OnSight("nodes/a", now_, now_);
  machine_.OnSight("nodes/b", now_, now_);
  machine_.OnSight("nodes/a", std::nullopt, now_);
  EXPECT_EQ(state(), Job::UNKNOWN);
  machine_.OnSight("nodes/b", std::nullopt, now_);
  EXPECT_EQ(state(), Job::RUNNING);
}

TEST_F(OutcomeTest, ANodeWhoseRanksAreDeadIsMissedByNobody) {
  Run();
  Exit(2, TrainerExited::COMPLETED);
  Exit(3, TrainerExited::COMPLETED);
  machine_.OnSight("nodes/b", now_, now_);
  machine_.OnSight("nodes/elsewhere", now_, now_);
  EXPECT_EQ(state(), Job::RUNNING);
  machine_.OnWorkerDied("nodes/b", "its worker died", now_);
  Pass(options_.adoption_timeout);
  EXPECT_EQ(state(), Job::RUNNING);
  EXPECT_FALSE(attempt().has_failure());
}

TEST_F(OutcomeTest, ACollateralFailureWaitsForItsCauseAsLongAsTheWindow) {
  Run();
  machine_.OnSight("nodes/b", now_, now_);
  Exit(0, TrainerExited::FAILED, true);
  Exit(1, TrainerExited::FAILED, true);
  Pass(options_.blame_window - absl::Milliseconds(1));
  EXPECT_EQ(attempt().state(), Attempt::STOPPING);
  EXPECT_THAT(machine_.job().state_reason(), HasSubstr("waiting to hear which was the first"));
  Pass(absl::Milliseconds(1));
  EXPECT_EQ(attempt().state(), Attempt::FAILED);
}

TEST_F(OutcomeTest, TheWindowBeginsWithTheFirstFailureWhicheverIsTheCause) {
  Run();
  machine_.OnSight("nodes/b", now_, now_);
  Exit(0, TrainerExited::FAILED, true);
  Pass(options_.blame_window - absl::Seconds(1));
  Exit(1, TrainerExited::FAILED);
  EXPECT_EQ(attempt().state(), Attempt::STOPPING);
  Pass(absl::Seconds(1));
  EXPECT_EQ(attempt().state(), Attempt::FAILED);
  EXPECT_EQ(attempt().failure().rank(), 1);
}

TEST_F(OutcomeTest, AFailureIsOfTheNodeThatRanTheRank) {
  for (uint32_t rank = 0; rank < 4; ++rank) {
    JobMachine machine(NewJob(), &options_);
    machine.Place({On("nodes/a", 0), On("nodes/b", 2)}, {}, ++token_, now_);
    machine.OnExit(Failed(rank, false), now_);
    EXPECT_EQ(machine.attempt()->failure().node(), rank < 2 ? "nodes/a" : "nodes/b") << rank;
  }
}

TEST_F(OutcomeTest, AResumedJobHasAllItsRetriesAgain) {
  for (int failed = 0; failed < 3; ++failed) {
    Run();
    for (uint32_t rank = 0; rank < 4; ++rank) Exit(rank, TrainerExited::FAILED, rank > 0);
    Pass(absl::Hours(1));
  }
  ASSERT_EQ(state(), Job::FAILED);
  ASSERT_TRUE(machine_.Resume(now_).ok());
  EXPECT_EQ(machine_.job().retries_used(), 0u);
  Run();
  for (uint32_t rank = 0; rank < 4; ++rank) Exit(rank, TrainerExited::FAILED, rank > 0);
  EXPECT_EQ(state(), Job::RETRYING);
}

TEST_F(OutcomeTest, ARankThatLeavesUnaskedTakesTheOthersAlong) {
  Run();
  Exit(1, TrainerExited::STOPPED);
  EXPECT_THAT(Commands(), ElementsAre("a:CHECKPOINT", "b:CHECKPOINT"));
  EXPECT_EQ(attempt().state_reason(), "rank 1 left");
  for (const uint32_t rank : {0, 2, 3}) Exit(rank, TrainerExited::STOPPED);
  EXPECT_EQ(state(), Job::PENDING);
  EXPECT_EQ(machine_.job().retries_used(), 0u);
}

TEST_F(OutcomeTest, AnExitIsToldInItsOwnWordsOrByItsNumbers) {
  struct Case {
    int outcome = TrainerExited::FAILED;
    std::string message;
    int code = 0, signal = 0;
    std::string expected;
  };
  for (const Case& each :
       {Case{.message = "shard 2 is damaged", .code = 1, .expected = "shard 2 is damaged"},
        Case{.message = "", .signal = 9, .expected = "killed by signal 9"},
        Case{.message = "", .code = 3, .expected = "exited with code 3 without a word"},
        Case{.outcome = 77, .message = "", .expected = "ended with outcome 77, which"}}) {
    JobMachine machine(NewJob(), &options_);
    machine.Place({On("nodes/a", 0)}, {}, ++token_, now_);
    TrainerExited exited;
    exited.set_rank(1);
    exited.set_outcome(static_cast<TrainerExited::Outcome>(each.outcome));
    exited.set_message(each.message);
    exited.set_exit_code(each.code);
    exited.set_signal(each.signal);
    machine.OnExit(exited, now_);
    const v1::Failure& failure = machine.attempt()->failure();
    EXPECT_THAT(failure.message(), HasSubstr(each.expected));
    EXPECT_EQ(failure.rank(), 1);
    EXPECT_EQ(failure.node(), "nodes/a");
    EXPECT_EQ(failure.exit_code(), each.code);
    EXPECT_EQ(failure.signal(), each.signal);
    EXPECT_FALSE(failure.retryable());
    EXPECT_EQ(machine.attempt()->ranks(1).state(), RankStatus::FAILED);
  }
}

// A job's record holds it once for the attempt and once for the job.
TEST_F(OutcomeTest, AnExitIsToldShortly) {
  Run();
  TrainerExited exited = Failed(1, false);
  exited.set_message(std::string(1'000'000, 'x'));
  machine_.OnExit(exited, now_);
  EXPECT_EQ(attempt().failure().message().size(), 4096u);
}

TEST_F(OutcomeTest, TheFirstEndOfARankCountsAndStrangersNone) {
  Run();
  Exit(4, TrainerExited::FAILED);
  EXPECT_EQ(attempt().state(), Attempt::RUNNING);
  Exit(1, TrainerExited::COMPLETED);
  Exit(1, TrainerExited::FAILED);
  EXPECT_EQ(attempt().ranks(1).state(), RankStatus::COMPLETED);
  EXPECT_FALSE(attempt().has_failure());
  EXPECT_EQ(attempt().ranks(1).address(), "");
}

TEST_F(OutcomeTest, WhenNothingRunsNoOrderIsLeftToSend) {
  Run();
  Exit(0, TrainerExited::FAILED);
  for (const uint32_t rank : {1, 2}) Exit(rank, TrainerExited::FAILED, true);
  Exit(3, TrainerExited::FAILED, true);
  const Effects effects = machine_.Take();
  EXPECT_THAT(effects.commands, IsEmpty());
  EXPECT_THAT(effects.over, ElementsAre(1));
  EXPECT_THAT(effects.ended, ElementsAre(Attempt::FAILED));
}

TEST_F(OutcomeTest, ThePausedJobSaysWhereItResumes) {
  ASSERT_TRUE(machine_.Pause(now_).ok());
  EXPECT_EQ(state(), Job::PAUSED);
  EXPECT_EQ(machine_.job().state_reason(), "no checkpoint yet: resumes from the start");
  ASSERT_TRUE(machine_.Resume(now_).ok());
  Run();
  Checkpoint(5);
  Checkpoint(3);  // late
  ASSERT_TRUE(machine_.Pause(now_).ok());
  for (uint32_t rank = 0; rank < 4; ++rank) Exit(rank, TrainerExited::STOPPED);
  EXPECT_EQ(machine_.job().state_reason(), "resumes from the checkpoint of step 5");
}

TEST_F(OutcomeTest, ARetryingJobIsPausedOrCancelledAtOnce) {
  for (const bool pause : {true, false}) {
    JobMachine machine(NewJob(), &options_);
    machine.Place({On("nodes/a", 0)}, {}, ++token_, now_);
    for (const uint32_t rank : {0, 1}) machine.OnExit(Failed(rank, rank > 0), now_);
    ASSERT_EQ(machine.job().state(), Job::RETRYING);
    ASSERT_TRUE((pause ? machine.Pause(now_) : machine.Cancel(now_)).ok());
    EXPECT_EQ(machine.job().state(), pause ? Job::PAUSED : Job::CANCELLED);
    machine.Tick(now_ + absl::Hours(1));
    EXPECT_EQ(machine.job().state(), pause ? Job::PAUSED : Job::CANCELLED);
  }
}

TEST_F(OutcomeTest, WhatACancelledAttemptFailedOfIsNoFailure) {
  Run();
  ASSERT_TRUE(machine_.Cancel(now_).ok());
  for (uint32_t rank = 0; rank < 4; ++rank) Exit(rank, TrainerExited::FAILED);
  EXPECT_EQ(state(), Job::CANCELLED);
  EXPECT_EQ(attempt().state(), Attempt::CANCELLED);
  EXPECT_EQ(attempt().state_reason(), "cancelled by a user");
  EXPECT_FALSE(attempt().has_failure());
  EXPECT_EQ(machine_.job().retries_used(), 0u);
  EXPECT_TRUE(machine_.job().has_end_time());
}

TEST_F(OutcomeTest, AJobThatCompletedWhileItWasCancelledHasSucceeded) {
  Run();
  for (const uint32_t rank : {0, 1, 2}) Exit(rank, TrainerExited::COMPLETED);
  ASSERT_TRUE(machine_.Cancel(now_).ok());
  Exit(3, TrainerExited::COMPLETED);
  EXPECT_EQ(state(), Job::SUCCEEDED);
  EXPECT_TRUE(absl::IsFailedPrecondition(machine_.Cancel(now_)));
  EXPECT_TRUE(absl::IsFailedPrecondition(machine_.Pause(now_)));
  EXPECT_TRUE(absl::IsFailedPrecondition(machine_.Resume(now_)));
}

TEST_F(OutcomeTest, AJobThatIsBeingCancelledIsNeitherPausedNorResumed) {
  Run();
  ASSERT_TRUE(machine_.Cancel(now_).ok());
  machine_.Take();
  EXPECT_TRUE(absl::IsFailedPrecondition(machine_.Pause(now_)));
  EXPECT_TRUE(absl::IsFailedPrecondition(machine_.Resume(now_)));
  EXPECT_TRUE(machine_.Cancel(now_, /*checkpoint=*/true).ok());
  EXPECT_EQ(machine_.job().state_reason(), "cancelled by a user") << "it is too late for one";
  EXPECT_EQ(state(), Job::CANCELLING);
  EXPECT_FALSE(machine_.Take().any());
}

TEST_F(OutcomeTest, ToResumeAJobThatWaitsOrRunsChangesNothing) {
  EXPECT_TRUE(machine_.Resume(now_).ok());
  EXPECT_EQ(state(), Job::PENDING);
  Run();
  EXPECT_TRUE(machine_.Resume(now_).ok());
  EXPECT_EQ(state(), Job::RUNNING);
  EXPECT_FALSE(machine_.Take().any());
  for (uint32_t rank = 0; rank < 4; ++rank) Exit(rank, TrainerExited::FAILED, rank > 0);
  EXPECT_TRUE(machine_.Resume(now_).ok());
  EXPECT_EQ(state(), Job::RETRYING);
  EXPECT_EQ(machine_.job().retries_used(), 1u);
}

// The attempt ended without a node that was out of sight, where ranks leave as they are asked to.
TEST_F(OutcomeTest, ARankThatLeavesAfterTheEndChangesNothingOfIt) {
  Run();
  machine_.OnSight("nodes/b", now_, now_);
  for (const uint32_t rank : {0, 1}) Exit(rank, TrainerExited::FAILED, true);
  Pass(options_.blame_window);
  ASSERT_EQ(attempt().state(), Attempt::FAILED);
  machine_.OnSight("nodes/b", std::nullopt, now_);
  machine_.Take();
  Exit(2, TrainerExited::STOPPED);
  EXPECT_EQ(attempt().state(), Attempt::FAILED);
  EXPECT_THAT(Commands(), IsEmpty());
  Exit(3, TrainerExited::STOPPED);
  Pass(options_.retry_backoff);
  EXPECT_EQ(state(), Job::PENDING);
  EXPECT_EQ(attempt().state(), Attempt::FAILED);
}

TEST_F(OutcomeTest, AJobThatMovesOffBeforeItTrainsOrOutOfSightWaitsAgain) {
  for (const bool is_unknown : {false, true}) {
    Place();
    if (is_unknown) machine_.OnSight("nodes/b", now_, now_);
    machine_.MoveOff("nodes/a", "it is being drained");
    machine_.OnSight("nodes/b", std::nullopt, now_);
    EXPECT_EQ(state(), is_unknown ? Job::UNKNOWN : Job::STARTING);
    for (uint32_t rank = 0; rank < 4; ++rank) Exit(rank, TrainerExited::STOPPED);
    EXPECT_EQ(attempt().state(), Attempt::PAUSED);
    EXPECT_EQ(attempt().state_reason(), "it is being drained");
    EXPECT_EQ(state(), Job::PENDING);
    EXPECT_EQ(machine_.job().retries_used(), 0u);
  }
}

// What is known of a failure is part of the record.
TEST_F(OutcomeTest, ASuccessorNamesTheCauseOfAFailureThatWasCollateral) {
  Run();
  Exit(0, TrainerExited::FAILED, /*collateral=*/true);
  Restart();
  for (const uint32_t rank : {3, 1, 2}) successor_->OnExit(Failed(rank, rank != 3), now_);
  EXPECT_EQ(successor_->attempt()->failure().rank(), 3);
}

TEST_F(OutcomeTest, ASuccessorCountsNoRetryForARefusal) {
  Place();
  machine_.OnStartRefused("nodes/b", "no room", now_, /*later=*/true);
  Restart();
  for (const uint32_t rank : {0, 1}) successor_->OnExit(Failed(rank, true), now_);
  EXPECT_EQ(successor_->job().state(), Job::RETRYING);
  EXPECT_EQ(successor_->job().retries_used(), 0u);
  EXPECT_THAT(successor_->job().state_reason(), HasSubstr("goes elsewhere for"));
}

TEST_F(OutcomeTest, ASuccessorSaysThatAnAttemptWasFenced) {
  Run();
  machine_.OnSight("nodes/b", now_, now_);
  Pass(options_.adoption_timeout);
  Restart();
  for (const uint32_t rank : {0, 1}) successor_->OnExit(Failed(rank, true), now_);
  EXPECT_EQ(successor_->attempt()->state(), Attempt::FENCED);
}

}  // namespace
}  // namespace ringleader::lifecycle
