// A supervisor whose time is the test's, with trainers that are processes of a shell script.
#pragma once

#include <gtest/gtest.h>
#include <prometheus/registry.h>
#include <signal.h>
#include <sys/stat.h>

#include <deque>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "base/protocol_version.h"
#include "base/testing/temp_dir.h"
#include "worker/agent/trainers/supervisor.h"

namespace ringleader::agent::testing {

// Whether a process has ended or cannot but end: kill(2) finds it until somebody reaps it.
inline bool IsDying(pid_t pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/stat"));
  const std::string text(std::istreambuf_iterator<char>(file), {});
  if (text.empty()) return true;
  // As proc(5) numbers them: state is 3, flags are 9, pending signals 31.
  const std::vector<std::string> fields =
      absl::StrSplit(text.substr(text.rfind(')') + 2), ' ', absl::SkipEmpty());
  uint64_t flags = 0, pending = 0;
  EXPECT_TRUE(absl::SimpleAtoi(fields.at(9 - 3), &flags));
  EXPECT_TRUE(absl::SimpleAtoi(fields.at(31 - 3), &pending));
  constexpr uint64_t kExiting = 0x4;  // PF_EXITING of Linux
  constexpr uint64_t kKillPending = uint64_t{1} << (SIGKILL - 1);
  return fields[0] == "Z" || fields[0] == "X" || (flags & kExiting) != 0 ||
         (pending & kKillPending) != 0;
}

// What a trainer is sent, and how it was hung up on.
class RecordingConnection : public TrainerConnection {
 public:
  void Send(v1::AgentMessage message) override { sent.push_back(std::move(message)); }
  void Close(const absl::Status& status) override { closed = status; }

  std::vector<v1::AgentMessage> sent;
  absl::Status closed;
};

// Two slots. Attempts have their token's number.
class SupervisedTest : public ::testing::Test {
 protected:
  // `gpus`: of the slots; none: they run on the CPU. `roots`: below which jobs' paths lie; none:
  // anywhere.
  explicit SupervisedTest(std::vector<std::string> gpus = {}, TlsOptions tls = {},
                          std::vector<std::string> roots = {}, uint32_t cores = 6)
      : gpus_(std::move(gpus)), tls_(std::move(tls)), roots_(std::move(roots)), cores_(cores) {
    TrainersDo("");
  }

  // Trainers that start from here on run `script` once they have said where they are; then they
  // stay.
  void TrainersDo(const std::string& script) {
    std::ofstream(binary_) << "#!/bin/sh\necho $$ >pid.new\nmv pid.new pid\n"
                           << script << "\nexec sleep 600\n";
    chmod(binary_.c_str(), 0755);
  }

  v1::Command Command(uint64_t token, const std::string& job = "job") {
    v1::Command command;
    command.set_command_id(++last_command_);
    command.set_job(job);
    command.set_attempt(static_cast<uint32_t>(token));
    command.set_fencing_token(token);
    return command;
  }
  v1::Command StartOf(uint64_t token, uint32_t trainers, const std::string& job = "job") {
    v1::Command command = Command(token, job);
    command.mutable_start()->set_trainers(trainers);
    command.mutable_start()->set_world_size(trainers);
    return command;
  }
  v1::Command StopOf(uint64_t token, v1::StopTrainers::Mode mode, uint32_t grace_milliseconds) {
    v1::Command command = Command(token);
    command.mutable_stop()->set_mode(mode);
    command.mutable_stop()->set_grace_milliseconds(grace_milliseconds);
    command.mutable_stop()->set_reason("rank 9 failed");
    return command;
  }
  // Carries the command out and returns what the coordinator is answered.
  v1::CommandAck Do(const v1::Command& command) {
    supervisor_.OnCommand(command, now_);
    // A trainer that it starts may have its first words there before the answer.
    std::deque<v1::WorkerMessage> words;
    v1::WorkerMessage answer = Next();
    for (; answer.event().has_logs(); answer = Next()) words.push_back(std::move(answer));
    words_ = std::move(words);
    EXPECT_EQ(answer.command_ack().command_id(), command.command_id());
    return answer.command_ack();
  }

  // Where a trainer runs: made when it is started.
  std::string FolderOf(uint64_t token, uint32_t rank, const std::string& job = "job") const {
    return dir_.File(absl::StrCat("data/jobs/", job, "/attempt-", token, "/rank-", rank));
  }
  // The number of its process, once it is there.
  pid_t PidOf(uint64_t token, uint32_t rank, const std::string& job = "job") const {
    const std::string path = FolderOf(token, rank, job) + "/pid";
    pid_t pid = 0;
    const absl::Time deadline = absl::Now() + absl::Seconds(20);
    while (!(std::ifstream(path) >> pid) && absl::Now() < deadline) {
      absl::SleepFor(absl::Milliseconds(2));
    }
    return pid;
  }

  v1::TrainerMessage HelloOf(uint64_t token, uint32_t rank, pid_t pid) const {
    v1::TrainerMessage message;
    message.mutable_hello()->set_rank(rank);
    message.mutable_hello()->set_fencing_token(token);
    message.mutable_hello()->set_pid(static_cast<uint32_t>(pid));
    message.mutable_hello()->set_protocol_version(kProtocolVersion);
    return message;
  }
  // The stream of a trainer that says what `message` does first.
  std::shared_ptr<RecordingConnection> Say(const v1::TrainerMessage& message) {
    auto connection = std::make_shared<RecordingConnection>();
    supervisor_.OnTrainerMessage(connection, message, now_);
    return connection;
  }
  // Its stream ends with its process, when a message is waited for.
  std::shared_ptr<RecordingConnection> Attach(uint64_t token, uint32_t rank,
                                              const std::string& job = "job") {
    const pid_t pid = PidOf(token, rank, job);
    auto connection = Say(HelloOf(token, rank, pid));
    EXPECT_EQ(connection->closed, absl::OkStatus());
    attached_.emplace_back(pid, connection);
    return connection;
  }
  void Pulse(const std::shared_ptr<RecordingConnection>& connection, uint64_t step,
             const std::string& phase = "backward") {
    v1::TrainerMessage message;
    message.mutable_pulse()->set_step(step);
    message.mutable_pulse()->set_phase(phase);
    supervisor_.OnTrainerMessage(connection, message, now_);
  }

  // Does what other threads have asked of the supervisor's, and returns how many things that was.
  size_t RunTasks() {
    std::vector<std::function<void()>> tasks;
    {
      absl::MutexLock lock(&mutex_);
      tasks.swap(tasks_);
    }
    for (const std::function<void()>& task : tasks) task();
    return tasks.size();
  }
  // The next message to the coordinator; while it waits, the test's time stands still.
  v1::WorkerMessage Next() {
    if (!words_.empty()) {
      v1::WorkerMessage first = std::move(words_.front());
      words_.pop_front();
      return first;
    }
    const absl::Time deadline = absl::Now() + absl::Seconds(20);
    while (absl::Now() < deadline) {
      RunTasks();
      supervisor_.Tick(now_);
      std::erase_if(attached_, [this](const auto& entry) {
        if (kill(entry.first, 0) == 0) return false;
        supervisor_.OnTrainerGone(entry.second);
        return true;
      });
      if (const auto message = events_.Next(seen_, absl::Milliseconds(2))) {
        seen_ = message->sequence();
        return *message;
      }
    }
    ADD_FAILURE() << "nothing to tell the coordinator";
    return {};
  }
  // The end of a trainer, which is the next message.
  v1::TrainerExited NextExit() {
    const v1::WorkerMessage message = Next();
    EXPECT_TRUE(message.event().has_trainer_exited()) << message.ShortDebugString();
    return message.event().trainer_exited();
  }
  // Nothing was told but what has been read, and at `now_` nobody is killed.
  void ExpectNothing() {
    supervisor_.Tick(now_);
    EXPECT_TRUE(words_.empty());
    EXPECT_FALSE(events_.Next(seen_, absl::ZeroDuration()).has_value());
    for (const auto& running : supervisor_.Running()) {
      for (const uint32_t rank : running.ranks()) {
        const std::string folder = FolderOf(running.fencing_token(), rank, running.job());
        if (std::filesystem::exists(folder + "/pid")) {
          EXPECT_FALSE(IsDying(PidOf(running.fencing_token(), rank, running.job())));
        }
      }
    }
  }

  const std::vector<std::string> gpus_;
  const TlsOptions tls_;
  const std::vector<std::string> roots_;
  const uint32_t cores_;
  const TempDir dir_;
  const std::string binary_ = dir_.File("trainer");
  absl::Time now_ = absl::UnixEpoch() + absl::Hours(100);
  DataDir data_dir_ = DataDir::Open(dir_.File("data"), absl::Seconds(1)).value();
  EventBuffer events_{1 << 20};
  prometheus::Registry registry_;
  WorkerMetrics metrics_{registry_};
  absl::Mutex mutex_;
  std::vector<std::function<void()>> tasks_ ABSL_GUARDED_BY(mutex_);
  Supervisor supervisor_{{.trainer_binary = binary_,
                          .slots = 2,
                          .cores = cores_,
                          .gpus = gpus_,
                          .listen_host = "10.0.0.7",
                          .tls = tls_,
                          .allowed_paths = roots_},
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
  std::deque<v1::WorkerMessage> words_;  // that came before an answer, and were not read since
  std::vector<std::pair<pid_t, std::shared_ptr<RecordingConnection>>> attached_;
};

}  // namespace ringleader::agent::testing
