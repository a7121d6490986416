// Sessions that end before a worker has acknowledged what it was told.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "coordinator/lifecycle/job_controller.h"
#include "coordinator/lifecycle/testing/controller_test.h"

namespace ringleader::lifecycle {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

using UnheardCommandsTest = testing::ControllerTest;

TEST_F(UnheardCommandsTest, ACommandThatEndedTwoSessionsIsNotSentAThirdTime) {
  ASSERT_TRUE(Create("j").ok());
  for (int i = 0; i < 2; ++i) {
    auto session = Connect("a", "folder.1");
    const std::vector<v1::Command> commands = session->Commands();
    ASSERT_THAT(commands, SizeIs(1)) << i;
    EXPECT_TRUE(commands[0].has_start());
    controller_->OnClosed(session);
    controller_->RunOnce();
  }
  EXPECT_EQ(Job().state(), v1::Job::FAILED);
  EXPECT_THAT(Job().state_reason(), HasSubstr("ended each time that it was sent the job"));
  auto session = Connect("a", "folder.1");
  EXPECT_THAT(session->Commands(), IsEmpty());
  // The node takes the next job.
  ASSERT_TRUE(Create("k").ok());
  controller_->RunOnce();
  EXPECT_THAT(session->Commands(), SizeIs(1));
}

// As the file of roles does that is saved twice while a node looks at its folders.
TEST_F(UnheardCommandsTest, SessionsThatEndedTogetherWithAllOthersAreNoCommandsFault) {
  ASSERT_TRUE(Create("j").ok());
  for (int i = 0; i < 4; ++i) {
    auto session = Connect("a", "folder.1");
    ASSERT_THAT(session->Commands(), SizeIs(1)) << i;
    session->Shut();
    controller_->OnClosed(session);
    controller_->RunOnce();
  }
  EXPECT_EQ(Job().state(), v1::Job::STARTING);
}

// A word to stop is no danger to a worker, and without it trainers of a job that was cancelled
// would train to their end.
TEST_F(UnheardCommandsTest, AWordToStopIsSentUntilItIsAcknowledged) {
  auto session = RunJob();
  Acknowledge(session, 4, 2);  // of Connect
  session->Commands();
  ASSERT_TRUE(Do([&] { return controller_->CancelJob("j", "", {}); }).ok());
  for (int i = 0; i < 4; ++i) {
    const std::vector<v1::Command> commands = session->Commands();
    ASSERT_THAT(commands, SizeIs(1)) << i;
    EXPECT_TRUE(commands[0].has_stop());
    EXPECT_EQ(absl::Milliseconds(commands[0].stop().grace_milliseconds()), options_.abort_grace);
    controller_->OnClosed(session);
    controller_->RunOnce();
    EXPECT_EQ(Job().state(), v1::Job::CANCELLING);
    session = Connect("a", "folder.1", {Running()});
  }
}

TEST_F(UnheardCommandsTest, SessionsThatEndBehindAnAcknowledgementAreNoCommandsFault) {
  auto session = RunJob();
  for (int i = 0; i < 3; ++i) {
    Acknowledge(session, 4 + i, 2);  // of Connect
    controller_->OnClosed(session);
    controller_->RunOnce();
    session = Connect("a", "folder.1", {Running()});
  }
  EXPECT_EQ(Job().state(), v1::Job::RUNNING);
}

// Its trainers are told to stop, and count as alive until they have.
TEST_F(UnheardCommandsTest, AnotherCommandThatEndedTwoSessionsEndsTheJobWithItsTrainers) {
  auto session = RunJob();
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(Job().attempts(0).state(), v1::Attempt::RUNNING);
    controller_->OnClosed(session);
    controller_->RunOnce();
    if (i == 0) session = Connect("a", "folder.1", {Running()});
  }
  EXPECT_THAT(Job().attempts(0).failure().message(), HasSubstr("was sent a command for the job"));
  EXPECT_EQ(Job().attempts(0).state(), v1::Attempt::STOPPING);
  for (const int rank : {0, 1}) {
    EXPECT_EQ(Job().attempts(0).ranks(rank).state(), v1::RankStatus::READY);
  }
  session = Connect("a", "folder.1", {Running()});
  const std::vector<v1::Command> commands = session->Commands();
  ASSERT_THAT(commands, SizeIs(1)) << "without the addresses";
  EXPECT_EQ(commands[0].stop().mode(), v1::StopTrainers::ABORT);
}

TEST_F(UnheardCommandsTest, AWorkerThatRefusesAnythingButAStartGoesOn) {
  auto session = RunJob();
  v1::WorkerMessage message;
  message.set_sequence(4);
  message.mutable_command_ack()->set_command_id(2);  // of Connect
  message.mutable_command_ack()->set_message("no such attempt");
  controller_->OnMessage(session, message);
  controller_->RunOnce();
  EXPECT_EQ(Job().attempts(0).state(), v1::Attempt::RUNNING);
  EXPECT_FALSE(Job().attempts(0).has_failure());
  session = Connect("a", "folder.1", {Running()});
  EXPECT_THAT(session->Commands(), IsEmpty()) << "it was heard";
}

TEST_F(UnheardCommandsTest, AStartThatNobodyHeardOutlivesTheCoordinatorAndTheWorker) {
  Connect("a", "folder.1");
  ASSERT_TRUE(Create("j").ok());
  Restart();
  auto session = Connect("a", "folder.2");
  EXPECT_EQ(Job().state(), v1::Job::STARTING);
  const std::vector<v1::Command> commands = session->Commands();
  ASSERT_THAT(commands, SizeIs(1));
  EXPECT_TRUE(commands[0].has_start());
  Acknowledge(session, 1, commands[0].command_id());
  EXPECT_THAT(Connect("a", "folder.2")->Commands(), IsEmpty());
}

// The trainers of one job died with their worker, which had not heard of the other.
TEST_F(UnheardCommandsTest, AStartIsOfItsOwnJobAlone) {
  auto session = Connect("a", "folder.1");
  ASSERT_TRUE(Do([&] { return controller_->CreateJob(Spec("j", 1), {}); }).ok());
  Acknowledge(session, 1, session->Commands().at(0).command_id());
  ASSERT_TRUE(Do([&] { return controller_->CreateJob(Spec("k", 1), {}); }).ok());
  controller_->OnClosed(session);
  Connect("a", "folder.2");
  EXPECT_EQ(Job("j").state(), v1::Job::RETRYING);
  // The end of the first attempt of one is none of the other's.
  session = Connect("a", "folder.2");
  EXPECT_EQ(Job("k").state(), v1::Job::STARTING);
  const std::vector<v1::Command> commands = session->Commands();
  ASSERT_THAT(commands, SizeIs(1));
  EXPECT_EQ(commands[0].job(), "k");
  Acknowledge(session, 1, commands[0].command_id());
  EXPECT_THAT(Connect("a", "folder.2")->Commands(), IsEmpty());
}

}  // namespace
}  // namespace ringleader::lifecycle
