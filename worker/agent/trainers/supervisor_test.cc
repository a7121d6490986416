#include "worker/agent/trainers/supervisor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <prometheus/registry.h>
#include <sys/stat.h>

#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/protocol_version.h"
#include "base/temp_dir.h"

namespace ringleader::agent {
namespace {

using ::testing::HasSubstr;

class Connection : public TrainerConnection {
 public:
  void Send(v1::AgentMessage message) override { sent.push_back(std::move(message)); }
  void Close(const absl::Status& status) override { closed = status; }

  std::vector<v1::AgentMessage> sent;
  absl::Status closed;
};

class SupervisorTest : public ::testing::Test {
 protected:
  SupervisorTest() {
    // A trainer that says who it is, and then nothing.
    std::ofstream(binary_) << "#!/bin/sh\necho $$ >pid.new\nmv pid.new pid\nexec sleep 600\n";
    chmod(binary_.c_str(), 0755);
  }

  v1::Command Command() {
    v1::Command command;
    command.set_command_id(++last_command_);
    command.set_job("job");
    command.set_attempt(1);
    command.set_fencing_token(7);
    return command;
  }
  // Starts rank 0 and returns the number of its process.
  uint32_t StartTrainer() {
    v1::Command command = Command();
    command.mutable_start()->set_trainers(1);
    command.mutable_start()->set_world_size(1);
    supervisor_.OnCommand(command, absl::Now());
    uint32_t pid = 0;
    const absl::Time deadline = absl::Now() + absl::Seconds(20);
    while (!(std::ifstream(dir_.File("data/jobs/job/attempt-1/rank-0/pid")) >> pid) &&
           absl::Now() < deadline) {
      absl::SleepFor(absl::Milliseconds(5));
    }
    return pid;
  }
  static v1::TrainerMessage Hello(uint32_t pid, uint32_t version) {
    v1::TrainerMessage message;
    message.mutable_hello()->set_fencing_token(7);
    message.mutable_hello()->set_pid(pid);
    message.mutable_hello()->set_protocol_version(version);
    return message;
  }
  // The next message to the coordinator, while time passes.
  v1::WorkerMessage Next() {
    const absl::Time deadline = absl::Now() + absl::Seconds(20);
    while (absl::Now() < deadline) {
      for (std::function<void()>& task : TakeTasks()) task();
      supervisor_.Tick(absl::Now());
      if (auto message = events_.Next(seen_, absl::Milliseconds(5))) {
        seen_ = message->sequence();
        return *message;
      }
    }
    return {};
  }

  const TempDir dir_;
  const std::string binary_ = dir_.File("trainer");
  DataDir data_dir_ = DataDir::Open(dir_.File("data"), absl::Seconds(1)).value();
  EventBuffer events_{1 << 20};
  prometheus::Registry registry_;
  WorkerMetrics metrics_{registry_};
  absl::Mutex mutex_;
  std::vector<std::function<void()>> tasks_ ABSL_GUARDED_BY(mutex_);
  Supervisor supervisor_{
      {.trainer_binary = binary_, .gpus = {}, .listen_host = "127.0.0.1", .tls = {}},
      &data_dir_,
      &events_,
      &logs_,
      &metrics_,
      [this](std::function<void()> task) {
        absl::MutexLock lock(&mutex_);
        tasks_.push_back(std::move(task));
      }};
  LogPump logs_;  // its thread calls the supervisor: it ends first
  uint64_t last_command_ = 0;
  uint64_t seen_ = 0;

 private:
  std::vector<std::function<void()>> TakeTasks() {
    absl::MutexLock lock(&mutex_);
    return std::exchange(tasks_, {});
  }
};

TEST_F(SupervisorTest, GivesATrainerOfItsProtocolVersionItsAssignment) {
  const uint32_t pid = StartTrainer();
  const auto connection = std::make_shared<Connection>();
  supervisor_.OnTrainerMessage(connection, Hello(pid, kProtocolVersion), absl::Now());
  EXPECT_EQ(connection->closed, absl::OkStatus());
  ASSERT_EQ(connection->sent.size(), 1u);
  EXPECT_EQ(connection->sent[0].assignment().protocol_version(), kProtocolVersion);
}

TEST_F(SupervisorTest, KillsATrainerOfAnotherProtocolVersionAndSaysWhy) {
  const uint32_t pid = StartTrainer();
  EXPECT_TRUE(Next().command_ack().accepted());
  const auto connection = std::make_shared<Connection>();
  supervisor_.OnTrainerMessage(connection, Hello(pid, 0), absl::Now());
  EXPECT_EQ(connection->closed.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(connection->sent.empty());
  const v1::TrainerExited exited = Next().event().trainer_exited();
  EXPECT_EQ(exited.outcome(), v1::TrainerExited::FAILED);
  EXPECT_TRUE(exited.retryable());
  EXPECT_THAT(exited.message(),
              HasSubstr("the trainer of rank 0 speaks protocol version 0 and its worker"));
}

TEST_F(SupervisorTest, RefusesCommandsThatItDoesNotKnow) {
  supervisor_.OnCommand(Command(), absl::Now());
  v1::CommandAck ack = Next().command_ack();
  EXPECT_FALSE(ack.accepted());
  EXPECT_THAT(ack.message(), HasSubstr("no kind that this worker knows"));
  v1::Command stop = Command();
  stop.mutable_stop()->set_mode(static_cast<v1::StopTrainers::Mode>(9));
  supervisor_.OnCommand(stop, absl::Now());
  ack = Next().command_ack();
  EXPECT_FALSE(ack.accepted());
  EXPECT_THAT(ack.message(), HasSubstr("stop.mode 9"));
}

}  // namespace
}  // namespace ringleader::agent
