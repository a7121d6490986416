#include "worker/agent/link/coordinator_link.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/protocol_version.h"

namespace ringleader::agent {
namespace {

// Welcomes everybody, in the name of a protocol version, and sends a command after it.
class FakeCoordinator : public v1::WorkerControl::Service {
 public:
  // `window_bytes`: what workers may send ahead; 0: nothing is said of it. `refusal`: the answer to
  // every hello, if not OK.
  explicit FakeCoordinator(uint32_t version, uint64_t window_bytes = 0,
                           const grpc::Status& refusal = grpc::Status::OK)
      : version_(version), window_bytes_(window_bytes), refusal_(refusal) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~FakeCoordinator() override { server_->Shutdown(std::chrono::system_clock::now()); }

  grpc::Status Session(
      grpc::ServerContext*,
      grpc::ServerReaderWriter<v1::CoordinatorMessage, v1::WorkerMessage>* stream) override {
    const int session = ++sessions_;
    v1::WorkerMessage message;
    if (!stream->Read(&message)) return grpc::Status::OK;
    if (!refusal_.ok() && session >= refuse_from_) return refusal_;
    if (session == without_welcome_) {
      while (stream->Read(&message)) {
      }
      return grpc::Status::OK;
    }
    v1::CoordinatorMessage welcome;
    welcome.mutable_welcome()->set_lease_milliseconds(lease_milliseconds_);
    welcome.mutable_welcome()->set_heartbeat_milliseconds(lease_milliseconds_ / 10);
    welcome.mutable_welcome()->set_fence_milliseconds(90'000);
    welcome.mutable_welcome()->set_protocol_version(version_);
    if (window_bytes_ > 0) welcome.mutable_intake()->set_window_bytes(window_bytes_);
    stream->Write(welcome);
    v1::CoordinatorMessage command;
    command.mutable_command()->set_command_id(1);
    stream->Write(command);
    if (session <= ends_soon_) {
      stream->Read(&message);  // its first heartbeat, or event
      return grpc::Status::OK;
    }
    while (stream->Read(&message)) {
      ++(message.has_heartbeat() ? heartbeats_ : events_);
      if (session == without_answers_ || (!message.has_heartbeat() && !take_)) continue;
      v1::CoordinatorMessage answer;
      answer.set_heartbeat_number(message.heartbeat().number());
      if (take_) {
        answer.mutable_intake()->set_taken_sequence(static_cast<uint64_t>(events_));
        answer.mutable_intake()->set_window_bytes(window_bytes_);
      }
      stream->Write(answer);
    }
    return grpc::Status::OK;
  }

  std::shared_ptr<grpc::Channel> Channel() const {
    return grpc::CreateChannel(absl::StrCat("127.0.0.1:", port_),
                               grpc::InsecureChannelCredentials());
  }
  int sessions() const { return sessions_; }
  int events() const { return events_; }
  int heartbeats() const { return heartbeats_; }
  void Take() { take_ = true; }
  void RefuseFrom(int session) { refuse_from_ = session; }
  // The first sessions, so many.
  void EndSoon(int sessions) { ends_soon_ = sessions; }
  // One session in which no hello is answered, and one in which no heartbeat is.
  void FallSilentIn(int without_welcome, int without_answers) {
    without_welcome_ = without_welcome;
    without_answers_ = without_answers;
  }
  void set_lease_milliseconds(uint32_t lease) { lease_milliseconds_ = lease; }

 private:
  const uint32_t version_;
  const uint64_t window_bytes_;
  const grpc::Status refusal_;
  std::atomic<uint32_t> lease_milliseconds_ = 10'000;
  std::atomic<int> refuse_from_ = 1;
  std::atomic<int> ends_soon_ = 0;
  std::atomic<int> without_welcome_ = 0;
  std::atomic<int> without_answers_ = 0;
  std::atomic<int> sessions_ = 0;
  std::atomic<int> events_ = 0;
  std::atomic<int> heartbeats_ = 0;
  std::atomic<bool> take_ = false;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

class CoordinatorLinkTest : public ::testing::Test {
 protected:
  // Until `commands` have come, or for `patience`.
  void RunLink(const FakeCoordinator& coordinator, int commands, absl::Duration patience) {
    CoordinatorLink link(coordinator.Channel(), &buffer_,
                         {.hello = [] { return v1::WorkerHello(); },
                          .on_welcome = [this] { ++welcomes_; },
                          .on_command = [this](v1::Command) { ++commands_; }});
    link.Start();
    const absl::Time deadline = absl::Now() + patience;
    while (commands_ < commands && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(5));
    sessions_ = link.sessions();
  }

  static bool Eventually(const std::function<bool()>& done) {
    const absl::Time deadline = absl::Now() + absl::Seconds(20);
    while (!done() && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(5));
    return done();
  }

  EventBuffer buffer_{1000};
  std::atomic<int> welcomes_ = 0;
  std::atomic<int> commands_ = 0;
  uint64_t sessions_ = 0;  // that the link counted as welcomed
};

TEST_F(CoordinatorLinkTest, WorksForACoordinatorOfItsProtocolVersion) {
  const FakeCoordinator coordinator(kProtocolVersion);
  RunLink(coordinator, 1, absl::Seconds(20));
  EXPECT_EQ(welcomes_, 1);
  EXPECT_EQ(commands_, 1);
  EXPECT_EQ(sessions_, 1u);
}

TEST_F(CoordinatorLinkTest, IsConnectedOnceItIsWelcome) {
  const FakeCoordinator stranger(kProtocolVersion + 1), coordinator(kProtocolVersion);
  for (const FakeCoordinator* const other : {&stranger, &coordinator}) {
    CoordinatorLink link(other->Channel(), &buffer_,
                         {.hello = [] { return v1::WorkerHello(); },
                          .on_welcome = [] {},
                          .on_command = [](v1::Command) {}});
    EXPECT_FALSE(link.connected());
    link.Start();
    if (other == &coordinator) {
      EXPECT_TRUE(Eventually([&] { return link.connected(); }));
    } else {
      ASSERT_TRUE(Eventually([&] { return other->sessions() >= 2; }));
      EXPECT_FALSE(link.connected());
    }
    link.Stop();
    EXPECT_FALSE(link.connected());
  }
}

TEST_F(CoordinatorLinkTest, TakesNoCommandFromAnotherVersionAndTriesAgainSlowly) {
  for (const uint32_t version : {0u, kProtocolVersion + 1}) {
    const FakeCoordinator coordinator(version);
    RunLink(coordinator, 1, absl::Milliseconds(1500));
    EXPECT_EQ(welcomes_, 0);
    EXPECT_EQ(commands_, 0);
    EXPECT_EQ(sessions_, 0u);
    EXPECT_GE(coordinator.sessions(), 1);
    // After half of 200, 400, 800 ms at the least.
    EXPECT_LE(coordinator.sessions(), 5);
  }
}

TEST_F(CoordinatorLinkTest, SaysNothingForAWorkerWhoseLoopDoesNotComeRound) {
  FakeCoordinator coordinator(kProtocolVersion);
  coordinator.set_lease_milliseconds(300);
  CoordinatorLink link(coordinator.Channel(), &buffer_,
                       {.hello = [] { return v1::WorkerHello(); },
                        .on_welcome = [] {},
                        .on_command = [](v1::Command) {},
                        .on_refused = [](const absl::Status&) {}});
  EXPECT_EQ(link.lease_end(), absl::InfiniteFuture());
  link.Start();
  ASSERT_TRUE(Eventually([&] {
    link.CheckLease();
    return coordinator.heartbeats() > 0;
  }));
  // A heartbeat may be on its way when the lease is over; none follows it.
  int heard = -1;
  ASSERT_TRUE(Eventually([&] {
    const int before = std::exchange(heard, coordinator.heartbeats());
    absl::SleepFor(absl::Milliseconds(300));
    return before == coordinator.heartbeats();
  }));
  const absl::Time end = link.lease_end();
  // The loop comes round again, as often as it takes: the coordinator was silent, too, which ends
  // the session, and on a busy machine the next one may begin when the first round is long ago.
  EXPECT_TRUE(Eventually([&] {
    link.CheckLease();
    return coordinator.heartbeats() > heard;
  }));
  EXPECT_TRUE(Eventually([&] {
    link.CheckLease();
    return link.lease_end() > end;
  }));
}

// Its coordinator ends the sessions of a worker that is silent, and each hello would count as life.
TEST_F(CoordinatorLinkTest, SaysHelloOnlyForAWorkerWhoseLoopComesRound) {
  FakeCoordinator coordinator(kProtocolVersion);
  coordinator.set_lease_milliseconds(300);
  coordinator.EndSoon(std::numeric_limits<int>::max());
  buffer_.Push(v1::WorkerMessage());  // each session ends with it
  CoordinatorLink link(coordinator.Channel(), &buffer_,
                       {.hello = [] { return v1::WorkerHello(); },
                        .on_welcome = [] {},
                        .on_command = [](v1::Command) {}});
  link.Start();
  ASSERT_TRUE(Eventually([&] { return link.sessions() > 0; }));
  // A hello may be on its way when the lease is over; none follows it.
  int heard = -1;
  EXPECT_TRUE(Eventually([&] {
    const int before = std::exchange(heard, coordinator.sessions());
    absl::SleepFor(absl::Seconds(1));
    return before == coordinator.sessions();
  }));
  const absl::Time end = link.lease_end();
  EXPECT_TRUE(Eventually([&] {
    link.CheckLease();
    return coordinator.sessions() > heard;
  }));
  EXPECT_TRUE(Eventually([&] {
    link.CheckLease();
    return link.lease_end() > end;
  }));
  link.Stop();
  EXPECT_FALSE(link.connected());
}

TEST_F(CoordinatorLinkTest, AWorkerThatIsRefusedForWhatItIsHearsWhyOnceAndTriesNoMore) {
  for (const grpc::StatusCode code : {grpc::PERMISSION_DENIED, grpc::UNAUTHENTICATED,
                                      grpc::INVALID_ARGUMENT, grpc::UNIMPLEMENTED}) {
    const FakeCoordinator coordinator(kProtocolVersion, 0, {code, "not nodes/a"});
    absl::Mutex mutex;
    std::vector<absl::Status> refusals;
    CoordinatorLink link(coordinator.Channel(), &buffer_,
                         {.hello = [] { return v1::WorkerHello(); },
                          .on_welcome = [] {},
                          .on_command = [](v1::Command) {},
                          .on_refused =
                              [&](const absl::Status& why) {
                                absl::MutexLock lock(&mutex);
                                refusals.push_back(why);
                              }});
    link.Start();
    EXPECT_TRUE(Eventually([&] {
      absl::MutexLock lock(&mutex);
      return !refusals.empty();
    }));
    link.Stop();
    EXPECT_EQ(coordinator.sessions(), 1);
    ASSERT_EQ(refusals.size(), 1u);
    EXPECT_EQ(refusals[0].message(), "not nodes/a");
  }
}

// Why an earlier session came to nothing is no part of a later one's end.
TEST_F(CoordinatorLinkTest, ARefusalCountsWhateverWasWrongBefore) {
  FakeCoordinator coordinator(kProtocolVersion + 1, 0, {grpc::PERMISSION_DENIED, "not nodes/a"});
  coordinator.RefuseFrom(2);
  std::atomic<bool> refused = false;
  CoordinatorLink link(coordinator.Channel(), &buffer_,
                       {.hello = [] { return v1::WorkerHello(); },
                        .on_welcome = [] {},
                        .on_command = [](v1::Command) {},
                        .on_refused = [&](const absl::Status&) { refused = true; }});
  link.Start();
  EXPECT_TRUE(Eventually([&] { return refused.load(); }));
  EXPECT_EQ(coordinator.sessions(), 2);
}

// Not only once the next heartbeat is due.
TEST_F(CoordinatorLinkTest, ASessionThatTheCoordinatorEndsIsMadeAgainAtOnce) {
  FakeCoordinator coordinator(kProtocolVersion);
  coordinator.set_lease_milliseconds(600'000);
  coordinator.EndSoon(std::numeric_limits<int>::max());
  CoordinatorLink link(coordinator.Channel(), &buffer_,
                       {.hello = [] { return v1::WorkerHello(); },
                        .on_welcome = [] {},
                        .on_command = [](v1::Command) {}});
  link.Start();
  EXPECT_TRUE(Eventually([&] { return coordinator.sessions() >= 4; }));
}

// Failures count from the session that was the last: a worker that lost many in its life does not
// keep its coordinator waiting.
TEST_F(CoordinatorLinkTest, AfterASessionItTriesAgainSoonHoweverManyThereWere) {
  constexpr absl::Duration kShortestOfTheLongWaits = absl::Seconds(1);
  FakeCoordinator coordinator(kProtocolVersion);
  coordinator.set_lease_milliseconds(600'000);
  coordinator.EndSoon(std::numeric_limits<int>::max());
  absl::Mutex mutex;
  std::vector<absl::Time> hellos;
  CoordinatorLink link(coordinator.Channel(), &buffer_,
                       {.hello =
                            [&] {
                              absl::MutexLock lock(&mutex);
                              hellos.push_back(absl::Now());
                              return v1::WorkerHello();
                            },
                        .on_welcome = [] {},
                        .on_command = [](v1::Command) {}});
  link.Start();
  EXPECT_TRUE(Eventually([&] { return link.sessions() >= 10; }));
  link.Stop();
  ASSERT_GE(hellos.size(), 10u);
  absl::Duration shortest = absl::InfiniteDuration();
  for (size_t i = 7; i < 10; ++i) shortest = std::min(shortest, hellos[i] - hellos[i - 1]);
  EXPECT_LT(shortest, kShortestOfTheLongWaits);
}

// However long ago the last word of the one before it was: longer than the lease here.
TEST_F(CoordinatorLinkTest, TheSilenceOfASessionCountsFromItsStart) {
  FakeCoordinator coordinator(kProtocolVersion);
  coordinator.set_lease_milliseconds(30);
  coordinator.EndSoon(1);
  buffer_.Push(v1::WorkerMessage());
  CoordinatorLink* its_link = nullptr;
  CoordinatorLink link(coordinator.Channel(), &buffer_,
                       {.hello =
                            [&] {
                              its_link->CheckLease();
                              return v1::WorkerHello();
                            },
                        .on_welcome = [] {},
                        .on_command = [](v1::Command) {}});
  its_link = &link;
  link.Start();
  EXPECT_TRUE(Eventually([&] {
    link.CheckLease();
    return link.sessions() >= 2;
  }));
}

// Every answer counts, not the welcome alone: it is silence that ends a session.
TEST_F(CoordinatorLinkTest, ASessionWhoseHeartbeatsAreAnsweredOutlastsItsLease) {
  constexpr uint32_t kLeaseMilliseconds = 300;
  FakeCoordinator coordinator(kProtocolVersion);
  coordinator.set_lease_milliseconds(kLeaseMilliseconds);
  CoordinatorLink link(coordinator.Channel(), &buffer_,
                       {.hello = [] { return v1::WorkerHello(); },
                        .on_welcome = [] {},
                        .on_command = [](v1::Command) {}});
  link.Start();
  // On a busy machine an answer may come too late and end one; the next one is as good.
  uint64_t session = 0;
  absl::Time begin = absl::InfiniteFuture();
  EXPECT_TRUE(Eventually([&] {
    link.CheckLease();
    const bool connected = link.connected();
    const uint64_t before = std::exchange(session, link.sessions());
    if (session != before) begin = absl::Now();
    return connected && absl::Now() - begin > 2 * absl::Milliseconds(kLeaseMilliseconds);
  }));
}

// A dead network does not say that it is, before a welcome or after it.
TEST_F(CoordinatorLinkTest, ASessionOnWhichNothingComesIsCutAfterItsLease) {
  FakeCoordinator coordinator(kProtocolVersion);
  coordinator.set_lease_milliseconds(300);
  coordinator.FallSilentIn(/*without_welcome=*/2, /*without_answers=*/1);
  CoordinatorLink link(coordinator.Channel(), &buffer_,
                       {.hello = [] { return v1::WorkerHello(); },
                        .on_welcome = [] {},
                        .on_command = [](v1::Command) {}});
  link.Start();
  EXPECT_TRUE(Eventually([&] {
    link.CheckLease();
    return coordinator.sessions() >= 3 && link.connected();
  }));
}

TEST_F(CoordinatorLinkTest, AWorkerThatIsRefusedForTheMomentTriesAgain) {
  const FakeCoordinator coordinator(kProtocolVersion, 0,
                                    {grpc::ALREADY_EXISTS, "another is there"});
  bool refused = false;
  CoordinatorLink link(coordinator.Channel(), &buffer_,
                       {.hello = [] { return v1::WorkerHello(); },
                        .on_welcome = [] {},
                        .on_command = [](v1::Command) {},
                        .on_refused = [&](const absl::Status&) { refused = true; }});
  link.Start();
  EXPECT_TRUE(Eventually([&] { return coordinator.sessions() >= 3; }));
  link.Stop();
  EXPECT_FALSE(refused);
}

// While the coordinator takes nothing, heartbeats go on, and events beyond the window wait here.
TEST_F(CoordinatorLinkTest, SendsNoFurtherAheadThanTheCoordinatorSays) {
  constexpr int kEvents = 50;
  for (int i = 0; i < kEvents; ++i) {
    v1::WorkerMessage message;
    message.mutable_drain()->set_reason(std::string(1000, 'x'));
    buffer_.Push(std::move(message));
  }
  FakeCoordinator coordinator(kProtocolVersion, 5000);
  CoordinatorLink link(coordinator.Channel(), &buffer_,
                       {.hello = [] { return v1::WorkerHello(); },
                        .on_welcome = [] {},
                        .on_command = [](v1::Command) {}});
  link.Start();
  const absl::Time deadline = absl::Now() + absl::Seconds(60);
  const auto await = [&](const auto& done) {
    while (!done() && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(5));
    return done();
  };
  ASSERT_TRUE(await([&] { return coordinator.heartbeats() >= 3; }));
  EXPECT_EQ(coordinator.events(), 5);
  EXPECT_TRUE(link.connected());
  coordinator.Take();
  EXPECT_TRUE(await([&] { return coordinator.events() == kEvents; }));
  EXPECT_EQ(coordinator.sessions(), 1);
}

// One goes ahead however large it is, and the next once that one is taken: not the one behind it.
TEST_F(CoordinatorLinkTest, EventsLargerThanTheWindowGoOneByOne) {
  for (int i = 0; i < 5; ++i) {
    v1::WorkerMessage message;
    message.mutable_drain()->set_reason(std::string(1000, 'x'));
    buffer_.Push(std::move(message));
  }
  FakeCoordinator coordinator(kProtocolVersion, 500);
  coordinator.Take();
  CoordinatorLink link(coordinator.Channel(), &buffer_,
                       {.hello = [] { return v1::WorkerHello(); },
                        .on_welcome = [] {},
                        .on_command = [](v1::Command) {}});
  link.Start();
  EXPECT_TRUE(Eventually([&] { return coordinator.events() == 5; }));
  EXPECT_EQ(coordinator.sessions(), 1);
}

// Whatever was on its way when the one before it ended.
TEST_F(CoordinatorLinkTest, ANewSessionHasAllOfItsWindow) {
  constexpr int kEvents = 50;
  for (int i = 0; i < kEvents; ++i) {
    v1::WorkerMessage message;
    message.mutable_drain()->set_reason(std::string(1000, 'x'));
    buffer_.Push(std::move(message));
  }
  FakeCoordinator coordinator(kProtocolVersion, 5000);
  coordinator.EndSoon(1);
  coordinator.Take();
  CoordinatorLink link(coordinator.Channel(), &buffer_,
                       {.hello = [] { return v1::WorkerHello(); },
                        .on_welcome = [] {},
                        .on_command = [](v1::Command) {}});
  link.Start();
  EXPECT_TRUE(Eventually([&] { return coordinator.events() == kEvents; }));
  EXPECT_EQ(coordinator.sessions(), 2);
}

}  // namespace
}  // namespace ringleader::agent
