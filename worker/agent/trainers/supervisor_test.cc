#include "worker/agent/trainers/supervisor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <prometheus/registry.h>
#include <signal.h>
#include <sys/stat.h>

#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "base/process/time_limit.h"
#include "base/protocol_version.h"
#include "base/testing/temp_dir.h"

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

  v1::Command Command(const std::string& job = "job", uint64_t token = 7) {
    v1::Command command;
    command.set_command_id(++last_command_);
    command.set_job(job);
    command.set_attempt(1);
    command.set_fencing_token(token);
    return command;
  }
  // Has so many ranks started; what comes of it is in the acknowledgement.
  void Start(const std::string& job, uint64_t token, uint32_t trainers) {
    v1::Command command = Command(job, token);
    command.mutable_start()->set_trainers(trainers);
    command.mutable_start()->set_world_size(trainers);
    supervisor_.OnCommand(command, absl::Now());
  }
  // The number of the process that runs the rank.
  int PidOf(const std::string& job, int rank) {
    int pid = 0;
    const std::string path =
        dir_.File(absl::StrCat("data/jobs/", job, "/attempt-1/rank-", rank, "/pid"));
    const absl::Time deadline = absl::Now() + absl::Seconds(20);
    while (!(std::ifstream(path) >> pid) && absl::Now() < deadline) {
      absl::SleepFor(absl::Milliseconds(5));
    }
    return pid;
  }
  // Starts rank 0 and returns the number of its process.
  uint32_t StartTrainer() {
    Start("job", 7, 1);
    return static_cast<uint32_t>(PidOf("job", 0));
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
      {.trainer_binary = binary_, .slots = 2, .gpus = {}, .listen_host = "127.0.0.1", .tls = {}},
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

TEST_F(SupervisorTest, TellsTrainersWhenTheirLeaseEnds) {
  const uint32_t pid = StartTrainer();
  const absl::Time first = absl::UnixEpoch() + absl::Seconds(100);
  supervisor_.SetLease(first);
  const auto connection = std::make_shared<Connection>();
  supervisor_.OnTrainerMessage(connection, Hello(pid, kProtocolVersion), absl::Now());
  ASSERT_EQ(connection->sent.size(), 1u);
  EXPECT_EQ(connection->sent[0].assignment().lease().end_boot_nanoseconds(),
            absl::ToUnixNanos(first));
  EXPECT_EQ(connection->sent[0].assignment().fencing_token(), 7u);
  supervisor_.SetLease(first);
  EXPECT_EQ(connection->sent.size(), 1u);
  supervisor_.SetLease(first + absl::Seconds(2));
  ASSERT_EQ(connection->sent.size(), 2u);
  EXPECT_EQ(connection->sent[1].lease().end_boot_nanoseconds(),
            absl::ToUnixNanos(first + absl::Seconds(2)));
}

TEST_F(SupervisorTest, SaysOfATrainerThatItEndedWithItsLease) {
  supervisor_.SetLease(absl::UnixEpoch() + absl::Nanoseconds(1));  // long over
  kill(static_cast<pid_t>(StartTrainer()), SIGKILL);
  EXPECT_TRUE(Next().command_ack().accepted());
  EXPECT_THAT(Next().event().trainer_exited().message(), HasSubstr("ended with its lease"));
}

// A rank that lingers keeps its own slot, and no other: as in the coordinator's books.
TEST_F(SupervisorTest, ARankThatEndedGivesItsSlotToAnotherJob) {
  Start("job", 7, 2);
  EXPECT_TRUE(Next().command_ack().accepted());
  PidOf("job", 1);
  kill(PidOf("job", 0), SIGKILL);
  EXPECT_EQ(Next().event().trainer_exited().rank(), 0u);
  Start("next", 8, 1);
  EXPECT_TRUE(Next().command_ack().accepted());
  EXPECT_GT(PidOf("next", 0), 0);
  Start("third", 9, 1);
  const v1::CommandAck refused = Next().command_ack();
  EXPECT_FALSE(refused.accepted());
  EXPECT_TRUE(refused.later());
  EXPECT_EQ(refused.message(), "2 of 2 trainers are taken, and 1 were asked for");
}

// A mount that does not answer holds up the look at a job's files, and nothing else: the worker's
// heartbeats come from the thread that starts trainers.
TEST_F(SupervisorTest, LooksAtAJobsFilesWithinATimeLimit) {
  Supervisor supervisor({.trainer_binary = binary_,
                         .slots = 2,
                         .gpus = {},
                         .listen_host = "127.0.0.1",
                         .tls = {},
                         .allowed_paths = {"/"}},
                        &data_dir_, &events_, &logs_, &metrics_, [](std::function<void()>) {});
  const auto answers = std::make_shared<absl::Notification>();
  for (int i = 0; i < kMaxLimitedCalls; ++i) {
    const absl::Status given_up = WithTimeLimit(absl::ZeroDuration(), "hanging", [answers] {
      answers->WaitForNotification();
      return absl::OkStatus();
    });
    EXPECT_TRUE(absl::IsDeadlineExceeded(given_up)) << given_up;
  }
  v1::Command command = Command();
  command.mutable_start()->set_trainers(1);
  supervisor.OnCommand(command, absl::Now());
  const v1::CommandAck ack = Next().command_ack();
  answers->Notify();
  EXPECT_FALSE(ack.accepted());
  EXPECT_TRUE(ack.later());
  EXPECT_THAT(ack.message(), HasSubstr("looking for the job's files: too many such calls"));
}

TEST_F(SupervisorTest, RefusesCommandsThatItDoesNotKnow) {
  supervisor_.OnCommand(Command(), absl::Now());
  v1::CommandAck ack = Next().command_ack();
  EXPECT_FALSE(ack.accepted());
  EXPECT_FALSE(ack.later());
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
