// A whole worker between a coordinator and a trainer that the test plays.
#include "worker/agent/worker.h"

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

namespace ringleader::agent {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

bool Becomes(const std::function<bool()>& holds) {
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
    stream_ = nullptr;
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

bool IsAck(const v1::WorkerMessage& message) {
  return message.has_command_ack();
}
bool IsExit(const v1::WorkerMessage& message) {
  return message.event().has_trainer_exited();
}
bool IsDrain(const v1::WorkerMessage& message) {
  return message.has_drain();
}

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

TEST_F(WorkerTest, SaysAllThatItIsAndWhatItRuns) {
  Start();
  ASSERT_TRUE(Becomes([&] { return coordinator_.in_session(); }));
  EXPECT_THAT(coordinator_.hellos().at(0),
              EqualsText(absl::StrFormat(
                  R"(node: "nodes/a" incarnation: "folder.1" version: "%s" protocol_version: %d
         inventory { trainers: 2 gpus { uuid: "GPU-a" } gpus { uuid: "GPU-b" } })",
                  std::string(kVersion), kProtocolVersion)));
  coordinator_.Send(StartOf(2));
  EXPECT_TRUE(coordinator_.Await(IsAck).command_ack().accepted());
  EXPECT_TRUE(Becomes([&] { return Metric("buffered_messages") == 0; }));
  coordinator_.EndSession();
  ASSERT_TRUE(Becomes([&] { return coordinator_.hellos().size() == 2; }));
  EXPECT_THAT(coordinator_.hellos()[1],
              EqualsText(absl::StrFormat(
                  R"(node: "nodes/a" incarnation: "folder.1" version: "%s" protocol_version: %d
         inventory { trainers: 2 gpus { uuid: "GPU-a" } gpus { uuid: "GPU-b" } }
         acknowledged_sequence: 1
         attempts { job: "job" attempt: 1 fencing_token: 7 ranks: [0, 1] })",
                  std::string(kVersion), kProtocolVersion)));
  EXPECT_TRUE(Becomes([&] { return coordinator_.in_session(); }));
  EXPECT_TRUE(Becomes([&] { return Metric("sessions_total") == 2; }));
  EXPECT_EQ(Metric("trainer_slots"), 2);
  EXPECT_EQ(Metric("trainers"), 2);
  EXPECT_TRUE(Becomes([&] { return Metric("connected") == 1; }));
  coordinator_.Send(Abort());
  EXPECT_EQ(coordinator_.Await(IsExit).event().trainer_exited().message(), "why");
  EXPECT_TRUE(Becomes([&] { return coordinator_.Received(IsExit).size() == 2; }));
  EXPECT_TRUE(Becomes([&] { return Metric("trainers") == 0; }));
  EXPECT_EQ(Leave(), absl::OkStatus());
}

TEST_F(WorkerTest, TrainersOfOtherUsersReachItsSocket) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root";
  const auto modes = [this] {
    struct stat folder {
    }, socket{};
    stat(dir_.File("data").c_str(), &folder);
    stat(socket_.c_str(), &socket);
    return absl::StrFormat("%o %o", folder.st_mode & 0001, socket.st_mode & 0006);
  };
  run_as_ = RunAs::Parse({"nobody"}).value();
  Start();
  EXPECT_EQ(modes(), "1 6");
}

TEST_F(WorkerTest, CarriesWordBetweenATrainerAndTheCoordinator) {
  Start();
  ASSERT_TRUE(Becomes([&] { return coordinator_.in_session(); }));
  coordinator_.Send(StartOf(1));
  const auto stub = v1::TrainerLink::NewStub(
      grpc::CreateChannel("unix:" + socket_, grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
  const auto stream = stub->Attach(&context);
  v1::TrainerMessage message;
  message.mutable_hello()->set_fencing_token(7);
  message.mutable_hello()->set_pid(static_cast<uint32_t>(PidOf(0)));
  message.mutable_hello()->set_protocol_version(kProtocolVersion);
  ASSERT_TRUE(stream->Write(message));
  v1::AgentMessage answer;
  ASSERT_TRUE(stream->Read(&answer));
  EXPECT_EQ(answer.assignment().job(), "job");
  EXPECT_GT(answer.assignment().lease().end_boot_nanoseconds(), 0);
  const int64_t first_lease = answer.assignment().lease().end_boot_nanoseconds();
  ASSERT_TRUE(stream->Read(&answer)) << "each heartbeat that arrived renews it";
  EXPECT_GT(answer.lease().end_boot_nanoseconds(), first_lease);
  message.mutable_step()->set_step(3);
  ASSERT_TRUE(stream->Write(message));
  EXPECT_EQ(
      coordinator_.Await([](const v1::WorkerMessage& sent) { return sent.event().has_step(); })
          .event()
          .step()
          .step(),
      3u);
  message.mutable_result()->set_outcome(v1::TrainerExited::COMPLETED);
  message.mutable_result()->set_message("done");
  ASSERT_TRUE(stream->Write(message));
  stream->WritesDone();
  while (stream->Read(&answer)) {
  }
  kill(PidOf(0), SIGKILL);
  EXPECT_EQ(coordinator_.Await(IsExit).event().trainer_exited().message(), "done");
}

TEST_F(WorkerTest, WhoIsNoTrainerOfItsOwnIsToldSo) {
  Start();
  const auto stub = v1::TrainerLink::NewStub(
      grpc::CreateChannel("unix:" + socket_, grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
  const auto stream = stub->Attach(&context);
  v1::TrainerMessage message;
  message.mutable_hello()->set_fencing_token(7);
  message.mutable_hello()->set_protocol_version(kProtocolVersion);
  stream->Write(message);
  v1::AgentMessage answer;
  EXPECT_FALSE(stream->Read(&answer));
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::PERMISSION_DENIED);
  EXPECT_EQ(status.error_message(), "not a trainer that this worker started");
}

TEST_F(WorkerTest, AGpuWithAFaultIsToldAndTakesNoTrainer) {
  SetFault("GPU-b", "broken from the start");
  Start();
  ASSERT_TRUE(Becomes([&] { return coordinator_.in_session(); }));
  EXPECT_THAT(coordinator_.hellos().at(0).inventory(),
              EqualsText("trainers: 1 gpus { uuid: 'GPU-a' } gpus { uuid: 'GPU-b' fault: 'broken "
                         "from the start' }"));
  EXPECT_EQ(Metric("trainer_slots"), 1);
  coordinator_.Send(StartOf(2));
  EXPECT_THAT(coordinator_.Await(IsAck).command_ack().message(),
              HasSubstr("a GPU is out of order"));
  SetFault("GPU-a", "broke now");
  EXPECT_TRUE(Becomes([&] { return Metric("trainer_slots") == 0; }));
  const auto tells = [](const v1::WorkerMessage& message) {
    return message.inventory().gpus_size() > 0 && message.inventory().gpus(0).fault() != "";
  };
  EXPECT_THAT(coordinator_.Await(tells).inventory(),
              EqualsText("gpus { uuid: 'GPU-a' fault: 'broke now' } "
                         "gpus { uuid: 'GPU-b' fault: 'broken from the start' }"));
  const auto any = [](const v1::WorkerMessage& message) { return message.has_inventory(); };
  EXPECT_EQ(coordinator_.Received(any).size(), 2u) << "said once each";
  // As many are faulty as before, and it is another fault.
  SetFault("GPU-a", "fell off the bus");
  EXPECT_TRUE(Becomes([&] { return coordinator_.Received(any).size() == 3; }));
  EXPECT_EQ(coordinator_.Received(any).back().inventory().gpus(0).fault(), "fell off the bus");
}

TEST_F(WorkerTest, OutOfContactItsTrainersEnd) {
  coordinator_.fence_milliseconds = 400;
  Start();
  ASSERT_TRUE(Becomes([&] { return coordinator_.in_session(); }));
  coordinator_.Send(StartOf(1));
  coordinator_.Await(IsAck);
  PidOf(0);
  EXPECT_TRUE(coordinator_.Received(IsExit).empty());
  coordinator_.silent = true;
  const v1::TrainerExited exited = coordinator_.Await(IsExit).event().trainer_exited();
  EXPECT_THAT(exited.message(), HasSubstr("out of contact with the coordinator"));
  EXPECT_GT(Metric("out_of_contact_seconds"), 0.3);
  EXPECT_TRUE(Becomes([&] { return Metric("buffered_messages") == 1; }))
      << "nobody has acknowledged the trainer's end";
  coordinator_.silent = false;
}

TEST_F(WorkerTest, ADrainIsAskedForInEverySessionUntilAllHaveLeft) {
  Start();
  ASSERT_TRUE(Becomes([&] { return coordinator_.in_session(); }));
  coordinator_.Send(StartOf(1));
  coordinator_.Await(IsAck);
  EXPECT_TRUE(coordinator_.Received(IsDrain).empty());
  worker_->Drain("SIGTERM");
  EXPECT_EQ(coordinator_.Await(IsDrain).drain().reason(), "SIGTERM");
  worker_->Drain("once more");
  coordinator_.EndSession();
  EXPECT_TRUE(Becomes([&] { return coordinator_.Received(IsDrain).size() == 2; }));
  EXPECT_EQ(coordinator_.Received(IsDrain).back().drain().reason(), "SIGTERM");
  coordinator_.Send(StartOf(1));  // of the same attempt: it runs
  v1::Command other = StartOf(1);
  other.set_job("other");
  other.set_fencing_token(8);
  coordinator_.Send(other);
  EXPECT_TRUE(Becomes([&] { return coordinator_.Received(IsAck).size() == 3; }));
  const v1::CommandAck refused = coordinator_.Received(IsAck).back().command_ack();
  EXPECT_EQ(refused.message(), "the worker is shutting down");
  EXPECT_TRUE(refused.later());
  EXPECT_FALSE(is_over_);
  coordinator_.Send(Abort());
  EXPECT_EQ(Leave(), absl::OkStatus());
  const std::vector<v1::WorkerMessage> exits = coordinator_.Received(IsExit);
  ASSERT_EQ(exits.size(), 1u) << "all was told before it left";
  EXPECT_THAT(exits[0].event().trainer_exited().message(), HasSubstr("why"))
      << "a drain gives trainers the time that it was given";
}

// And then it is what a restart of the machine, or of a whole cluster of them, waits for.
TEST_F(WorkerTest, LeavesAsSoonAsItsLastWordsAreAcknowledged) {
  constexpr absl::Duration kFarewell = absl::Seconds(5);  // where nobody acknowledges them
  Start();
  AwaitWelcome();
  const absl::Time begin = absl::Now();
  EXPECT_EQ(Leave(), absl::OkStatus());
  EXPECT_LT(absl::Now() - begin, kFarewell);
  EXPECT_EQ(coordinator_.Received(IsDrain).size(), 1u);
}

TEST_F(WorkerTest, WhatWasDroppedIsCountedByKind) {
  max_log_buffer_bytes_ = 0;
  trainers_do_ = "echo one; echo two >&2";
  Start();
  ASSERT_TRUE(Becomes([&] { return coordinator_.in_session(); }));
  coordinator_.Send(StartOf(1));
  EXPECT_TRUE(Becomes([&] { return Metric("dropped_log_lines_total") == 2; }));
  coordinator_.Send(Abort());
  EXPECT_EQ(Leave(), absl::OkStatus());
  EXPECT_EQ(Metric("dropped_step_reports_total"), 0);
}

// A coordinator whose disk is full acknowledges nothing.
TEST_F(WorkerTest, LeavesAlthoughNobodyAcknowledgesItsLastWords) {
  Start();
  AwaitWelcome();
  coordinator_.silent = true;
  worker_->Drain("SIGTERM");
  EXPECT_TRUE(Becomes([&] { return is_over_.load(); }));
  EXPECT_EQ(coordinator_.Received(IsDrain).size(), 1u) << "it was in session";
  coordinator_.silent = false;
  coordinator_.EndSession();
  EXPECT_EQ(Leave(), absl::OkStatus());
}

// Else its coordinator would take the trainers for alive, and wait before it replaces them.
TEST_F(WorkerTest, WhatItKilledAtTheEndOfADrainIsToldOnceSomebodyListens) {
  drain_timeout_ = absl::Milliseconds(200);
  Start();
  ASSERT_TRUE(Becomes([&] { return coordinator_.in_session(); }));
  coordinator_.Send(StartOf(1));
  coordinator_.Await(IsAck);
  PidOf(0);
  coordinator_.Refuse(grpc::Status(grpc::StatusCode::UNAVAILABLE, "not now"));
  coordinator_.EndSession();
  worker_->Drain("SIGTERM");
  EXPECT_TRUE(Becomes([&] { return Metric("trainers") == 0; }));
  coordinator_.Refuse(grpc::Status::OK);
  EXPECT_TRUE(Becomes([&] { return is_over_.load(); }));
  EXPECT_EQ(Leave(), absl::OkStatus());
  const std::vector<v1::WorkerMessage> exits = coordinator_.Received(IsExit);
  ASSERT_EQ(exits.size(), 1u);
  EXPECT_EQ(exits[0].event().trainer_exited().message(), "the worker had to end");
}

// It was away for a moment, and says itself what is to become of what runs.
TEST_F(WorkerTest, ACoordinatorThatIsBackIsNotOvertaken) {
  constexpr absl::Duration kPatienceWithCoordinator = absl::Seconds(3);
  Start();
  ASSERT_TRUE(Becomes([&] { return coordinator_.in_session(); }));
  coordinator_.Send(StartOf(1));
  coordinator_.Await(IsAck);
  const auto pid = static_cast<uint32_t>(PidOf(0));
  worker_->Drain("SIGTERM");
  coordinator_.Await(IsDrain);
  coordinator_.Refuse(grpc::Status(grpc::StatusCode::UNAVAILABLE, "not now"));
  coordinator_.EndSession();
  EXPECT_TRUE(Becomes([&] { return Metric("connected") == 0; }));
  const absl::Time lost = absl::Now();
  coordinator_.Refuse(grpc::Status::OK);
  EXPECT_TRUE(Becomes([&] { return Metric("sessions_total") == 2; }));
  const auto stub = v1::TrainerLink::NewStub(
      grpc::CreateChannel("unix:" + socket_, grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
  const auto stream = stub->Attach(&context);
  v1::TrainerMessage message;
  message.mutable_hello()->set_fencing_token(7);
  message.mutable_hello()->set_pid(pid);
  message.mutable_hello()->set_protocol_version(kProtocolVersion);
  ASSERT_TRUE(stream->Write(message));
  v1::AgentMessage answer;
  ASSERT_TRUE(stream->Read(&answer));
  EXPECT_TRUE(answer.has_assignment());
  // For longer than it would have waited, had nobody come back.
  while (absl::Now() < lost + kPatienceWithCoordinator + absl::Milliseconds(300)) {
    ASSERT_TRUE(stream->Read(&answer));
    EXPECT_TRUE(answer.has_lease()) << answer.ShortDebugString();
  }
  coordinator_.Send(Abort());
  while (stream->Read(&answer) && !answer.has_stop()) {
  }
  EXPECT_EQ(answer.stop().mode(), v1::StopTrainers::ABORT);
  stream->WritesDone();
  EXPECT_EQ(Leave(), absl::OkStatus());
}

TEST_F(WorkerTest, WithoutACoordinatorADrainStopsWhatRuns) {
  Start();
  ASSERT_TRUE(Becomes([&] { return coordinator_.in_session(); }));
  coordinator_.Send(StartOf(1));
  coordinator_.Await(IsAck);
  const pid_t pid = PidOf(0);
  coordinator_.Refuse(grpc::Status(grpc::StatusCode::UNAVAILABLE, "not now"));
  coordinator_.EndSession();
  worker_->Drain("SIGTERM");
  kill(pid, SIGKILL);  // as a trainer would that leaves
  EXPECT_EQ(Leave(), absl::OkStatus());
}

TEST_F(WorkerTest, ARefusalForGoodEndsIt) {
  coordinator_.Refuse(grpc::Status(grpc::StatusCode::PERMISSION_DENIED, "you are not a"));
  Start();
  EXPECT_TRUE(Becomes([&] { return is_over_.load(); }));
  runner_.join();
  EXPECT_EQ(outcome_, absl::PermissionDeniedError("you are not a"));
}

}  // namespace
}  // namespace ringleader::agent
