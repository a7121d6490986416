// What goes through a worker: to trainers from commands, and from trainers to the coordinator.
#include <gmock/gmock.h>
#include <signal.h>

#include "absl/strings/str_format.h"
#include "base/testing/equals_text.h"
#include "worker/agent/testing/supervised.h"

namespace ringleader::agent {
namespace {

using ::testing::ElementsAre;

class TrainerMessagesTest : public testing::SupervisedTest {
 protected:
  // Ranks 4 and 5 of six.
  v1::Command StartHere() {
    v1::Command command = Command(7);
    v1::StartTrainers* start = command.mutable_start();
    start->set_trainers(2);
    start->set_first_rank(4);
    start->set_world_size(6);
    start->set_ranks_per_node(2);
    start->set_checkpoint_step(40);
    start->mutable_spec()->set_name("job");
    start->mutable_plan()->set_version(3);
    return command;
  }
};

TEST_F(TrainerMessagesTest, AnAssignmentIsTheStartsField) {
  v1::Command start = StartHere();
  start.mutable_start()->mutable_measure()->set_budget_milliseconds(1234);
  start.mutable_start()->set_job_uid("job-1");
  supervisor_.SetLease(absl::FromUnixNanos(12'345));
  EXPECT_TRUE(Do(start).accepted());
  const auto trainer = Attach(7, 5);
  ASSERT_EQ(trainer->sent.size(), 1u);
  EXPECT_THAT(trainer->sent[0], EqualsText(absl::StrFormat(R"(
    assignment {
      job: "job" attempt: 7 spec { name: "job" } plan { version: 3 } rank: 5 world_size: 6
      ranks_per_node: 2 checkpoint_step: 40 listen_host: "10.0.0.7" protocol_version: %d
      job_uid: "job-1" measure { budget_milliseconds: 1234 } fencing_token: 7
      lease { end_boot_nanoseconds: 12345 } threads: 3
    })",
                                                           kProtocolVersion)))
      << "six cores for two slots";
}

TEST_F(TrainerMessagesTest, WhoAttachesLateIsToldToStop) {
  EXPECT_TRUE(Do(StartHere()).accepted());
  EXPECT_TRUE(Do(StopOf(7, v1::StopTrainers::CHECKPOINT, 60'000)).accepted());
  const auto trainer = Attach(7, 4);
  ASSERT_EQ(trainer->sent.size(), 2u);
  EXPECT_TRUE(trainer->sent[0].has_assignment());
  EXPECT_THAT(
      trainer->sent[1],
      EqualsText("stop { mode: CHECKPOINT grace_milliseconds: 60000 reason: 'rank 9 failed' }"));
}

TEST_F(TrainerMessagesTest, APlanForWhoHasNotComeYetIsAccepted) {
  v1::Command start = StartHere(), plan = Command(7);
  start.mutable_start()->set_first_rank(0);
  plan.mutable_plan()->set_version(9);
  EXPECT_TRUE(Do(start).accepted());
  EXPECT_TRUE(Do(plan).accepted());
}

TEST_F(TrainerMessagesTest, WhatIsNoMessageEndsTheStream) {
  EXPECT_TRUE(Do(StartHere()).accepted());
  const auto trainer = Attach(7, 4);
  supervisor_.OnTrainerMessage(trainer, v1::TrainerMessage(), now_);
  EXPECT_TRUE(absl::IsInvalidArgument(trainer->closed)) << trainer->closed;
  v1::TrainerMessage pulse;
  pulse.mutable_pulse()->set_step(1);
  EXPECT_TRUE(absl::IsFailedPrecondition(Say(pulse)->closed)) << "it has not said hello";
  ExpectNothing();
}

TEST_F(TrainerMessagesTest, ThreadsAreTheJobsIfItSays) {
  v1::Command start = StartHere();
  start.mutable_start()->mutable_spec()->mutable_resources()->set_threads(11);
  EXPECT_TRUE(Do(start).accepted());
  EXPECT_EQ(Attach(7, 4)->sent[0].assignment().threads(), 11u);
}

class OneCoreTest : public testing::SupervisedTest {
 protected:
  OneCoreTest() : SupervisedTest({}, {}, {}, /*cores=*/1) {}
};

TEST_F(OneCoreTest, ATrainerHasAThreadHoweverManyShareACore) {
  EXPECT_TRUE(Do(StartOf(7, 1)).accepted());
  EXPECT_EQ(Attach(7, 0)->sent[0].assignment().threads(), 1u);
}

TEST_F(TrainerMessagesTest, AddressesGoToAllPlansAndTracesToRankZero) {
  v1::Command start = StartHere();
  start.mutable_start()->set_first_rank(0);
  EXPECT_TRUE(Do(start).accepted());
  const auto zero = Attach(7, 0), one = Attach(7, 1);
  zero->sent.clear();
  one->sent.clear();
  v1::Command connect = Command(7), plan = Command(7), profile = Command(7);
  connect.mutable_connect()->add_addresses("127.0.0.1:1");
  plan.mutable_plan()->set_version(9);
  profile.mutable_profile()->set_steps(2);
  for (const v1::Command& command : {connect, plan, profile}) {
    EXPECT_TRUE(Do(command).accepted());
  }
  ASSERT_EQ(zero->sent.size(), 3u);
  EXPECT_THAT(zero->sent[0].connect().addresses(), ElementsAre("127.0.0.1:1"));
  EXPECT_EQ(zero->sent[1].plan().version(), 9u);
  EXPECT_EQ(zero->sent[2].profile().steps(), 2u);
  ASSERT_EQ(one->sent.size(), 1u);
  EXPECT_TRUE(one->sent[0].has_connect());
}

// Rank 0 alone asks all others to follow it; two that do so would wait for each other.
TEST_F(TrainerMessagesTest, PlansAndTracesAreForNobodyWhereRankZeroIsElsewhere) {
  EXPECT_TRUE(Do(StartHere()).accepted());
  const auto four = Attach(7, 4), five = Attach(7, 5);
  four->sent.clear();
  five->sent.clear();
  v1::Command plan = Command(7), profile = Command(7);
  plan.mutable_plan()->set_version(9);
  profile.mutable_profile()->set_steps(2);
  for (const v1::Command& command : {plan, profile}) EXPECT_TRUE(Do(command).accepted());
  EXPECT_TRUE(four->sent.empty());
  EXPECT_TRUE(five->sent.empty());
}

TEST_F(TrainerMessagesTest, CommandsForWhatHasEndedAreAccepted) {
  v1::Command plan = Command(7), connect = Command(7);
  plan.mutable_plan()->set_version(9);
  connect.mutable_connect()->add_addresses("127.0.0.1:1");
  EXPECT_TRUE(Do(plan).accepted());
  EXPECT_TRUE(Do(connect).accepted());
  EXPECT_TRUE(Do(StopOf(7, v1::StopTrainers::ABORT, 0)).accepted());
  EXPECT_TRUE(supervisor_.idle());
}

TEST_F(TrainerMessagesTest, ReportsGoUpInTheNameOfTheTrainerThatSentThem) {
  EXPECT_TRUE(Do(StartHere()).accepted());
  const auto trainer = Attach(7, 5);
  v1::TrainerMessage ready, step, eval, checkpoint, model, measured;
  ready.mutable_ready()->set_rank(0);  // it may say what it likes
  ready.mutable_ready()->set_address("127.0.0.1:5");
  step.mutable_step()->set_rank(0);
  step.mutable_step()->set_loss(2.5);
  eval.mutable_eval()->set_loss(3.5);
  checkpoint.mutable_checkpoint()->set_path("/checkpoints/step-1");
  model.mutable_model_exported()->set_path("/checkpoints/model");
  measured.mutable_measurements()->add_links()->set_bytes_per_second(4.5);
  std::vector<v1::AttemptEvent> events;
  for (const v1::TrainerMessage& message : {ready, step, eval, checkpoint, model, measured}) {
    supervisor_.OnTrainerMessage(trainer, message, now_);
    events.push_back(Next().event());
    EXPECT_EQ(events.back().job(), "job");
    EXPECT_EQ(events.back().attempt(), 7u);
    EXPECT_EQ(events.back().fencing_token(), 7u);
  }
  EXPECT_EQ(events[0].trainer_ready().rank(), 5u);
  EXPECT_EQ(events[0].trainer_ready().address(), "127.0.0.1:5");
  EXPECT_EQ(events[1].step().rank(), 5);
  EXPECT_EQ(events[1].step().loss(), 2.5);
  EXPECT_EQ(events[2].eval().loss(), 3.5);
  EXPECT_EQ(events[3].checkpoint().path(), "/checkpoints/step-1");
  EXPECT_EQ(events[4].model_exported().path(), "/checkpoints/model");
  EXPECT_EQ(events[5].measurements().links(0).bytes_per_second(), 4.5);
  Pulse(trainer, 9);
  ExpectNothing();  // pulses stay here
}

TEST_F(TrainerMessagesTest, WhatRunsIsKnownByRankAndStep) {
  EXPECT_TRUE(supervisor_.Running().empty());
  EXPECT_TRUE(Do(StartHere()).accepted());
  const auto four = Attach(7, 4), five = Attach(7, 5);
  Pulse(four, 12);
  Pulse(five, 11);
  std::vector<v1::RunningAttempt> running = supervisor_.Running();
  ASSERT_EQ(running.size(), 1u);
  EXPECT_EQ(running[0].job(), "job");
  EXPECT_EQ(running[0].attempt(), 7u);
  EXPECT_EQ(running[0].fencing_token(), 7u);
  EXPECT_THAT(running[0].ranks(), ElementsAre(4, 5));
  EXPECT_EQ(running[0].last_step(), 12u);
  kill(PidOf(7, 4), SIGKILL);
  supervisor_.OnTrainerGone(four);
  EXPECT_EQ(Next().event().trainer_exited().rank(), 4u);
  running = supervisor_.Running();
  ASSERT_EQ(running.size(), 1u);
  EXPECT_THAT(running[0].ranks(), ElementsAre(5));
  EXPECT_EQ(running[0].last_step(), 11u);
}

}  // namespace
}  // namespace ringleader::agent
