// A whole worker between a coordinator and a trainer that the test plays.
#pragma once

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <prometheus/registry.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "base/process/version.h"
#include "base/protocol_version.h"
#include "base/testing/equals_text.h"
#include "base/testing/temp_dir.h"
#include "ringleader/v1/trainer_link.grpc.pb.h"
#include "ringleader/v1/worker_control.grpc.pb.h"
#include "worker/agent/worker.h"

namespace ringleader::agent {

inline bool Becomes(const std::function<bool()>& holds) {
  const absl::Time deadline = absl::Now() + absl::Seconds(30);
  while (!holds() && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(5));
  return holds();
}

// Welcomes the worker, acknowledges what it says, and sends what the test wants.
class PlayedCoordinator : public v1::WorkerControl::Service {
 public:
  using Stream = grpc::ServerReaderWriter<v1::CoordinatorMessage, v1::WorkerMessage>;

  PlayedCoordinator() {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~PlayedCoordinator() override { server_->Shutdown(std::chrono::system_clock::now()); }

  std::shared_ptr<grpc::Channel> Channel() const {
    return grpc::CreateChannel(absl::StrCat("127.0.0.1:", port_),
                               grpc::InsecureChannelCredentials());
  }

  grpc::Status Session(grpc::ServerContext* context, Stream* stream) override {
    v1::WorkerMessage message;
    if (!stream->Read(&message)) return grpc::Status::OK;
    {
      absl::MutexLock lock(&mutex_);
      hellos_.push_back(message.hello());
      if (!refusal_.ok()) return refusal_;
      v1::CoordinatorMessage welcome;
      welcome.mutable_welcome()->set_lease_milliseconds(60'000);
      welcome.mutable_welcome()->set_heartbeat_milliseconds(20);
      welcome.mutable_welcome()->set_fence_milliseconds(fence_milliseconds);
      welcome.mutable_welcome()->set_protocol_version(kProtocolVersion);
      stream->Write(welcome);
      stream_ = stream;
      context_ = context;
    }
    while (stream->Read(&message)) {
      absl::MutexLock lock(&mutex_);
      v1::CoordinatorMessage answer;
      answer.set_heartbeat_number(message.heartbeat().number());
      answer.set_acknowledged_sequence(message.sequence());
      if (!message.has_heartbeat()) received_.push_back(message);
      if (!silent) stream->Write(answer);
    }
    absl::MutexLock lock(&mutex_);
    if (stream_ == stream) stream_ = nullptr;  // the next session may have begun
    return grpc::Status::OK;
  }

  void Send(v1::Command command) {
    v1::CoordinatorMessage message;
    *message.mutable_command() = std::move(command);
    absl::MutexLock lock(&mutex_);
    if (stream_ != nullptr) stream_->Write(message);
  }
  void EndSession() {
    absl::MutexLock lock(&mutex_);
    if (stream_ != nullptr) context_->TryCancel();
  }
  void Refuse(const grpc::Status& refusal) {
    absl::MutexLock lock(&mutex_);
    refusal_ = refusal;
  }
  bool in_session() {
    absl::MutexLock lock(&mutex_);
    return stream_ != nullptr;
  }
  std::vector<v1::WorkerHello> hellos() {
    absl::MutexLock lock(&mutex_);
    return hellos_;
  }
  // All that fit, in order.
  std::vector<v1::WorkerMessage> Received(
      const std::function<bool(const v1::WorkerMessage&)>& fits) {
    absl::MutexLock lock(&mutex_);
    std::vector<v1::WorkerMessage> found;
    for (const v1::WorkerMessage& message : received_) {
      if (fits(message)) found.push_back(message);
    }
    return found;
  }
  // The first that fits, once it has come.
  v1::WorkerMessage Await(const std::function<bool(const v1::WorkerMessage&)>& fits) {
    EXPECT_TRUE(Becomes([&] { return !Received(fits).empty(); }));
    const std::vector<v1::WorkerMessage> found = Received(fits);
    return found.empty() ? v1::WorkerMessage() : found.front();
  }

  std::atomic<uint32_t> fence_milliseconds = 90'000;
  std::atomic<bool> silent = false;

 private:
  int port_ = 0;
  absl::Mutex mutex_;
  grpc::Status refusal_ ABSL_GUARDED_BY(mutex_);
  std::vector<v1::WorkerHello> hellos_ ABSL_GUARDED_BY(mutex_);
  std::vector<v1::WorkerMessage> received_ ABSL_GUARDED_BY(mutex_);
  Stream* stream_ ABSL_GUARDED_BY(mutex_) = nullptr;
  grpc::ServerContext* context_ ABSL_GUARDED_BY(mutex_) = nullptr;
  std::unique_ptr<grpc::Server> server_;
};

inline bool IsAck(const v1::WorkerMessage& message) {
  return message.has_command_ack();
}
inline bool IsExit(const v1::WorkerMessage& message) {
  return message.event().has_trainer_exited();
}
inline bool IsDrain(const v1::WorkerMessage& message) {
  return message.has_drain();
}

// A trainer's stream to the worker of this socket, and its hello, still to be written.
struct TrainerStream {
  explicit TrainerStream(const std::string& socket)
      : link(v1::TrainerLink::NewStub(
            grpc::CreateChannel("unix:" + socket, grpc::InsecureChannelCredentials()))) {
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    stream = link->Attach(&context);
    message.mutable_hello()->set_fencing_token(7);
    message.mutable_hello()->set_protocol_version(kProtocolVersion);
  }

  grpc::ClientContext context;
  const std::unique_ptr<v1::TrainerLink::Stub> link;
  std::unique_ptr<grpc::ClientReaderWriter<v1::TrainerMessage, v1::AgentMessage>> stream;
  v1::TrainerMessage message;
};

// A worker of two slots, each with a GPU.
class WorkerTest : public ::testing::Test {
 protected:
  ~WorkerTest() override {
    if (!runner_.joinable()) return;
    EXPECT_EQ(Leave(), absl::OkStatus());
  }

  void Start() {
    const std::string binary = dir_.File("trainer");
    std::ofstream(binary) << "#!/bin/sh\necho $$ >pid.new\nmv pid.new pid\n"
                          << trainers_do_ << "\nexec sleep 600\n";
    chmod(binary.c_str(), 0755);
    DataDir data_dir = DataDir::Open(dir_.File("data"), absl::ZeroDuration()).value();
    socket_ = data_dir.socket_path();
    WorkerOptions options = {
        .node = "a", .incarnation = "folder.1", .inventory = {}, .supervisor = {}};
    options.inventory.set_trainers(2);
    for (const char* const uuid : {"GPU-a", "GPU-b"}) options.inventory.add_gpus()->set_uuid(uuid);
    options.supervisor = {.trainer_binary = binary,
                          .slots = 2,
                          .cores = 4,
                          .gpus = {"GPU-a", "GPU-b"},
                          .listen_host = "10.0.0.7",
                          .tls = {},
                          .run_as = run_as_};
    options.max_log_buffer_bytes = max_log_buffer_bytes_;
    options.drain_timeout = drain_timeout_;
    options.gpu_faults = [this] {
      absl::MutexLock lock(&mutex_);
      return faults_;
    };
    auto worker = Worker::Create(options, std::move(data_dir), coordinator_.Channel(), &metrics_);
    ASSERT_TRUE(worker.ok()) << worker.status();
    worker_ = *std::move(worker);
    runner_ = std::thread([this] {
      outcome_ = worker_->Run();
      is_over_ = true;
    });
  }
  // What Run() returns once the worker was told to leave and its trainers have ended.
  absl::Status Leave() {
    if (!is_over_) worker_->Drain("SIGTERM");
    EXPECT_TRUE(Becomes([&] { return is_over_.load(); }));
    runner_.join();
    return outcome_;
  }
  // Until the worker has taken its welcome, which is some time after the coordinator gave it.
  void AwaitWelcome() {
    ASSERT_TRUE(Becomes([&] { return coordinator_.in_session(); }));
    coordinator_.Send(Abort());  // of nothing: it is answered after what came before
    coordinator_.Await(IsAck);
  }
  // Until the worker has read that all it has said was acknowledged.
  void AwaitAcknowledged() {
    metrics_.SetBuffered(99);  // until it is written anew
    EXPECT_TRUE(Becomes([&] { return Metric("buffered_messages") == 0; }));
  }
  void SetFault(const std::string& uuid, const std::string& fault) {
    absl::MutexLock lock(&mutex_);
    faults_[uuid] = fault;
  }

  v1::Command Command() {
    v1::Command command;
    command.set_command_id(++last_command_);
    command.set_job("job");
    command.set_attempt(1);
    command.set_fencing_token(7);
    return command;
  }
  v1::Command StartOf(uint32_t trainers) {
    v1::Command command = Command();
    command.mutable_start()->set_trainers(trainers);
    command.mutable_start()->set_world_size(trainers);
    return command;
  }
  v1::Command Abort() {
    v1::Command command = Command();
    command.mutable_stop()->set_mode(v1::StopTrainers::ABORT);
    command.mutable_stop()->set_reason("why");
    return command;
  }
  pid_t PidOf(uint32_t rank) {
    pid_t pid = 0;
    EXPECT_TRUE(Becomes([&] {
      std::ifstream file(dir_.File(absl::StrCat("data/jobs/job/attempt-1/rank-", rank, "/pid")));
      return static_cast<bool>(file >> pid);
    }));
    return pid;
  }
  double Metric(const std::string& name) {
    for (const prometheus::MetricFamily& family : registry_.Collect()) {
      if (family.name != "ringleader_worker_" + name) continue;
      return family.type == prometheus::MetricType::Gauge ? family.metric.at(0).gauge.value
                                                          : family.metric.at(0).counter.value;
    }
    ADD_FAILURE() << name;
    return -1;
  }

  const TempDir dir_;
  PlayedCoordinator coordinator_;
  prometheus::Registry registry_;
  WorkerMetrics metrics_{registry_};
  std::string socket_;
  RunAs run_as_;
  std::string trainers_do_;  // before they sleep
  size_t max_log_buffer_bytes_ = 1 << 20;
  absl::Duration drain_timeout_ = absl::Seconds(20);
  absl::Mutex mutex_;
  std::map<std::string, std::string> faults_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<Worker> worker_;
  absl::Status outcome_ = absl::UnknownError("Run() has not returned");
  std::atomic<bool> is_over_ = false;
  uint64_t last_command_ = 0;
  std::thread runner_;
};

}  // namespace ringleader::agent
