#include "worker/agent/worker.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "base/boot_clock.h"
#include "base/process/version.h"
#include "base/protocol_version.h"
#include "base/status_macros.h"
#include "base/wait/timed_wait.h"
#include "worker/agent/node/inventory.h"

namespace ringleader::agent {
namespace {

constexpr absl::Duration kTick = absl::Milliseconds(50);
// A draining worker that cannot reach its coordinator stops its trainers itself after this.
constexpr absl::Duration kPatienceWithCoordinator = absl::Seconds(3);
// After the last trainer has ended, the coordinator has so long to acknowledge what it was told.
constexpr absl::Duration kFarewell = absl::Seconds(5);

absl::Time MonotonicNow() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return absl::TimeFromTimespec(now);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Worker>> Worker::Create(const WorkerOptions& options,
                                                       DataDir data_dir,
                                                       std::shared_ptr<grpc::Channel> channel,
                                                       WorkerMetrics* metrics) {
  std::unique_ptr<Worker> worker(
      new Worker(options, std::move(data_dir), std::move(channel), metrics));
  grpc::ServerBuilder builder;
  ASSIGN_OR_RETURN(
      worker->connections_,
      Connections::Open({.host = "", .port = 0, .path = worker->data_dir_.socket_path()}));
  Connections::Sink hand_over = Connections::ForServer(builder, grpc::InsecureServerCredentials());
  builder.RegisterService(&worker->trainer_link_);
  worker->server_ = builder.BuildAndStart();
  if (worker->server_ == nullptr) {
    return absl::UnavailableError(
        absl::StrCat("cannot listen on ", worker->data_dir_.socket_path()));
  }
  worker->connections_->Serve(std::move(hand_over));
  if (options.supervisor.run_as.any()) RETURN_IF_ERROR(worker->data_dir_.OpenToOtherUsers());
  return worker;
}

Worker::Worker(const WorkerOptions& options, DataDir data_dir,
               std::shared_ptr<grpc::Channel> channel, WorkerMetrics* metrics)
    : options_(options),
      data_dir_(std::move(data_dir)),
      metrics_(metrics),
      events_(options.max_log_buffer_bytes),
      inventory_(options.inventory),
      supervisor_(options.supervisor, &data_dir_, &events_, &logs_, metrics,
                  [this](std::function<void()> task) { Post(std::move(task)); }),
      trainer_link_(this),
      link_(std::move(channel), &events_,
            {.hello = [this] { return Hello(); },
             .on_welcome =
                 [this] {
                   Post([this] {
                     // Before any command: trainers get their lease with their assignment.
                     supervisor_.SetLease(link_.lease_end());
                     // A restarted coordinator has not heard that this worker wants to go.
                     if (draining_) SendDrainRequest();
                   });
                 },
             .on_command =
                 [this](v1::Command command) {
                   Post([this, command = std::move(command)] {
                     supervisor_.OnCommand(command, MonotonicNow());
                   });
                 },
             .on_refused =
                 [this](const absl::Status& why) { Post([this, why] { refused_ = why; }); }}) {}

Worker::~Worker() {
  link_.Stop();
  supervisor_.KillAll("the worker ended");
  connections_.reset();
  if (server_ != nullptr) {
    server_->Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(1));
    server_->Wait();
  }
}

void Worker::Post(std::function<void()> task) {
  absl::MutexLock lock(&mutex_);
  tasks_.push_back(std::move(task));
}

v1::WorkerHello Worker::Hello() const {
  v1::WorkerHello hello;
  hello.set_node("nodes/" + options_.node);
  hello.set_incarnation(options_.incarnation);
  {
    absl::MutexLock lock(&mutex_);
    *hello.mutable_inventory() = inventory_;
  }
  hello.set_version(std::string(kVersion));
  hello.set_protocol_version(kProtocolVersion);
  hello.set_acknowledged_sequence(events_.acknowledged());
  for (v1::RunningAttempt& attempt : supervisor_.Running()) {
    *hello.add_attempts() = std::move(attempt);
  }
  return hello;
}

void Worker::OnTrainerMessage(std::shared_ptr<TrainerConnection> connection,
                              v1::TrainerMessage message) {
  Post([this, connection = std::move(connection), message = std::move(message)]() mutable {
    supervisor_.OnTrainerMessage(connection, std::move(message), MonotonicNow());
  });
}

void Worker::OnTrainerGone(std::shared_ptr<TrainerConnection> connection) {
  Post([this, connection = std::move(connection)] { supervisor_.OnTrainerGone(connection); });
}

absl::Status Worker::Run() {
  metrics_->SetSlots(options_.inventory.trainers());
  CheckGpus();
  link_.Start();
  absl::Time next_tick = MonotonicNow();
  while (true) {
    std::vector<std::function<void()>> tasks;
    {
      absl::MutexLock lock(&mutex_);
      const auto something = [this]()
                                 ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !tasks_.empty(); };
      AwaitFor(mutex_, absl::Condition(&something),
               std::max(absl::ZeroDuration(), next_tick - MonotonicNow()));
      tasks.swap(tasks_);
    }
    for (const std::function<void()>& task : tasks) task();
    if (!refused_.ok()) return refused_;
    const absl::Time now = MonotonicNow();
    if (now < next_tick) continue;
    supervisor_.StoodStill(now - next_tick);
    next_tick = now + kTick;
    link_.CheckLease();
    CheckFence();
    CheckGpus();
    supervisor_.Tick(now);
    supervisor_.SetLease(link_.lease_end());
    UpdateMetrics();
    if (draining_ && CheckDrain(now)) return absl::OkStatus();
  }
}

// The coordinator gives up what it has not heard of for its adoption time-out, and starts it anew
// elsewhere. By then nothing may run here any more. Trainers end by themselves at the end of their
// lease; the worker sees to it as well, and knows the reason.
void Worker::CheckFence() {
  if (supervisor_.idle() || BootNow() < link_.lease_end()) return;
  supervisor_.KillAll(
      absl::StrFormat("killed after %s out of contact with the coordinator, which may have "
                      "replaced it",
                      absl::FormatDuration(absl::Trunc(link_.OutOfContact(), absl::Seconds(1)))));
}

// A GPU that computes wrongly takes no trainers, and the coordinator is told why.
void Worker::CheckGpus() {
  if (options_.gpu_faults == nullptr) return;
  std::map<std::string, std::string> faults = options_.gpu_faults();
  if (faults == gpu_faults_) return;
  for (const auto& [uuid, fault] : faults) spdlog::error("{} takes no trainers: {}", uuid, fault);
  const v1::NodeInventory inventory = WithFaults(options_.inventory, faults);
  {
    absl::MutexLock lock(&mutex_);
    inventory_ = inventory;
  }
  metrics_->SetSlots(inventory.trainers());
  supervisor_.SetFaults(faults);
  gpu_faults_ = std::move(faults);
  v1::WorkerMessage message;
  *message.mutable_inventory() = inventory;
  events_.Push(std::move(message));
}

void Worker::Drain(const std::string& reason) {
  Post([this, reason] {
    if (draining_) return;
    spdlog::info("draining: {}", reason);
    draining_ = true;
    drain_reason_ = reason;
    drain_deadline_ = MonotonicNow() + options_.drain_timeout;
    supervisor_.RefuseStarts("the worker is shutting down");
    SendDrainRequest();
  });
}

void Worker::SendDrainRequest() {
  v1::WorkerMessage message;
  message.mutable_drain()->set_reason(drain_reason_);
  events_.Push(std::move(message));
}

bool Worker::CheckDrain(absl::Time now) {
  if (link_.connected()) {
    alone_since_ = absl::InfiniteFuture();
  } else if (alone_since_ == absl::InfiniteFuture()) {
    alone_since_ = now;
  }
  const bool alone = now - alone_since_ > kPatienceWithCoordinator;
  if (supervisor_.idle()) {
    // The worker may go once all is told, or there is nobody to tell it to.
    farewell_end_ = std::min(farewell_end_, now + kFarewell);
    return events_.empty() || alone || now >= farewell_end_;
  }
  if (alone) supervisor_.StopAll(drain_reason_, drain_deadline_ - now, now);
  if (now >= drain_deadline_) supervisor_.KillAll("the worker had to end");
  return false;
}

void Worker::UpdateMetrics() {
  metrics_->SetConnected(link_.connected());
  metrics_->SetOutOfContact(absl::ToDoubleSeconds(link_.OutOfContact()));
  metrics_->SetBuffered(events_.size());
  metrics_->SetSessions(link_.sessions());
  metrics_->SetDroppedLogLines(events_.dropped_log_lines());
  metrics_->SetDroppedStepReports(events_.dropped_step_reports());
}

}  // namespace ringleader::agent
