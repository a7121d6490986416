// Which attempt may run: tokens, slots, and who may call itself a trainer of it.
#include <gmock/gmock.h>
#include <signal.h>

#include <filesystem>
#include <fstream>

#include "worker/agent/testing/supervised.h"

namespace ringleader::agent {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using FencingTest = testing::SupervisedTest;

TEST_F(FencingTest, AnOlderTokenIsRefusedWhateverItAsks) {
  EXPECT_TRUE(Do(StartOf(7, 1)).accepted());
  const auto trainer = Attach(7, 0);
  trainer->sent.clear();
  v1::Command connect = Command(6), plan = Command(6);
  connect.mutable_connect()->add_addresses("127.0.0.1:1");
  plan.mutable_plan()->set_version(2);
  for (const v1::Command& command :
       {StartOf(6, 1), StopOf(6, v1::StopTrainers::ABORT, 0), connect, plan}) {
    const v1::CommandAck ack = Do(command);
    EXPECT_FALSE(ack.accepted());
    EXPECT_EQ(ack.message(), "fencing token 6 is older than 7, which jobs/job has shown here");
  }
  EXPECT_TRUE(trainer->sent.empty());
  EXPECT_FALSE(std::filesystem::exists(FolderOf(6, 0)));
  ExpectNothing();
  // Tokens are each job's own.
  EXPECT_TRUE(Do(StartOf(3, 1, "other")).accepted());
  EXPECT_GT(PidOf(3, 0, "other"), 0);
}

TEST_F(FencingTest, AnOlderTokenStaysRefusedWhenItsAttemptIsGone) {
  EXPECT_TRUE(Do(StartOf(7, 1)).accepted());
  kill(PidOf(7, 0), SIGKILL);
  NextExit();
  EXPECT_TRUE(supervisor_.idle());
  EXPECT_FALSE(Do(StartOf(6, 1)).accepted());
}

// Its process is dead, but something that it started may still write in its name.
TEST_F(FencingTest, ANewAttemptWaitsForWhatHoldsTheOlderOnesOutput) {
  TrainersDo("setsid sh -c 'echo $$ >holder; exec sleep 600' &");
  // It writes its number once it has left its trainer's group.
  const auto holder_of = [this](uint64_t token) {
    pid_t holder = 0;
    const absl::Time deadline = absl::Now() + absl::Seconds(20);
    while (!(std::ifstream(FolderOf(token, 0) + "/holder") >> holder) && absl::Now() < deadline) {
      absl::SleepFor(absl::Milliseconds(2));
    }
    EXPECT_GT(holder, 0);
    return holder;
  };
  EXPECT_TRUE(Do(StartOf(7, 1)).accepted());
  const pid_t first = PidOf(7, 0), holder = holder_of(7);
  supervisor_.OnCommand(StartOf(8, 1), now_);
  EXPECT_TRUE(Next().command_ack().accepted());
  const absl::Time deadline = absl::Now() + absl::Seconds(20);
  while (kill(first, 0) == 0 && absl::Now() < deadline) supervisor_.Tick(now_);
  ASSERT_NE(kill(first, 0), 0);
  supervisor_.Tick(now_);
  supervisor_.Tick(now_);
  EXPECT_FALSE(std::filesystem::exists(FolderOf(8, 0)));
  kill(holder, SIGKILL);
  EXPECT_EQ(Next().event().fencing_token(), 7u);
  supervisor_.Tick(now_);
  EXPECT_GT(PidOf(8, 0), 0);
  kill(holder_of(8), SIGKILL);
}

TEST_F(FencingTest, ANewAttemptWaitsUntilTheOlderOnesTrainersAreGone) {
  EXPECT_TRUE(Do(StartOf(7, 2)).accepted());
  const pid_t first = PidOf(7, 0), second = PidOf(7, 1);
  // Both of the node's slots are the older attempt's own.
  supervisor_.OnCommand(StartOf(8, 2), now_);
  EXPECT_FALSE(std::filesystem::exists(FolderOf(8, 0))) << "started beside trainers of the job";
  EXPECT_TRUE(Next().command_ack().accepted());
  for (int i = 0; i < 2; ++i) {
    const v1::WorkerMessage message = Next();
    EXPECT_EQ(message.event().fencing_token(), 7u);
    EXPECT_EQ(message.event().trainer_exited().message(), "a newer attempt took its place");
    EXPECT_EQ(message.event().trainer_exited().signal(), SIGKILL);
    EXPECT_TRUE(message.event().trainer_exited().retryable());
  }
  supervisor_.Tick(now_);
  EXPECT_NE(kill(first, 0), 0);
  EXPECT_NE(kill(second, 0), 0);
  EXPECT_GT(PidOf(8, 0), 0);
  EXPECT_GT(PidOf(8, 1), 0);
}

TEST_F(FencingTest, WhatLostItsPlaceWhileItWaitedIsNeverStarted) {
  EXPECT_TRUE(Do(StartOf(7, 1)).accepted());
  PidOf(7, 0);
  supervisor_.OnCommand(StartOf(8, 1), now_);
  const absl::Time deadline = absl::Now() + absl::Seconds(20);
  while (supervisor_.Running().size() > 1 && absl::Now() < deadline) {
    RunTasks();
    supervisor_.Tick(now_);
  }
  // Nothing is in its way any more, and its turn has not come yet.
  ASSERT_EQ(supervisor_.Running().size(), 1u);
  ASSERT_FALSE(std::filesystem::exists(FolderOf(8, 0)));
  supervisor_.OnCommand(StartOf(9, 1), now_);
  std::map<uint64_t, v1::TrainerExited> exits;
  while (exits.size() < 2 && !HasFailure()) {
    const v1::WorkerMessage message = Next();
    if (!message.event().has_trainer_exited()) continue;
    exits[message.event().fencing_token()] = message.event().trainer_exited();
  }
  EXPECT_EQ(exits[7].signal(), SIGKILL);
  EXPECT_EQ(exits[8].message(), "a newer attempt took its place");
  EXPECT_EQ(exits[8].signal(), 0) << "it had a process";
  supervisor_.Tick(now_);
  EXPECT_GT(PidOf(9, 0), 0);
}

TEST_F(FencingTest, AnyCommandOfANewerTokenEndsWhatIsOlder) {
  EXPECT_TRUE(Do(StartOf(7, 1)).accepted());
  EXPECT_TRUE(Do(StartOf(5, 1, "other")).accepted());
  PidOf(7, 0);
  const pid_t other = PidOf(5, 0, "other");
  EXPECT_TRUE(Do(StopOf(8, v1::StopTrainers::ABORT, 0)).accepted());
  EXPECT_EQ(NextExit().message(), "a newer attempt took its place");
  ExpectNothing();
  EXPECT_EQ(kill(other, 0), 0) << "another job's token says nothing of it";
}

TEST_F(FencingTest, NoMoreTrainersThanSlots) {
  v1::CommandAck ack = Do(StartOf(1, 3));
  EXPECT_FALSE(ack.accepted());
  EXPECT_THAT(ack.message(), HasSubstr("0 of 2 trainers are taken, and 3 were asked for"));
  EXPECT_TRUE(Do(StartOf(2, 1)).accepted());
  ack = Do(StartOf(3, 2, "other"));
  EXPECT_FALSE(ack.accepted());
  EXPECT_THAT(ack.message(), HasSubstr("1 of 2 trainers are taken, and 2 were asked for"));
  EXPECT_TRUE(Do(StartOf(4, 1, "other")).accepted());
  EXPECT_FALSE(Do(StartOf(5, 1, "third")).accepted());
  ASSERT_EQ(supervisor_.Running().size(), 2u);
}

TEST_F(FencingTest, WhatIsSaidTwiceIsDoneOnce) {
  const v1::Command start = StartOf(7, 1);
  EXPECT_TRUE(Do(start).accepted());
  const pid_t pid = PidOf(7, 0);
  // Whoever asks again has forgotten the answer.
  EXPECT_TRUE(Do(start).accepted());
  ExpectNothing();
  EXPECT_EQ(PidOf(7, 0), pid);
  const v1::Command refused = StartOf(9, 2, "third");
  EXPECT_FALSE(Do(refused).accepted());
  const v1::CommandAck repeated = Do(refused);
  EXPECT_FALSE(repeated.accepted());
  EXPECT_TRUE(repeated.later());
  EXPECT_THAT(repeated.message(), ::testing::HasSubstr("trainers are taken"));
  v1::Command again = StartOf(7, 1);
  EXPECT_TRUE(Do(again).accepted());
  EXPECT_EQ(PidOf(7, 0), pid);
  ASSERT_EQ(supervisor_.Running().size(), 1u);
  EXPECT_THAT(supervisor_.Running()[0].ranks(), ElementsAre(0));
  // One without a number needs no answer.
  again = StartOf(8, 1, "other");
  again.clear_command_id();
  supervisor_.OnCommand(again, now_);
  ExpectNothing();
  EXPECT_GT(PidOf(8, 0, "other"), 0);
}

// So many that no coordinator repeats an older one, and a worker of years does not grow.
TEST_F(FencingTest, TheLastTenThousandCommandsAreRemembered) {
  constexpr int kRemembered = 10'000;
  EXPECT_TRUE(Do(StartOf(7, 1)).accepted());
  const auto trainer = Attach(7, 0);
  trainer->sent.clear();
  v1::Command plan = Command(7);
  plan.mutable_plan()->set_version(9);
  EXPECT_TRUE(Do(plan).accepted());
  for (int i = 1; i < kRemembered; ++i) {
    ASSERT_TRUE(Do(StopOf(7, v1::StopTrainers::CHECKPOINT, 60'000)).accepted());
  }
  trainer->sent.clear();
  EXPECT_TRUE(Do(plan).accepted());
  EXPECT_TRUE(trainer->sent.empty());
  EXPECT_TRUE(Do(StopOf(7, v1::StopTrainers::CHECKPOINT, 60'000)).accepted());
  EXPECT_TRUE(Do(plan).accepted());
  EXPECT_EQ(trainer->sent.size(), 2u) << "the plan was forgotten";
}

// A coordinator that was put back from a backup has forgotten all that came after it.
TEST_F(FencingTest, AStartThatIsRepeatedWhenItsAttemptIsOverStartsNothing) {
  const v1::Command start = StartOf(7, 1);
  EXPECT_TRUE(Do(start).accepted());
  PidOf(7, 0);
  EXPECT_TRUE(Do(StopOf(7, v1::StopTrainers::ABORT, 0)).accepted());
  NextExit();
  EXPECT_TRUE(Do(start).accepted());
  ExpectNothing();
  EXPECT_TRUE(supervisor_.idle());
}

TEST_F(FencingTest, AWorkerThatLeavesStartsNothing) {
  supervisor_.RefuseStarts("the worker is shutting down");
  const v1::CommandAck ack = Do(StartOf(7, 1));
  EXPECT_FALSE(ack.accepted());
  EXPECT_TRUE(ack.later()) << "another worker may take it, and the job keeps its retries";
  EXPECT_EQ(ack.message(), "the worker is shutting down");
  EXPECT_TRUE(supervisor_.idle());
}

TEST_F(FencingTest, OnlyTheProcessThatWasStartedAttaches) {
  EXPECT_TRUE(Do(StartOf(7, 2)).accepted());
  const pid_t pid = PidOf(7, 0), other = PidOf(7, 1);
  // Another process, another rank's, an older token, a newer one, and a rank that is not here.
  for (const v1::TrainerMessage& hello :
       {HelloOf(7, 0, getpid()), HelloOf(7, 0, other), HelloOf(6, 0, pid), HelloOf(8, 0, pid),
        HelloOf(7, 2, pid)}) {
    const auto stranger = Say(hello);
    EXPECT_EQ(stranger->closed,
              absl::PermissionDeniedError("not a trainer that this worker started"));
    EXPECT_TRUE(stranger->sent.empty());
  }
  EXPECT_EQ(Attach(7, 0)->sent.size(), 1u);
  kill(other, SIGKILL);
  NextExit();
  EXPECT_EQ(Say(HelloOf(7, 1, other))->closed.code(), absl::StatusCode::kPermissionDenied);
}

TEST_F(FencingTest, WhoDoesNotSayHelloFirstIsHungUpOn) {
  v1::TrainerMessage message;
  message.mutable_step()->set_step(1);
  EXPECT_EQ(Say(message)->closed,
            absl::FailedPreconditionError("the first message must be a hello"));
  EXPECT_TRUE(Do(StartOf(7, 1)).accepted());
  const auto trainer = Attach(7, 0);
  supervisor_.OnTrainerMessage(trainer, v1::TrainerMessage(), now_);
  EXPECT_EQ(trainer->closed.code(), absl::StatusCode::kInvalidArgument);
  ExpectNothing();
}

}  // namespace
}  // namespace ringleader::agent
