// Who says what first, what a session is from its hello to its end, and how far it may send ahead.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "base/protocol_version.h"
#include "base/testing/fake_clock.h"
#include "coordinator/session/worker_control_service.h"

namespace ringleader::session {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

// Keeps what it is told, and welcomes everybody.
class Listener : public SessionListener {
 public:
  // Behind whoever called last, which ThreadSanitizer does not see of gRPC's own ends.
  ~Listener() override { absl::MutexLock lock(&mutex_); }
  void OnHello(std::shared_ptr<Session> session, v1::WorkerHello hello) override {
    session->Send([] {
      v1::CoordinatorMessage message;
      message.mutable_welcome()->set_epoch(1);
      return message;
    }());
    absl::MutexLock lock(&mutex_);
    sessions_.push_back(std::move(session));
    hellos_.push_back(std::move(hello));
  }
  void OnMessage(std::shared_ptr<Session> session, v1::WorkerMessage message) override {
    absl::MutexLock lock(&mutex_);
    senders_.push_back(session->node());
    sequences_.push_back(message.sequence());
  }
  void OnClosed(std::shared_ptr<Session> session) override {
    absl::MutexLock lock(&mutex_);
    closed_.push_back(std::move(session));
  }
  void OnDeath(std::string node, std::string incarnation,
               std::function<void(const absl::Status&)> done) override {
    {
      absl::MutexLock lock(&mutex_);
      deaths_.emplace_back(std::move(node), std::move(incarnation));
    }
    done(absl::UnavailableError("say it again"));
  }

  std::vector<std::shared_ptr<Session>> sessions() const {
    absl::MutexLock lock(&mutex_);
    return sessions_;
  }
  std::vector<v1::WorkerHello> hellos() const {
    absl::MutexLock lock(&mutex_);
    return hellos_;
  }
  // Those that were told of, with their sessions, once so many were: workers are welcomed before.
  std::vector<v1::WorkerHello> AwaitHellos(size_t count) const {
    absl::MutexLock lock(&mutex_);
    const auto there = [this, count]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return hellos_.size() >= count;
    };
    EXPECT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&there), absl::Minutes(1)));
    return hellos_;
  }
  std::vector<std::string> senders() const {
    absl::MutexLock lock(&mutex_);
    return senders_;
  }
  std::vector<std::pair<std::string, std::string>> deaths() const {
    absl::MutexLock lock(&mutex_);
    return deaths_;
  }
  bool AwaitMessages(size_t count) const {
    absl::MutexLock lock(&mutex_);
    const auto there = [this, count]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return sequences_.size() >= count;
    };
    return mutex_.AwaitWithTimeout(absl::Condition(&there), absl::Minutes(1));
  }
  // The sessions that have ended, once so many have.
  std::vector<std::shared_ptr<Session>> AwaitClosed(size_t count) const {
    absl::MutexLock lock(&mutex_);
    const auto there = [this, count]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return closed_.size() >= count;
    };
    EXPECT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&there), absl::Minutes(1)));
    return closed_;
  }

 private:
  mutable absl::Mutex mutex_;
  std::vector<std::shared_ptr<Session>> sessions_ ABSL_GUARDED_BY(mutex_);
  std::vector<v1::WorkerHello> hellos_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> senders_ ABSL_GUARDED_BY(mutex_);
  std::vector<uint64_t> sequences_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<Session>> closed_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::pair<std::string, std::string>> deaths_ ABSL_GUARDED_BY(mutex_);
};

v1::WorkerMessage Hello(const std::string& node, const std::string& incarnation = "folder.1",
                        uint32_t version = kProtocolVersion) {
  v1::WorkerMessage message;
  message.mutable_hello()->set_node(node);
  message.mutable_hello()->set_incarnation(incarnation);
  message.mutable_hello()->set_protocol_version(version);
  return message;
}
v1::WorkerMessage Heartbeat(uint64_t number) {
  v1::WorkerMessage message;
  message.mutable_heartbeat()->set_number(number);
  return message;
}
v1::WorkerMessage Event(uint64_t sequence) {
  v1::WorkerMessage message;
  message.set_sequence(sequence);
  message.mutable_event()->set_job("j");
  return message;
}

class SessionRulesTest : public ::testing::Test {
 protected:
  // A worker's end of a session.
  struct Worker {
    ~Worker() {
      context.TryCancel();
      if (stream != nullptr) stream->Finish();
    }
    bool Say(const v1::WorkerMessage& message) { return stream->Write(message); }
    // The next answer that `fits`; an empty one where the session ends before.
    v1::CoordinatorMessage Hear(const std::function<bool(const v1::CoordinatorMessage&)>& fits) {
      v1::CoordinatorMessage message;
      while (stream->Read(&message)) {
        if (fits(message)) return message;
      }
      return {};
    }
    grpc::Status End() {
      v1::CoordinatorMessage message;
      while (stream->Read(&message)) continue;
      grpc::Status status = stream->Finish();
      stream = nullptr;
      return status;
    }

    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientReaderWriter<v1::WorkerMessage, v1::CoordinatorMessage>> stream;
  };

  explicit SessionRulesTest(const SessionOptions& options = {}, const limits::Options& limits = {})
      : options_(options), limits_(limits, Clock::Real(), &registry_) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(&service_);
    server_ = builder.BuildAndStart();
    stub_ = v1::WorkerControl::NewStub(
        grpc::CreateChannel(absl::StrCat("127.0.0.1:", port_), grpc::InsecureChannelCredentials()));
  }
  ~SessionRulesTest() override {
    service_.CloseAll();
    server_->Shutdown(std::chrono::system_clock::now());
  }

  std::unique_ptr<Worker> Open() {
    auto worker = std::make_unique<Worker>();
    worker->context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    worker->stream = stub_->Session(&worker->context);
    return worker;
  }
  // One that was welcomed.
  std::unique_ptr<Worker> OpenAs(const std::string& node) {
    auto worker = Open();
    EXPECT_TRUE(worker->Say(Hello("nodes/" + node)));
    welcome_ = worker->Hear([](const auto& message) { return message.has_welcome(); });
    EXPECT_TRUE(welcome_.has_welcome());
    return worker;
  }
  // How a session ends in which this is said.
  grpc::Status EndOf(const std::vector<v1::WorkerMessage>& said) {
    const auto worker = Open();
    for (const v1::WorkerMessage& message : said) worker->Say(message);
    return worker->End();
  }
  grpc::Status Testify(const std::string& node, const std::string& incarnation) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    v1::ReportDeathRequest request;
    request.set_node(node);
    request.set_incarnation(incarnation);
    v1::ReportDeathResponse response;
    return stub_->ReportDeath(&context, request, &response);
  }
  // What a worker may send ahead, as it hears with the answer to a heartbeat.
  static uint64_t WindowOf(Worker& worker) {
    EXPECT_TRUE(worker.Say(Heartbeat(7)));
    return worker.Hear([](const auto& message) { return message.heartbeat_number() == 7; })
        .intake()
        .window_bytes();
  }

  const SessionOptions options_;
  FakeClock clock_;
  Listener listener_;
  prometheus::Registry registry_;
  limits::Limits limits_;
  WorkerControlService service_{&listener_, &clock_, &limits_, options_};
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<v1::WorkerControl::Stub> stub_;
  v1::CoordinatorMessage welcome_;
};

TEST_F(SessionRulesTest, ASessionBeginsWithAHelloAndHasNoOther) {
  for (const auto& [said, why] :
       std::vector<std::pair<std::vector<v1::WorkerMessage>, std::string>>{
           {{Heartbeat(1)}, "the first message must be a hello"},
           {{Event(1)}, "the first message must be a hello"},
           {{Hello("nodes/a"), Hello("nodes/a")}, "a second hello on one session"},
           {{Hello("nodes/a"), Event(0)}, "only hello and heartbeats may have sequence 0"}}) {
    const grpc::Status ended = EndOf(said);
    EXPECT_EQ(ended.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_EQ(ended.error_message(), why);
  }
  EXPECT_THAT(listener_.AwaitHellos(2), SizeIs(2));
  EXPECT_THAT(listener_.senders(), IsEmpty());
  // Those that were never heard of do not end either.
  EXPECT_THAT(listener_.AwaitClosed(2), SizeIs(2));
}

TEST_F(SessionRulesTest, AHelloSaysWhoItIs) {
  for (const char* const name : {"", "a", "nodes/", "jobs/a", "nodes/a/b"}) {
    EXPECT_EQ(EndOf({Hello(name)}).error_code(), grpc::StatusCode::INVALID_ARGUMENT) << name;
  }
  const grpc::Status nobody = EndOf({Hello("nodes/a", "")});
  EXPECT_EQ(nobody.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(nobody.error_message(), "incarnation must have 1 to 128 bytes");
  EXPECT_EQ(EndOf({Hello("nodes/a", std::string(129, 'x'))}).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  for (int i = 0; i < 2; ++i) {  // whether it was said before or not
    const grpc::Status other = EndOf({Hello("nodes/a", "folder.1", kProtocolVersion + 1)});
    EXPECT_EQ(other.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
    EXPECT_THAT(other.error_message(), HasSubstr("the worker of nodes/a speaks protocol version"));
  }
  EXPECT_THAT(listener_.hellos(), IsEmpty());
  EXPECT_THAT(listener_.AwaitClosed(0), IsEmpty());
}

// Whatever a node says of itself is held in memory, and looked at by the one thread that decides.
// It would be looked up, sent back and written into logs.
TEST_F(SessionRulesTest, TrainersAreOfAJobThatCanBe) {
  for (const std::string& name : {std::string(), std::string("j\n"), std::string("jobs/j"),
                                  std::string(254, 'j'), std::string(1 << 20, 'j')}) {
    v1::WorkerMessage message = Hello("nodes/a");
    message.mutable_hello()->add_attempts()->set_job("j");
    message.mutable_hello()->add_attempts()->set_job(name);
    const grpc::Status ended = EndOf({message});
    EXPECT_EQ(ended.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << name.size();
    EXPECT_THAT(ended.error_message(), HasSubstr("attempts: the name of a job"));
  }
  EXPECT_THAT(listener_.hellos(), IsEmpty());
}

TEST_F(SessionRulesTest, ANodeIsOnlySoLarge) {
  const auto end_of = [&](const std::function<void(v1::WorkerHello&)>& say) {
    v1::WorkerMessage message = Hello("nodes/a");
    say(*message.mutable_hello());
    return EndOf({message});
  };
  const std::vector<std::pair<std::string, std::function<void(v1::WorkerHello&)>>> too_large = {
      {"inventory: 4097 trainers",
       [](v1::WorkerHello& hello) { hello.mutable_inventory()->set_trainers(4097); }},
      {"inventory: more than 64 KiB",
       [](v1::WorkerHello& hello) {
         hello.mutable_inventory()->set_hostname(std::string(64 << 10, 'x'));
       }},
      {"version: more than 128 bytes",
       [](v1::WorkerHello& hello) { hello.set_version(std::string(129, 'x')); }},
      {"attempts: 4097 trainers",
       [](v1::WorkerHello& hello) {
         for (int i = 0; i < 4097; ++i) hello.add_attempts()->set_job("j");
       }},
      {"attempts: 4097 trainers", [](v1::WorkerHello& hello) {
         for (int i = 0; i < 2; ++i) {
           v1::RunningAttempt* const running = hello.add_attempts();
           running->set_job("j");
           for (uint32_t rank = 0; rank < 2048; ++rank) running->add_ranks(rank);
         }
         hello.mutable_attempts(0)->add_ranks(2048);
       }}};
  for (const auto& [why, say] : too_large) {
    const grpc::Status ended = end_of(say);
    EXPECT_EQ(ended.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << why;
    EXPECT_THAT(ended.error_message(), HasSubstr(why));
  }
  EXPECT_THAT(listener_.hellos(), IsEmpty());
  v1::WorkerMessage largest = Hello("nodes/a");
  largest.mutable_hello()->mutable_inventory()->set_trainers(4096);
  largest.mutable_hello()->mutable_inventory()->set_hostname(std::string(65'000, 'x'));
  largest.mutable_hello()->set_version(std::string(128, 'x'));
  for (int i = 0; i < 4096; ++i) largest.mutable_hello()->add_attempts()->set_job("j");
  // What it says later is measured in the same way.
  v1::WorkerMessage grown;
  grown.set_sequence(1);
  grown.mutable_inventory()->set_trainers(4097);
  const grpc::Status ended = EndOf({largest, grown});
  EXPECT_EQ(ended.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(ended.error_message(), HasSubstr("inventory: 4097 trainers"));
  EXPECT_THAT(listener_.hellos(), SizeIs(1));
  EXPECT_THAT(listener_.senders(), IsEmpty());
}

TEST_F(SessionRulesTest, IsHeardOfFromItsHelloToItsEnd) {
  auto worker = OpenAs("a");
  EXPECT_EQ(listener_.AwaitHellos(1).at(0).node(), "nodes/a");
  const std::shared_ptr<Session> session = listener_.sessions().at(0);
  EXPECT_EQ(session->node(), "a");
  EXPECT_EQ(session->incarnation(), "folder.1");
  EXPECT_EQ(session->certificate(), "");
  EXPECT_EQ(session->last_heard(), clock_.Now());
  // Any message is a sign of life; its own answers are none.
  const absl::Time before = clock_.Now();
  clock_.Advance(absl::Seconds(3));
  session->Send({});
  EXPECT_EQ(session->last_heard(), before);
  EXPECT_GT(WindowOf(*worker), 0u);
  EXPECT_EQ(session->last_heard(), clock_.Now());
  clock_.Advance(absl::Seconds(3));
  ASSERT_TRUE(worker->Say(Event(1)));
  ASSERT_TRUE(listener_.AwaitMessages(1));
  EXPECT_EQ(session->last_heard(), clock_.Now());
  EXPECT_THAT(listener_.senders(), ElementsAre("a"));
  worker.reset();
  EXPECT_EQ(listener_.AwaitClosed(1).at(0), session);
}

TEST_F(SessionRulesTest, ADeathIsOfAProcessOfANode) {
  EXPECT_EQ(Testify("a", "folder.1").error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  const grpc::Status nobody = Testify("nodes/a", "");
  EXPECT_EQ(nobody.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(nobody.error_message(), "incarnation must have 1 to 128 bytes");
  EXPECT_THAT(listener_.deaths(), IsEmpty());
  const grpc::Status answer = Testify("nodes/a", "folder.1");
  EXPECT_EQ(answer.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(answer.error_message(), "say it again");
  EXPECT_THAT(listener_.deaths(),
              ElementsAre(std::pair<std::string, std::string>("a", "folder.1")));
}

// There is one place for a session that has not said hello.
class OnePlaceTest : public SessionRulesTest {
 protected:
  OnePlaceTest() : SessionRulesTest({}, {.silent_sessions = 1}) {}
  // Takes nothing: who comes just then would be refused.
  bool IsFree() const { return limits_.silent_sessions.taken() == 0; }
  bool Becomes(bool free) const {
    const absl::Time deadline = absl::Now() + absl::Seconds(30);
    while (IsFree() != free && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(1));
    return IsFree() == free;
  }
};

TEST_F(OnePlaceTest, AHelloOrAnEndGivesItBack) {
  const auto spoke = OpenAs("a");
  EXPECT_TRUE(IsFree());
  auto silent = Open();
  EXPECT_TRUE(Becomes(false));
  EXPECT_EQ(EndOf({Hello("nodes/b")}).error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  ASSERT_TRUE(silent->Say(Hello("nodes/b")));
  silent->Hear([](const auto& message) { return message.has_welcome(); });
  EXPECT_TRUE(IsFree());
  silent = Open();
  EXPECT_TRUE(Becomes(false));
  silent.reset();
  EXPECT_TRUE(Becomes(true));
}

TEST_F(OnePlaceTest, AllSessionsAreClosedForGoodOrForNow) {
  const auto first = OpenAs("a"), silent = Open();
  EXPECT_TRUE(Becomes(false));
  service_.CloseOpen(absl::UnauthenticatedError("come in again"));
  for (Worker* const worker : {first.get(), silent.get()}) {
    const grpc::Status ended = worker->End();
    EXPECT_EQ(ended.error_code(), grpc::StatusCode::UNAUTHENTICATED);
    EXPECT_EQ(ended.error_message(), "come in again");
  }
  EXPECT_TRUE(Becomes(true));
  const auto second = OpenAs("a");
  service_.CloseAll();
  EXPECT_EQ(second->End().error_code(), grpc::StatusCode::UNAVAILABLE);
  const grpc::Status late = EndOf({Hello("nodes/b")});
  EXPECT_EQ(late.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(late.error_message(), "the coordinator is shutting down");
  EXPECT_THAT(listener_.AwaitHellos(2), SizeIs(2));
}

class ImpatientTest : public SessionRulesTest {
 protected:
  // Workers' ends take 64 KiB that nobody reads.
  ImpatientTest() : SessionRulesTest({.end_patience = absl::Milliseconds(100)}) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
    arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 1 << 16);
    stub_ = v1::WorkerControl::NewStub(grpc::CreateCustomChannel(
        absl::StrCat("127.0.0.1:", port_), grpc::InsecureChannelCredentials(), arguments));
  }
};

// Before, a worker that read nothing kept a session, and what was queued in it, for as long as it
// liked.
TEST_F(ImpatientTest, ASessionEndsWhetherItIsReadOrNot) {
  EXPECT_EQ(SessionOptions().end_patience, absl::Seconds(10));
  v1::CoordinatorMessage message;
  message.mutable_command()->set_job(std::string(size_t{1} << 20, 'x'));
  grpc::StatusCode code = grpc::StatusCode::ABORTED;
  // Where the server has not heard yet that the welcome was read, nothing behind it is under way,
  // and the worker hears how the session ended: then another one is closed.
  for (size_t tries = 1; tries <= 100 && code == grpc::StatusCode::ABORTED; ++tries) {
    const auto worker = OpenAs("a");
    listener_.AwaitHellos(tries);
    const std::shared_ptr<Session> session = listener_.sessions().back();
    for (int i = 0; i < 3; ++i) session->Send(message);
    session->Close(absl::AbortedError("another session of this node has begun"));
    ASSERT_THAT(listener_.AwaitClosed(tries), SizeIs(tries));
    EXPECT_EQ(listener_.AwaitClosed(tries).back(), session);
    code = worker->End().error_code();
  }
  EXPECT_EQ(code, grpc::StatusCode::CANCELLED);
}

class WindowTest : public SessionRulesTest {
 protected:
  WindowTest() : SessionRulesTest({.waiting_bytes = size_t{160} << 10}) {}
};

TEST_F(WindowTest, SessionsShareWhatMayWait) {
  const auto first = OpenAs("a");
  EXPECT_EQ(welcome_.intake().window_bytes(), size_t{160} << 10);
  auto second = OpenAs("b");
  EXPECT_EQ(welcome_.intake().window_bytes(), size_t{80} << 10);
  EXPECT_EQ(WindowOf(*first), size_t{80} << 10);
  // No less than keeps a line busy.
  const auto third = OpenAs("c");
  EXPECT_EQ(welcome_.intake().window_bytes(), size_t{64} << 10);
  second.reset();
  listener_.AwaitClosed(1);
  EXPECT_EQ(WindowOf(*first), size_t{80} << 10);
}

// However much there is for all.
TEST_F(SessionRulesTest, OneSessionsWindowIsBounded) {
  OpenAs("a");
  EXPECT_EQ(welcome_.intake().window_bytes(), size_t{4} << 20);
}

}  // namespace
}  // namespace ringleader::session
