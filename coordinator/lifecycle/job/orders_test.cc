// What a job's machine has workers do, field by field, and what it takes from their reports.
#include "coordinator/lifecycle/testing/machine_test.h"
#include "proto/timestamps.h"

namespace ringleader::lifecycle {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using v1::Job;
using v1::RankStatus;
using v1::StopTrainers;
using v1::TrainerExited;
using OrdersTest = testing::MachineTest;

TEST_F(OrdersTest, OneTrainerIsNotSeveral) {
  v1::Placement one = On("nodes/a", 0);
  one.set_trainers(1);
  machine_.Place({one}, {}, 42, now_);
  EXPECT_EQ(machine_.job().state_reason(), "attempt 1: starting 1 trainer");
}

TEST_F(OrdersTest, AStartSaysWhatEachNodeRuns) {
  v1::StepPlan plan;
  plan.set_version(3);
  machine_.Place({On("nodes/a", 0), On("nodes/b", 2)}, plan, 42, now_);
  EXPECT_EQ(machine_.job().state_reason(), "attempt 1: starting 4 trainers");
  const Effects effects = machine_.Take();
  ASSERT_EQ(effects.commands.size(), 2u);
  for (uint32_t i = 0; i < 2; ++i) {
    const v1::Command& command = effects.commands[i].command;
    EXPECT_EQ(effects.commands[i].node, i == 0 ? "nodes/a" : "nodes/b");
    EXPECT_EQ(command.job(), "j");
    EXPECT_EQ(command.attempt(), 1u);
    EXPECT_EQ(command.fencing_token(), 42u);
    EXPECT_EQ(command.start().spec().name(), "j");
    EXPECT_EQ(command.start().plan().version(), 3u);
    EXPECT_EQ(command.start().first_rank(), 2 * i);
    EXPECT_EQ(command.start().trainers(), 2u);
    EXPECT_EQ(command.start().world_size(), 4u);
    EXPECT_EQ(command.start().ranks_per_node(), 2u);
    EXPECT_EQ(command.start().checkpoint_step(), 0u);
  }
  EXPECT_EQ(attempt().fencing_token(), 42u);
  EXPECT_EQ(attempt().ranks_size(), 4);
  EXPECT_TRUE(attempt().has_create_time());
}

TEST_F(OrdersTest, EachAttemptSaysSinceWhenItWaited) {
  Run();
  EXPECT_FALSE(attempt().has_queue_time()) << "of a job of an earlier release";
  EXPECT_EQ(ToTime(attempt().place_time()), now_);
  for (const uint32_t rank : {0, 1, 2, 3}) Exit(rank, TrainerExited::FAILED);
  now_ += absl::Hours(1);
  machine_.Tick(now_);
  ASSERT_EQ(state(), Job::PENDING);
  const absl::Time waits = now_;
  now_ += absl::Minutes(3);
  machine_.Place({On("nodes/a", 0), On("nodes/b", 2)}, {}, ++token_, now_, now_ - absl::Seconds(7));
  EXPECT_EQ(ToTime(attempt().queue_time()), waits);
  EXPECT_EQ(ToTime(attempt().place_time()), now_ - absl::Seconds(7));
  EXPECT_FALSE(attempt().has_ready_time());
}

TEST_F(OrdersTest, AStopSaysHowMuchTimeThereIs) {
  Run();
  ASSERT_TRUE(machine_.Pause(now_).ok());
  const Effects pause = machine_.Take();
  ASSERT_EQ(pause.commands.size(), 2u);
  EXPECT_EQ(pause.commands[0].command.stop().grace_milliseconds(), 120'000u);
  EXPECT_EQ(pause.commands[0].command.stop().reason(), "the job was paused");
  ASSERT_TRUE(machine_.Cancel(now_).ok());
  const Effects cancel = machine_.Take();
  ASSERT_EQ(cancel.commands.size(), 2u) << "an abort overrides a checkpoint";
  EXPECT_EQ(cancel.commands[0].command.stop().mode(), StopTrainers::ABORT);
  EXPECT_EQ(cancel.commands[0].command.stop().grace_milliseconds(), 5'000u);
  EXPECT_EQ(cancel.commands[0].command.stop().reason(), "the job was cancelled");
}

TEST_F(OrdersTest, RanksAreToldWhatTheyStopFor) {
  for (const bool collateral : {true, false}) {
    Run();
    Exit(3, TrainerExited::FAILED, collateral);
    const std::string reason =
        collateral ? "another rank failed" : "rank 3 on nodes/b: out of memory";
    EXPECT_EQ(attempt().state_reason(), reason);
    ASSERT_EQ(machine_.effects().commands.size(), 2u);
    EXPECT_EQ(machine_.effects().commands[0].command.stop().reason(), reason);
    for (const uint32_t rank : {0, 1, 2}) Exit(rank, TrainerExited::FAILED, true);
    Pass(options_.max_retry_backoff);
  }
}

TEST_F(OrdersTest, EachAttemptIsStoppedAnew) {
  for (uint32_t number = 1; number <= 2; ++number) {
    Run();
    EXPECT_EQ(attempt().number(), number);
    Exit(0, TrainerExited::FAILED);
    EXPECT_THAT(Commands(), ElementsAre("a:ABORT", "b:ABORT"));
    for (const uint32_t rank : {1, 2, 3}) Exit(rank, TrainerExited::FAILED, true);
    EXPECT_EQ(attempt().failure().rank(), 0) << "not the last attempt's";
    Pass(absl::Minutes(1));
    ASSERT_EQ(state(), Job::PENDING);
    EXPECT_FALSE(machine_.job().has_end_time());
  }
}

TEST_F(OrdersTest, APlanGoesToRankZeroOfWhatRuns) {
  v1::StepPlan plan;
  plan.set_version(9);
  machine_.Replan(plan);
  EXPECT_THAT(Commands(), IsEmpty());
  Run();
  machine_.Replan(plan);
  const Effects effects = machine_.Take();
  ASSERT_EQ(effects.commands.size(), 1u);
  EXPECT_EQ(effects.commands[0].node, "nodes/a");
  EXPECT_EQ(effects.commands[0].command.plan().version(), 9u);
  ASSERT_TRUE(machine_.Pause(now_).ok());
  machine_.Take();
  machine_.Replan(plan);
  EXPECT_THAT(Commands(), IsEmpty()) << "it leaves";
}

// What was announced is in the attempt's record, with what came of it.
TEST_F(OrdersTest, ChangesOfThePlanAreRecorded) {
  Run();
  v1::StepPlan plan;
  plan.set_version(2);
  plan.set_effective_step(3);
  plan.set_layout(v1::ParallelismSpec::ZIGZAG);
  plan.add_reasons("why");
  machine_.Replan(plan);
  ASSERT_EQ(attempt().plan_changes_size(), 1);
  EXPECT_EQ(attempt().plan_changes(0).state(), v1::PlanChange::ANNOUNCED);
  EXPECT_EQ(attempt().plan_changes(0).reasons(0), "why");
  const auto report = [&](uint64_t step, uint64_t version) {
    for (int rank = 0; rank < attempt().ranks_size(); ++rank) {
      v1::StepReport one;
      one.set_step(step);
      one.set_rank(rank);
      one.set_plan_version(version);
      machine_.OnStep(one, {});
    }
  };
  report(2, 1);
  EXPECT_EQ(attempt().plan_changes(0).state(), v1::PlanChange::ANNOUNCED);
  report(3, 2);
  EXPECT_EQ(attempt().plan_changes(0).state(), v1::PlanChange::IN_FORCE);
  plan.set_version(3);
  plan.set_effective_step(5);
  machine_.Replan(plan);
  report(5, 2);
  EXPECT_EQ(attempt().plan_changes(0).state(), v1::PlanChange::IN_FORCE);
  EXPECT_EQ(attempt().plan_changes(1).state(), v1::PlanChange::MISSED);
  // The next change overtakes one that had not begun.
  for (const uint64_t version : {4, 5}) {
    plan.set_version(version);
    plan.set_effective_step(9);
    machine_.Replan(plan);
  }
  report(8, 5);
  EXPECT_EQ(attempt().plan_changes(2).state(), v1::PlanChange::MISSED);
  EXPECT_EQ(attempt().plan_changes(3).state(), v1::PlanChange::IN_FORCE);
}

// The attempt died before all ranks had reported the step, so nothing was merged that would have
// had the change withdrawn. One rank's word tells.
TEST_F(OrdersTest, AChangeThatRanksTrainedPastIsKnownToBeMissed) {
  Run();
  v1::StepPlan plan;
  plan.set_version(2);
  plan.set_effective_step(3);
  machine_.Replan(plan);
  Step(1);
  v1::StepReport last;
  last.set_step(3);
  last.set_plan_version(1);
  machine_.OnStep(last, {});
  EXPECT_FALSE(machine_.Missed(2));
  for (uint32_t rank = 0; rank < 4; ++rank) Exit(rank, TrainerExited::FAILED, rank > 0);
  EXPECT_TRUE(machine_.Missed(2));
  EXPECT_FALSE(machine_.Missed(1));
  // There is no checkpoint: the next attempt begins anew, and its second plan is another.
  Run();
  machine_.Replan(plan);
  EXPECT_FALSE(machine_.Missed(2));
}

// A shape that does not fit would end every attempt in its first step.
TEST_F(OrdersTest, AChangeInWhoseFirstStepTheAttemptFailedIsLeftOut) {
  Run();
  v1::StepPlan plan;
  for (const uint64_t version : {2, 3}) {
    plan.set_version(version);
    plan.set_effective_step(version + 1);
    machine_.Replan(plan);
  }
  Step(1);
  Step(2);
  for (uint32_t rank = 0; rank < 4; ++rank) Exit(rank, TrainerExited::FAILED, rank > 0);
  EXPECT_TRUE(machine_.Missed(2));
  EXPECT_FALSE(machine_.Missed(3)) << "it had not begun";
}

TEST_F(OrdersTest, ASlowRanksNodeIsNamedAndShunnedByTheNextAttempt) {
  Run();
  EXPECT_THAT(machine_.SlowNodes(), IsEmpty());
  v1::SlowRank slow;
  slow.set_rank(0);
  slow.set_ratio(1.4);
  slow.set_step(77);
  machine_.NameSlowRanks({slow});
  ASSERT_EQ(attempt().slow_ranks_size(), 1);
  EXPECT_EQ(attempt().slow_ranks(0).node(), "nodes/a");
  EXPECT_THAT(machine_.SlowNodes(), ElementsAre("a"));
  EXPECT_THAT(machine_.Take().changed_attempts, ElementsAre(1u));
  machine_.NameSlowRanks({slow});
  EXPECT_FALSE(machine_.Take().any()) << "nothing new";
  machine_.NameSlowRanks({});
  EXPECT_THAT(machine_.SlowNodes(), IsEmpty());
}

TEST_F(OrdersTest, ReadinessCountsOnceAndOnlyWhereItIsWaitedFor) {
  v1::TrainerReady stranger;
  stranger.set_rank(4);
  machine_.OnReady(stranger, now_);  // before any attempt
  Place();
  machine_.Take();
  machine_.OnReady(stranger, now_);
  Ready(0);
  v1::TrainerReady again;
  again.set_rank(0);
  again.set_address("elsewhere:1");
  machine_.OnReady(again, now_);
  EXPECT_EQ(attempt().ranks(0).address(), "host:1000");
  ASSERT_TRUE(machine_.Pause(now_).ok());
  machine_.Take();
  for (const uint32_t rank : {1, 2, 3}) Ready(rank);
  EXPECT_THAT(Commands(), IsEmpty()) << "it leaves before it began";
  EXPECT_EQ(state(), Job::PAUSING);
}

TEST_F(OrdersTest, AStartIsTimedAndARunIsNot) {
  Place();
  for (const uint32_t rank : {0, 1, 3}) Ready(rank);
  machine_.Take();
  Pass(options_.start_timeout - absl::Milliseconds(1));
  EXPECT_THAT(Commands(), IsEmpty());
  Ready(2);
  Commands();
  Pass(absl::Hours(24));
  EXPECT_EQ(state(), Job::RUNNING);
  EXPECT_THAT(Commands(), IsEmpty());
}

TEST_F(OrdersTest, AStartThatIsTakenBackIsNotTimed) {
  Place();
  ASSERT_TRUE(machine_.Pause(now_).ok());
  machine_.Take();
  Pass(options_.start_timeout);
  EXPECT_THAT(Commands(), IsEmpty());
  EXPECT_FALSE(attempt().has_failure());
}

// The last node has what is left.
TEST_F(OrdersTest, RanksAreCountedByTheFirstNode) {
  v1::Placement last = On("nodes/b", 2);
  last.set_trainers(1);
  machine_.Place({On("nodes/a", 0), last}, {}, ++token_, now_);
  ASSERT_EQ(machine_.effects().commands.size(), 2u);
  for (const Effects::NodeCommand& effect : machine_.effects().commands) {
    EXPECT_EQ(effect.command.start().ranks_per_node(), 2u);
    EXPECT_EQ(effect.command.start().world_size(), 3u);
  }
}

TEST_F(OrdersTest, ARefusedStartIsOfThatNodesRanks) {
  Place();
  machine_.Take();
  machine_.OnStartRefused("nodes/b", "2 of 2 trainers are taken", now_);
  EXPECT_EQ(attempt().ranks(1).state(), RankStatus::STARTING);
  EXPECT_EQ(attempt().ranks(2).state(), RankStatus::FAILED);
  EXPECT_EQ(attempt().ranks(3).state(), RankStatus::FAILED);
  EXPECT_EQ(attempt().failure().rank(), 2);
  EXPECT_EQ(attempt().failure().node(), "nodes/b");
  EXPECT_EQ(attempt().failure().message(),
            "the worker did not start it: 2 of 2 trainers are taken");
  EXPECT_THAT(Commands(), ElementsAre("a:ABORT"));
}

TEST_F(OrdersTest, TimesAreThoseOfTheFirstRunAndTheEnd) {
  Place();
  EXPECT_FALSE(machine_.job().has_start_time());
  now_ += absl::Seconds(5);
  for (uint32_t rank = 0; rank < 4; ++rank) Ready(rank);
  const int64_t started = machine_.job().start_time().seconds();
  EXPECT_EQ(started, absl::ToUnixSeconds(now_));
  now_ += absl::Seconds(5);
  for (uint32_t rank = 0; rank < 4; ++rank) Exit(rank, TrainerExited::FAILED, rank > 0);
  EXPECT_EQ(attempt().end_time().seconds(), absl::ToUnixSeconds(now_));
  Pass(absl::Minutes(1));
  Run();
  EXPECT_EQ(machine_.job().start_time().seconds(), started);
  now_ += absl::Seconds(5);
  for (uint32_t rank = 0; rank < 4; ++rank) Exit(rank, TrainerExited::COMPLETED);
  EXPECT_EQ(machine_.job().end_time().seconds(), absl::ToUnixSeconds(now_));
}

TEST_F(OrdersTest, ProgressFollowsTheNewestSteps) {
  Run();
  const auto step = [&](uint64_t number, double seconds, double loss) {
    for (int rank = 0; rank < 4; ++rank) {
      v1::StepReport report;
      report.set_step(number);
      report.set_rank(rank);
      report.set_step_seconds(seconds);
      report.set_loss(loss);
      report.set_tokens(100);
      machine_.OnStep(report, {"node", "incarnation", number});
    }
  };
  step(1, 2, 6.5);
  step(2, 7, 5.5);
  const v1::Progress& progress = machine_.job().progress();
  EXPECT_EQ(progress.step(), 2u);
  EXPECT_EQ(progress.total_steps(), 10u);
  EXPECT_EQ(progress.tokens(), 200u);
  EXPECT_EQ(progress.first_loss(), 6.5);
  EXPECT_EQ(progress.loss(), 5.5);
  EXPECT_DOUBLE_EQ(progress.tokens_per_second(), 100 / 3.0) << "2 s, and a fifth of the way to 7";
  EXPECT_DOUBLE_EQ(progress.eta_seconds(), 8 * 3.0);
  EXPECT_EQ(attempt().first_step(), 0u);
  EXPECT_EQ(attempt().last_step(), 2u);
  step(10, 3, 4.5);
  EXPECT_EQ(progress.eta_seconds(), 0);
}

TEST_F(OrdersTest, EvaluationsAreKeptFirstAndLast) {
  const auto eval = [&](uint64_t step, double loss) {
    v1::EvalReport report;
    report.set_step(step);
    report.set_loss(loss);
    machine_.OnEval(report);
  };
  eval(2, 5.0);
  eval(4, 4.0);
  EXPECT_EQ(machine_.job().first_eval().loss(), 5.0);
  EXPECT_EQ(machine_.job().last_eval().loss(), 4.0);
  eval(2, 3.0);  // by a resumed attempt
  EXPECT_EQ(machine_.job().first_eval().loss(), 3.0);
  EXPECT_EQ(machine_.job().last_eval().loss(), 3.0);
  EXPECT_TRUE(machine_.effects().any());
}

TEST_F(OrdersTest, TheExportedModelIsTheJobs) {
  machine_.Take();
  machine_.OnModelExported("/checkpoints/model");
  EXPECT_EQ(machine_.job().model_directory(), "/checkpoints/model");
  EXPECT_TRUE(machine_.Take().job_changed);
  EXPECT_FALSE(machine_.effects().any());
}

TEST_F(OrdersTest, AJobThatCannotRunSaysWhy) {
  machine_.Wait("2 of 4 trainers are free");
  EXPECT_EQ(machine_.job().state_reason(), "2 of 4 trainers are free");
  machine_.Reject("no plan: the sequence does not divide", now_);
  EXPECT_EQ(state(), Job::FAILED);
  EXPECT_EQ(machine_.job().state_reason(), "no plan: the sequence does not divide");
  EXPECT_TRUE(machine_.Finished());
  EXPECT_TRUE(machine_.job().has_end_time());
}

}  // namespace
}  // namespace ringleader::lifecycle
