// Back-pressure: what workers send waits with them, not in the coordinator.
#include "coordinator/session/worker_control_service.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <deque>
#include <fstream>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/protocol_version.h"

namespace ringleader::session {
namespace {

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
  void OnDeath(std::string, std::string, std::function<void(const absl::Status&)>) override {}

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

  Listener listener_;
  prometheus::Registry registry_;
  limits::LimitMetrics metrics_{&registry_};
  limits::Quota silent_{{.label = "silent"}, 10, 10, &metrics_};
  WorkerControlService service_{
      &listener_, Clock::Real(), &silent_, {.waiting_bytes = size_t{64} << 20}};
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<v1::WorkerControl::Stub> stub_;
  grpc::ClientContext context_;
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

// One that does not keep to it waits itself: 400 MB come in as they are taken.
TEST_F(WorkerControlServiceTest, ABurstWaitsWithWhoeverSendsIt) {
  constexpr size_t kBurst = 400, kMessageBytes = 1 << 20;
  size_t most_waiting = 0;
  std::thread sender([&] {
    for (size_t i = 0; i < kBurst; ++i) ASSERT_TRUE(SendLog(kMessageBytes));
  });
  size_t taken = 0;
  while (taken < kBurst) {
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

}  // namespace
}  // namespace ringleader::session
