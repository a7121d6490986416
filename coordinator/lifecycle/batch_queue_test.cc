#include "coordinator/lifecycle/batch_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "base/boot_clock.h"
#include "coordinator/lifecycle/testing/controller_test.h"

namespace ringleader::lifecycle {
namespace {

using ::testing::ElementsAre;
using testing::FakeSession;
using ::testing::IsEmpty;
using ::testing::Optional;
using ::testing::SizeIs;

constexpr absl::Duration kNever = absl::Hours(1);
constexpr absl::Duration kPatience = absl::Seconds(20);
constexpr absl::Duration kShort = absl::Milliseconds(30);

class BatchQueueTest : public ::testing::Test {
 protected:
  // What a worker's session brought.
  BatchItem Event(const std::shared_ptr<FakeSession>& session, size_t bytes = 1) {
    return {.apply = nullptr, .session = session, .message_bytes = bytes};
  }
  // What somebody waits for, and hears in `heard_`.
  BatchItem Request() {
    return {.apply = nullptr,
            .done = [this](const absl::Status& status) { heard_.push_back(status); }};
  }
  static BatchItem Hello(const std::shared_ptr<FakeSession>& session) {
    return {.apply = nullptr, .vital = true, .session = session};
  }
  std::shared_ptr<FakeSession> Session(const std::string& node) {
    return std::make_shared<FakeSession>(node, "folder.1", &clock_);
  }

  // What Await() returns, if it does before the test's patience is over.
  std::optional<bool> Awaits(absl::Duration tick, absl::Duration window) {
    absl::Notification returned;
    std::optional<bool> goes_on;
    std::thread waiter([&] {
      goes_on = queue_.Await(tick, window);
      returned.Notify();
    });
    const bool in_time = returned.WaitForNotificationWithTimeout(kPatience);
    if (!in_time) queue_.Stop();
    waiter.join();
    return in_time ? goes_on : std::nullopt;
  }
  absl::Duration TimeOfAwait(absl::Duration tick, absl::Duration window) {
    const absl::Time begin = BootNow();
    EXPECT_TRUE(queue_.Await(tick, window));
    return BootNow() - begin;
  }

  FakeClock clock_;
  std::vector<absl::Status> heard_;
  BatchQueue queue_;
};

const absl::Status kFull = absl::ResourceExhaustedError("the disk is full");

TEST_F(BatchQueueTest, ARequestIsTakenAtOnce) {
  queue_.Push(Event(Session("a")));
  queue_.Push(Request());
  EXPECT_THAT(Awaits(kNever, kNever), Optional(true));
  EXPECT_THAT(queue_.Take(absl::OkStatus()), SizeIs(2));
}

TEST_F(BatchQueueTest, AnEventWaitsForOthersThroughTheWindow) {
  queue_.Push(Event(Session("a")));
  EXPECT_THAT(Awaits(kNever, absl::ZeroDuration()), Optional(true));
  EXPECT_GE(TimeOfAwait(kNever, kShort), kShort);
}

TEST_F(BatchQueueTest, WithoutAnythingToTakeATickPasses) {
  EXPECT_GE(TimeOfAwait(kShort, kNever), kShort);
  queue_.Push(Request());
  BatchQueue::Finish(queue_.Take(absl::OkStatus()), absl::OkStatus());
  EXPECT_THAT(heard_, ElementsAre(absl::OkStatus()));
  EXPECT_GE(TimeOfAwait(kShort, kNever), kShort);
}

// A transaction has 8 MiB of messages: the one that reaches them is its last.
TEST_F(BatchQueueTest, WhatIsLeftOverIsTakenNext) {
  const auto session = Session("a");
  const size_t half = size_t{4} << 20;
  queue_.Push(Event(session, half));
  queue_.Push(Event(session, half - 1));
  queue_.Push(Event(session, half));
  queue_.Push(Event(session, 1));
  EXPECT_THAT(queue_.Take(absl::OkStatus()), SizeIs(3));
  // Nobody waits for the last one, but it is there.
  EXPECT_THAT(Awaits(kNever, absl::ZeroDuration()), Optional(true));
  EXPECT_GE(TimeOfAwait(kNever, kShort), kShort);
  queue_.Push(Event(session, 2 * half));
  queue_.Push(Request());
  EXPECT_THAT(queue_.Take(absl::OkStatus()), SizeIs(2));
  EXPECT_THAT(Awaits(kNever, kNever), Optional(true));
  EXPECT_THAT(queue_.Take(absl::OkStatus()), SizeIs(1));
  EXPECT_THAT(queue_.Take(absl::OkStatus()), IsEmpty());
}

// However small they are.
TEST_F(BatchQueueTest, ABatchHasSoManyItems) {
  const auto session = Session("a");
  for (int i = 0; i < 5000; ++i) queue_.Push(Event(session));
  queue_.Push(Request());
  for (const size_t count : {4096u, 905u}) {
    EXPECT_THAT(Awaits(kNever, kNever), Optional(true)) << "for somebody waits";
    std::vector<BatchItem> batch = queue_.Take(absl::OkStatus());
    EXPECT_THAT(batch, SizeIs(count));
    BatchQueue::Finish(batch, absl::OkStatus());
  }
  EXPECT_EQ(session->taken(), 5000);
  EXPECT_THAT(heard_, ElementsAre(absl::OkStatus()));
}

TEST_F(BatchQueueTest, AfterALongChangeABatchEnds) {
  for (const bool is_long : {false, true, true, false}) {
    queue_.Push(Request());
    BatchItem change = Request();
    change.ends_batch = is_long;
    queue_.Push(std::move(change));
  }
  for (const size_t count : {4u, 2u, 2u}) {
    EXPECT_THAT(Awaits(kNever, kNever), Optional(true)) << "for somebody waits";
    EXPECT_TRUE(queue_.IsReady());
    EXPECT_THAT(queue_.Take(absl::OkStatus()), SizeIs(count));
  }
  EXPECT_FALSE(queue_.IsReady());
  EXPECT_THAT(queue_.Take(absl::OkStatus()), IsEmpty());
}

TEST_F(BatchQueueTest, SessionsHearThatTheirMessagesWereTaken) {
  const auto session = Session("a");
  queue_.Push(Event(session));
  queue_.Push(Hello(session));
  std::vector<BatchItem> batch = queue_.Take(absl::OkStatus());
  EXPECT_EQ(session->taken(), 0);
  BatchQueue::Finish(batch, kFull);
  EXPECT_EQ(session->taken(), 1);
}

TEST_F(BatchQueueTest, WhileTheDiskIsFullEventsWaitAndRequestsAreRefused) {
  const auto session = Session("a");
  queue_.Push(Event(session));
  queue_.Push(Request());
  queue_.Push(Hello(Session("b")));
  std::vector<BatchItem> vital = queue_.Take(kFull);
  EXPECT_THAT(heard_, ElementsAre(kFull));
  ASSERT_THAT(vital, SizeIs(1));
  EXPECT_EQ(vital[0].session->node(), "b");
  EXPECT_EQ(session->taken(), 0);
  EXPECT_EQ(session->closed(), std::nullopt);
  // What waits is no reason to look again before something comes.
  EXPECT_GE(TimeOfAwait(kShort, kNever), kShort);
  EXPECT_THAT(queue_.Take(absl::OkStatus()), SizeIs(1));
}

TEST_F(BatchQueueTest, WhileTheDiskIsFullAHelloTakesThePlaceOfItsNodesEarlierSession) {
  const auto earlier = Session("a"), other = Session("b"), later = Session("a");
  BatchItem plan = Request();
  plan.vital = true;  // of no session
  queue_.Push(std::move(plan));
  queue_.Push(Event(earlier));
  queue_.Push(Event(other));
  queue_.Push(Event(later));
  queue_.Push(Hello(later));
  EXPECT_THAT(queue_.Take(kFull), SizeIs(2));
  EXPECT_THAT(heard_, IsEmpty()) << "it was taken up";
  EXPECT_THAT(earlier->closed(),
              Optional(absl::AbortedError("another session of this node has begun")));
  EXPECT_EQ(earlier->taken(), 1);
  EXPECT_EQ(other->closed(), std::nullopt);
  EXPECT_EQ(later->closed(), std::nullopt);
  EXPECT_THAT(queue_.Take(absl::OkStatus()), SizeIs(2));
}

TEST_F(BatchQueueTest, AfterTheStopNothingWaits) {
  EXPECT_TRUE(queue_.Stop());
  EXPECT_FALSE(queue_.Stop());
  EXPECT_THAT(Awaits(kNever, kNever), Optional(false));
  const auto session = Session("a");
  queue_.Push(Event(session));
  queue_.Push(Request());
  EXPECT_EQ(session->taken(), 1);
  EXPECT_THAT(heard_, ElementsAre(absl::UnavailableError("the coordinator is shutting down")));
  EXPECT_THAT(queue_.Take(absl::OkStatus()), IsEmpty());
}

}  // namespace
}  // namespace ringleader::lifecycle
