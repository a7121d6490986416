// Which nodes are no longer spoken of.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "coordinator/lifecycle/testing/controller_test.h"
#include "proto/timestamps.h"

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

  void BeginToLeave(const std::shared_ptr<FakeSession>& session) {
    v1::WorkerMessage message;
    message.set_sequence(1);
    message.mutable_drain()->set_reason("SIGTERM");
    controller_->OnMessage(session, message);
    controller_->RunOnce();
  }
  void Close(const std::shared_ptr<FakeSession>& session) {
    controller_->OnClosed(session);
    controller_->RunOnce();
  }
  void Leave(const std::shared_ptr<FakeSession>& session) {
    BeginToLeave(session);
    Close(session);
  }

  void Pass(absl::Duration time) {
    clock_.Advance(time);
    controller_->RunOnce();
  }

  // Of the only node.
  v1::Node Shown() {
    const std::vector<v1::Node> nodes = controller_->ListNodes();
    EXPECT_EQ(nodes.size(), 1u);
    return nodes.empty() ? v1::Node() : nodes[0];
  }
  absl::Time Seen() { return ToTime(Shown().last_heartbeat_time()); }
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

TEST_F(ForgottenNodesTest, OneWhoseWorkerLeftIsWithItsLeaseAlsoAfterARestart) {
  Leave(Connect("a", "folder.1"));
  Restart();
  EXPECT_EQ(Shown().state(), v1::Node::DRAINED);
  Pass(options_.lease);
  EXPECT_EQ(Shown().state(), v1::Node::DRAINED);
  Pass(absl::Seconds(1));
  EXPECT_THAT(Nodes(), IsEmpty());
}

TEST_F(ForgottenNodesTest, OneIsLeavingUntilAnotherProcessOfItSaysHello) {
  BeginToLeave(Connect("a", "folder.1"));
  Restart();
  Connect("a", "folder.1");
  EXPECT_EQ(Shown().state(), v1::Node::DRAINED);
  Restart();
  auto next = Connect("a", "folder.2");
  EXPECT_EQ(Shown().state(), v1::Node::READY);
  Restart();
  EXPECT_EQ(Shown().state_reason(),
            "its worker is not connected; it takes no trainers until it is");
  Pass(options_.lease + absl::Seconds(1));
  EXPECT_EQ(Shown().state(), v1::Node::UNREACHABLE);
}

TEST_F(ForgottenNodesTest, OneThatWasLostIsAsLongAfterItsLastWordAcrossRestarts) {
  const absl::Time heard = clock_.Now();
  Close(Connect("a", "folder.1"));
  Pass(options_.keep_nodes / 2);
  for (int restarts = 0; restarts < 2; ++restarts) {
    Restart();
    EXPECT_EQ(Seen(), heard);
    EXPECT_EQ(Shown().state(), v1::Node::READY) << "its worker has a lease to come back";
    Pass(options_.lease);
    EXPECT_EQ(Shown().state(), v1::Node::READY);
    Pass(absl::Seconds(1));
    EXPECT_EQ(Shown().state(), v1::Node::UNREACHABLE);
    EXPECT_THAT(Shown().state_reason(), HasSubstr("no word since 2019-12-20T00:00:00"));
  }
  Pass(heard + options_.keep_nodes - clock_.Now());
  EXPECT_THAT(Nodes(), ElementsAre("nodes/a"));
  Pass(absl::Seconds(1));
  EXPECT_THAT(Nodes(), IsEmpty());
}

TEST_F(ForgottenNodesTest, OneThatIsHeardIsWrittenOnlyWhenThatEnds) {
  auto session = Connect("a", "folder.1");
  const uint64_t before = store_.revision();
  for (int i = 0; i < 5; ++i) Pass(options_.lease / 2);
  EXPECT_EQ(store_.revision(), before);
  session->FallSilent();
  const absl::Time heard = clock_.Now();
  Pass(options_.lease + absl::Seconds(1));
  Restart();
  EXPECT_EQ(Seen(), heard) << "its lease ran out";
  // Of one that was heard to the end it is not known, and it cannot have been later.
  session = Connect("a", "folder.1");
  Pass(absl::Hours(1));
  Restart();
  EXPECT_EQ(Seen(), clock_.Now());
}

TEST_F(ForgottenNodesTest, OneThatWasSilentAndIsHeardAgainIsAsIfItHadNotBeen) {
  auto session = Connect("a", "folder.1");
  session->FallSilent();
  Pass(options_.lease + absl::Seconds(1));
  session->HearAgain();
  Pass(options_.keep_nodes * 2);
  EXPECT_EQ(Shown().state(), v1::Node::READY);
  Restart();
  EXPECT_EQ(Seen(), clock_.Now());
}

// A clock that was ahead and is set right.
TEST_F(ForgottenNodesTest, OneIsNeverHeardInTheFuture) {
  Close(Connect("a", "folder.1"));
  clock_.Advance(-absl::Hours(24 * 365));
  Restart();
  EXPECT_EQ(Seen(), clock_.Now());
  Pass(options_.keep_nodes + absl::Seconds(1));
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
