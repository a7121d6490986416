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

std::string NodeName(std::string_view id) {
  return "nodes/" + std::string(id);
}
std::string NodeId(std::string_view name) {
  return std::string(name.substr(std::string_view("nodes/").size()));
}

absl::Status CheckEtag(const v1::Job& job, std::string_view etag) {
  if (etag.empty() || etag == job.etag()) return absl::OkStatus();
  return absl::AbortedError(
      absl::StrFormat("%s has changed since (etag %s, not %s): get it again and decide anew",
                      job.name(), job.etag(), std::string(etag)));
}

}  // namespace

absl::Status ControllerCore::Load(store::ReadTransaction& transaction, absl::Time now) {
  for (auto& [id, record] : nodes_) {
    if (record.session) record.session->Close(absl::UnavailableError("reconnect, please"));
  }
  machines_.clear();
  nodes_.clear();
  unacknowledged_.clear();
  outbox_.clear();
  ASSIGN_OR_RETURN(std::vector<v1::Job> jobs, transaction.ListUnfinishedJobs());
  for (v1::Job& job : jobs) {
    const std::string id = job.spec().name();
    if (!v1::Job::State_IsValid(job.state()) || job.state() == v1::Job::STATE_UNSPECIFIED) {
      return absl::DataLossError(
          absl::StrFormat("%s is in state %d, which this program does not know; run the newer "
                          "ringleader-coordinator, or restore the backup made before the upgrade",
                          job.name(), static_cast<int>(job.state())));
    }
    machines_.emplace(id, std::make_unique<JobMachine>(std::move(job), &options_));
  }
  ASSIGN_OR_RETURN(const std::vector<v1::Node> nodes, transaction.ListNodes());
  for (const v1::Node& node : nodes) {
    const std::string id = NodeId(node.name());
    NodeRecord& record = nodes_[id];
    record.node = node;
    record.last_heard = now;
    ASSIGN_OR_RETURN(const std::vector<v1::Command> commands, transaction.ListCommands(id));
    for (const v1::Command& command : commands) Remember(id, command);
  }
  schedule_due_ = true;
  CountTrainers();
  return absl::OkStatus();
}

bool ControllerCore::Tick(absl::Time now) {
  for (auto& [id, record] : nodes_) {
    if (record.session)
      record.last_heard = std::max(record.last_heard, record.session->last_heard());
    const bool out_of_sight = now - record.last_heard > options_.lease;
    if (out_of_sight == record.out_of_sight) continue;
    record.out_of_sight = out_of_sight;
    schedule_due_ = true;
    if (out_of_sight) metrics_->LeaseRanOut();
    spdlog::warn("nodes/{} is {}", id, out_of_sight ? "out of sight: its lease ran out" : "back");
    for (auto& [job, machine] : machines_) {
      machine->OnSight(NodeName(id), out_of_sight ? std::optional(record.last_heard) : std::nullopt,
                       now);
    }
  }
  bool due = schedule_due_;
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

absl::StatusOr<v1::Job> ControllerCore::CreateJob(store::WriteTransaction& transaction,
                                                  const v1::JobSpec& spec,
                                                  const Ownership& ownership, absl::Time now) {
  v1::Job job;
  job.set_name("jobs/" + spec.name());
  // Ids can be used again after a job was deleted; this cannot.
  job.set_uid(absl::StrFormat("%s-%x", spec.name(), absl::ToUnixNanos(now)));
  job.set_etag("1");
  *job.mutable_spec() = spec;
  job.set_owner(ownership.owner);
  job.set_project(ownership.project);
  job.set_state(v1::Job::PENDING);
  job.mutable_progress()->set_total_steps(spec.training().steps());
  SetTime(now, job.mutable_create_time());
  RETURN_IF_ERROR(transaction.CreateJob(&job));
  machines_.insert_or_assign(spec.name(), std::make_unique<JobMachine>(job, &options_));
  schedule_due_ = true;
  return job;
}

absl::StatusOr<v1::Job> ControllerCore::ChangeJob(store::WriteTransaction& transaction,
                                                  std::string_view id, std::string_view etag,
                                                  const JobCheck& may, const Intent& intent,
                                                  absl::Time now) {
  JobMachine* machine = Find(id);
  std::unique_ptr<JobMachine> ended;  // only to say what it may not do any longer
  if (machine == nullptr) {
    ASSIGN_OR_RETURN(v1::Job job, transaction.GetJob(id));
    ended = std::make_unique<JobMachine>(std::move(job), &options_);
    machine = ended.get();
  }
  if (may) RETURN_IF_ERROR(may(machine->job()));
  RETURN_IF_ERROR(CheckEtag(machine->job(), etag));
  RETURN_IF_ERROR(intent(*machine, now));
  if (!ended) RETURN_IF_ERROR(Flush(transaction, *machine));
  return machine->job();
}

absl::Status ControllerCore::DeleteJob(store::WriteTransaction& transaction, std::string_view id,
                                       std::string_view etag, const JobCheck& may) {
  ASSIGN_OR_RETURN(const v1::Job job, transaction.GetJob(id));
  if (may) RETURN_IF_ERROR(may(job));
  RETURN_IF_ERROR(CheckEtag(job, etag));
  const bool runs_somewhere = Find(id) != nullptr;
  if (!IsTerminal(job.state()) || runs_somewhere) {
    return absl::FailedPreconditionError(
        absl::StrFormat("%s is %s%s; cancel it and wait until it has ended", job.name(),
                        v1::Job::State_Name(job.state()),
                        IsTerminal(job.state()) ? ", but trainers of it may still be alive" : ""));
  }
  return transaction.DeleteJob(id);
}

absl::StatusOr<v1::Node> ControllerCore::SetDraining(store::WriteTransaction& transaction,
                                                     std::string_view id, bool draining,
                                                     absl::Time now) {
  const auto found = nodes_.find(id);
  if (found == nodes_.end()) {
    return absl::NotFoundError(absl::StrFormat("nodes/%s does not exist", std::string(id)));
  }
  NodeRecord& record = found->second;
  const bool was_draining = record.node.state() != v1::Node::READY;
  if (draining != was_draining) {
    record.node.set_state(draining ? v1::Node::DRAINING : v1::Node::READY);
    record.node.set_state_reason(draining ? "drained by a user" : "");
    schedule_due_ = true;
    RETURN_IF_ERROR(transaction.PutNode(record.node));
    if (draining) {
      for (auto& [job, machine] : machines_) {
        machine->MoveOff(record.node.name(), "the node is being drained", now);
      }
    }
    RETURN_IF_ERROR(UpdateDrains(transaction));
  }
  return record.View();
}

// --- Placement.

void ControllerCore::CountTrainers() {
  for (auto& [id, record] : nodes_) {
    record.trainers_in_use = 0;
    record.jobs.clear();
  }
  for (const auto& [id, machine] : machines_) {
    const v1::Attempt* attempt = machine->attempt();
    if (attempt == nullptr) continue;
    for (const v1::Placement& placement : attempt->placements()) {
      const auto node = nodes_.find(NodeId(placement.node()));
      if (node == nodes_.end()) continue;
      uint32_t alive = 0;
      for (uint32_t i = 0; i < placement.trainers(); ++i) {
        if (!Dead(attempt->ranks(static_cast<int>(placement.first_rank() + i)))) ++alive;
      }
      if (alive == 0) continue;
      node->second.trainers_in_use += alive;
      node->second.jobs.push_back(machine->job().name());
    }
  }
}

std::vector<scheduler::NodeSlots> ControllerCore::Slots() const {
  std::vector<scheduler::NodeSlots> slots;
  for (const auto& [id, record] : nodes_) slots.push_back(record.Slots());
  return slots;
}

absl::Status ControllerCore::Schedule(store::WriteTransaction& transaction, absl::Time now) {
  schedule_due_ = false;
  CountTrainers();
  std::vector<scheduler::Request> waiting;
  for (const auto& [id, machine] : machines_) {
    if (machine->job().state() == v1::Job::PENDING) {
      waiting.push_back(scheduler::MakeRequest(machine->job()));
    }
  }
  if (waiting.empty()) return absl::OkStatus();
  for (const scheduler::Decision& decision : scheduler::Schedule(std::move(waiting), Slots())) {
    JobMachine& machine = *Find(decision.id);
    if (decision.placements.empty()) {
      machine.Wait(decision.pending_reason);
    } else {
      RETURN_IF_ERROR(Place(transaction, machine, decision.placements, now));
    }
  }
  CountTrainers();
  return absl::OkStatus();
}

std::vector<v1::NodeInventory> ControllerCore::Inventories(
    const std::vector<v1::Placement>& placements) const {
  std::vector<v1::NodeInventory> inventories;
  for (const v1::Placement& placement : placements) {
    const auto node = nodes_.find(NodeId(placement.node()));
    inventories.push_back(node == nodes_.end() ? v1::NodeInventory()
                                               : node->second.node.inventory());
  }
  return inventories;
}

absl::StatusOr<v1::StepPlan> ControllerCore::MakePlan(
    const v1::JobSpec& spec, const std::vector<v1::Placement>& placements) const {
  return plans_->Plan(spec, placements, Inventories(placements));
}

absl::Status ControllerCore::Place(store::WriteTransaction& transaction, JobMachine& machine,
                                   const std::vector<v1::Placement>& placements, absl::Time now) {
  const absl::StatusOr<v1::StepPlan> plan = MakePlan(machine.job().spec(), placements);
  if (!plan.ok()) {
    machine.Reject(absl::StrCat("no plan: ", std::string(plan.status().message())), now);
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(const uint64_t token, transaction.Next(store::Counter::kFencingToken));
  machine.Place(placements, *plan, token, now);
  plans_->Started(machine.job(), *plan, Inventories(placements));
  return absl::OkStatus();
}

absl::StatusOr<JobController::Preview> ControllerCore::PreviewJob(const v1::JobSpec& spec) const {
  v1::Job job;
  *job.mutable_spec() = spec;
  // It comes after everything that waits already.
  SetTime(absl::InfiniteFuture(), job.mutable_create_time());
  std::vector<scheduler::Request> waiting = {scheduler::MakeRequest(job)};
  waiting.back().id.clear();  // not the waiting job of the same name, if there is one
  for (const auto& [id, machine] : machines_) {
    if (machine->job().state() == v1::Job::PENDING) {
      waiting.push_back(scheduler::MakeRequest(machine->job()));
    }
  }
  JobController::Preview preview;
  std::vector<v1::Placement> placements;
  for (scheduler::Decision& decision : scheduler::Schedule(std::move(waiting), Slots())) {
    if (!decision.id.empty()) continue;
    placements = std::move(decision.placements);
    preview.pending_reason = std::move(decision.pending_reason);
  }
  if (placements.empty()) {  // as if one node had room for all
    v1::Placement& placement = placements.emplace_back();
    placement.set_node("nodes/any");
    placement.set_trainers(spec.resources().trainers());
  }
  ASSIGN_OR_RETURN(preview.plan, MakePlan(spec, placements));
  return preview;
}

// --- Writing down.

void ControllerCore::Remember(const std::string& node, const v1::Command& command) {
  unacknowledged_[command.command_id()] = {.node = node,
                                           .job = command.job(),
                                           .attempt = command.attempt(),
                                           .token = command.fencing_token(),
                                           .is_start = command.has_start()};
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

absl::Status ControllerCore::Flush(store::WriteTransaction& transaction, JobMachine& machine) {
  Effects effects = machine.Take();
  for (const std::string& transition : effects.transitions) spdlog::info("{}", transition);
  for (const v1::Job::State state : effects.entered) metrics_->JobBecame(state);
  for (const v1::Attempt::State state : effects.ended) metrics_->AttemptEnded(state);
  metrics_->StepsRecorded(effects.steps.size());
  if (!effects.transitions.empty() || !effects.over.empty()) schedule_due_ = true;
  for (const StepMerger::Origin& origin : effects.released) {
    const auto node = nodes_.find(origin.node);
    if (node != nodes_.end() && node->second.log.incarnation() == origin.incarnation) {
      node->second.log.Release(origin.sequence);
    }
  }
  if (!effects.any()) return absl::OkStatus();
  const std::string& id = machine.job().spec().name();
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
    RETURN_IF_ERROR(transaction.PutCommand(node, &effect.command));
    Remember(node, effect.command);
    const auto record = nodes_.find(node);
    if (record == nodes_.end() || record->second.session == nullptr) continue;
    v1::CoordinatorMessage message;
    *message.mutable_command() = std::move(effect.command);
    outbox_.emplace_back(record->second.session, std::move(message));
  }
  return absl::OkStatus();
}

absl::Status ControllerCore::UpdateDrains(store::WriteTransaction& transaction) {
  for (auto& [id, record] : nodes_) {
    if (record.node.state() != v1::Node::DRAINING || record.trainers_in_use > 0) continue;
    record.node.set_state(v1::Node::DRAINED);
    RETURN_IF_ERROR(transaction.PutNode(record.node));
  }
  return absl::OkStatus();
}

absl::Status ControllerCore::Commit(store::WriteTransaction& transaction, absl::Time now) {
  // Placing follows from changes and makes some itself, e.g. a job that no plan fits.
  for (int round = 0; round < 2; ++round) {
    for (const auto& [id, machine] : machines_) {
      RETURN_IF_ERROR(Flush(transaction, *machine));
    }
    if (!schedule_due_) break;
    RETURN_IF_ERROR(Schedule(transaction, now));
  }
  for (const auto& [id, machine] : machines_) {
    RETURN_IF_ERROR(Flush(transaction, *machine));
    if (!machine->Finished()) continue;
    plans_->Forget(machine->job());
  }
  std::erase_if(machines_, [](const auto& entry) { return entry.second->Finished(); });
  RETURN_IF_ERROR(UpdateDrains(transaction));
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
}

std::vector<v1::Node> ControllerCore::ListNodes() const {
  std::vector<v1::Node> nodes;
  for (const auto& [id, record] : nodes_) nodes.push_back(record.View());
  return nodes;
}

}  // namespace ringleader::lifecycle
