// What becomes of an attempt whose node refuses it, loses its trainers, or is lost itself: at once,
// without waiting for another report or for time to pass.
#include <functional>
#include <set>

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
using NodesLostTest = testing::MachineTest;

TEST_F(NodesLostTest, AJobOfOneNodeEndsWithIt) {
  const auto on_refused = [this](JobMachine& machine) {
    machine.OnStartRefused("nodes/a", "why", now_);
  };
  const auto on_deadly = [this](JobMachine& machine) {
    machine.OnDeadlyCommand("nodes/a", /*is_start=*/true, now_);
  };
  const auto on_died = [this](JobMachine& machine) {
    machine.OnWorkerDied("nodes/a", "why", now_);
  };
  const auto on_lost = [this](JobMachine& machine) {
    machine.OnEndsLost("nodes/a", {}, "why", now_);
  };
  struct Case {
    std::function<void(JobMachine&)> happens;
    Job::State becomes;
    RankStatus::State ranks;
    std::string failure;
  };
  for (const Case& one : std::vector<Case>{
           {on_refused, Job::RETRYING, RankStatus::FAILED, "the worker did not start it: why"},
           {on_deadly, Job::FAILED, RankStatus::FAILED,
            "the worker's session ended each time that it was sent the job, which is not sent "
            "again: look into the worker's log"},
           {on_died, Job::RETRYING, RankStatus::LOST, "why"},
           {on_lost, Job::RETRYING, RankStatus::LOST, "why"}}) {
    JobMachine machine(NewJob(), &options_);
    one.happens(machine);
    EXPECT_EQ(machine.job().state(), Job::PENDING) << "it has no attempt";
    machine.Place({On("nodes/a", 0)}, {}, ++token_, now_);
    one.happens(machine);
    EXPECT_EQ(machine.job().state(), one.becomes) << one.failure;
    EXPECT_EQ(machine.attempt()->state(), Attempt::FAILED);
    EXPECT_EQ(machine.attempt()->failure().rank(), 0);
    EXPECT_EQ(machine.attempt()->failure().node(), "nodes/a");
    EXPECT_EQ(machine.attempt()->failure().message(), one.failure);
    for (const RankStatus& rank : machine.attempt()->ranks()) EXPECT_EQ(rank.state(), one.ranks);
    // Said once more, it changes nothing.
    const std::string before = machine.job().ShortDebugString();
    one.happens(machine);
    EXPECT_EQ(machine.job().ShortDebugString(), before);
  }
}

TEST_F(NodesLostTest, WhatIsKnownOfANodeIsNoMereSignOfAFailureElsewhere) {
  for (const bool died : {true, false}) {
    JobMachine machine(NewJob(), &options_);
    machine.Place({On("nodes/a", 0), On("nodes/b", 2)}, {}, ++token_, now_);
    if (died) {
      machine.OnWorkerDied("nodes/b", "why", now_);
    } else {
      machine.OnDeadlyCommand("nodes/b", /*is_start=*/false, now_);
    }
    TrainerExited exited;
    exited.set_outcome(TrainerExited::FAILED);
    machine.OnExit(exited, now_);
    EXPECT_EQ(machine.attempt()->failure().rank(), 2) << died;
  }
}

TEST_F(NodesLostTest, TrainersThatStillRunAreNotLost) {
  Run();
  machine_.OnEndsLost("nodes/a", {0, 1}, "how", now_);
  EXPECT_EQ(attempt().state(), Attempt::RUNNING);
  EXPECT_FALSE(attempt().has_failure());
  machine_.OnEndsLost("nodes/a", {0}, "how", now_);
  EXPECT_EQ(attempt().ranks(0).state(), RankStatus::READY);
  EXPECT_EQ(attempt().ranks(1).state(), RankStatus::LOST);
  EXPECT_EQ(attempt().failure().rank(), 1);
}

// The command had come too late: the trainers went on to their end.
TEST_F(NodesLostTest, AJobThatSucceedsHasNoFailure) {
  Run();
  machine_.OnDeadlyCommand("nodes/a", /*is_start=*/false, now_);
  EXPECT_THAT(attempt().failure().message(), HasSubstr("was sent a command for the job, which"));
  for (uint32_t rank = 0; rank < 4; ++rank) Exit(rank, TrainerExited::COMPLETED);
  EXPECT_EQ(state(), Job::SUCCEEDED);
  EXPECT_FALSE(attempt().has_failure());
  EXPECT_EQ(attempt().state_reason(), "");
}

TEST_F(NodesLostTest, ARefusalThatComesAfterTheEndOnlyKeepsTheJobAway) {
  Run();
  for (uint32_t rank = 0; rank < 4; ++rank) Exit(rank, TrainerExited::COMPLETED);
  machine_.OnStartRefused("nodes/b", "why", now_);
  EXPECT_EQ(attempt().ranks(2).state(), RankStatus::COMPLETED);
  EXPECT_EQ(state(), Job::SUCCEEDED);
  EXPECT_THAT(machine_.AvoidedNodes(), ElementsAre("b"));
}

// An attempt ends without a node that is out of sight; when that comes back and starts nothing, its
// ranks will never report an end.
TEST_F(NodesLostTest, AStartThatComesToNothingAfterTheEndFreesTheJob) {
  using Happens = std::function<void(JobMachine&)>;
  for (const Happens& happens :
       {Happens([this](JobMachine& machine) { machine.OnStartRefused("nodes/b", "why", now_); }),
        Happens([this](JobMachine& machine) {
          machine.OnDeadlyCommand("nodes/b", /*is_start=*/true, now_);
        })}) {
    for (const bool is_cancelled : {false, true}) {
      JobMachine machine(NewJob(), &options_);
      machine.Place({On("nodes/a", 0), On("nodes/b", 2)}, {}, ++token_, now_);
      machine.OnSight("nodes/b", now_, now_);
      machine.OnStartRefused("nodes/a", "why", now_);
      now_ += options_.blame_window;
      machine.Tick(now_);
      ASSERT_EQ(machine.job().state(), Job::RETRYING);
      ASSERT_EQ(machine.attempt()->ranks(2).state(), RankStatus::STARTING);
      if (is_cancelled) {
        ASSERT_TRUE(machine.Cancel(now_).ok());
      }
      machine.OnSight("nodes/b", std::nullopt, now_);
      happens(machine);
      EXPECT_EQ(machine.attempt()->ranks(2).state(), RankStatus::FAILED);
      now_ += options_.max_retry_backoff;
      machine.Tick(now_);
      EXPECT_EQ(machine.job().state(), is_cancelled ? Job::CANCELLED : Job::PENDING);
    }
  }
}

TEST_F(NodesLostTest, ARefusalForNowBesideAFailureCostsARetry) {
  for (const bool first : {true, false}) {
    JobMachine machine(NewJob(), &options_);
    machine.Place({On("nodes/a", 0), On("nodes/b", 2)}, {}, ++token_, now_);
    machine.OnStartRefused("nodes/a", "no room", now_, /*later=*/first);
    machine.OnStartRefused("nodes/b", "no room", now_, /*later=*/!first);
    EXPECT_EQ(machine.job().retries_used(), first ? 0u : 1u);
    EXPECT_THAT(
        machine.job().state_reason(),
        HasSubstr(first ? "no room; it does not count as a retry, and goes elsewhere for 30s"
                        : "no room; retry 1 of 2"));
  }
}

TEST_F(NodesLostTest, ANodeThatRefusedIsAvoidedForItsTime) {
  machine_.OnStartRefused("nodes/b", "why", now_);
  now_ += options_.refusal_pause - absl::Milliseconds(1);
  EXPECT_FALSE(machine_.EndAvoidance(now_));
  now_ += absl::Milliseconds(1);
  EXPECT_TRUE(machine_.EndAvoidance(now_));
  EXPECT_THAT(machine_.AvoidedNodes(), IsEmpty());
  EXPECT_FALSE(machine_.EndAvoidance(now_));
  machine_.OnStartRefused("nodes/b", "why", now_);
  EXPECT_FALSE(machine_.EndAvoidance(now_ + 2 * options_.refusal_pause - absl::Milliseconds(1)));
  EXPECT_TRUE(machine_.EndAvoidance(now_ + 2 * options_.refusal_pause));
  for (int i = 0; i < 10; ++i) machine_.OnStartRefused("nodes/b", "why", now_);
  EXPECT_FALSE(machine_.EndAvoidance(now_ + options_.max_retry_backoff - absl::Milliseconds(1)));
  EXPECT_TRUE(machine_.EndAvoidance(now_ + options_.max_retry_backoff));
}

// A node may be set aside for what is held against it.
TEST_F(NodesLostTest, OnlyWhatARankFailsOfByItselfAndCouldTryAgainIsHeldAgainstItsNode) {
  const auto held = [&](const std::function<void()>& happens) {
    machine_.mutable_job()->set_retries_used(0);
    Place();
    happens();
    for (uint32_t rank = 0; rank < 4; ++rank) Exit(rank, TrainerExited::FAILED, true);
    const Effects effects = machine_.Take();
    EXPECT_THAT(effects.ended, ElementsAre(Attempt::FAILED));
    Pass(options_.max_retry_backoff);
    return effects.node_failures;
  };
  const auto fails = held([&] { Exit(2, TrainerExited::FAILED); });
  ASSERT_EQ(fails.size(), 1u);
  EXPECT_EQ(fails[0].node, "nodes/b");
  EXPECT_EQ(fails[0].message, "out of memory");
  const auto refuses = [&](bool later) {
    return held([&] { machine_.OnStartRefused("nodes/a", "no room", now_, later); }).size();
  };
  EXPECT_EQ(refuses(/*later=*/false), 1u);
  EXPECT_EQ(refuses(/*later=*/true), 0u);
  EXPECT_EQ(held([&] { machine_.OnWorkerDied("nodes/b", "how", now_); }).size(), 0u);
  EXPECT_EQ(held([&] { machine_.OnEndsLost("nodes/b", {}, "how", now_); }).size(), 0u);
  EXPECT_EQ(held([&] { Exit(2, TrainerExited::FAILED, false, /*retryable=*/false); }).size(), 0u);
}

// Ranks on another node lost a peer: that is no word about a node whose own ranks had completed.
TEST_F(NodesLostTest, ALostNodeWhoseRanksAreDeadIsNotNamed) {
  Run();
  for (const uint32_t rank : {2, 3}) Exit(rank, TrainerExited::COMPLETED);
  machine_.OnSight("nodes/b", now_, now_);
  for (const uint32_t rank : {0, 1}) Exit(rank, TrainerExited::FAILED, true);
  EXPECT_EQ(attempt().failure().rank(), 0);
  EXPECT_THAT(attempt().failure().message(), HasSubstr("a peer is gone"));
}

TEST_F(NodesLostTest, TheEndThatTimeBringsIsAChangeOfTheAttempt) {
  Run();
  machine_.OnSight("nodes/b", now_, now_);
  for (const uint32_t rank : {0, 1}) Exit(rank, TrainerExited::FAILED, true);
  machine_.Take();
  Pass(options_.blame_window);
  const Effects effects = machine_.Take();
  EXPECT_THAT(effects.ended, ElementsAre(Attempt::FAILED));
  EXPECT_THAT(effects.changed_attempts, ElementsAre(1u));
}

// The last ranks came up while another node was out of sight.
TEST_F(NodesLostTest, RanksThatAreAllUpConnectAndTheAttemptStaysUnknown) {
  Place();
  for (const uint32_t rank : {2, 3}) Ready(rank);
  machine_.OnSight("nodes/b", now_, now_);
  machine_.Take();
  for (const uint32_t rank : {0, 1}) Ready(rank);
  EXPECT_THAT(Commands(), ElementsAre("a:connect", "b:connect"));
  EXPECT_EQ(attempt().state(), Attempt::UNKNOWN);
  EXPECT_EQ(state(), Job::UNKNOWN);
  EXPECT_TRUE(attempt().has_ready_time());
  machine_.OnSight("nodes/b", std::nullopt, now_);
  EXPECT_EQ(attempt().state(), Attempt::RUNNING);
  EXPECT_EQ(state(), Job::RUNNING);
}

}  // namespace
}  // namespace ringleader::lifecycle
