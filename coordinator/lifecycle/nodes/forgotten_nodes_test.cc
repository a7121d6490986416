// Which nodes are no longer spoken of.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "coordinator/lifecycle/testing/controller_test.h"

namespace ringleader::lifecycle {
namespace {

using ::testing::ElementsAre;
using testing::FakeSession;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class ForgottenNodesTest : public testing::ControllerTest {
 protected:
  std::vector<std::string> Nodes() {
    std::vector<std::string> names;
    for (const v1::Node& node : controller_->ListNodes()) names.push_back(node.name());
    return names;
  }

  void Leave(const std::shared_ptr<FakeSession>& session) {
    v1::WorkerMessage message;
    message.set_sequence(1);
    message.mutable_drain()->set_reason("SIGTERM");
    controller_->OnMessage(session, message);
    controller_->RunOnce();
    controller_->OnClosed(session);
    controller_->RunOnce();
  }

  void Pass(absl::Duration time) {
    clock_.Advance(time);
    controller_->RunOnce();
  }
};

TEST_F(ForgottenNodesTest, OneWhoseWorkerLeftInGoodOrderIsWithItsLease) {
  Leave(Connect("a", "folder.1"));
  Connect("b", "folder.1");
  EXPECT_THAT(Nodes(), ElementsAre("nodes/a", "nodes/b"));
  EXPECT_EQ(controller_->ListNodes()[0].state(), v1::Node::DRAINED);
  Pass(options_.lease + absl::Seconds(1));
  EXPECT_THAT(Nodes(), ElementsAre("nodes/b"));
  Restart();
  EXPECT_THAT(Nodes(), ElementsAre("nodes/b"));
  Connect("a", "folder.2");
  EXPECT_THAT(Nodes(), ElementsAre("nodes/a", "nodes/b"));
  EXPECT_EQ(controller_->ListNodes()[0].state(), v1::Node::READY);
}

TEST_F(ForgottenNodesTest, OneThatWasLostIsAfterDays) {
  controller_->OnClosed(Connect("a", "folder.1"));
  controller_->RunOnce();
  Pass(options_.keep_nodes - absl::Seconds(1));
  ASSERT_THAT(Nodes(), ElementsAre("nodes/a"));
  EXPECT_EQ(controller_->ListNodes()[0].state(), v1::Node::UNREACHABLE);
  Pass(absl::Seconds(2));
  EXPECT_THAT(Nodes(), IsEmpty());
}

TEST_F(ForgottenNodesTest, OneThatAUserDrainedStaysDrainedAndIsNoFault) {
  auto session = Connect("a", "folder.1");
  EXPECT_EQ(Do([&] { return controller_->DrainNode("a", {}); })->state(), v1::Node::DRAINED);
  Leave(session);
  Pass(options_.lease + absl::Seconds(1));
  ASSERT_THAT(Nodes(), ElementsAre("nodes/a"));
  EXPECT_EQ(controller_->ListNodes()[0].state(), v1::Node::DRAINED);
  EXPECT_THAT(controller_->ListNodes()[0].state_reason(), HasSubstr("no word since"));
  Connect("a", "folder.2");
  EXPECT_EQ(controller_->ListNodes()[0].state(), v1::Node::DRAINED);
}

TEST_F(ForgottenNodesTest, OneWithTrainersIsKept) {
  auto session = RunJob();
  session->FallSilent();
  controller_->OnClosed(session);
  Pass(options_.lease + absl::Seconds(1));
  EXPECT_EQ(Job().state(), v1::Job::UNKNOWN);
  EXPECT_THAT(Nodes(), ElementsAre("nodes/a"));
}

}  // namespace
}  // namespace ringleader::lifecycle
