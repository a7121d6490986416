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

}  // namespace
}  // namespace ringleader::lifecycle
