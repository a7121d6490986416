// What trainers say to their supervisor, what it tells them when they attach, and what the
// coordinator hears of them.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/boot_clock.h"
#include "base/net/token.h"
#include "base/protocol_version.h"
#include "proto/timestamps.h"
#include "worker/agent/trainers/supervisor.h"

namespace ringleader::agent {

void Supervisor::OnHello(const std::shared_ptr<TrainerConnection>& connection,
                         const v1::TrainerHello& hello, absl::Time now) {
  Attempt* const attempt = Find(hello.fencing_token());
  Trainer* trainer = nullptr;
  if (attempt != nullptr) {
    for (Trainer& candidate : attempt->trainers) {
      if (candidate.rank == hello.rank()) trainer = &candidate;
    }
  }
  // Hashes, so that the time that the comparison takes tells nothing of the secret.
  if (trainer == nullptr || !trainer->process ||
      static_cast<uint32_t>(trainer->process->pid()) != hello.pid() ||
      TokenHash(trainer->secret) != TokenHash(hello.secret())) {
    connection->Close(absl::PermissionDeniedError("not a trainer that this worker started"));
    return;
  }
  if (const absl::Status same =
          CheckProtocolVersion(absl::StrCat("the trainer of rank ", trainer->rank),
                               hello.protocol_version(), "its worker");
      !same.ok()) {
    Kill(*trainer, std::string(same.message()));
    connection->Close(same);
    return;
  }
  trainer->connection = connection;
  trainer->last_pulse = trainer->last_progress = now;
  connection->Send(Assignment(*attempt, *trainer));
  trainer->lease_end = lease_end_;
  if (attempt->stop) {
    v1::AgentMessage stop;
    *stop.mutable_stop() = *attempt->stop;
    connection->Send(std::move(stop));
  }
}

v1::TrainerLease Supervisor::Lease() const {
  v1::TrainerLease lease;
  lease.set_end_boot_nanoseconds(absl::ToUnixNanos(lease_end_));
  return lease;
}

void Supervisor::SetLease(absl::Time end) {
  if (end == lease_end_) return;
  lease_end_ = end;
  v1::AgentMessage message;
  *message.mutable_lease() = Lease();
  for (auto& [token, attempt] : attempts_) {
    Forward(attempt, message);
    for (Trainer& trainer : attempt.trainers) {
      // What comes after a lease's end prolongs it no more.
      if (trainer.connection && BootNow() < trainer.lease_end) trainer.lease_end = end;
    }
  }
}

v1::AgentMessage Supervisor::Assignment(const Attempt& attempt, const Trainer& trainer) const {
  const v1::StartTrainers& start = attempt.start.start();
  v1::AgentMessage message;
  v1::TrainerAssignment* const assignment = message.mutable_assignment();
  assignment->set_job(attempt.start.job());
  assignment->set_attempt(attempt.start.attempt());
  *assignment->mutable_spec() = start.spec();
  *assignment->mutable_plan() = start.plan();
  assignment->set_rank(trainer.rank);
  assignment->set_world_size(start.world_size());
  assignment->set_ranks_per_node(start.ranks_per_node());
  assignment->set_checkpoint_step(start.checkpoint_step());
  assignment->set_listen_host(options_.listen_host);
  assignment->set_protocol_version(kProtocolVersion);
  assignment->set_job_uid(start.job_uid());
  if (start.has_measure()) *assignment->mutable_measure() = start.measure();
  assignment->set_fencing_token(attempt.start.fencing_token());
  *assignment->mutable_lease() = Lease();
  const uint32_t threads = start.spec().resources().threads();
  assignment->set_threads(threads != 0 ? threads : std::max(1u, options_.cores / options_.slots));
  return message;
}

void Supervisor::OnPulse(Trainer& trainer, const v1::TrainerPulse& pulse, absl::Time now) {
  trainer.last_pulse = now;
  if (std::exchange(trainer.progress, pulse.progress()) != pulse.progress()) {
    trainer.last_progress = now;
  }
  if (pulse.step() == trainer.step && pulse.phase() == trainer.phase) return;
  trainer.step = pulse.step();
  trainer.phase = pulse.phase();
  trainer.last_progress = now;
  UpdateRunning();
}

void Supervisor::OnTrainerMessage(const std::shared_ptr<TrainerConnection>& connection,
                                  v1::TrainerMessage message, absl::Time now) {
  if (message.has_hello()) {
    OnHello(connection, message.hello(), now);
    return;
  }
  const auto [attempt, trainer] = Find(connection.get());
  if (trainer == nullptr) {
    connection->Close(absl::FailedPreconditionError("the first message must be a hello"));
    return;
  }
  trainer->last_pulse = now;
  v1::AttemptEvent event = EventOf(*attempt);
  switch (message.body_case()) {
    case v1::TrainerMessage::kReady:
      *event.mutable_trainer_ready() = std::move(*message.mutable_ready());
      event.mutable_trainer_ready()->set_rank(trainer->rank);
      break;
    case v1::TrainerMessage::kStep:
      trainer->last_progress = now;
      *event.mutable_step() = std::move(*message.mutable_step());
      event.mutable_step()->set_rank(static_cast<int32_t>(trainer->rank));
      break;
    case v1::TrainerMessage::kEval:
      *event.mutable_eval() = std::move(*message.mutable_eval());
      break;
    case v1::TrainerMessage::kCheckpoint:
      *event.mutable_checkpoint() = std::move(*message.mutable_checkpoint());
      break;
    case v1::TrainerMessage::kModelExported:
      *event.mutable_model_exported() = std::move(*message.mutable_model_exported());
      break;
    case v1::TrainerMessage::kMeasurements:
      *event.mutable_measurements() = std::move(*message.mutable_measurements());
      break;
    case v1::TrainerMessage::kResult:
      trainer->result = std::move(*message.mutable_result());
      return;
    case v1::TrainerMessage::kPulse:
      OnPulse(*trainer, message.pulse(), now);
      return;
    case v1::TrainerMessage::kHello:  // above
      return;
    case v1::TrainerMessage::BODY_NOT_SET:
      connection->Close(absl::InvalidArgumentError("a message of no kind that this worker knows"));
      return;
  }
  Push(std::move(event));
}

void Supervisor::OnTrainerGone(const std::shared_ptr<TrainerConnection>& connection) {
  const auto [attempt, trainer] = Find(connection.get());
  if (trainer != nullptr) trainer->connection = nullptr;
}

// --- To the coordinator.

void Supervisor::Report(const Attempt& attempt, Trainer& trainer) {
  trainer.reported = true;
  v1::AttemptEvent event = EventOf(attempt);
  *event.mutable_trainer_exited() = DescribeExit(trainer, absl::Now());
  SetTime(absl::Now(), event.mutable_trainer_exited()->mutable_time());
  spdlog::info("rank {} of jobs/{} ended: {} {}", trainer.rank, attempt.start.job(),
               v1::TrainerExited::Outcome_Name(event.trainer_exited().outcome()),
               event.trainer_exited().message());
  metrics_->TrainerExited(event.trainer_exited().outcome());
  Push(std::move(event));
}

v1::AttemptEvent Supervisor::EventOf(const Attempt& attempt) const {
  v1::AttemptEvent event;
  event.set_job(attempt.start.job());
  event.set_attempt(attempt.start.attempt());
  event.set_fencing_token(attempt.start.fencing_token());
  return event;
}

void Supervisor::Push(v1::AttemptEvent event) {
  v1::WorkerMessage message;
  *message.mutable_event() = std::move(event);
  events_->Push(std::move(message));
}

void Supervisor::UpdateRunning() {
  std::vector<v1::RunningAttempt> running;
  size_t trainers = 0;
  for (const auto& [token, attempt] : attempts_) {
    v1::RunningAttempt& entry = running.emplace_back();
    entry.set_job(attempt.start.job());
    entry.set_attempt(attempt.start.attempt());
    entry.set_fencing_token(token);
    for (const Trainer& trainer : attempt.trainers) {
      if (trainer.reported) continue;
      ++trainers;
      entry.add_ranks(trainer.rank);
      entry.set_last_step(std::max(entry.last_step(), trainer.step));
    }
  }
  metrics_->SetTrainers(trainers);
  absl::MutexLock lock(&mutex_);
  running_ = std::move(running);
}

std::vector<v1::RunningAttempt> Supervisor::Running() const {
  absl::MutexLock lock(&mutex_);
  return running_;
}

}  // namespace ringleader::agent
