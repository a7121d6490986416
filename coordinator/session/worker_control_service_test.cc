// Back-pressure: what workers send waits with them, not in the coordinator.
#include "coordinator/session/worker_control_service.h"

#include <gmock/gmock.h>
#include <google/protobuf/unknown_field_set.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <deque>
#include <fstream>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "base/protocol_version.h"

namespace ringleader::session {
namespace {

using ::testing::HasSubstr;

// Takes what is delivered when it is told to.
class Listener : public SessionListener {
 public:
  void OnHello(std::shared_ptr<Session> session, v1::WorkerHello) override {
    v1::CoordinatorMessage message;
    message.mutable_welcome()->set_epoch(1);
    session->Send(std::move(message));
  }
  void OnMessage(std::shared_ptr<Session> session, v1::WorkerMessage message) override {
    absl::MutexLock lock(&mutex_);
    bytes_ += message.ByteSizeLong();
    EXPECT_EQ(message.sequence(), ++sequence_);
    waiting_.push_back({std::move(session), std::move(message)});
  }
  void OnClosed(std::shared_ptr<Session>) override {}
  void OnDeath(std::string, std::string, std::function<void(const absl::Status&)> done) override {
    absl::MutexLock lock(&mutex_);
    deaths_.push_back(std::move(done));
  }
  // Answers what witnesses have said so far, once `count` have; false if they have not within a
  // minute.
  bool AnswerDeaths(size_t count) {
    std::vector<std::function<void(const absl::Status&)>> deaths;
    {
      absl::MutexLock lock(&mutex_);
      const auto there = [this, count]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return deaths_.size() >= count;
      };
      if (!mutex_.AwaitWithTimeout(absl::Condition(&there), absl::Minutes(1))) return false;
      deaths.swap(deaths_);
    }
    for (const auto& answer : deaths) answer(absl::OkStatus());
    return true;
  }

  // Waits until `bytes` have been delivered; returns whether they were, within a minute.
  bool Await(size_t bytes) {
    absl::MutexLock lock(&mutex_);
    const auto there = [this, bytes]()
                           ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return bytes_ >= bytes; };
    return mutex_.AwaitWithTimeout(absl::Condition(&there), absl::Minutes(1));
  }
  size_t bytes() const {
    absl::MutexLock lock(&mutex_);
    return bytes_;
  }
  std::shared_ptr<Session> LastSession() const {
    absl::MutexLock lock(&mutex_);
    return waiting_.back().session;
  }
  // Returns how many messages that was.
  size_t TakeAll() {
    std::deque<Delivered> taken;
    {
      absl::MutexLock lock(&mutex_);
      taken.swap(waiting_);
    }
    for (Delivered& delivered : taken) {
      delivered.message.Clear();
      delivered.session->Taken();
    }
    return taken.size();
  }

 private:
  struct Delivered {
    std::shared_ptr<Session> session;
    v1::WorkerMessage message;
  };
  mutable absl::Mutex mutex_;
  std::vector<std::function<void(const absl::Status&)>> deaths_ ABSL_GUARDED_BY(mutex_);
  std::deque<Delivered> waiting_ ABSL_GUARDED_BY(mutex_);
  size_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t sequence_ ABSL_GUARDED_BY(mutex_) = 0;
};

class WorkerControlServiceTest : public ::testing::Test {
 protected:
  using Stream = grpc::ClientReaderWriter<v1::WorkerMessage, v1::CoordinatorMessage>;

  WorkerControlServiceTest() {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.SetMaxReceiveMessageSize(16 << 20);
    builder.RegisterService(&service_);
    server_ = builder.BuildAndStart();
    stub_ = v1::WorkerControl::NewStub(
        grpc::CreateChannel(absl::StrCat("127.0.0.1:", port_), grpc::InsecureChannelCredentials()));
    context_.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(120));
    stream_ = stub_->Session(&context_);
    v1::WorkerMessage hello;
    hello.mutable_hello()->set_node("nodes/n1");
    hello.mutable_hello()->set_incarnation("folder.process");
    hello.mutable_hello()->set_protocol_version(kProtocolVersion);
    EXPECT_TRUE(stream_->Write(hello));
    EXPECT_TRUE(stream_->Read(&answer_));
    EXPECT_TRUE(answer_.has_welcome());
  }
  ~WorkerControlServiceTest() override {
    context_.TryCancel();
    next_context_.TryCancel();
    stream_->Finish();
    service_.CloseAll();
    server_->Shutdown(std::chrono::system_clock::now());
  }

  bool SendLog(size_t bytes) {
    v1::WorkerMessage message;
    message.set_sequence(++sequence_);
    message.mutable_event()->mutable_logs()->add_lines()->set_text(std::string(bytes, 'x'));
    return stream_->Write(message);
  }
  bool SendHeartbeat(uint64_t number) {
    v1::WorkerMessage message;
    message.mutable_heartbeat()->set_number(number);
    return stream_->Write(message);
  }
  // Reads on until the heartbeat is answered; returns whether it was.
  bool AwaitHeartbeat(uint64_t number) {
    while (stream_->Read(&answer_)) {
      if (answer_.heartbeat_number() == number) return true;
    }
    return false;
  }

  // How a session ends in which these bytes follow the hello.
  grpc::Status SayRaw(const std::string& wire) {
    grpc::GenericStub stub(
        grpc::CreateChannel(absl::StrCat("127.0.0.1:", port_), grpc::InsecureChannelCredentials()));
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    grpc::CompletionQueue queue;
    const auto call = stub.PrepareCall(&context, "/ringleader.v1.WorkerControl/Session", &queue);
    const auto wait = [&queue] {
      void* tag = nullptr;
      bool ok = false;
      return queue.Next(&tag, &ok) && ok;
    };
    const auto write = [&](const std::string& bytes) {
      const grpc::Slice slice(bytes);
      call->Write(grpc::ByteBuffer(&slice, 1), nullptr);
      return wait();
    };
    call->StartCall(nullptr);
    v1::WorkerMessage hello;
    hello.mutable_hello()->set_node("nodes/raw");
    hello.mutable_hello()->set_incarnation("folder.raw");
    hello.mutable_hello()->set_protocol_version(kProtocolVersion);
    EXPECT_TRUE(wait() && write(hello.SerializeAsString()) && write(wire));
    grpc::ByteBuffer answer;
    do {
      call->Read(&answer, nullptr);
    } while (wait());
    grpc::Status status;
    call->Finish(&status, nullptr);
    EXPECT_TRUE(wait());
    return status;
  }
  // The memory of this process, in which both ends are.
  static size_t ResidentBytes() { return StatusBytes("VmRSS:"); }
  static size_t PeakBytes() { return StatusBytes("VmHWM:"); }
  static void ResetPeak() { std::ofstream("/proc/self/clear_refs") << 5; }
  static size_t StatusBytes(const std::string& name) {
    std::ifstream file("/proc/self/status");
    for (std::string word; file >> word;) {
      size_t kibibytes = 0;
      if (word == name && file >> kibibytes) return kibibytes << 10;
    }
    ADD_FAILURE() << "no " << name;
    return 0;
  }

  Listener listener_;
  prometheus::Registry registry_;
  limits::Limits limits_{{.calls_per_client = 2}, Clock::Real(), &registry_};
  WorkerControlService service_{
      &listener_, Clock::Real(), &limits_, {.waiting_bytes = size_t{64} << 20}};
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<v1::WorkerControl::Stub> stub_;
  grpc::ClientContext context_, next_context_;
  std::unique_ptr<Stream> stream_;
  v1::CoordinatorMessage answer_;
  uint64_t sequence_ = 0;
};

// A worker that keeps to its window is in sight however much of what it sent waits.
TEST_F(WorkerControlServiceTest, HeartbeatsAreAnsweredWhileEventsWait) {
  const size_t window = answer_.intake().window_bytes();
  ASSERT_GT(window, 0u);
  EXPECT_EQ(answer_.intake().taken_sequence(), 0u);
  for (size_t sent = 0; sent < window; sent += 100'000) ASSERT_TRUE(SendLog(100'000));
  ASSERT_TRUE(listener_.Await(window));
  ASSERT_TRUE(SendHeartbeat(1));
  ASSERT_TRUE(AwaitHeartbeat(1));
  EXPECT_EQ(answer_.intake().taken_sequence(), 0u);
  // What is taken makes room, and the worker hears of it.
  EXPECT_EQ(listener_.TakeAll(), sequence_);
  while (answer_.intake().taken_sequence() < sequence_ - window / 4 / 100'000) {
    ASSERT_TRUE(stream_->Read(&answer_));
  }
  ASSERT_TRUE(SendHeartbeat(2));
  ASSERT_TRUE(AwaitHeartbeat(2));
  EXPECT_EQ(answer_.intake().taken_sequence(), sequence_);
}

// What is small on the wire and large once it is parsed is not parsed.
TEST_F(WorkerControlServiceTest, AMessageOfEmptyLinesTakesLittleMemory) {
  // The fields event, logs and lines; the lines are empty.
  constexpr size_t kLines = size_t{2} << 20;
  const auto field = [](char tag, const std::string& body) {
    std::string wire(1, tag);
    for (size_t rest = body.size(); rest > 0; rest >>= 7) {
      wire.push_back(static_cast<char>((rest & 0x7f) | (rest > 0x7f ? 0x80 : 0)));
    }
    return wire + body;
  };
  std::string lines;
  for (size_t i = 0; i < kLines; ++i) lines.append("\x0a\x00", 2);
  const std::string wire = std::string("\x08\x01") + field(0x2a, field(0x4a, lines));
  const size_t before = ResidentBytes();
  ResetPeak();
  EXPECT_EQ(SayRaw(wire).error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_LT(PeakBytes(), before + (size_t{64} << 20));
  EXPECT_EQ(listener_.bytes(), 0u);
  EXPECT_EQ(SayRaw("\x2a\x05").error_code(), grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(WorkerControlServiceTest, WhatHasNoNameHereIsNotKept) {
  v1::WorkerMessage message;
  message.set_sequence(1);
  v1::StepReport* const step = message.mutable_event()->mutable_step();
  step->set_loss(2);
  const size_t known = message.ByteSizeLong();
  step->GetReflection()->MutableUnknownFields(step)->AddLengthDelimited(9999,
                                                                        std::string(100'000, 'x'));
  ASSERT_TRUE(stream_->Write(message));
  ASSERT_TRUE(listener_.Await(1));
  EXPECT_EQ(listener_.bytes(), known);
}

// A worker that reads nothing costs the coordinator no more than its share, whatever it is sent.
TEST_F(WorkerControlServiceTest, WhatAWorkerDoesNotReadIsBoundedInBytes) {
  ASSERT_TRUE(SendLog(1));
  ASSERT_TRUE(listener_.Await(1));
  const std::shared_ptr<Session> session = listener_.LastSession();
  v1::CoordinatorMessage message;
  message.mutable_command()->mutable_start()->mutable_spec()->set_name(
      std::string(size_t{1} << 20, 'x'));
  const size_t before = ResidentBytes();
  ResetPeak();
  for (int i = 0; i < 300; ++i) session->Send(message);
  EXPECT_LT(PeakBytes(), before + (size_t{160} << 20));
  while (stream_->Read(&answer_)) continue;
  const grpc::Status ended = stream_->Finish();
  EXPECT_EQ(ended.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(ended.error_message(), "the peer reads too slowly");
  stream_ = stub_->Session(&next_context_);  // for the end of the test
}

// One that does not keep to it waits itself: 400 MB come in as they are taken.
TEST_F(WorkerControlServiceTest, ABurstWaitsWithWhoeverSendsIt) {
  constexpr size_t kBurst = 400, kMessageBytes = 1 << 20;
  size_t most_waiting = 0;
  std::thread sender([&] {
    for (size_t i = 0; i < kBurst; ++i) ASSERT_TRUE(SendLog(kMessageBytes));
  });
  size_t taken = 0;
  while (taken < kBurst && !HasFailure()) {
    // Waits until nothing more comes while nothing is taken.
    size_t before = 0;
    do {
      before = listener_.bytes();
      absl::SleepFor(absl::Milliseconds(100));
    } while (listener_.bytes() > before);
    most_waiting = std::max(most_waiting, listener_.bytes() - taken * kMessageBytes);
    taken += listener_.TakeAll();
  }
  sender.join();
  EXPECT_GT(most_waiting, size_t{1} << 20);
  EXPECT_LT(most_waiting, size_t{32} << 20);
}

// Witnesses, too, have a share of the calls at the same time.
TEST_F(WorkerControlServiceTest, DeathsOfOneClientAreLimited) {
  struct Call {
    grpc::ClientContext context;
    v1::ReportDeathRequest request;
    v1::ReportDeathResponse response;
    grpc::Status status;
    absl::Notification done;
  };
  std::vector<std::unique_ptr<Call>> calls;
  absl::Notification one_ended;
  std::once_flag ended;
  const auto start = [&] {
    Call* const call = calls.emplace_back(std::make_unique<Call>()).get();
    call->context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    call->request.set_node("nodes/n1");
    call->request.set_incarnation("folder.process");
    stub_->async()->ReportDeath(&call->context, &call->request, &call->response,
                                [call, &one_ended, &ended](const grpc::Status& status) {
                                  call->status = status;
                                  std::call_once(ended, [&] { one_ended.Notify(); });
                                  call->done.Notify();
                                });
    return call;
  };
  for (int i = 0; i < 3; ++i) start();
  // Two wait for their answer; the third has none to wait for.
  ASSERT_TRUE(one_ended.WaitForNotificationWithTimeout(absl::Seconds(60)));
  ASSERT_TRUE(listener_.AnswerDeaths(2));
  int refused = 0;
  for (const auto& call : calls) {
    call->done.WaitForNotification();
    if (call->status.ok()) continue;
    ++refused;
    EXPECT_EQ(call->status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
    EXPECT_THAT(call->status.error_message(), HasSubstr("--calls-per-client"));
  }
  EXPECT_EQ(refused, 1);
  Call* const again = start();
  EXPECT_TRUE(listener_.AnswerDeaths(1));
  again->done.WaitForNotification();
  EXPECT_TRUE(again->status.ok()) << again->status.error_message();
}

}  // namespace
}  // namespace ringleader::session
