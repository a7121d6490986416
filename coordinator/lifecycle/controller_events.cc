// What workers report, applied to the core: events of attempts, acknowledgements.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
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
constexpr uint32_t kMostLayers = 1024;
constexpr int kMostHeads = 128 * int{kMostLayers};  // of all layers
constexpr int kMostBins = 64;                       // one for each power of two
constexpr size_t kMostEvalBytes = size_t{16} << 10;
constexpr size_t kMostPathBytes = 4096;
constexpr size_t kMostReasonBytes = 4096;

// A ring has as many steps as ranks, and all ranks may be in one. What is merged only no rank has.
bool IsOfASize(const v1::StepReport& step, int ranks) {
  int heads = 0;
  for (const v1::LayerReport& layer : step.layers()) {
    if (layer.layer() >= kMostLayers || layer.tiles_per_ring_step_size() > ranks) return false;
    heads += layer.probed_recall_by_head_size();
  }
  return step.layers_size() <= int{kMostLayers} && heads <= kMostHeads &&
         step.lengths_size() <= kMostBins && step.documents_size() <= kMostBins &&
         step.rank_tiles().empty() && step.rank_paces().empty();
}

// Figures and addresses that a trainer can come to in an attempt of so many ranks, of a job of so
// many steps. The loss of a step is finite unless the step was skipped for it; a held-out loss need
// not be.
bool InRange(const v1::AttemptEvent& event, uint64_t steps, int ranks) {
  switch (event.kind_case()) {
    case v1::AttemptEvent::kStep: {
      const v1::StepReport& step = event.step();
      return step.step() >= 1 && step.step() <= steps && IsDuration(step.step_seconds()) &&
             IsOfASize(step, ranks) && IsTime(step.time()) && std::isfinite(step.learning_rate()) &&
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
    if (record.leaving()) return absl::OkStatus();
    spdlog::info("nodes/{} is shutting down: {}", session->node(),
                 jobspec::Shortened(message.drain().reason(), kMostReasonBytes));
    record.node.set_leaving(true);
    schedule_due_ = true;
    for (auto& [job, machine] : machines_) {
      machine->MoveOff(record.node.name(), "its worker is shutting down");
    }
    return transaction.PutNode(record.node);
  }
  return absl::OkStatus();
}

absl::Status ControllerCore::OnAck(store::WriteTransaction& transaction, NodeRecord& record,
                                   const v1::CommandAck& ack, absl::Time now) {
  const std::string node = NodeId(record.node.name());
  const auto sent = unacknowledged_.find(ack.command_id());
  if (sent == unacknowledged_.end()) return absl::OkStatus();
  if (sent->second.node != node) {
    warnings_.Add(record.node.name(), Warnings::Reason::kForeignCommand, [&] {
      return absl::StrFormat("nodes/%s acknowledged a command to nodes/%s: ignored", node,
                             sent->second.node);
    });
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
  const std::string& node = record.node.name();
  if (!store::JobIdFromName(absl::StrCat("jobs/", event.job())).ok()) {
    warnings_.Add(node, Warnings::Reason::kNoJobsName, [&] {
      return absl::StrFormat("%s reports of a job \"%s\", as which none can be called: ignored",
                             node, jobspec::Printable(event.job()));
    });
    return false;
  }
  const v1::Placement* placement = nullptr;
  // How far late steps of a job that has ended may lie is looked at with its record.
  uint64_t steps = std::numeric_limits<uint64_t>::max();
  int ranks = 0;
  if (const JobMachine* const machine = Find(event.job())) {
    const auto& attempts = machine->job().attempts();
    const auto attempt = std::find_if(attempts.begin(), attempts.end(), [&](const v1::Attempt& a) {
      return a.number() == event.attempt() && a.fencing_token() == event.fencing_token();
    });
    // The event is of a job that had the name before.
    if (attempt == attempts.end()) return false;
    placement = PlacementOn(*attempt, node);
    steps = machine->job().spec().training().steps();
    ranks = attempt->ranks_size();
  } else {
    const absl::StatusOr<EndedAttempt*> ended =
        ended_.Find(transaction, node, event.job(), event.attempt());
    if (absl::IsDataLoss(ended.status())) {  // it will never be known
      warnings_.Add(node, Warnings::Reason::kDamagedRecord, [&] {
        return absl::StrFormat("%s; what %s reports of it is ignored", ended.status().message(),
                               node);
      });
      return false;
    }
    if (!ended.ok()) return ended.status();
    // Deleted meanwhile, or of a job that had the name before.
    if (*ended == nullptr || (*ended)->token != event.fencing_token()) return false;
    if ((*ended)->placement.has_value()) placement = &*(*ended)->placement;
    ranks = (*ended)->ranks;
  }
  const bool genuine = placement != nullptr && SpeaksOf(*placement, event) &&
                       InRange(event, steps, ranks) && IsPath(PathOf(event));
  if (!genuine) {
    warnings_.Add(node, Warnings::Reason::kNotItsOwn, [&] {
      return absl::StrFormat(
          "%s reports of attempt %d of jobs/%s what it cannot know, for those ranks run elsewhere, "
          "the job has no such step or path, or a figure is none: ignored",
          node, event.attempt(), event.job());
    });
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
    if (later == nullptr) return OnStepOfTheEnded(transaction, record, event);
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

absl::Status ControllerCore::OnStepOfTheEnded(store::WriteTransaction& transaction,
                                              const NodeRecord& record,
                                              const v1::AttemptEvent& event) {
  ASSIGN_OR_RETURN(EndedAttempt* const ended,
                   ended_.Find(transaction, record.node.name(), event.job(), event.attempt()));
  if (ended == nullptr) return absl::OkStatus();
  ASSIGN_OR_RETURN(const bool lacks,
                   EndedAttempts::Lacks(transaction, event.job(), event.step(), ended));
  if (!lacks) return absl::OkStatus();
  ended->recorded = std::max(ended->recorded.value_or(0), event.step().step());
  return transaction.PutMissingStep(event.job(), MergeSteps({event.step()}));
}

absl::Status ControllerCore::OnMeasurements(store::WriteTransaction& transaction,
                                            const NodeRecord& record, const JobMachine& machine,
                                            const v1::Measurements& measured) {
  const absl::StatusOr<v1::Measurements> checked =
      plans_->Check(machine.job(), record.node.inventory(), measured);
  if (!checked.ok()) {
    warnings_.Add(record.node.name(), Warnings::Reason::kNotBelieved, [&] {
      return absl::StrFormat("%s measured for %s what is not believed: %s", record.node.name(),
                             machine.job().name(), checked.status().message());
    });
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
