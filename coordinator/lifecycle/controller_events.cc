// What workers say, applied to the core: hellos, events, acknowledgements.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_format.h"
#include "base/protocol_version.h"
#include "base/status_macros.h"
#include "coordinator/lifecycle/controller_core.h"
#include "jobspec/text.h"
#include "proto/states.h"
#include "proto/timestamps.h"

namespace ringleader::lifecycle {

JobMachine* ControllerCore::FindAttempt(std::string_view job, uint32_t attempt, uint64_t token) {
  JobMachine* const machine = Find(job);
  if (machine == nullptr || machine->attempt() == nullptr) return nullptr;
  const v1::Attempt& current = *machine->attempt();
  return current.number() == attempt && current.fencing_token() == token ? machine : nullptr;
}

namespace {

bool Holds(const v1::Placement& placement, int64_t rank) {
  return rank >= placement.first_rank() &&
         rank < int64_t{placement.first_rank()} + placement.trainers();
}

const v1::Placement* PlacementOn(const v1::Attempt& attempt, const std::string& node) {
  const auto found = std::find_if(attempt.placements().begin(), attempt.placements().end(),
                                  [&](const auto& p) { return p.node() == node; });
  return found == attempt.placements().end() ? nullptr : &*found;
}

// All ranks that the event speaks of are at the placement.
bool SpeaksOf(const v1::Placement& placement, const v1::AttemptEvent& event) {
  switch (event.kind_case()) {
    case v1::AttemptEvent::kTrainerReady:
      return Holds(placement, event.trainer_ready().rank());
    case v1::AttemptEvent::kTrainerExited:
      return Holds(placement, event.trainer_exited().rank());
    case v1::AttemptEvent::kStep:
      return Holds(placement, event.step().rank());
    case v1::AttemptEvent::kLogs:
      return std::all_of(event.logs().lines().begin(), event.logs().lines().end(),
                         [&](const v1::LogLine& line) { return Holds(placement, line.rank()); });
    case v1::AttemptEvent::kEval:
    case v1::AttemptEvent::kCheckpoint:
    case v1::AttemptEvent::kModelExported:
      return Holds(placement, 0);  // which alone reports these
    case v1::AttemptEvent::KIND_NOT_SET:
      return true;
  }
  return false;
}

bool IsDuration(double seconds) {
  return std::isfinite(seconds) && seconds >= 0;
}

// Numbers that a trainer of a job of so many steps can come to. The loss of a step is finite unless
// the step was skipped for it; a held-out loss need not be.
bool InRange(const v1::AttemptEvent& event, uint64_t steps) {
  switch (event.kind_case()) {
    case v1::AttemptEvent::kStep: {
      const v1::StepReport& step = event.step();
      return step.step() >= 1 && step.step() <= steps && IsDuration(step.step_seconds()) &&
             std::isfinite(step.learning_rate()) &&
             (step.skipped() ||
              (std::isfinite(step.loss()) && std::isfinite(step.gradient_norm())));
    }
    case v1::AttemptEvent::kEval:
      return event.eval().step() <= steps && IsDuration(event.eval().seconds());
    case v1::AttemptEvent::kCheckpoint:
      return event.checkpoint().step() <= steps && IsDuration(event.checkpoint().seconds());
    case v1::AttemptEvent::kTrainerReady:
    case v1::AttemptEvent::kTrainerExited:
    case v1::AttemptEvent::kLogs:
    case v1::AttemptEvent::kModelExported:
    case v1::AttemptEvent::KIND_NOT_SET:
      return true;
  }
  return false;
}

// Sessions that end while the same command is not acknowledged, until it is not sent again. One may
// end by chance.
constexpr int kMaxSessionsEnded = 2;

// Shown to people, whose terminals obey control characters.
const std::string& PathOf(const v1::AttemptEvent& event) {
  if (event.has_model_exported()) return event.model_exported().path();
  return event.checkpoint().path();
}

// The part that says which data folder a worker process uses.
std::string_view FolderOf(std::string_view incarnation) {
  return incarnation.substr(0, incarnation.find('.'));
}

}  // namespace

// After a restart or a failed commit the record in memory has none, and the store is asked.
absl::StatusOr<std::string> ControllerCore::NewestIncarnation(store::ReadTransaction& transaction,
                                                              const std::string& node,
                                                              const NodeRecord& record) {
  if (!record.log.incarnation().empty()) return record.log.incarnation();
  return transaction.GetNewestIncarnation(node);
}

// A new process of a node stands for the death of the old one and of its trainers, because the
// folder's lock says so. That of another folder, or beside one that is alive, does not.
absl::Status ControllerCore::CheckIdentity(const NodeRecord& record, const std::string& known,
                                           const session::Session& session, absl::Time now) const {
  if (known.empty() || known == session.incarnation()) return absl::OkStatus();
  if (record.session != nullptr && now - record.session->last_heard() <= options_.lease) {
    return absl::AlreadyExistsError(absl::StrFormat(
        "another worker is connected as nodes/%s: give each its own --name", session.node()));
  }
  if (FolderOf(known) != FolderOf(session.incarnation()) && record.trainers_in_use > 0) {
    return absl::FailedPreconditionError(
        absl::StrFormat("nodes/%s was last a worker with another --data-dir, whose trainers may "
                        "be alive: use that folder, or wait until they are given up",
                        session.node()));
  }
  return absl::OkStatus();
}

absl::Status ControllerCore::OnHello(store::WriteTransaction& transaction,
                                     const std::shared_ptr<session::Session>& session,
                                     const v1::WorkerHello& hello, absl::Time now) {
  const std::string& id = session->node();
  if (const auto found = nodes_.find(id); found != nodes_.end()) {
    CountTrainers();
    ASSIGN_OR_RETURN(const std::string known, NewestIncarnation(transaction, id, found->second));
    if (const absl::Status refused = CheckIdentity(found->second, known, *session, now);
        !refused.ok()) {
      session->Close(refused);
      return absl::OkStatus();
    }
  }
  NodeRecord& record = nodes_[id];
  if (record.session && record.session != session) {
    record.session->Close(absl::AbortedError("another session of this node has begun"));
  }
  ASSIGN_OR_RETURN(const uint64_t epoch, transaction.Next(store::Counter::kSessionEpoch));
  ASSIGN_OR_RETURN(const uint64_t applied,
                   transaction.GetAppliedSequence(id, session->incarnation()));
  const auto milliseconds = [](absl::Duration duration) {
    return static_cast<uint32_t>(absl::ToInt64Milliseconds(duration));
  };
  v1::Node& node = record.node;
  if (node.name().empty()) {
    node.set_name("nodes/" + id);
    node.set_state(v1::Node::READY);
    SetTime(now, node.mutable_create_time());
  }
  *node.mutable_inventory() = hello.inventory();
  node.set_worker_version(hello.version());
  node.set_session_epoch(epoch);
  node.set_fence_milliseconds(milliseconds(options_.fence_after));
  node.set_certificate(session->certificate());
  RETURN_IF_ERROR(transaction.PutNode(node));

  if (record.log.incarnation() != session->incarnation()) {
    record.log = EventLog(session->incarnation(), applied);
    record.leaving = false;
  }
  record.session = session;
  record.last_heard = now;
  schedule_due_ = true;
  // A process of which nothing was ever applied cannot have started what an earlier one
  // acknowledged: that died with the earlier one. (What was not acknowledged is sent to this one.)
  if (applied == 0) {
    for (auto& [job, machine] : machines_) {
      if (StartPending(id, job)) continue;
      machine->OnWorkerDied(node.name(), "its worker was restarted, and it died with the old one",
                            now);
    }
  }
  record.out_of_sight = false;
  for (auto& [job, machine] : machines_) machine->OnSight(node.name(), std::nullopt, now);

  v1::CoordinatorMessage message;
  v1::Welcome* const welcome = message.mutable_welcome();
  welcome->set_epoch(epoch);
  welcome->set_lease_milliseconds(milliseconds(options_.lease));
  welcome->set_heartbeat_milliseconds(milliseconds(options_.heartbeat_interval));
  welcome->set_fence_milliseconds(milliseconds(options_.fence_after));
  welcome->set_applied_sequence(record.log.acknowledged());
  welcome->set_protocol_version(kProtocolVersion);
  outbox_.emplace_back(session, std::move(message));
  StopStrays(record, hello);
  ASSIGN_OR_RETURN(std::vector<v1::Command> commands, transaction.ListCommands(id));
  for (v1::Command& command : commands) {
    if (const auto sent = unacknowledged_.find(command.command_id());
        sent != unacknowledged_.end()) {
      sent->second.sent_on = session.get();
    }
    v1::CoordinatorMessage again;
    *again.mutable_command() = std::move(command);
    outbox_.emplace_back(session, std::move(again));
  }
  metrics_->SessionBegan();
  spdlog::info("nodes/{} connected (epoch {}, version {}, {} trainers, runs {} attempts)", id,
               epoch, hello.version(), hello.inventory().trainers(), hello.attempts_size());
  return absl::OkStatus();
}

bool ControllerCore::StartPending(const std::string& node, const std::string& job) const {
  const auto found = machines_.find(job);
  if (found == machines_.end() || found->second->attempt() == nullptr) return false;
  const uint32_t attempt = found->second->attempt()->number();
  return std::any_of(unacknowledged_.begin(), unacknowledged_.end(), [&](const auto& entry) {
    const SentCommand& command = entry.second;
    return command.is_start && command.job == job && command.node == node &&
           command.attempt == attempt;
  });
}

absl::StatusOr<bool> ControllerCore::OnDeath(store::WriteTransaction& transaction,
                                             const std::string& node,
                                             const std::string& incarnation, absl::Time now) {
  const auto found = nodes_.find(node);
  if (found == nodes_.end()) return true;
  NodeRecord& record = found->second;
  ASSIGN_OR_RETURN(const std::string newest, NewestIncarnation(transaction, node, record));
  // A later process of the node has said the same by its hello.
  if (newest != incarnation) return true;
  // Its last words are in the connection, ahead of its end.
  if (record.session != nullptr && !record.out_of_sight) return false;
  spdlog::warn("nodes/{}: its worker process died, and all of its trainers", node);
  schedule_due_ = true;
  for (auto& [job, machine] : machines_) {
    machine->OnWorkerDied(record.node.name(), "its worker process died, and it died with it", now);
  }
  return true;
}

// The command is not durable: trainers that are still there at the next hello are told again then.
void ControllerCore::StopStrays(NodeRecord& record, const v1::WorkerHello& hello) {
  record.strays.clear();
  for (const v1::RunningAttempt& running : hello.attempts()) {
    JobMachine* const machine =
        FindAttempt(running.job(), running.attempt(), running.fencing_token());
    const v1::Placement* const placement =
        machine == nullptr ? nullptr : PlacementOn(*machine->attempt(), record.node.name());
    const auto wanted = [&](uint32_t rank) {
      return placement != nullptr && Holds(*placement, rank) &&
             rank < static_cast<uint32_t>(machine->attempt()->ranks_size()) &&
             !Dead(machine->attempt()->ranks(static_cast<int>(rank)));
    };
    if (std::all_of(running.ranks().begin(), running.ranks().end(), wanted)) continue;
    for (const uint32_t rank : running.ranks()) {
      record.strays.emplace(running.fencing_token(), rank);
    }
    spdlog::warn("nodes/{} still runs attempt {} of jobs/{}, which was given up: stopping it",
                 record.session->node(), running.attempt(), running.job());
    v1::CoordinatorMessage message;
    v1::Command* const command = message.mutable_command();
    command->set_job(running.job());
    command->set_attempt(running.attempt());
    command->set_fencing_token(running.fencing_token());
    command->mutable_stop()->set_mode(v1::StopTrainers::ABORT);
    command->mutable_stop()->set_reason("the attempt was given up");
    outbox_.emplace_back(record.session, std::move(message));
  }
}

absl::Status ControllerCore::OnClosed(store::WriteTransaction& transaction,
                                      const std::shared_ptr<session::Session>& session,
                                      absl::Time now) {
  const auto found = nodes_.find(session->node());
  if (found == nodes_.end() || found->second.session != session) return absl::OkStatus();
  found->second.last_heard = std::max(found->second.last_heard, session->last_heard());
  found->second.session = nullptr;
  schedule_due_ = true;
  spdlog::info("nodes/{} disconnected", session->node());
  // A worker acknowledges commands one after the other: if one of them ended the session, it is the
  // first that is left.
  const auto suspect =
      std::find_if(unacknowledged_.begin(), unacknowledged_.end(), [&](const auto& entry) {
        return entry.second.node == session->node() && entry.second.sent_on == session.get();
      });
  if (suspect == unacknowledged_.end()) return absl::OkStatus();
  suspect->second.sent_on = nullptr;
  if (++suspect->second.sessions_ended < kMaxSessionsEnded) return absl::OkStatus();
  const SentCommand command = suspect->second;
  RETURN_IF_ERROR(transaction.DeleteCommand(suspect->first));
  unacknowledged_.erase(suspect);
  JobMachine* const machine = FindAttempt(command.job, command.attempt, command.token);
  if (machine != nullptr) machine->OnDeadlyCommand("nodes/" + command.node, command.is_start, now);
  return absl::OkStatus();
}

absl::Status ControllerCore::OnMessage(store::WriteTransaction& transaction,
                                       const std::shared_ptr<session::Session>& session,
                                       v1::WorkerMessage& message, absl::Time now) {
  const auto found = nodes_.find(session->node());
  // A message of a session that was replaced: the new session sends it again.
  if (found == nodes_.end() || found->second.session != session) return absl::OkStatus();
  NodeRecord& record = found->second;
  const EventLog::Verdict verdict = record.log.Admit(message.sequence());
  if (verdict == EventLog::Verdict::kGap) {
    record.session = nullptr;
    session->Close(absl::DataLossError(
        absl::StrFormat("sequence %d came after %d: send everything that was not acknowledged",
                        message.sequence(), record.log.applied())));
    return absl::OkStatus();
  }
  const bool seen = verdict == EventLog::Verdict::kSeen;
  if (message.has_event()) {
    return OnEvent(transaction, record, message.sequence(), seen, *message.mutable_event(), now);
  }
  if (seen) return absl::OkStatus();
  if (message.has_command_ack()) {
    return OnAck(transaction, session->node(), message.command_ack(), now);
  }
  if (message.has_inventory()) {
    *record.node.mutable_inventory() = message.inventory();
    schedule_due_ = true;
    return transaction.PutNode(record.node);
  }
  if (message.has_drain()) {
    spdlog::info("nodes/{} is shutting down: {}", session->node(), message.drain().reason());
    record.leaving = true;
    schedule_due_ = true;
    for (auto& [job, machine] : machines_) {
      machine->MoveOff(record.node.name(), "its worker is shutting down", now);
    }
  }
  return absl::OkStatus();
}

absl::Status ControllerCore::OnAck(store::WriteTransaction& transaction, const std::string& node,
                                   const v1::CommandAck& ack, absl::Time now) {
  const auto sent = unacknowledged_.find(ack.command_id());
  if (sent == unacknowledged_.end()) return absl::OkStatus();
  if (sent->second.node != node) {
    spdlog::warn("nodes/{} acknowledged a command to nodes/{}: ignored", node, sent->second.node);
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(transaction.DeleteCommand(ack.command_id()));
  const SentCommand command = sent->second;
  unacknowledged_.erase(sent);
  if (ack.accepted()) return absl::OkStatus();
  spdlog::warn("nodes/{} refused a command for attempt {} of jobs/{}: {}", node, command.attempt,
               command.job, ack.message());
  JobMachine* const machine = FindAttempt(command.job, command.attempt, command.token);
  if (machine != nullptr && command.is_start) {
    machine->OnStartRefused("nodes/" + node, ack.message(), now, ack.later());
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> ControllerCore::IsGenuine(store::ReadTransaction& transaction,
                                               const NodeRecord& record,
                                               const v1::AttemptEvent& event) {
  v1::Job stored;
  const JobMachine* const machine = Find(event.job());
  if (machine == nullptr) {
    absl::StatusOr<v1::Job> job = transaction.GetJob(event.job());
    if (absl::IsNotFound(job.status())) return false;  // deleted meanwhile
    if (!job.ok()) return job.status();
    stored = *std::move(job);
  }
  const v1::Job& job = machine == nullptr ? stored : machine->job();
  const auto attempt =
      std::find_if(job.attempts().begin(), job.attempts().end(), [&](const v1::Attempt& a) {
        return a.number() == event.attempt() && a.fencing_token() == event.fencing_token();
      });
  // The event is of a job that had the name before.
  if (attempt == job.attempts().end()) return false;
  const v1::Placement* const placement = PlacementOn(*attempt, record.node.name());
  const bool genuine = placement != nullptr && SpeaksOf(*placement, event) &&
                       InRange(event, job.spec().training().steps()) &&
                       !jobspec::HasControls(PathOf(event));
  if (!genuine) {
    spdlog::warn(
        "{} reports of attempt {} of {} what it cannot know, for those ranks run elsewhere, the "
        "job has no such step or path, or a figure is none: ignored",
        record.node.name(), event.attempt(), job.name());
  }
  return genuine;
}

absl::Status ControllerCore::OnEvent(store::WriteTransaction& transaction, NodeRecord& record,
                                     uint64_t sequence, bool seen, v1::AttemptEvent& event,
                                     absl::Time now) {
  // A stray's end is of interest whatever it was part of.
  if (!seen && event.has_trainer_exited() &&
      record.strays.erase({event.fencing_token(), event.trainer_exited().rank()}) > 0) {
    schedule_due_ = true;
  }
  ASSIGN_OR_RETURN(const bool genuine, IsGenuine(transaction, record, event));
  if (!genuine) return absl::OkStatus();
  if (event.kind_case() == v1::AttemptEvent::kStep) {
    return OnStep(transaction, record, sequence, event);
  }
  if (seen) return absl::OkStatus();
  JobMachine* const machine = FindAttempt(event.job(), event.attempt(), event.fencing_token());
  switch (event.kind_case()) {
    case v1::AttemptEvent::kLogs:
      return AppendLogs(transaction, event);
    case v1::AttemptEvent::kTrainerReady:
      if (machine != nullptr) machine->OnReady(event.trainer_ready(), now);
      break;
    case v1::AttemptEvent::kTrainerExited:
      if (machine != nullptr) machine->OnExit(event.trainer_exited(), now);
      break;
    case v1::AttemptEvent::kEval:
      if (machine == nullptr) break;
      machine->OnEval(event.eval());
      return transaction.PutEval(event.job(), event.eval());
    case v1::AttemptEvent::kCheckpoint:
      if (machine != nullptr) return OnCheckpoint(transaction, *machine, event.checkpoint());
      break;
    case v1::AttemptEvent::kModelExported:
      if (machine != nullptr) machine->OnModelExported(event.model_exported().path());
      break;
    case v1::AttemptEvent::kStep:  // above
      break;
    case v1::AttemptEvent::KIND_NOT_SET: {
      const std::shared_ptr<session::Session> session = std::exchange(record.session, nullptr);
      session->Close(absl::InvalidArgumentError(
          absl::StrFormat("event %d of jobs/%s, attempt %d, is of no kind that this coordinator "
                          "knows",
                          sequence, event.job(), event.attempt())));
      break;
    }
  }
  return absl::OkStatus();
}

// A report that was seen before counts, too: one that a restart kept from being merged is merged
// now.
absl::Status ControllerCore::OnStep(store::WriteTransaction& transaction, NodeRecord& record,
                                    uint64_t sequence, v1::AttemptEvent& event) {
  JobMachine* const machine = FindAttempt(event.job(), event.attempt(), event.fencing_token());
  if (machine == nullptr || !IsLive(machine->attempt()->state())) {
    JobMachine* const later = Find(event.job());
    if (later == nullptr) return OnStepOfEndedJob(transaction, event);
    later->OnLateStep(event.attempt(), std::move(*event.mutable_step()));
    return absl::OkStatus();
  }
  record.log.Hold(sequence);
  StepMerger::Origin origin{record.session->node(), record.log.incarnation(), sequence};
  const std::optional<v1::StepReport> merged =
      machine->OnStep(std::move(*event.mutable_step()), std::move(origin));
  if (!merged) return absl::OkStatus();
  if (const auto plan = plans_->Observe(machine->job(), *merged)) machine->Replan(*plan);
  return absl::OkStatus();
}

absl::Status ControllerCore::OnStepOfEndedJob(store::WriteTransaction& transaction,
                                              const v1::AttemptEvent& event) {
  const absl::StatusOr<v1::Job> job = transaction.GetJob(event.job());
  if (!job.ok()) return absl::IsNotFound(job.status()) ? absl::OkStatus() : job.status();
  // Another job may have the name by now; the token says whether it is this one's attempt.
  const bool known =
      std::any_of(job->attempts().begin(), job->attempts().end(), [&](const auto& attempt) {
        return attempt.number() == event.attempt() &&
               attempt.fencing_token() == event.fencing_token();
      });
  // One rank's word will do, as in JobMachine::OnLateStep.
  return known ? transaction.PutMissingStep(event.job(), MergeSteps({event.step()}))
               : absl::OkStatus();
}

absl::Status ControllerCore::OnCheckpoint(store::WriteTransaction& transaction, JobMachine& machine,
                                          const v1::CheckpointNotice& checkpoint) {
  machine.OnCheckpoint(checkpoint);
  const v1::JobSpec& spec = machine.job().spec();
  RETURN_IF_ERROR(transaction.PutCheckpoint(spec.name(), checkpoint));
  // Trainers keep the last few on disk; the record follows.
  const size_t keep = spec.checkpoint().keep_last();
  if (keep == 0) return absl::OkStatus();
  ASSIGN_OR_RETURN(const std::vector<v1::CheckpointNotice> kept,
                   transaction.ListCheckpoints(spec.name()));
  std::vector<uint64_t> steps;
  steps.reserve(kept.size());
  for (const v1::CheckpointNotice& notice : kept) steps.push_back(notice.step());
  std::sort(steps.begin(), steps.end());
  for (size_t i = 0; i + keep < steps.size(); ++i) {
    RETURN_IF_ERROR(transaction.DeleteCheckpoint(spec.name(), steps[i]));
  }
  return absl::OkStatus();
}

absl::Status ControllerCore::AppendLogs(store::WriteTransaction& transaction,
                                        v1::AttemptEvent& event) {
  // The last words of an attempt may arrive when its job has ended, or has been deleted.
  if (Find(event.job()) == nullptr) {
    const absl::Status stored = transaction.GetJob(event.job()).status();
    if (absl::IsNotFound(stored)) return absl::OkStatus();
    RETURN_IF_ERROR(stored);
  }
  auto* const lines = event.mutable_logs()->mutable_lines();
  return transaction.AppendLogs(
      event.job(), event.attempt(),
      {std::make_move_iterator(lines->begin()), std::make_move_iterator(lines->end())});
}

}  // namespace ringleader::lifecycle
