// A trainer without a model: speaks trainer_link.proto, takes its steps in lock step with its
// peers, writes and reads a checkpoint, and misbehaves as the job's labels say:
//
//   fake-step-ms      length of a step (default 20)
//   fake-crash        "RANK.STEP": that rank kills itself in that step of the first attempt
//   fake-crash-always "RANK.STEP": in every attempt
//   fake-hang         "RANK.STEP": stops itself (SIGSTOP) in that step of the first attempt
//   fake-stall        "RANK.STEP": likewise, but goes on saying that it lives
//   fake-refuse       "1": leaves with an error that no retry can mend
//   fake-hold         "STEP": takes no step after that one until the checkpoint folder holds a file
//                     `go`: however slow a test is, the job is not over before the test lets it
//
// The loss depends on every step before, so a step lost or trained twice shows in it. In the
// checkpoint folder, `audit` tells what ran when, and `rank-N.alive` is locked while rank N lives:
// finding it locked means that the job runs twice.
#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <sys/file.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/process/process_end.h"
#include "base/process/trainer_secret.h"
#include "base/protocol_version.h"
#include "ringleader/v1/trainer_link.grpc.pb.h"
#include "tests/faults/ring.h"

namespace ringleader::faults {
namespace {

namespace fs = std::filesystem;
using v1::TrainerExited;

struct Arguments {
  std::string socket;
  uint32_t rank = 0;
  uint64_t token = 0;
};

class FakeTrainer {
 public:
  explicit FakeTrainer(const Arguments& arguments) : arguments_(arguments) {}

  int Run() {
    channel_ = grpc::CreateChannel("unix:" + arguments_.socket, grpc::InsecureChannelCredentials());
    const auto stub = v1::TrainerLink::NewStub(channel_);
    stream_ = stub->Attach(&context_);
    v1::TrainerMessage hello;
    hello.mutable_hello()->set_rank(arguments_.rank);
    hello.mutable_hello()->set_fencing_token(arguments_.token);
    hello.mutable_hello()->set_pid(static_cast<uint32_t>(getpid()));
    hello.mutable_hello()->set_protocol_version(kProtocolVersion);
    if (const char* secret = std::getenv(kTrainerSecretVariable)) {
      hello.mutable_hello()->set_secret(secret);
    }
    Send(hello);
    std::thread reader([this] { ReadAll(); });
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return assignment_.has_value() || gone_; });
    }
    if (!assignment_) std::_Exit(3);
    std::thread pulse([this] { Pulse(); });
    const v1::TrainerResult result = Train();
    ended_ = true;
    pulse.join();
    v1::TrainerMessage message;
    *message.mutable_result() = result;
    Send(message);
    {
      std::lock_guard<std::mutex> lock(write_mutex_);
      stream_->WritesDone();
    }
    reader.join();
    stream_->Finish();
    return result.outcome() == TrainerExited::FAILED ? 1 : 0;
  }

 private:
  const v1::JobSpec& spec() const { return assignment_->spec(); }
  std::string Label(const std::string& name) const {
    const auto found = spec().labels().find(name);
    return found == spec().labels().end() ? "" : found->second;
  }
  bool Now(const std::string& label) const {
    return Label(label) == absl::StrCat(arguments_.rank, ".", step_.load());
  }
  std::string File(const std::string& name) const {
    return spec().checkpoint().directory() + "/" + name;
  }

  void Send(const v1::TrainerMessage& message) {
    std::lock_guard<std::mutex> lock(write_mutex_);
    stream_->Write(message);
  }

  void ReadAll() {
    v1::AgentMessage message;
    while (stream_->Read(&message)) {
      std::lock_guard<std::mutex> lock(mutex_);
      if (message.has_assignment()) {
        assignment_ = message.assignment();
        LiveUntil(message.assignment().lease());
      }
      if (message.has_lease()) LiveUntil(message.lease());
      if (message.has_connect()) connect_ = message.connect();
      if (message.has_stop()) {
        stop_ = true;
        if (message.stop().mode() == v1::StopTrainers::ABORT) std::_Exit(4);
      }
      changed_.notify_all();
    }
    std::lock_guard<std::mutex> lock(mutex_);
    gone_ = true;
    changed_.notify_all();
  }

  void LiveUntil(const v1::TrainerLease& lease) {
    const absl::Time end = absl::FromUnixNanos(lease.end_boot_nanoseconds());
    if (!end_.ok() || !end_->Set(end).ok()) std::_Exit(5);
  }

  void Pulse() {
    while (!ended_) {
      v1::TrainerMessage message;
      message.mutable_pulse()->set_step(step_);
      message.mutable_pulse()->set_phase("step");
      Send(message);
      for (int i = 0; i < 10 && !ended_; ++i) absl::SleepFor(absl::Milliseconds(10));
    }
  }

  // One line, in one write: ranks share the file.
  void Audit(const std::string& what) {
    const std::string line =
        absl::StrCat(absl::ToUnixMillis(absl::Now()), " ", what, " attempt ",
                     assignment_->attempt(), " token ", arguments_.token, " rank ", arguments_.rank,
                     " pid ", getpid(), " step ", step_.load(), "\n");
    const int fd = open(File("audit").c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    (void)!write(fd, line.data(), line.size());
    close(fd);
  }

  // Held until the kernel has this process off its books.
  void ClaimRank() {
    const int fd = open(File(absl::StrCat("rank-", arguments_.rank, ".alive")).c_str(),
                        O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    Audit(flock(fd, LOCK_EX | LOCK_NB) == 0 ? "start" : "DOUBLE");
  }

  static v1::TrainerResult Result(TrainerExited::Outcome outcome, const std::string& message = "",
                                  bool retryable = true, bool collateral = false) {
    v1::TrainerResult result;
    result.set_outcome(outcome);
    result.set_message(message);
    result.set_retryable(retryable);
    result.set_collateral(collateral);
    return result;
  }

  void LoadCheckpoint() {
    std::ifstream file(File("checkpoint"));
    uint64_t step = 0;
    double state = 0;
    if (file >> step >> state) {
      step_ = step;
      state_ = state;
    }
  }

  void SaveCheckpoint() {
    if (arguments_.rank != 0) return;
    {
      std::ofstream file(File("checkpoint.new"));
      file.precision(17);
      file << step_ << " " << state_ << "\n";
    }
    fs::rename(File("checkpoint.new"), File("checkpoint"));
    v1::TrainerMessage message;
    message.mutable_checkpoint()->set_step(step_);
    message.mutable_checkpoint()->set_path(File("checkpoint"));
    Send(message);
  }

  void Report(double seconds) {
    v1::TrainerMessage message;
    v1::StepReport* const report = message.mutable_step();
    report->set_step(step_);
    report->set_rank(static_cast<int32_t>(arguments_.rank));
    report->set_loss(state_);
    report->set_tokens(spec().data().sequence_length());
    report->set_step_seconds(seconds);
    v1::LayerReport* const layer = report->add_layers();
    layer->set_density(0.5);
    layer->add_tiles_per_ring_step(10 + arguments_.rank);
    Send(message);
    std::printf("step %lu loss %.6f\n", static_cast<unsigned long>(step_.load()), state_);
    std::fflush(stdout);
  }

  v1::TrainerResult Train() {
    ClaimRank();
    if (!Label("fake-refuse").empty()) {
      return Result(TrainerExited::FAILED, "model.config: not to my taste", false);
    }
    v1::TrainerMessage ready;
    ready.mutable_ready()->set_rank(arguments_.rank);
    ready.mutable_ready()->set_address(
        absl::StrCat(assignment_->listen_host(), ":", ring_.Listen()));
    Send(ready);
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return connect_.has_value() || stop_ || gone_; });
      if (!connect_) return Result(TrainerExited::STOPPED);
    }
    if (!ring_.Connect(arguments_.rank,
                       {connect_->addresses().begin(), connect_->addresses().end()})) {
      return Result(TrainerExited::FAILED, "a peer is gone", true, true);
    }
    LoadCheckpoint();
    int step_ms = 20;
    (void)absl::SimpleAtoi(Label("fake-step-ms"), &step_ms);
    uint64_t hold = UINT64_MAX;
    if (!absl::SimpleAtoi(Label("fake-hold"), &hold)) hold = UINT64_MAX;
    while (step_ < spec().training().steps()) {
      while (arguments_.rank == 0 && step_ >= hold && !stop_ && !fs::exists(File("go"))) {
        absl::SleepFor(absl::Milliseconds(10));
      }
      bool stop = false;
      if (!ring_.Barrier(stop_, &stop)) {
        return Result(TrainerExited::FAILED, "a peer is gone", true, true);
      }
      if (stop) {
        SaveCheckpoint();
        return Result(TrainerExited::STOPPED);
      }
      absl::SleepFor(absl::Milliseconds(step_ms));
      ++step_;
      const bool first = assignment_->attempt() == 1;
      if ((first && Now("fake-crash")) || Now("fake-crash-always")) raise(SIGKILL);
      if (first && Now("fake-hang")) raise(SIGSTOP);
      if (first && Now("fake-stall")) absl::SleepFor(absl::InfiniteDuration());
      state_ = 0.9 * state_ + 1.0 / static_cast<double>(step_);
      if (arguments_.rank == 0) Audit("step");
      Report(step_ms / 1000.0);
      if (step_ % spec().checkpoint().every_steps() == 0) SaveCheckpoint();
    }
    bool any = false;
    if (!ring_.Barrier(false, &any)) {
      return Result(TrainerExited::FAILED, "a peer is gone", true, true);
    }
    if (arguments_.rank == 0) {
      v1::TrainerMessage message;
      message.mutable_model_exported()->set_path(File("model"));
      Send(message);
    }
    return Result(TrainerExited::COMPLETED);
  }

  const Arguments arguments_;
  absl::StatusOr<ProcessEnd> end_ = ProcessEnd::Create();
  std::shared_ptr<grpc::Channel> channel_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::TrainerMessage, v1::AgentMessage>> stream_;
  std::mutex write_mutex_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<v1::TrainerAssignment> assignment_;
  std::optional<v1::ConnectPeers> connect_;
  bool gone_ = false;
  std::atomic<bool> stop_ = false;
  std::atomic<bool> ended_ = false;

  Ring ring_;
  std::atomic<uint64_t> step_ = 0;
  double state_ = 5;
};

}  // namespace
}  // namespace ringleader::faults

int main(int argc, char** argv) {
  ringleader::faults::Arguments arguments;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i];
    if (flag == "--socket") arguments.socket = argv[i + 1];
    if (flag == "--rank") (void)absl::SimpleAtoi(argv[i + 1], &arguments.rank);
    if (flag == "--token") (void)absl::SimpleAtoi(argv[i + 1], &arguments.token);
  }
  return ringleader::faults::FakeTrainer(arguments).Run();
}
