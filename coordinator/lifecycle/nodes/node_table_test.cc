// What is known of one node, and how users and the scheduler see it.
#include "coordinator/lifecycle/nodes/node_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>

#include "base/testing/fake_clock.h"
#include "coordinator/lifecycle/testing/controller_test.h"
#include "proto/timestamps.h"

namespace ringleader::lifecycle {
namespace {

class NodeRecordTest : public ::testing::Test {
 protected:
  NodeRecordTest() {
    record_.node.set_name("nodes/a");
    record_.node.set_state(v1::Node::READY);
    record_.node.mutable_inventory()->set_trainers(8);
    record_.session = std::make_shared<testing::FakeSession>("a", "folder.1", &clock_);
    record_.Hear(clock_.Now());
  }

  FakeClock clock_;
  NodeRecord record_;
};

TEST_F(NodeRecordTest, TheSchedulerIsToldAllThatItGoesBy) {
  scheduler::NodeSlots slots = record_.Slots();
  EXPECT_EQ(slots.id, "a");
  EXPECT_EQ(slots.total, 8u);
  EXPECT_EQ(slots.in_use, 0u);
  EXPECT_TRUE(slots.ready);
  EXPECT_FALSE(slots.has_gpus);
  EXPECT_EQ(slots.domain, "");
  record_.node.mutable_inventory()->add_gpus();
  record_.node.mutable_inventory()->set_topology_domain("rack-7");
  record_.trainers_in_use = 1;
  record_.reserved = 2;
  record_.strays = {{7, 0}, {7, 1}, {8, 0}};
  slots = record_.Slots();
  EXPECT_EQ(slots.in_use, 6u);
  EXPECT_TRUE(slots.has_gpus);
  EXPECT_EQ(slots.domain, "rack-7");
}

TEST_F(NodeRecordTest, ItTakesTrainersUnlessAnythingIsAmiss) {
  const auto takes = [&](auto&& amiss) {
    NodeRecord record = record_;
    amiss(record);
    EXPECT_EQ(record.Slots().ready, record.TakesTrainers());
    return record.TakesTrainers();
  };
  EXPECT_TRUE(takes([](NodeRecord&) {}));
  EXPECT_FALSE(takes([](NodeRecord& record) { record.session = nullptr; }));
  EXPECT_FALSE(takes([](NodeRecord& record) { record.out_of_sight = true; }));
  EXPECT_FALSE(takes([](NodeRecord& record) { record.node.set_leaving(true); }));
  EXPECT_FALSE(takes([&](NodeRecord& record) { record.set_aside_until = clock_.Now(); }));
  EXPECT_FALSE(takes([](NodeRecord& record) { record.node.set_state(v1::Node::DRAINING); }));
  EXPECT_FALSE(takes([](NodeRecord& record) { record.node.set_state(v1::Node::DRAINED); }));
}

// Whatever takes a node out of service, its trainers are let finish.
TEST_F(NodeRecordTest, ItIsDrainedOnceItsTrainersAreGone) {
  const auto expect = [&](const NodeRecord& record, const std::string& reason) {
    NodeRecord busy = record;
    busy.trainers_in_use = 1;
    EXPECT_EQ(busy.View().state(), v1::Node::DRAINING) << reason;
    EXPECT_EQ(record.View().state(), v1::Node::DRAINED) << reason;
    EXPECT_EQ(record.View().state_reason(), reason);
  };
  NodeRecord leaving = record_;
  leaving.node.set_leaving(true);
  expect(leaving, "its worker is shutting down");
  NodeRecord set_aside = record_;
  set_aside.set_aside_until = clock_.Now();
  set_aside.set_aside_reason = "set aside until noon";
  expect(set_aside, "set aside until noon");
  NodeRecord without_gpus = record_;
  without_gpus.node.mutable_inventory()->set_trainers(0);
  for (const std::string gpu : {"GPU-0", "GPU-1"}) {
    v1::Gpu* const added = without_gpus.node.mutable_inventory()->add_gpus();
    added->set_uuid(gpu);
    added->set_fault("XID 79");
  }
  without_gpus.node.mutable_inventory()->add_gpus()->set_uuid("GPU-2");
  expect(without_gpus, "GPU-0 takes no trainers: XID 79; GPU-1 takes no trainers: XID 79");
}

TEST_F(NodeRecordTest, WhatAUserDrainedStaysSoWhateverElseIsTrueOfIt) {
  record_.node.set_state(v1::Node::DRAINED);
  record_.node.set_state_reason("drained by a user");
  record_.set_aside_until = clock_.Now();
  record_.set_aside_reason = "set aside until noon";
  EXPECT_EQ(record_.View().state_reason(), "drained by a user");
  record_.session = nullptr;
  EXPECT_EQ(record_.View().state_reason(), "drained by a user");
  record_.out_of_sight = true;
  EXPECT_EQ(record_.View().state(), v1::Node::DRAINED);
  EXPECT_EQ(record_.View().state_reason(),
            "drained by a user; no word since 2019-12-20T00:00:00+00:00");
  record_.node.set_state(v1::Node::DRAINING);
  EXPECT_EQ(record_.View().state(), v1::Node::UNREACHABLE) << "its trainers may be alive";
}

TEST_F(NodeRecordTest, WhenItWasLastHeardIsStoredOnceItIsNoLonger) {
  EXPECT_FALSE(record_.NoteLastHeard());
  record_.out_of_sight = true;
  EXPECT_TRUE(record_.NoteLastHeard());
  EXPECT_EQ(ToTime(record_.node.last_heartbeat_time()), clock_.Now());
  EXPECT_FALSE(record_.NoteLastHeard()) << "it is stored";
  record_.Hear(clock_.Now() + absl::Nanoseconds(1));
  EXPECT_TRUE(record_.NoteLastHeard());
  EXPECT_FALSE(record_.NoteLastHeard());
  record_.out_of_sight = false;
  EXPECT_TRUE(record_.NoteLastHeard());
  EXPECT_FALSE(record_.node.has_last_heartbeat_time());
  record_.session = nullptr;
  EXPECT_FALSE(record_.NoteLastHeard()) << "of no process: the coordinator has just begun";
  record_.log = EventLog("folder.1", 0);
  EXPECT_TRUE(record_.NoteLastHeard());
}

TEST_F(NodeRecordTest, ALeaseMayBeginLaterThanTheLastWord) {
  const absl::Time heard = clock_.Now();
  record_.lease_begin = heard + absl::Seconds(5);
  record_.Hear(heard + absl::Seconds(2));
  EXPECT_EQ(record_.last_heard, heard + absl::Seconds(2));
  EXPECT_EQ(record_.lease_begin, heard + absl::Seconds(5));
  EXPECT_EQ(ToTime(record_.View().last_heartbeat_time()), record_.last_heard);
  record_.Hear(heard);
  EXPECT_EQ(record_.last_heard, heard + absl::Seconds(2));
}

TEST(EventLogTest, WhatIsHeldIsAcknowledgedWithNothingBehindIt) {
  EventLog log("folder.1", 4);
  EXPECT_EQ(log.TakeUnstored(), 4u) << "that this process is the newest";
  EXPECT_EQ(log.TakeUnstored(), std::nullopt);
  EXPECT_EQ(log.TakeAcknowledgement(), std::nullopt) << "nothing has come again";
  EXPECT_EQ(log.Admit(6), EventLog::Verdict::kGap);
  EXPECT_EQ(log.Admit(3), EventLog::Verdict::kSeen);
  EXPECT_EQ(log.TakeAcknowledgement(), 3u);
  for (const uint64_t sequence : {5, 6, 7}) {
    EXPECT_EQ(log.Admit(sequence), EventLog::Verdict::kNew);
  }
  log.Hold(5);
  log.Hold(7);
  EXPECT_EQ(log.TakeAcknowledgement(), 4u);
  log.Release(7);
  EXPECT_EQ(log.TakeAcknowledgement(), std::nullopt);
  log.Release(5);
  EXPECT_EQ(log.TakeAcknowledgement(), 7u);
  EXPECT_EQ(log.acknowledged(), 7u);
  EXPECT_EQ(log.TakeUnstored(), 7u);
  EXPECT_EQ(log.applied(), 7u);
  EXPECT_EQ(EventLog().TakeUnstored(), std::nullopt) << "of no process";
}

}  // namespace
}  // namespace ringleader::lifecycle
