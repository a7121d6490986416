// What a worker holds while its coordinator is away, and from when its silence counts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/boot_clock.h"
#include "base/protocol_version.h"
#include "worker/agent/link/coordinator_link.h"

namespace ringleader::agent {
namespace {

using ::testing::ElementsAre;

constexpr absl::Duration kFenceAfter = absl::Seconds(90);

// A coordinator that plays one session after the other as it is told.
class ScriptedCoordinator : public v1::WorkerControl::Service {
 public:
  struct Script {
    uint64_t applied = 0;      // as its welcome says
    uint64_t acknowledge = 0;  // once it has come: ends the session; 0: never
    absl::Duration welcome_after = absl::ZeroDuration();
    absl::Duration answer_after = absl::ZeroDuration();  // heartbeats; infinite: never
    uint64_t answers = ~uint64_t{0};                     // to so many heartbeats
    grpc::Status refusal = grpc::Status::OK;             // in place of a welcome
  };

  // `buffer`: that of the link, which is left only once it has taken an acknowledgement.
  ScriptedCoordinator(const EventBuffer* buffer, std::vector<Script> scripts)
      : buffer_(*buffer), scripts_(std::move(scripts)) {
    received_.resize(scripts_.size());
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    channel_ =
        grpc::CreateChannel(absl::StrCat("127.0.0.1:", port), grpc::InsecureChannelCredentials());
  }
  ~ScriptedCoordinator() override { server_->Shutdown(std::chrono::system_clock::now()); }

  grpc::Status Session(
      grpc::ServerContext*,
      grpc::ServerReaderWriter<v1::CoordinatorMessage, v1::WorkerMessage>* stream) override {
    size_t number = 0;
    {
      absl::MutexLock lock(&mutex_);
      number = std::min(sessions_++, scripts_.size() - 1);
    }
    const Script& script = scripts_[number];
    uint64_t heartbeats = 0;
    v1::WorkerMessage message;
    if (!stream->Read(&message)) return grpc::Status::OK;
    {
      absl::MutexLock lock(&mutex_);
      ++hellos_;
      hello_arrived_ = BootNow();
    }
    if (!script.refusal.ok()) return script.refusal;
    absl::SleepFor(script.welcome_after);
    v1::CoordinatorMessage welcome;
    welcome.mutable_welcome()->set_lease_milliseconds(10'000);
    welcome.mutable_welcome()->set_heartbeat_milliseconds(50);
    welcome.mutable_welcome()->set_fence_milliseconds(
        static_cast<uint32_t>(absl::ToInt64Milliseconds(kFenceAfter)));
    welcome.mutable_welcome()->set_applied_sequence(script.applied);
    welcome.mutable_welcome()->set_protocol_version(kProtocolVersion);
    stream->Write(welcome);
    while (stream->Read(&message)) {
      v1::CoordinatorMessage answer;
      if (message.has_heartbeat()) {
        if (script.acknowledge > 0 && buffer_.acknowledged() >= script.acknowledge) break;
        if (script.answer_after == absl::InfiniteDuration()) continue;
        if (++heartbeats > script.answers) continue;
        const absl::Time arrived = BootNow();
        answer.set_heartbeat_number(message.heartbeat().number());
        absl::SleepFor(script.answer_after);
        absl::MutexLock lock(&mutex_);
        heartbeat_arrived_ = arrived;
      } else {
        absl::MutexLock lock(&mutex_);
        received_[number].push_back(message.sequence());
        if (message.sequence() == script.acknowledge) {
          answer.set_acknowledged_sequence(script.acknowledge);
        }
      }
      stream->Write(answer);
    }
    return grpc::Status::OK;
  }

  const std::shared_ptr<grpc::Channel>& channel() const { return channel_; }
  std::vector<uint64_t> ReceivedIn(size_t session) {
    absl::MutexLock lock(&mutex_);
    return received_[session];
  }
  // Sessions that said hello.
  size_t hellos() {
    absl::MutexLock lock(&mutex_);
    return hellos_;
  }
  // When the newest session said hello, in boot time.
  absl::Time hello_arrived() {
    absl::MutexLock lock(&mutex_);
    return hello_arrived_;
  }
  // When the newest heartbeat that was answered arrived, in boot time.
  absl::Time heartbeat_arrived() {
    absl::MutexLock lock(&mutex_);
    return heartbeat_arrived_;
  }

 private:
  const EventBuffer& buffer_;
  const std::vector<Script> scripts_;
  std::shared_ptr<grpc::Channel> channel_;
  absl::Mutex mutex_;
  size_t sessions_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t hellos_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<std::vector<uint64_t>> received_ ABSL_GUARDED_BY(mutex_);  // sequences, by session
  absl::Time hello_arrived_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  absl::Time heartbeat_arrived_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  std::unique_ptr<grpc::Server> server_;
};

bool Becomes(const std::function<bool()>& holds) {
  const absl::Time deadline = absl::Now() + absl::Seconds(30);
  while (!holds() && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(2));
  return holds();
}

class ReconnectTest : public ::testing::Test {
 protected:
  std::unique_ptr<CoordinatorLink> Link(const ScriptedCoordinator& coordinator) {
    CoordinatorLink::Callbacks callbacks;
    callbacks.hello = [] { return v1::WorkerHello(); };
    callbacks.on_welcome = [] {};
    callbacks.on_command = [](v1::Command) {};
    callbacks.on_refused = [this](const absl::Status& why) {
      absl::MutexLock lock(&mutex_);
      refusals_.push_back(why);
    };
    auto link = std::make_unique<CoordinatorLink>(coordinator.channel(), &buffer_, callbacks);
    link->Start();
    return link;
  }
  void PushSteps(int count) {
    for (int i = 0; i < count; ++i) {
      v1::WorkerMessage message;
      message.mutable_event()->mutable_step()->set_step(++steps_);
      buffer_.Push(std::move(message));
    }
  }

  EventBuffer buffer_{1000};
  uint64_t steps_ = 0;
  absl::Mutex mutex_;
  std::vector<absl::Status> refusals_ ABSL_GUARDED_BY(mutex_);
};

TEST_F(ReconnectTest, ReportsAreHeldUntilTheyAreAcknowledgedAndSentAgainInOrder) {
  // The first coordinator acknowledges two of five and dies; the next has applied a third, whose
  // acknowledgement was lost.
  ScriptedCoordinator coordinator(&buffer_,
                                  {{.acknowledge = 2}, {.applied = 3, .acknowledge = 6}, {}});
  PushSteps(5);
  const auto link = Link(coordinator);
  ASSERT_TRUE(Becomes([&] { return coordinator.ReceivedIn(1).size() >= 2; }));
  PushSteps(1);
  ASSERT_TRUE(Becomes([&] { return buffer_.empty(); }));
  EXPECT_THAT(coordinator.ReceivedIn(1), ElementsAre(4, 5, 6));
  const std::vector<uint64_t> first = coordinator.ReceivedIn(0);
  ASSERT_GE(first.size(), 2u);
  for (size_t i = 0; i < first.size(); ++i) EXPECT_EQ(first[i], i + 1);
  EXPECT_GE(link->sessions(), 2u);
}

// Only the welcome says what need not be sent again, and until it comes nobody is there.
TEST_F(ReconnectTest, ANewSessionBeginsWithItsWelcome) {
  ScriptedCoordinator coordinator(
      &buffer_, {{.acknowledge = 1}, {.applied = 3, .welcome_after = absl::Milliseconds(300)}});
  PushSteps(3);
  const auto link = Link(coordinator);
  ASSERT_TRUE(Becomes([&] { return coordinator.hellos() == 2; }));
  EXPECT_TRUE(!link->connected() || link->sessions() == 2);
  ASSERT_TRUE(Becomes([&] { return link->sessions() == 2; }));
  EXPECT_TRUE(link->connected());
  const absl::Time hello = coordinator.hello_arrived();
  ASSERT_TRUE(Becomes([&] { return coordinator.heartbeat_arrived() > hello; }));
  EXPECT_THAT(coordinator.ReceivedIn(1), ElementsAre()) << "all of it had been applied";
  EXPECT_TRUE(buffer_.empty());
}

TEST_F(ReconnectTest, NothingIsForgottenByACoordinatorThatRemembersNothing) {
  // A coordinator whose database was restored from a backup asks from the start.
  ScriptedCoordinator coordinator(&buffer_,
                                  {{.acknowledge = 1}, {.applied = 0, .acknowledge = 3}, {}});
  PushSteps(3);
  const auto link = Link(coordinator);
  ASSERT_TRUE(Becomes([&] { return buffer_.empty(); }));
  EXPECT_THAT(coordinator.ReceivedIn(1), ElementsAre(2, 3)) << "what it acknowledged is gone";
}

// The coordinator counts from a sign of life's arrival, so the worker, to be sooner, counts from
// when it was sent: not from the answer, which may have been long on its way.
TEST_F(ReconnectTest, SilenceCountsFromWhenASignOfLifeWasSent) {
  ScriptedCoordinator coordinator(&buffer_, {{.answer_after = absl::Milliseconds(300)}});
  EXPECT_EQ(CoordinatorLink(coordinator.channel(), &buffer_, {}).OutOfContact(),
            absl::ZeroDuration())
      << "before the first session";
  const auto link = Link(coordinator);
  absl::Time arrived = absl::InfinitePast();
  for (int answers = 0; answers < 3; ++answers) {
    ASSERT_TRUE(Becomes([&] { return coordinator.heartbeat_arrived() > arrived; }));
    arrived = coordinator.heartbeat_arrived();
    // Until the next answer, the newest that can be confirmed is this one.
    ASSERT_TRUE(Becomes([&] {
      const absl::Duration since_it_arrived = BootNow() - arrived;
      const absl::Duration silence = link->OutOfContact();
      if (coordinator.heartbeat_arrived() > arrived) return true;
      EXPECT_GE(silence, since_it_arrived);
      return HasFailure();
    }));
  }
  link->Stop();
}

// So do the leases that a first hello begins, however long its answer takes.
TEST_F(ReconnectTest, AFirstLeaseCountsFromWhenTheHelloWasSent) {
  ScriptedCoordinator coordinator(&buffer_, {{.welcome_after = absl::Milliseconds(300),
                                              .answer_after = absl::InfiniteDuration()}});
  const absl::Time begin = BootNow();
  const auto link = Link(coordinator);
  ASSERT_TRUE(Becomes([&] { return link->sessions() == 1; }));
  EXPECT_GE(link->lease_end(), begin + kFenceAfter);
  EXPECT_LE(link->lease_end(), coordinator.hello_arrived() + kFenceAfter);
  link->Stop();
}

// And each answer prolongs it, the last one, too.
TEST_F(ReconnectTest, ALeaseCountsFromTheHeartbeatThatWasAnsweredLast) {
  constexpr absl::Duration kWelcomeAfter = absl::Milliseconds(300);
  ScriptedCoordinator coordinator(&buffer_, {{.welcome_after = kWelcomeAfter, .answers = 1}});
  const auto link = Link(coordinator);
  ASSERT_TRUE(Becomes([&] { return coordinator.heartbeat_arrived() > absl::InfinitePast(); }));
  EXPECT_TRUE(Becomes([&] {
    return link->lease_end() >= coordinator.hello_arrived() + kWelcomeAfter + kFenceAfter;
  })) << "a heartbeat is sent after the welcome";
  EXPECT_LE(link->lease_end(), coordinator.heartbeat_arrived() + kFenceAfter);
  link->Stop();
}

// Its access file may be under repair; the trainers go on, and the worker is wanted again.
TEST_F(ReconnectTest, AWorkerThatWasLetInOnceTriesAgainWhateverItIsToldLater) {
  ScriptedCoordinator coordinator(
      &buffer_,
      {{.acknowledge = 1}, {.refusal = {grpc::PERMISSION_DENIED, "no role for nodes/a"}}, {}});
  PushSteps(1);
  const auto link = Link(coordinator);
  EXPECT_TRUE(Becomes([&] { return link->sessions() == 2; }));
  absl::MutexLock lock(&mutex_);
  EXPECT_TRUE(refusals_.empty());
}

}  // namespace
}  // namespace ringleader::agent
