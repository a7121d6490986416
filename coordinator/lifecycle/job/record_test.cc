// What the record of a job and of its attempts holds, field by field, and which changes of it are
// told to the store.
#include "base/testing/equals_text.h"
#include "coordinator/lifecycle/testing/machine_test.h"
#include "proto/timestamps.h"

namespace ringleader::lifecycle {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using v1::Attempt;
using v1::Job;
using v1::TrainerExited;

class RecordTest : public testing::MachineTest {
 protected:
  void FailAll() {
    for (uint32_t rank = 0; rank < 4; ++rank) Exit(rank, TrainerExited::FAILED, rank > 0);
  }
};

v1::StepPlan FullPlan() {
  v1::StepPlan plan;
  plan.set_version(3);
  plan.set_effective_step(7);
  plan.mutable_ring()->set_inner(2);
  plan.set_layout(v1::ParallelismSpec::ZIGZAG);
  plan.set_stripe(64);
  plan.add_reasons("why");
  plan.add_sample_weights()->set_tokens(5);
  plan.add_earlier_weights()->set_from_step(1);
  plan.add_earlier_shapes()->set_from_step(2);
  return plan;
}

TEST_F(RecordTest, OfANewAttemptAndWhatItsNodesAreSent) {
  Job job = NewJob();
  job.set_uid("j-1");
  job.set_owner("alice");
  job.mutable_progress()->set_checkpoint_step(4);
  SetTime(absl::FromUnixSeconds(999'000), job.mutable_pending_time());
  JobMachine machine(job, &options_);
  machine.Place({On("nodes/a", 0), On("nodes/b", 2)}, FullPlan(), 42, now_,
                now_ - absl::Seconds(9));
  EXPECT_THAT(*machine.attempt(), EqualsText(R"(
    number: 1 state: STARTING fencing_token: 42
    placements { node: "nodes/a" trainers: 2 }
    placements { node: "nodes/b" first_rank: 2 trainers: 2 }
    create_time { seconds: 1000000 } queue_time { seconds: 999000 } place_time { seconds: 999991 }
    ranks { state: STARTING } ranks { state: STARTING }
    ranks { state: STARTING } ranks { state: STARTING }
    plan { version: 3 effective_step: 7 ring { inner: 2 } layout: ZIGZAG stripe: 64 reasons: "why" }
  )")) << "without the plan's lists";
  EXPECT_EQ(ToTime(machine.job().pending_time()), absl::FromUnixSeconds(999'000));
  const Effects effects = machine.Take();
  ASSERT_EQ(effects.commands.size(), 2u);
  EXPECT_EQ(effects.commands[1].node, "nodes/b");
  EXPECT_THAT(effects.commands[1].command, EqualsText(R"(
    job: "j" attempt: 1 fencing_token: 42
    start {
      spec { name: "j" training { steps: 10 global_batch: 1 } data { sequence_length: 100 }
             scheduling { max_retries: 2 } }
      plan { version: 3 effective_step: 7 ring { inner: 2 } layout: ZIGZAG stripe: 64 reasons: "why"
             sample_weights { tokens: 5 } earlier_weights { from_step: 1 }
             earlier_shapes { from_step: 2 } }
      first_rank: 2 trainers: 2 world_size: 4 ranks_per_node: 2 checkpoint_step: 4
      job_uid: "j-1" owner: "alice"
    })"));
  EXPECT_THAT(effects.entered, ElementsAre(Job::STARTING));
  EXPECT_THAT(effects.changed_attempts, ElementsAre(1u));
  EXPECT_TRUE(effects.job_changed);
}

TEST_F(RecordTest, OfARunAndItsEnd) {
  Run();
  EXPECT_EQ(ToTime(machine_.job().start_time()), now_);
  EXPECT_EQ(ToTime(attempt().ready_time()), now_);
  FailAll();
  Effects effects = machine_.Take();
  EXPECT_THAT(effects.entered, ElementsAre(Job::RETRYING));
  EXPECT_THAT(effects.ended, ElementsAre(Attempt::FAILED));
  EXPECT_THAT(effects.over, ElementsAre(1u));
  EXPECT_EQ(effects.node_failures.size(), 1u);
  EXPECT_THAT(attempt(), EqualsText(R"(
    number: 1 state: FAILED state_reason: "rank 0 on nodes/a: out of memory" fencing_token: 7
    placements { node: "nodes/a" trainers: 2 }
    placements { node: "nodes/b" first_rank: 2 trainers: 2 }
    create_time { seconds: 1000000 } place_time { seconds: 1000000 }
    ready_time { seconds: 1000000 } end_time { seconds: 1000000 }
    failure { node: "nodes/a" message: "out of memory" retryable: true }
    ranks { state: FAILED } ranks { state: FAILED } ranks { state: FAILED } ranks { state: FAILED }
    plan {})"));
  // The same job, as it waits again: nothing but its state changed.
  Pass(options_.retry_backoff);
  effects = machine_.Take();
  EXPECT_THAT(effects.entered, ElementsAre(Job::PENDING));
  EXPECT_TRUE(effects.job_changed);
  EXPECT_THAT(effects.changed_attempts, IsEmpty());
  EXPECT_EQ(ToTime(machine_.job().pending_time()), now_);
  EXPECT_FALSE(machine_.job().has_end_time());
  const absl::Time first = now_ - options_.retry_backoff;
  Run();
  EXPECT_EQ(ToTime(machine_.job().start_time()), first) << "when it first ran";
  EXPECT_EQ(ToTime(machine_.job().pending_time()), now_) << "since when it waited last";
  now_ += absl::Seconds(5);
  for (uint32_t rank = 0; rank < 4; ++rank) Exit(rank, TrainerExited::COMPLETED);
  effects = machine_.Take();
  EXPECT_THAT(effects.entered, ElementsAre(Job::SUCCEEDED));
  EXPECT_THAT(effects.ended, ElementsAre(Attempt::SUCCEEDED));
  EXPECT_EQ(ToTime(machine_.job().end_time()), now_);
  EXPECT_EQ(ToTime(attempt().end_time()), now_);
}

TEST_F(RecordTest, OfAChangeOfThePlan) {
  Run();
  machine_.Replan(FullPlan());
  const Effects effects = machine_.Take();
  ASSERT_EQ(attempt().plan_changes_size(), 1);
  EXPECT_THAT(attempt().plan_changes(0), EqualsText(R"(
    version: 3 effective_step: 7 state: ANNOUNCED ring { inner: 2 } layout: ZIGZAG stripe: 64
    reasons: "why")"));
  EXPECT_THAT(effects.changed_attempts, ElementsAre(1u));
}

TEST_F(RecordTest, TheNewestChangesOfThePlanAreKept) {
  Run();
  v1::StepPlan plan;
  for (int version = 1; version <= kPlanChangesKept + 2; ++version) {
    plan.set_version(static_cast<uint64_t>(version));
    machine_.Replan(plan);
    EXPECT_EQ(attempt().plan_changes_size(), std::min(version, kPlanChangesKept));
    EXPECT_EQ(attempt().plan_changes().rbegin()->version(), plan.version());
  }
  EXPECT_EQ(attempt().plan_changes(0).version(), 3u);
}

TEST_F(RecordTest, TheNewestAttemptsAreKept) {
  for (int number = 1; number <= kAttemptsKept + 2; ++number) {
    machine_.mutable_job()->set_retries_used(0);
    Place();
    EXPECT_EQ(machine_.job().attempts_size(), std::min(number, kAttemptsKept));
    EXPECT_EQ(attempt().number(), static_cast<uint32_t>(number));
    const std::set<uint32_t> forgotten = machine_.Take().forgotten_attempts;
    if (number <= kAttemptsKept) {
      EXPECT_THAT(forgotten, IsEmpty());
    } else {
      EXPECT_THAT(forgotten, ElementsAre(static_cast<uint32_t>(number - kAttemptsKept)));
    }
    FailAll();
    Pass(options_.retry_backoff);
  }
  EXPECT_EQ(machine_.job().attempts(0).number(), 3u);
}

TEST_F(RecordTest, TheEtagCountsTransitions) {
  machine_.mutable_job()->set_etag("41");
  Place();
  EXPECT_EQ(machine_.job().etag(), "42");
}

TEST_F(RecordTest, AskingAgainChangesNothing) {
  ASSERT_TRUE(machine_.Pause(now_).ok());
  ASSERT_EQ(state(), Job::PAUSED);
  machine_.Take();
  const std::string etag = machine_.job().etag();
  EXPECT_TRUE(machine_.Pause(now_).ok());
  EXPECT_TRUE(machine_.Take().transitions.empty());
  ASSERT_TRUE(machine_.Cancel(now_).ok());
  machine_.Take();
  EXPECT_TRUE(machine_.Cancel(now_).ok());
  EXPECT_TRUE(machine_.Take().transitions.empty());
}

TEST_F(RecordTest, ADrainLeavesAFailuresReasonStanding) {
  Run();
  Exit(0, TrainerExited::FAILED);
  const std::string reason = machine_.job().state_reason();
  EXPECT_EQ(reason, "stopping the others: rank 0 on nodes/a: out of memory");
  machine_.MoveOff("nodes/b", "it is being drained");
  EXPECT_EQ(machine_.job().state_reason(), reason);
  EXPECT_EQ(attempt().state_reason(), "rank 0 on nodes/a: out of memory");
}

TEST_F(RecordTest, AnAttemptOnANodeThatIsOutOfSightIsUnknownFromItsStart) {
  machine_.OnSight("nodes/b", now_, now_ + options_.lease);
  Place();
  EXPECT_EQ(attempt().state(), Attempt::UNKNOWN);
  EXPECT_EQ(state(), Job::UNKNOWN);
}

// Its first attempt failed long ago: how long the second one waits for a cause begins with its own
// failure.
TEST_F(RecordTest, EachAttemptHasItsOwnBlameWindow) {
  Run();
  FailAll();
  Pass(options_.retry_backoff);
  Run();
  Pass(absl::Minutes(1));
  machine_.OnSight("nodes/b", now_, now_);
  Exit(0, TrainerExited::FAILED, true);
  Exit(1, TrainerExited::FAILED, true);
  Pass(options_.blame_window - absl::Milliseconds(1));
  EXPECT_EQ(attempt().state(), Attempt::STOPPING);
  Pass(absl::Milliseconds(1));
  EXPECT_EQ(attempt().state(), Attempt::FAILED);
}

TEST_F(RecordTest, AJobThatFailedBesideALostNodeIsNotFinished) {
  Run();
  machine_.OnSight("nodes/b", now_, now_);
  Exit(0, TrainerExited::FAILED, /*collateral=*/false, /*retryable=*/false);
  Exit(1, TrainerExited::FAILED, true);
  Pass(options_.blame_window);
  ASSERT_EQ(state(), Job::FAILED);
  EXPECT_FALSE(machine_.Finished());
  Pass(options_.adoption_timeout);
  EXPECT_TRUE(machine_.Finished());
}

TEST_F(RecordTest, RankZeroIsNamedLikeAnyOther) {
  Run();
  FailAll();
  EXPECT_EQ(machine_.job().state_reason(),
            "attempt 1 failed: rank 0 on nodes/a: out of memory; retry 1 of 2");
}

TEST_F(RecordTest, AStateThatChangesForTheSameReasonIsAChange) {
  machine_.Wait("it needs 4 trainers");
  machine_.Take();
  machine_.Reject("it needs 4 trainers", now_);
  EXPECT_TRUE(machine_.Take().job_changed);
}

TEST_F(RecordTest, AnAttemptThatIsToldToStopIsAChangeOfIt) {
  Run();
  ASSERT_TRUE(machine_.Pause(now_).ok());
  EXPECT_THAT(machine_.Take().changed_attempts, ElementsAre(1u));
}

TEST_F(RecordTest, ARankThatEndsIsAChangeOfItsAttempt) {
  Run();
  Exit(1, TrainerExited::COMPLETED);
  EXPECT_THAT(machine_.Take().changed_attempts, ElementsAre(1u));
  Exit(0, TrainerExited::FAILED, /*collateral=*/true);
  machine_.Take();
  machine_.OnDeadlyCommand("nodes/b", /*is_start=*/false, now_);
  EXPECT_EQ(attempt().failure().rank(), 2);
  EXPECT_THAT(machine_.Take().changed_attempts, ElementsAre(1u)) << "another is to blame";
}

TEST_F(RecordTest, NothingOfAnAttemptIsLeftInTheNext) {
  // Given up, and with steps of 12 s.
  Run();
  for (int rank = 0; rank < 4; ++rank) {
    v1::StepReport report;
    report.set_step(1);
    report.set_rank(rank);
    report.set_step_seconds(12);
    report.set_tokens(100);
    machine_.OnStep(report, {});
  }
  for (const char* const node : {"nodes/a", "nodes/b"}) machine_.OnSight(node, now_, now_);
  Pass(options_.adoption_timeout);
  EXPECT_EQ(attempt().state(), Attempt::FENCED);
  for (const char* const node : {"nodes/a", "nodes/b"}) {
    machine_.OnSight(node, std::nullopt, now_);
  }
  Pass(options_.retry_backoff);
  Run();
  Step(2);
  EXPECT_EQ(machine_.job().progress().tokens_per_second(), 50);
  const uint32_t used = machine_.job().retries_used();
  FailAll();
  EXPECT_EQ(attempt().state(), Attempt::FAILED);
  EXPECT_EQ(machine_.job().retries_used(), used + 1);
  // Refused for want of room, which counts for nothing; the next one's failure does.
  Pass(options_.max_retry_backoff);
  Place();
  machine_.OnStartRefused("nodes/a", "no room", now_, /*later=*/true);
  machine_.OnStartRefused("nodes/b", "no room", now_, /*later=*/true);
  EXPECT_EQ(machine_.job().retries_used(), used + 1);
  Pass(options_.max_retry_backoff);
  Run();
  FailAll();
  EXPECT_EQ(machine_.job().retries_used(), used + 2);
}

// A clock that was set back while the coordinator was away: the retry comes as soon as it may.
TEST_F(RecordTest, ARetryThatWouldComeTooLateIsWrittenDownAnew) {
  Run();
  FailAll();
  for (const absl::Duration set_back : {absl::ZeroDuration(), absl::Hours(1)}) {
    JobMachine successor(machine_.job(), &options_);
    successor.Adopt(now_ - set_back);
    EXPECT_EQ(ToTime(successor.job().retry_time()), now_ - set_back + options_.retry_backoff);
    EXPECT_EQ(successor.Take().any(), set_back > absl::ZeroDuration());
  }
  Pass(options_.retry_backoff);
  Run();
  FailAll();
  JobMachine successor(machine_.job(), &options_);
  successor.Adopt(now_ - absl::Hours(1));
  EXPECT_EQ(ToTime(successor.job().retry_time()),
            now_ - absl::Hours(1) + 2 * options_.retry_backoff);
}

}  // namespace
}  // namespace ringleader::lifecycle
