#include "tests/support/fake_worker.h"

#include <deque>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "ringleader/v1/worker_control.grpc.pb.h"

namespace ringleader::testing {

class FakeWorker::Reactor
    : public grpc::ClientBidiReactor<v1::WorkerMessage, v1::CoordinatorMessage> {
 public:
  Reactor(const FakeWorkerOptions& options, const std::shared_ptr<grpc::Channel>& channel)
      : options_(options), stub_(v1::WorkerControl::NewStub(channel)) {
    stub_->async()->Session(&context_, this);
    v1::WorkerMessage message;
    v1::WorkerHello* const hello = message.mutable_hello();
    hello->set_node(absl::StrCat("nodes/", options.node));
    hello->set_incarnation(absl::StrCat(options.node, "-", std::random_device()()));
    hello->mutable_inventory()->set_trainers(options.trainers);
    hello->mutable_inventory()->set_cpu_cores(options.trainers);
    hello->mutable_inventory()->set_memory_bytes(uint64_t{1} << 40);
    hello->mutable_inventory()->set_hostname(options.node);
    hello->mutable_inventory()->set_address("127.0.0.1");
    hello->set_version("fake");
    hello->set_protocol_version(options.protocol_version);
    absl::MutexLock lock(&mu_);
    Send(std::move(message));
    StartRead(&incoming_);
    StartCall();
  }

  void End() {
    context_.TryCancel();
    absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(&done_));
  }

  bool welcomed() const {
    absl::MutexLock lock(&mu_);
    return welcomed_;
  }
  bool ended() const {
    absl::MutexLock lock(&mu_);
    return done_;
  }
  int trainers_running() const {
    absl::MutexLock lock(&mu_);
    int running = 0;
    for (const auto& [key, attempt] : attempts_)
      running += static_cast<int>(attempt.start.trainers());
    return running;
  }

  void Heartbeat() {
    absl::MutexLock lock(&mu_);
    v1::WorkerMessage message;
    message.mutable_heartbeat()->set_number(++heartbeats_);
    Send(std::move(message));
  }

  int Step() {
    absl::MutexLock lock(&mu_);
    int reported = 0;
    for (auto it = attempts_.begin(); it != attempts_.end();) {
      Attempt& attempt = it->second;
      if (!attempt.connected) {
        ++it;
        continue;
      }
      ++attempt.step;
      for (uint32_t i = 0; i < attempt.start.trainers(); ++i, ++reported) {
        Report(attempt, static_cast<int32_t>(attempt.start.first_rank() + i));
      }
      if (attempt.step < attempt.start.spec().training().steps()) {
        ++it;
        continue;
      }
      Leave(attempt, v1::TrainerExited::COMPLETED);
      it = attempts_.erase(it);
    }
    return reported;
  }

  void OnReadDone(bool ok) override {
    if (!ok) return;
    {
      absl::MutexLock lock(&mu_);
      if (incoming_.has_welcome()) welcomed_ = true;
      if (incoming_.has_command()) Obey(incoming_.command());
    }
    StartRead(&incoming_);
  }

  void OnWriteDone(bool ok) override {
    absl::MutexLock lock(&mu_);
    outgoing_.pop_front();
    if (!ok) outgoing_.clear();
    if (!outgoing_.empty()) StartWrite(&outgoing_.front());
  }

  void OnDone(const grpc::Status&) override {
    absl::MutexLock lock(&mu_);
    done_ = true;
  }

 private:
  struct Attempt {
    std::string job;
    uint32_t number = 0;
    uint64_t token = 0;
    v1::StartTrainers start;
    bool connected = false;
    uint64_t step = 0;
  };

  void Send(v1::WorkerMessage message) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (done_) return;
    outgoing_.push_back(std::move(message));
    if (outgoing_.size() == 1) StartWrite(&outgoing_.front());
  }
  void SendEvent(const Attempt& attempt, v1::AttemptEvent event)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    event.set_job(attempt.job);
    event.set_attempt(attempt.number);
    event.set_fencing_token(attempt.token);
    v1::WorkerMessage message;
    message.set_sequence(++sequence_);
    *message.mutable_event() = std::move(event);
    Send(std::move(message));
  }

  void Obey(const v1::Command& command) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    v1::WorkerMessage ack;
    ack.set_sequence(++sequence_);
    ack.mutable_command_ack()->set_command_id(command.command_id());
    ack.mutable_command_ack()->set_accepted(true);
    Send(std::move(ack));
    const uint64_t key = command.fencing_token();
    if (command.has_start()) {
      Attempt& attempt = attempts_[key];
      attempt.job = command.job();
      attempt.number = command.attempt();
      attempt.token = command.fencing_token();
      attempt.start = command.start();
      for (uint32_t i = 0; i < attempt.start.trainers(); ++i) {
        v1::AttemptEvent event;
        event.mutable_trainer_ready()->set_rank(attempt.start.first_rank() + i);
        event.mutable_trainer_ready()->set_address("127.0.0.1:1");
        SendEvent(attempt, std::move(event));
      }
    }
    const auto found = attempts_.find(key);
    if (found == attempts_.end()) return;
    if (command.has_connect()) found->second.connected = true;
    if (command.has_stop()) {
      Leave(found->second, v1::TrainerExited::STOPPED);
      attempts_.erase(found);
    }
  }

  void Leave(const Attempt& attempt, v1::TrainerExited::Outcome outcome)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    for (uint32_t i = 0; i < attempt.start.trainers(); ++i) {
      v1::AttemptEvent event;
      event.mutable_trainer_exited()->set_rank(attempt.start.first_rank() + i);
      event.mutable_trainer_exited()->set_outcome(outcome);
      SendEvent(attempt, std::move(event));
    }
  }

  void Report(const Attempt& attempt, int32_t rank) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    v1::AttemptEvent event;
    v1::StepReport* const report = event.mutable_step();
    report->set_step(attempt.step);
    report->set_rank(rank);
    report->set_loss(5.0 / static_cast<double>(attempt.step));
    report->set_tokens(16384);
    report->set_step_seconds(1.0);
    report->mutable_phases()->set_attention_forward(0.2);
    report->mutable_phases()->set_attention_backward(0.5);
    for (int i = 0; i < options_.layers; ++i) {
      v1::LayerReport* const layer = report->add_layers();
      layer->set_layer(static_cast<uint32_t>(i));
      layer->set_density(0.05);
      layer->set_verticals(300);
      layer->set_slashes(20);
      layer->set_recall(0.97);
      for (uint32_t ring_step = 0; ring_step < attempt.start.world_size(); ++ring_step) {
        layer->add_tiles_per_ring_step(1000 + ring_step);
      }
    }
    SendEvent(attempt, std::move(event));
    if (rank != 0) return;
    v1::AttemptEvent logs;
    v1::LogLine* const line = logs.mutable_logs()->add_lines();
    line->set_rank(rank);
    line->set_text(absl::StrCat("step ", attempt.step));
    SendEvent(attempt, std::move(logs));
  }

  const FakeWorkerOptions options_;
  const std::unique_ptr<v1::WorkerControl::Stub> stub_;
  grpc::ClientContext context_;
  v1::CoordinatorMessage incoming_;

  mutable absl::Mutex mu_;
  bool welcomed_ ABSL_GUARDED_BY(mu_) = false;
  bool done_ ABSL_GUARDED_BY(mu_) = false;
  uint64_t sequence_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t heartbeats_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<uint64_t, Attempt> attempts_ ABSL_GUARDED_BY(mu_);    // by fencing token
  std::deque<v1::WorkerMessage> outgoing_ ABSL_GUARDED_BY(mu_);  // the front is being written
};

FakeWorker::FakeWorker(const FakeWorkerOptions& options,
                       const std::shared_ptr<grpc::Channel>& channel)
    : reactor_(std::make_unique<Reactor>(options, channel)) {}
FakeWorker::~FakeWorker() {
  reactor_->End();
}
bool FakeWorker::welcomed() const {
  return reactor_->welcomed();
}
bool FakeWorker::ended() const {
  return reactor_->ended();
}
void FakeWorker::Heartbeat() {
  reactor_->Heartbeat();
}
int FakeWorker::Step() {
  return reactor_->Step();
}
int FakeWorker::trainers_running() const {
  return reactor_->trainers_running();
}

}  // namespace ringleader::testing
