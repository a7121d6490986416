#include "coordinator/lifecycle/controller_core.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "proto/states.h"
#include "proto/timestamps.h"

namespace ringleader::lifecycle {
namespace {

// Jobs that have not ended: each is looked at several times a second, and is held in memory with
// its specification.
struct Unfinished {
  uint64_t jobs;
  uint64_t mebibytes;  // of specifications
};
constexpr Unfinished kOfOneOwner = {.jobs = 2000, .mebibytes = 64};
constexpr Unfinished kOfAllOwners = {.jobs = 10'000, .mebibytes = 256};

absl::Status CheckEtag(const v1::Job& job, std::string_view etag) {
  if (etag.empty() || etag == job.etag()) return absl::OkStatus();
  return absl::AbortedError(
      absl::StrFormat("%s has changed since (etag %s, not %s): get it again and decide anew",
                      job.name(), job.etag(), std::string(etag)));
}

// Whether a job with its checkpoints in `outer` writes where `inner` lies, or removes what is
// there: in a folder of a name that it gives (docs/formats.md). Of normal paths without a slash at
// their end.
bool WritesInto(const std::string& outer, const std::string& inner) {
  const std::string folder = outer == "/" ? outer : outer + "/";
  if (!inner.starts_with(folder)) return false;
  std::string_view name = std::string_view(inner).substr(folder.size());
  name = name.substr(0, name.find('/'));
  return name == "model" || name == "profiles" || name.starts_with("model-token-") ||
         name.starts_with("step-") || name.starts_with("owner.json") || name.starts_with('.');
}

// Before anything is changed: a record that is damaged ends the request that is about it, and not
// the whole transaction.
absl::StatusOr<v1::Job> GetStored(store::ReadTransaction& transaction, std::string_view id) {
  absl::StatusOr<v1::Job> job = transaction.GetJob(id);
  if (absl::IsDataLoss(job.status())) return absl::FailedPreconditionError(job.status().message());
  return job;
}

}  // namespace

void ControllerCore::Drop(const absl::Status& cause) {
  const absl::Status closed = absl::UnavailableError(
      absl::StrCat("nothing can be recorded (", cause.message(), "); reconnect, please"));
  for (auto& [id, record] : nodes_) {
    if (record.session) record.session->Close(closed);
    record.session = nullptr;
  }
  for (const auto& [id, planning] : planning_) *planning.is_overtaken = true;
  planning_.clear();
  outbox_.clear();
  happened_ = {};
  ended_.Clear();
}

absl::Status ControllerCore::Load(store::ReadTransaction& transaction, absl::Time now) {
  // Half of what is stored would pass for all of it: trainers for strays, drained nodes for ready.
  decltype(machines_) machines;
  decltype(nodes_) nodes;
  decltype(unacknowledged_) unacknowledged;
  ASSIGN_OR_RETURN(const bool restored, transaction.Restored());
  ASSIGN_OR_RETURN(std::vector<v1::Job> jobs, transaction.ListUnfinishedJobs());
  for (v1::Job& job : jobs) {
    const std::string id = job.spec().name();
    if (!v1::Job::State_IsValid(job.state()) || job.state() == v1::Job::STATE_UNSPECIFIED) {
      return absl::DataLossError(
          absl::StrFormat("%s is in state %d, which this program does not know; run the newer "
                          "ringleader-coordinator, or restore the backup made before the upgrade",
                          job.name(), static_cast<int>(job.state())));
    }
    machines.emplace(id, std::make_unique<JobMachine>(std::move(job), &options_))
        .first->second->Adopt(now);
  }
  // Ranks outlive a job that failed while their node was out of sight.
  ASSIGN_OR_RETURN(std::vector<v1::Job> failed,
                   transaction.ListFailedJobs([](const v1::Attempt& last) {
                     return !std::all_of(last.ranks().begin(), last.ranks().end(), Dead);
                   }));
  for (v1::Job& job : failed) {
    const std::string id = job.spec().name();
    machines.emplace(id, std::make_unique<JobMachine>(std::move(job), &options_));
  }
  ASSIGN_OR_RETURN(const std::vector<v1::Node> stored, transaction.ListNodes());
  for (const v1::Node& node : stored) {
    const std::string id = NodeId(node.name());
    NodeRecord& record = nodes[id];
    record.node = node;
    // Of a worker that was connected when the coordinator before ended, nothing is stored.
    record.last_heard =
        node.has_last_heartbeat_time() ? std::min(ToTime(node.last_heartbeat_time()), now) : now;
    // The coordinator before may have promised its trainers more time than this one would.
    const absl::Duration promised = absl::Milliseconds(node.fence_milliseconds());
    record.lease_begin = now + std::max(absl::ZeroDuration(), promised - options_.fence_after);
    ASSIGN_OR_RETURN(const std::vector<v1::Command> commands, transaction.ListCommands(id));
    for (const v1::Command& command : commands) {
      unacknowledged.emplace(command.command_id(), Sent(id, command));
    }
  }
  // An attempt that was out of sight is so until its nodes say hello, and so are ranks that outlive
  // their job. A node of which nothing is known was heard just now, at the latest.
  for (auto& [id, machine] : machines) {
    const v1::Attempt* const attempt = machine->attempt();
    if (attempt == nullptr) continue;
    if (attempt->state() != v1::Attempt::UNKNOWN && !IsTerminal(machine->job().state())) continue;
    for (const v1::Placement& placement : attempt->placements()) {
      const auto node = nodes.find(NodeId(placement.node()));
      machine->OnSight(placement.node(), node == nodes.end() ? now : node->second.lease_begin, now);
    }
  }
  machines_ = std::move(machines);
  nodes_ = std::move(nodes);
  unacknowledged_ = std::move(unacknowledged);
  restored_until_ = restored ? now + options_.adoption_timeout : absl::InfinitePast();
  RETURN_IF_ERROR(ReadMeasurements(transaction));
  for (const auto& [id, machine] : machines_) RETURN_IF_ERROR(RestorePlan(transaction, *machine));
  schedule_due_ = true;
  CountTrainers();
  return absl::OkStatus();
}

bool ControllerCore::Tick(absl::Time now) {
  for (auto& [id, record] : nodes_) {
    if (record.session) record.Hear(record.session->last_heard());
    if (record.set_aside() && now >= record.set_aside_until) {
      record.TakeBack();
      schedule_due_ = true;
      spdlog::info("nodes/{} is no longer set aside", id);
    }
    schedule_due_ = schedule_due_ || IsToBeForgotten(record, now);
    const bool out_of_sight = now - record.lease_begin > options_.lease;
    if (out_of_sight == record.out_of_sight) continue;
    record.out_of_sight = out_of_sight;
    schedule_due_ = true;
    if (out_of_sight) metrics_->LeaseRanOut();
    spdlog::warn("nodes/{} is {}", id, out_of_sight ? "out of sight: its lease ran out" : "back");
    for (auto& [job, machine] : machines_) {
      machine->OnSight(record.node.name(),
                       out_of_sight ? std::optional(record.lease_begin) : std::nullopt, now);
    }
  }
  for (auto& [id, machine] : machines_) {
    schedule_due_ = machine->EndAvoidance(now) || schedule_due_;
  }
  schedule_due_ = schedule_due_ || now >= reasons_due_;
  bool due = schedule_due_ || (restored() && now >= restored_until_);
  for (auto& [id, machine] : machines_) {
    machine->Tick(now);
    due = due || machine->effects().any();
  }
  return due;
}

JobMachine* ControllerCore::Find(std::string_view job) {
  const auto found = machines_.find(job);
  return found == machines_.end() ? nullptr : found->second.get();
}

JobMachine* ControllerCore::FindAttempt(std::string_view job, uint32_t attempt, uint64_t token) {
  JobMachine* const machine = Find(job);
  if (machine == nullptr || machine->attempt() == nullptr) return nullptr;
  const v1::Attempt& current = *machine->attempt();
  return current.number() == attempt && current.fencing_token() == token ? machine : nullptr;
}

absl::Status ControllerCore::CheckDirectory(const v1::JobSpec& spec) const {
  const std::string wanted = CheckpointFolder(spec);
  for (const auto& [id, machine] : machines_) {
    if (wanted.empty() || id == spec.name()) continue;
    const std::string& folder = machine->checkpoint_folder();
    const char* const relation = wanted == folder             ? "is"
                                 : WritesInto(folder, wanted) ? "lies in"
                                 : WritesInto(wanted, folder) ? "holds"
                                                              : nullptr;
    if (relation == nullptr) continue;
    const v1::Job& other = machine->job();
    return absl::FailedPreconditionError(absl::StrFormat(
        "checkpoint.directory: %s %s that of %s, which is %s; choose another folder", wanted,
        relation, other.name(), v1::Job::State_Name(other.state())));
  }
  return absl::OkStatus();
}

absl::Status ControllerCore::CheckRoom(const std::string& owner, const v1::JobSpec& spec) const {
  uint64_t all = 1, own = 1, all_bytes = spec.ByteSizeLong(), own_bytes = all_bytes;
  for (const auto& [id, machine] : machines_) {
    ++all;
    all_bytes += machine->spec_bytes();
    if (machine->job().owner() != owner) continue;
    ++own;
    own_bytes += machine->spec_bytes();
  }
  const auto check = [](uint64_t count, uint64_t bytes, const Unfinished& most,
                        const std::string& who) -> absl::Status {
    if (count <= most.jobs && bytes <= most.mebibytes << 20) return absl::OkStatus();
    return absl::ResourceExhaustedError(absl::StrFormat(
        "%s may have %d jobs that have not ended, with specifications of %d MiB; wait until some "
        "have, or cancel some",
        who, most.jobs, most.mebibytes));
  };
  // Where nobody has a name all jobs are nobody's.
  if (!owner.empty()) RETURN_IF_ERROR(check(own, own_bytes, kOfOneOwner, owner));
  return check(all, all_bytes, kOfAllOwners, "all owners together");
}

absl::StatusOr<v1::Job> ControllerCore::CreateJob(store::WriteTransaction& transaction,
                                                  const v1::JobSpec& spec,
                                                  const v1::ModelShape& shape,
                                                  const Ownership& ownership, absl::Time now) {
  RETURN_IF_ERROR(CheckDirectory(spec));
  RETURN_IF_ERROR(CheckRoom(ownership.owner, spec));
  v1::Job job;
  job.set_name("jobs/" + spec.name());
  // Ids can be used again after a job was deleted; this cannot.
  job.set_uid(absl::StrFormat("%s-%x", spec.name(), absl::ToUnixNanos(now)));
  job.set_etag("1");
  *job.mutable_spec() = spec;
  *job.mutable_model_shape() = shape;
  job.set_owner(ownership.owner);
  job.set_project(ownership.project);
  job.set_state(v1::Job::PENDING);
  job.mutable_progress()->set_total_steps(spec.training().steps());
  SetTime(now, job.mutable_create_time());
  SetTime(now, job.mutable_pending_time());
  RETURN_IF_ERROR(transaction.CreateJob(&job));
  machines_.insert_or_assign(spec.name(), std::make_unique<JobMachine>(job, &options_));
  happened_.entered.push_back(job.state());
  schedule_due_ = true;
  return job;
}

absl::StatusOr<v1::Job> ControllerCore::ChangeJob(store::WriteTransaction& transaction,
                                                  std::string_view id, std::string_view etag,
                                                  const JobCheck& may, const Intent& intent,
                                                  absl::Time now) {
  JobMachine* machine = Find(id);
  std::unique_ptr<JobMachine> ended;
  if (machine == nullptr) {
    ASSIGN_OR_RETURN(v1::Job job, GetStored(transaction, id));
    ended = std::make_unique<JobMachine>(std::move(job), &options_);
    machine = ended.get();
  }
  if (may) RETURN_IF_ERROR(may(machine->job()));
  RETURN_IF_ERROR(CheckEtag(machine->job(), etag));
  RETURN_IF_ERROR(intent(*machine, now));
  if (ended != nullptr && !ended->Finished()) {  // it goes on
    RETURN_IF_ERROR(CheckDirectory(ended->job().spec()));
    RETURN_IF_ERROR(CheckRoom(ended->job().owner(), ended->job().spec()));
    machines_.insert_or_assign(std::string(id), std::move(ended));
  }
  if (ended == nullptr) RETURN_IF_ERROR(Flush(transaction, *machine, now));
  return machine->job();
}

absl::Status ControllerCore::DeleteJob(store::WriteTransaction& transaction, std::string_view id,
                                       std::string_view etag, const JobCheck& may) {
  ASSIGN_OR_RETURN(const v1::Job job, GetStored(transaction, id));
  if (may) RETURN_IF_ERROR(may(job));
  RETURN_IF_ERROR(CheckEtag(job, etag));
  const bool runs_somewhere = Find(id) != nullptr;
  if (!IsTerminal(job.state()) || runs_somewhere) {
    return absl::FailedPreconditionError(
        absl::StrFormat("%s is %s%s; cancel it and wait until it has ended", job.name(),
                        v1::Job::State_Name(job.state()),
                        IsTerminal(job.state()) ? ", but trainers of it may still be alive" : ""));
  }
  ended_.Clear();
  return transaction.DeleteJob(id);
}

ControllerCore::SentCommand ControllerCore::Sent(const std::string& node,
                                                 const v1::Command& command) {
  return {.node = node,
          .job = command.job(),
          .attempt = command.attempt(),
          .token = command.fencing_token(),
          .is_start = command.has_start(),
          .is_stop = command.has_stop()};
}

void ControllerCore::AddCertificates(const v1::Attempt& attempt, v1::ConnectPeers* peers) const {
  std::vector<std::string> certificates(static_cast<size_t>(peers->addresses_size()));
  bool any = false;
  for (const v1::Placement& placement : attempt.placements()) {
    const auto record = nodes_.find(NodeId(placement.node()));
    if (record == nodes_.end() || record->second.node.certificate().empty()) continue;
    const auto first = certificates.begin() + placement.first_rank();
    std::fill(first, first + placement.trainers(), record->second.node.certificate());
    any = true;
  }
  if (any) peers->mutable_certificates()->Assign(certificates.begin(), certificates.end());
}

absl::Status ControllerCore::Flush(store::WriteTransaction& transaction, JobMachine& machine,
                                   absl::Time now) {
  Effects effects = machine.Take();
  JudgeNodes(machine, effects, now);
  for (const std::string& transition : effects.transitions) spdlog::info("{}", transition);
  happened_.entered.insert(happened_.entered.end(), effects.entered.begin(), effects.entered.end());
  happened_.ended.insert(happened_.ended.end(), effects.ended.begin(), effects.ended.end());
  happened_.steps += effects.steps.size();
  if (!effects.transitions.empty() || !effects.over.empty()) schedule_due_ = true;
  for (const StepMerger::Origin& origin : effects.released) {
    const auto node = nodes_.find(origin.node);
    if (node != nodes_.end() && node->second.log.incarnation() == origin.incarnation) {
      node->second.log.Release(origin.sequence);
    }
  }
  if (!effects.any()) return absl::OkStatus();
  const std::string& id = machine.job().spec().name();
  for (const uint32_t attempt : effects.forgotten_attempts) {
    RETURN_IF_ERROR(transaction.DeleteAttempt(id, attempt));
  }
  for (const v1::Attempt& attempt : machine.job().attempts()) {
    if (!effects.changed_attempts.contains(attempt.number())) continue;
    RETURN_IF_ERROR(transaction.PutAttempt(id, attempt));
  }
  RETURN_IF_ERROR(transaction.UpdateJob(machine.mutable_job()));
  for (const v1::StepReport& step : effects.steps) {
    RETURN_IF_ERROR(transaction.PutStep(id, step));
  }
  for (const uint32_t attempt : effects.over) {
    RETURN_IF_ERROR(transaction.DeleteCommands(id, attempt));
    std::erase_if(unacknowledged_, [&](const auto& entry) {
      return entry.second.job == id && entry.second.attempt == attempt;
    });
  }
  for (Effects::NodeCommand& effect : effects.commands) {
    const std::string node = NodeId(effect.node);
    if (effect.command.has_connect()) {
      AddCertificates(*machine.attempt(), effect.command.mutable_connect());
    }
    if (effect.command.has_start()) {
      v1::StartTrainers* const start = effect.command.mutable_start();
      if (KnowToMeasure(*machine.attempt())) {
        *start->mutable_measure() = plans_->WhatToMeasure(machine.job());
      }
      if (start->first_rank() == 0) RETURN_IF_ERROR(transaction.PutPlan(id, start->plan()));
    }
    if (effect.command.has_plan()) {
      RETURN_IF_ERROR(transaction.PutPlan(id, effect.command.plan()));
    }
    RETURN_IF_ERROR(transaction.PutCommand(node, &effect.command));
    SentCommand& sent = unacknowledged_[effect.command.command_id()];
    sent = Sent(node, effect.command);
    const auto record = nodes_.find(node);
    if (record == nodes_.end() || record->second.session == nullptr) continue;
    sent.sent_on = record->second.session.get();
    v1::CoordinatorMessage message;
    *message.mutable_command() = std::move(effect.command);
    outbox_.emplace_back(record->second.session, std::move(message));
  }
  return absl::OkStatus();
}

absl::Status ControllerCore::Commit(store::WriteTransaction& transaction, absl::Time now) {
  ended_.Clear();
  // What changed may make room, which Flush() notes.
  for (const auto& [id, machine] : machines_) {
    RETURN_IF_ERROR(Flush(transaction, *machine, now));
  }
  if (restored() && now >= restored_until_) {
    RETURN_IF_ERROR(transaction.EndRestore());
    restored_until_ = absl::InfinitePast();
    schedule_due_ = true;
  }
  if (schedule_due_) RETURN_IF_ERROR(Schedule(transaction, now));
  for (const auto& [id, machine] : machines_) {
    RETURN_IF_ERROR(Flush(transaction, *machine, now));
    if (!machine->Finished()) continue;
    plans_->Forget(machine->job());
  }
  std::erase_if(machines_, [](const auto& entry) { return entry.second->Finished(); });
  RETURN_IF_ERROR(UpdateDrains(transaction));
  RETURN_IF_ERROR(ForgetNodes(transaction, now));
  RETURN_IF_ERROR(StoreLastHeard(transaction));
  for (auto& [id, record] : nodes_) {
    if (const std::optional<uint64_t> applied = record.log.TakeUnstored()) {
      RETURN_IF_ERROR(transaction.SetAppliedSequence(id, record.log.incarnation(), *applied));
    }
    if (record.session == nullptr) continue;
    if (const std::optional<uint64_t> safe = record.log.TakeAcknowledgement()) {
      v1::CoordinatorMessage message;
      message.set_acknowledged_sequence(*safe);
      outbox_.emplace_back(record.session, std::move(message));
    }
  }
  return absl::OkStatus();
}

void ControllerCore::Publish() {
  for (auto& [session, message] : std::exchange(outbox_, {})) session->Send(std::move(message));
  const Happened happened = std::exchange(happened_, {});
  for (const v1::Job::State state : happened.entered) metrics_->JobBecame(state);
  for (const v1::Attempt::State state : happened.ended) metrics_->AttemptEnded(state);
  metrics_->StepsRecorded(happened.steps);
}

}  // namespace ringleader::lifecycle
