// What workers report, applied to the core: events of attempts, acknowledgements.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "base/text/controls.h"
#include "coordinator/lifecycle/controller_core.h"
#include "jobspec/fields/text.h"
#include "proto/states.h"
#include "proto/timestamps.h"

namespace ringleader::lifecycle {
namespace {

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
    case v1::AttemptEvent::kMeasurements:
      return Holds(placement, 0);  // which alone reports these
    case v1::AttemptEvent::KIND_NOT_SET:
      return true;
  }
  return false;
}

// A host and a port, as all ranks of the attempt are told them.
bool IsAddress(const std::string& address) {
  constexpr size_t kMostBytes = 256;
  return address.size() <= kMostBytes && !HasControls(address);
}

bool IsDuration(double seconds) {
  return std::isfinite(seconds) && seconds >= 0;
}

// A time that protobuf can write as JSON, which dashboards and the page read.
bool IsTime(const google::protobuf::Timestamp& time) {
  constexpr int64_t kEndOfYear9999 = 253'402'300'800;
  return time.seconds() >= 0 && time.seconds() < kEndOfYear9999 && time.nanos() >= 0 &&
         time.nanos() < 1'000'000'000;
}

// What is kept of reports is bounded by what trainers can have to say, not by what a message holds.
constexpr int kMostLayers = 1024;
constexpr int kMostHeads = 128 * kMostLayers;  // of all layers
constexpr int kMostBins = 64;                  // one for each power of two
constexpr size_t kMostEvalBytes = size_t{16} << 10;
constexpr size_t kMostPathBytes = 4096;
constexpr size_t kMostReasonBytes = 4096;

bool IsOfASize(const v1::StepReport& step) {
  int heads = 0;
  for (const v1::LayerReport& layer : step.layers()) heads += layer.probed_recall_by_head_size();
  return step.layers_size() <= kMostLayers && heads <= kMostHeads &&
         step.lengths_size() <= kMostBins && step.documents_size() <= kMostBins;
}

// Figures and addresses that a trainer of a job of so many steps can come to. The loss of a step is
// finite unless the step was skipped for it; a held-out loss need not be.
bool InRange(const v1::AttemptEvent& event, uint64_t steps) {
  switch (event.kind_case()) {
    case v1::AttemptEvent::kStep: {
      const v1::StepReport& step = event.step();
      return step.step() >= 1 && step.step() <= steps && IsDuration(step.step_seconds()) &&
             IsOfASize(step) && IsTime(step.time()) && std::isfinite(step.learning_rate()) &&
             (step.skipped() ||
              (std::isfinite(step.loss()) && std::isfinite(step.gradient_norm())));
    }
    case v1::AttemptEvent::kEval:
      return event.eval().step() <= steps && IsDuration(event.eval().seconds()) &&
             event.eval().ByteSizeLong() <= kMostEvalBytes;
    case v1::AttemptEvent::kCheckpoint:
      return event.checkpoint().step() <= steps && IsDuration(event.checkpoint().seconds());
    case v1::AttemptEvent::kTrainerReady:
      return IsAddress(event.trainer_ready().address());
    case v1::AttemptEvent::kLogs:
      return std::all_of(event.logs().lines().begin(), event.logs().lines().end(),
                         [](const v1::LogLine& line) { return IsTime(line.time()); });
    case v1::AttemptEvent::kTrainerExited:
    case v1::AttemptEvent::kModelExported:
    case v1::AttemptEvent::kMeasurements:  // OnMeasurements() looks at each figure
    case v1::AttemptEvent::KIND_NOT_SET:
      return true;
  }
  return false;
}

// Shown to people, whose terminals obey control characters.
bool IsPath(const std::string& path) {
  return path.size() <= kMostPathBytes && !HasControls(path);
}

const std::string& PathOf(const v1::AttemptEvent& event) {
  if (event.has_model_exported()) return event.model_exported().path();
  return event.checkpoint().path();
}

}  // namespace

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
    session->Close(absl::AbortedError(
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
    return OnAck(transaction, record, message.command_ack(), now);
  }
  if (message.has_inventory()) {
    *record.node.mutable_inventory() = message.inventory();
    schedule_due_ = true;
    return transaction.PutNode(record.node);
  }
  if (message.has_drain()) {
    spdlog::info("nodes/{} is shutting down: {}", session->node(),
                 jobspec::Shortened(message.drain().reason(), kMostReasonBytes));
    record.leaving = true;
    schedule_due_ = true;
    for (auto& [job, machine] : machines_) {
      machine->MoveOff(record.node.name(), "its worker is shutting down");
    }
  }
  return absl::OkStatus();
}

absl::Status ControllerCore::OnAck(store::WriteTransaction& transaction, NodeRecord& record,
                                   const v1::CommandAck& ack, absl::Time now) {
  const std::string node = NodeId(record.node.name());
  const auto sent = unacknowledged_.find(ack.command_id());
  if (sent == unacknowledged_.end()) return absl::OkStatus();
  if (sent->second.node != node) {
    spdlog::warn("nodes/{} acknowledged a command to nodes/{}: ignored", node, sent->second.node);
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(transaction.DeleteCommand(ack.command_id()));
  const SentCommand command = sent->second;
  unacknowledged_.erase(sent);
  if (ack.accepted()) {
    if (const v1::Placement* const dead = DeadRanksOf(command)) {
      std::vector<uint32_t> ranks(dead->trainers());
      std::iota(ranks.begin(), ranks.end(), dead->first_rank());
      OnStrays(record, command.job, command.attempt, command.token, ranks);
    }
    return absl::OkStatus();
  }
  const std::string why = jobspec::Shortened(ack.message(), kMostReasonBytes);
  spdlog::warn("nodes/{} refused a command for attempt {} of jobs/{}: {}", node, command.attempt,
               command.job, why);
  JobMachine* const machine = FindAttempt(command.job, command.attempt, command.token);
  if (machine != nullptr && command.is_start) {
    machine->OnStartRefused("nodes/" + node, why, now, ack.later());
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
    if (absl::IsDataLoss(job.status())) {              // it will never be known
      spdlog::error("{}; what {} reports of it is ignored", std::string(job.status().message()),
                    record.node.name());
      return false;
    }
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
                       InRange(event, job.spec().training().steps()) && IsPath(PathOf(event));
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
      if (machine == nullptr ||
          Dead(machine->attempt()->ranks(static_cast<int>(event.trainer_ready().rank())))) {
        OnStrays(record, event.job(), event.attempt(), event.fencing_token(),
                 {event.trainer_ready().rank()});
      } else {
        machine->OnReady(event.trainer_ready(), now);
      }
      break;
    case v1::AttemptEvent::kTrainerExited:
      if (machine != nullptr) machine->OnExit(event.trainer_exited(), now);
      break;
    case v1::AttemptEvent::kEval:
      if (machine == nullptr) break;
      machine->OnEval(event.eval());
      return transaction.PutEval(event.job(), event.eval());
    case v1::AttemptEvent::kCheckpoint:
      if (machine != nullptr) {
        return OnCheckpoint(transaction, *machine, *event.mutable_checkpoint(), now);
      }
      break;
    case v1::AttemptEvent::kModelExported:
      if (machine != nullptr) machine->OnModelExported(event.model_exported().path());
      break;
    case v1::AttemptEvent::kMeasurements:
      if (machine == nullptr) break;
      return OnMeasurements(transaction, record, *machine, event.measurements());
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
    // Fills a gap that an attempt which was given up left in its record; one rank's word will do.
    if (later == nullptr) {
      return transaction.PutMissingStep(event.job(), MergeSteps({event.step()}));
    }
    later->OnLateStep(event.attempt(), std::move(*event.mutable_step()));
    return absl::OkStatus();
  }
  record.log.Hold(sequence);
  StepMerger::Origin origin{record.session->node(), record.log.incarnation(), sequence};
  const std::optional<v1::StepReport> merged =
      machine->OnStep(std::move(*event.mutable_step()), std::move(origin));
  if (!merged) return absl::OkStatus();
  if (const auto plan = plans_->Observe(machine->job(), *merged)) machine->Replan(*plan);
  machine->NameSlowRanks(plans_->SlowRanks(machine->job()));
  return absl::OkStatus();
}

absl::Status ControllerCore::OnMeasurements(store::WriteTransaction& transaction,
                                            const NodeRecord& record, const JobMachine& machine,
                                            const v1::Measurements& measured) {
  const absl::StatusOr<v1::Measurements> checked =
      plans_->Check(machine.job(), record.node.inventory(), measured);
  if (!checked.ok()) {
    spdlog::warn("{} measured for {} what is not believed: {}", record.node.name(),
                 machine.job().name(), std::string(checked.status().message()));
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(transaction.PutMeasurements(*checked));
  return ReadMeasurements(transaction);
}

absl::Status ControllerCore::OnCheckpoint(store::WriteTransaction& transaction, JobMachine& machine,
                                          v1::CheckpointNotice& checkpoint, absl::Time now) {
  SetTime(now, checkpoint.mutable_time());
  checkpoint.set_attempt(machine.attempt()->number());
  machine.OnCheckpoint(checkpoint);
  const v1::JobSpec& spec = machine.job().spec();
  RETURN_IF_ERROR(transaction.PutCheckpoint(spec.name(), checkpoint));
  // Trainers keep the last few on disk; the record follows.
  const auto kept = static_cast<int>(spec.checkpoint().keep_last());
  return kept == 0 ? absl::OkStatus() : transaction.TrimCheckpoints(spec.name(), kept);
}

absl::Status ControllerCore::AppendLogs(store::WriteTransaction& transaction,
                                        v1::AttemptEvent& event) {
  auto* const lines = event.mutable_logs()->mutable_lines();
  return transaction.AppendLogs(
      event.job(), event.attempt(),
      {std::make_move_iterator(lines->begin()), std::make_move_iterator(lines->end())});
}

}  // namespace ringleader::lifecycle
