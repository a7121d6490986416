// Which worker process speaks for a node, and what the death of one proves.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "coordinator/lifecycle/testing/controller_test.h"

namespace ringleader::lifecycle {
namespace {

using ::testing::ElementsAre;
using testing::FakeSession;
using ::testing::HasSubstr;

class WorkerIdentityTest : public testing::ControllerTest {};

TEST_F(WorkerIdentityTest, AnotherProcessOfTheWorkerMeansThatItsTrainersAreDead) {
  auto old = RunJob();
  controller_->OnClosed(old);
  Connect("a", "folder.2");
  EXPECT_EQ(Job().attempts(0).state(), v1::Attempt::FAILED);
  EXPECT_EQ(Job().state(), v1::Job::RETRYING);
  EXPECT_THAT(Job().state_reason(), HasSubstr("its worker was restarted"));
  clock_.Advance(options_.retry_backoff);
  controller_->RunOnce();
  EXPECT_EQ(Job().attempts_size(), 2);
  EXPECT_GT(Job().attempts(1).fencing_token(), token_);
}

// Its session broke right after its first words, and the controller had been busy meanwhile.
TEST_F(WorkerIdentityTest, AHelloBehindTheFirstWordsOfTheSameProcessIsNoOtherProcess) {
  auto session = Connect("a", "folder.1");
  ASSERT_TRUE(Create("j").ok());
  const std::vector<v1::Command> commands = session->Commands();
  ASSERT_EQ(commands.size(), 1);
  token_ = commands[0].fencing_token();
  v1::WorkerMessage acknowledgement;
  acknowledgement.set_sequence(1);
  acknowledgement.mutable_command_ack()->set_command_id(commands[0].command_id());
  acknowledgement.mutable_command_ack()->set_accepted(true);
  controller_->OnMessage(session, acknowledgement);
  controller_->OnClosed(session);
  session = Connect("a", "folder.1", {Running()});
  EXPECT_EQ(Job().state(), v1::Job::STARTING);
  EXPECT_EQ(Job().retries_used(), 0);
  Say(session, 2, Ready(0));
  Say(session, 3, Ready(1));
  EXPECT_EQ(Job().state(), v1::Job::RUNNING);
}

TEST_F(WorkerIdentityTest, AWitnessedDeathFailsTheAttemptOnceItsLastWordsAreIn) {
  auto session = RunJob();
  // What the process said last may still be on its way.
  EXPECT_TRUE(absl::IsUnavailable(Witness("folder.1")));
  EXPECT_EQ(Job().state(), v1::Job::RUNNING);
  Say(session, 4, Step(1, 0));
  Say(session, 5, Step(1, 1));
  controller_->OnClosed(session);
  EXPECT_TRUE(Witness("folder.1").ok());
  EXPECT_EQ(Job().attempts(0).state(), v1::Attempt::FAILED);
  EXPECT_EQ(Job().attempts(0).failure().rank(), 0);
  EXPECT_THAT(Job().attempts(0).failure().message(), HasSubstr("its worker process died"));
  EXPECT_EQ(Job().state(), v1::Job::RETRYING);
  EXPECT_THAT(Steps(), ElementsAre(1));
}

TEST_F(WorkerIdentityTest, AWitnessedDeathIsTakenInWhenOnlyTheConnectionLingers) {
  auto session = RunJob();
  session->FallSilent();
  clock_.Advance(options_.lease + absl::Seconds(1));
  controller_->RunOnce();
  EXPECT_EQ(Job().state(), v1::Job::UNKNOWN);
  EXPECT_TRUE(Witness("folder.1").ok());
  EXPECT_EQ(Job().attempts(0).state(), v1::Attempt::FAILED);
}

TEST_F(WorkerIdentityTest, AWitnessIsToTestifyAgainWhereItsWordCouldNotBeWritten) {
  controller_->OnClosed(RunJob());
  controller_->RunOnce();
  store_.full = true;
  EXPECT_TRUE(absl::IsUnavailable(Witness("folder.1")));
  store_.full = false;
  EXPECT_EQ(Job().state(), v1::Job::RUNNING);
  EXPECT_TRUE(Witness("folder.1").ok());
  EXPECT_EQ(Job().attempts(0).state(), v1::Attempt::FAILED);
}

TEST_F(WorkerIdentityTest, AWitnessSpeaksOfItsOwnWorkerOnly) {
  auto session = RunJob();
  controller_->OnClosed(session);
  EXPECT_TRUE(Witness("folder.0").ok());
  EXPECT_TRUE(Witness("folder.1", "nobody").ok());
  EXPECT_EQ(Job().state(), v1::Job::RUNNING);
  // A coordinator that has heard neither process looks it up.
  Restart();
  EXPECT_TRUE(Witness("folder.0").ok());
  EXPECT_EQ(Job().state(), v1::Job::RUNNING);
  EXPECT_TRUE(Witness("folder.1").ok());
  EXPECT_EQ(Job().attempts(0).state(), v1::Attempt::FAILED);
}

// The start may be in the hands of a later process, whose hello the last coordinator heard.
TEST_F(WorkerIdentityTest, AWitnessOfAnEarlierProcessProvesNothingAfterARestart) {
  auto first = Connect("a", "folder.1");
  Say(first, 1, Log("something, so that the store knows this process"));
  controller_->OnClosed(first);
  Connect("a", "folder.2");
  ASSERT_TRUE(Create("j").ok());
  controller_->RunOnce();
  EXPECT_EQ(Job().state(), v1::Job::STARTING);
  Restart();
  EXPECT_TRUE(Witness("folder.1").ok());
  EXPECT_EQ(Job().state(), v1::Job::STARTING);
}

TEST_F(WorkerIdentityTest, AnotherWorkerOfTheSameNameProvesNothing) {
  auto session = RunJob();
  // Beside one that is alive.
  EXPECT_TRUE(absl::IsAlreadyExists(*Connect("a", "folder.2")->closed()));
  EXPECT_FALSE(session->closed().has_value());
  // A worker from elsewhere may not replace one that has gone: the old trainers may be alive.
  controller_->OnClosed(session);
  EXPECT_TRUE(absl::IsFailedPrecondition(*Connect("a", "elsewhere.1")->closed()));
  EXPECT_EQ(Job().state(), v1::Job::RUNNING);
  // A coordinator that has heard neither yet knows as much.
  Restart();
  EXPECT_TRUE(absl::IsFailedPrecondition(*Connect("a", "elsewhere.1")->closed()));
  EXPECT_EQ(Job().state(), v1::Job::RUNNING);
  session = Connect("a", "folder.1", {Running()});
  EXPECT_FALSE(session->closed().has_value());
  // One that could not write begins anew in the same way.
  store_.full = true;
  Say(session, 4, Log("lost"));
  store_.full = false;
  EXPECT_TRUE(absl::IsFailedPrecondition(*Connect("a", "elsewhere.1")->closed()));
  EXPECT_EQ(Job().state(), v1::Job::RUNNING);
  clock_.Advance(options_.adoption_timeout);
  controller_->RunOnce();
  EXPECT_EQ(Job().attempts(0).state(), v1::Attempt::FENCED);
  EXPECT_FALSE(Connect("a", "elsewhere.1")->closed().has_value());
}

// A hello makes room for itself before it is known to be refused. What goes for it is sent again.
TEST_F(WorkerIdentityTest, ARefusedWorkerTakesNoReportsOfTheOtherAlongOnAFullDisk) {
  auto session = RunJob();
  store_.scarce = true;
  Say(session, 4, Step(1, 0));
  EXPECT_TRUE(absl::IsAlreadyExists(*Connect("a", "folder.2")->closed()));
  ASSERT_TRUE(session->closed().has_value());
  controller_->OnClosed(session);
  session = Connect("a", "folder.1", {Running()});
  EXPECT_FALSE(session->closed().has_value());
  Say(session, 4, Step(1, 0));
  Say(session, 5, Step(1, 1));
  store_.scarce = false;
  controller_->RunOnce();
  EXPECT_THAT(Steps(), ::testing::ElementsAre(1));
}

// Its reports wait for space; they are not taken for those of an earlier session.
TEST_F(WorkerIdentityTest, AWorkersOwnHelloLeavesItsReportsInTheQueueOnAFullDisk) {
  controller_->OnClosed(RunJob());
  controller_->RunOnce();
  store_.scarce = true;
  const auto session = std::make_shared<FakeSession>("a", "folder.1", &clock_);
  v1::WorkerHello hello;
  hello.set_node("nodes/a");
  hello.set_incarnation("folder.1");
  hello.set_version(worker_version_);
  hello.mutable_inventory()->set_trainers(2);
  *hello.add_attempts() = Running();
  controller_->OnHello(session, hello);
  Say(session, 4, Step(1, 0));  // both are taken up together
  EXPECT_FALSE(session->closed().has_value());
  Say(session, 5, Step(1, 1));
  store_.scarce = false;
  controller_->RunOnce();
  EXPECT_THAT(Steps(), ::testing::ElementsAre(1));
}

TEST_F(WorkerIdentityTest, AWorkerThatWasRestartedWithItsCoordinatorIsLetIn) {
  RunJob();
  Restart();
  EXPECT_FALSE(Connect("a", "folder.2")->closed().has_value());
  EXPECT_EQ(Job().attempts(0).state(), v1::Attempt::FAILED);
  EXPECT_THAT(Job().state_reason(), HasSubstr("its worker was restarted"));
}

// Whose hello was taken last counts, not who came first or said more.
TEST_F(WorkerIdentityTest, AWorkerThatTookItsPlaceBackIsKnownAfterARestart) {
  auto first = Connect("a", "folder.1");
  Say(first, 1, Log("something, so that the store knows this process"));
  controller_->OnClosed(first);
  controller_->OnClosed(Connect("a", "elsewhere.1"));
  Connect("a", "folder.1");
  ASSERT_TRUE(Create("j").ok());
  controller_->RunOnce();
  EXPECT_EQ(Job().state(), v1::Job::STARTING);
  Restart();
  EXPECT_TRUE(absl::IsFailedPrecondition(*Connect("a", "elsewhere.1")->closed()));
  EXPECT_FALSE(Connect("a", "folder.1")->closed().has_value());
  EXPECT_EQ(Job().state(), v1::Job::STARTING);
}

}  // namespace
}  // namespace ringleader::lifecycle
