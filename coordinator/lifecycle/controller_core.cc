#include "coordinator/lifecycle/controller_core.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/process/version.h"
#include "base/status_macros.h"
#include "google/protobuf/util/message_differencer.h"
#include "proto/states.h"
#include "proto/timestamps.h"

namespace ringleader::lifecycle {
namespace {

// Plans that are made at the same time: each holds a copy of its job's specification.
constexpr size_t kMaxPlanning = 32;

// Reports of an attempt's last steps from which a restarted coordinator learns again what it costs.
// Those before hardly count any more.
constexpr uint64_t kStepsRelearned = 128;

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
  for (const auto& [id, planning] : planning_) *planning.is_overtaken = true;
  planning_.clear();
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
    machines_.emplace(id, std::make_unique<JobMachine>(std::move(job), &options_))
        .first->second->Adopt(now);
  }
  ASSIGN_OR_RETURN(const std::vector<v1::Node> nodes, transaction.ListNodes());
  for (const v1::Node& node : nodes) {
    const std::string id = NodeId(node.name());
    NodeRecord& record = nodes_[id];
    record.node = node;
    // The coordinator before may have promised its trainers more time than this one would.
    const absl::Duration promised = absl::Milliseconds(node.fence_milliseconds());
    record.last_heard = now + std::max(absl::ZeroDuration(), promised - options_.fence_after);
    ASSIGN_OR_RETURN(const std::vector<v1::Command> commands, transaction.ListCommands(id));
    for (const v1::Command& command : commands) Remember(id, command);
  }
  // An attempt that was out of sight is so until its nodes say hello.
  for (auto& [id, machine] : machines_) {
    const v1::Attempt* const attempt = machine->attempt();
    if (attempt == nullptr || attempt->state() != v1::Attempt::UNKNOWN) continue;
    for (const v1::Placement& placement : attempt->placements()) {
      const auto node = nodes_.find(NodeId(placement.node()));
      if (node == nodes_.end()) continue;
      machine->OnSight(placement.node(), node->second.last_heard, now);
    }
  }
  RETURN_IF_ERROR(ReadMeasurements(transaction));
  for (const auto& [id, machine] : machines_) RETURN_IF_ERROR(RestorePlan(transaction, *machine));
  schedule_due_ = true;
  CountTrainers();
  return absl::OkStatus();
}

absl::Status ControllerCore::ReadMeasurements(store::ReadTransaction& transaction) {
  ASSIGN_OR_RETURN(store::MeasurementList list, transaction.ListMeasurements());
  // They are measured anew, like machines that nobody knows.
  for (const absl::Status& damage : list.damaged) {
    spdlog::error("{}; it is measured anew", std::string(damage.message()));
  }
  plans_->Measured(std::make_shared<const store::MeasurementList>(std::move(list)));
  return absl::OkStatus();
}

absl::Status ControllerCore::RestorePlan(store::ReadTransaction& transaction,
                                         const JobMachine& machine) {
  const std::string& id = machine.job().spec().name();
  if (machine.attempt() == nullptr) return absl::OkStatus();
  ASSIGN_OR_RETURN(const std::optional<v1::StepPlan> plan, transaction.GetPlan(id));
  if (!plan.has_value()) return absl::OkStatus();  // of an earlier release
  const uint64_t step = machine.job().progress().step();
  std::vector<v1::StepReport> reports;
  store::StepPage page;
  page.more = true;
  while (page.more) {
    ASSIGN_OR_RETURN(page, transaction.ListSteps(id, step - std::min(step, kStepsRelearned),
                                                 page.last_sequence, kStepsRelearned));
    std::move(page.steps.begin(), page.steps.end(), std::back_inserter(reports));
  }
  const auto& placements = machine.attempt()->placements();
  plans_->Restored(machine.job(), *plan, Inventories({placements.begin(), placements.end()}),
                   reports);
  return absl::OkStatus();
}

bool ControllerCore::Tick(absl::Time now) {
  for (auto& [id, record] : nodes_) {
    if (record.session)
      record.last_heard = std::max(record.last_heard, record.session->last_heard());
    if (record.set_aside() && now >= record.set_aside_until) {
      record.TakeBack();
      schedule_due_ = true;
      spdlog::info("nodes/{} is no longer set aside", id);
    }
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
  for (auto& [id, machine] : machines_) {
    schedule_due_ = machine->EndAvoidance(now) || schedule_due_;
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

absl::Status ControllerCore::CheckDirectory(const v1::JobSpec& spec) const {
  const std::string wanted = CheckpointFolder(spec);
  for (const auto& [id, machine] : machines_) {
    if (machine->checkpoint_folder() != wanted || wanted.empty() || id == spec.name()) continue;
    const v1::Job& other = machine->job();
    return absl::FailedPreconditionError(absl::StrFormat(
        "checkpoint.directory: %s is that of %s, which is %s; choose another folder", wanted,
        other.name(), v1::Job::State_Name(other.state())));
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::Job> ControllerCore::CreateJob(store::WriteTransaction& transaction,
                                                  const v1::JobSpec& spec,
                                                  const v1::ModelShape& shape,
                                                  const Ownership& ownership, absl::Time now) {
  RETURN_IF_ERROR(CheckDirectory(spec));
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
  std::unique_ptr<JobMachine> ended;
  if (machine == nullptr) {
    ASSIGN_OR_RETURN(v1::Job job, transaction.GetJob(id));
    ended = std::make_unique<JobMachine>(std::move(job), &options_);
    machine = ended.get();
  }
  if (may) RETURN_IF_ERROR(may(machine->job()));
  RETURN_IF_ERROR(CheckEtag(machine->job(), etag));
  RETURN_IF_ERROR(intent(*machine, now));
  if (ended != nullptr && !ended->Finished()) {  // it goes on
    RETURN_IF_ERROR(CheckDirectory(ended->job().spec()));
    machines_.insert_or_assign(std::string(id), std::move(ended));
  }
  if (ended == nullptr) RETURN_IF_ERROR(Flush(transaction, *machine, now));
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
  if (!draining && record.set_aside()) {
    record.TakeBack();
    record.failures.Clear();
    schedule_due_ = true;
  }
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
    record.trainers_in_use = record.reserved = 0;
    record.jobs.clear();
  }
  for (const auto& [id, planning] : planning_) {
    for (const v1::Placement& placement : planning.placements) {
      const auto node = nodes_.find(NodeId(placement.node()));
      if (node != nodes_.end()) node->second.reserved += placement.trainers();
    }
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

absl::Status ControllerCore::Schedule(store::ReadTransaction& transaction) {
  schedule_due_ = false;
  std::erase_if(planning_, [&](const auto& entry) {
    return *entry.second.is_overtaken = !Stands(entry.first, entry.second);
  });
  CountTrainers();
  std::vector<scheduler::Request> waiting;
  for (const auto& [id, machine] : machines_) {
    if (machine->job().state() == v1::Job::PENDING && !planning_.contains(id)) {
      waiting.push_back(scheduler::MakeRequest(machine->job()));
      waiting.back().avoid = machine->AvoidedNodes();
    }
  }
  if (waiting.empty()) return absl::OkStatus();
  for (const scheduler::Decision& decision : scheduler::Schedule(std::move(waiting), Slots())) {
    JobMachine& machine = *Find(decision.id);
    if (decision.placements.empty()) {
      machine.Wait(decision.pending_reason);
    } else if (*plans_under_way_ >= kMaxPlanning) {
      machine.Wait(absl::StrFormat("there is room; its plan comes after those of %d other jobs",
                                   plans_under_way_->load()));
    } else {
      RETURN_IF_ERROR(BeginPlanning(transaction, machine, decision.placements));
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

absl::Status ControllerCore::BeginPlanning(store::ReadTransaction& transaction, JobMachine& machine,
                                           const std::vector<v1::Placement>& placements) {
  const std::string& id = machine.job().spec().name();
  std::optional<v1::StepPlan> kept;
  if (machine.job().progress().checkpoint_step() > 0) {
    ASSIGN_OR_RETURN(kept, transaction.GetPlan(id));
  }
  const uint64_t ticket = ++last_ticket_;
  Planning& planning = planning_[id];
  planning = {.ticket = ticket,
              .placements = placements,
              .nodes = Inventories(placements),
              .is_overtaken = std::make_shared<std::atomic<bool>>(false)};
  machine.Wait(absl::StrFormat(
      "planning how to run on %s%s", placements.front().node(),
      placements.size() == 1 ? "" : absl::StrFormat(" and %d more", placements.size() - 1)));
  PlanRequest request = {.spec = machine.job().spec(),
                         .placements = placements,
                         .nodes = planning.nodes,
                         .kept = std::move(kept),
                         .is_overtaken = planning.is_overtaken};
  if (machine.job().has_model_shape()) request.shape = machine.job().model_shape();
  ++*plans_under_way_;
  plans_->Plan(std::move(request), [on_made = on_made_, under_way = plans_under_way_, id,
                                    ticket](absl::StatusOr<MadePlan> made) {
    --*under_way;
    on_made(id, ticket, std::move(made));
  });
  return absl::OkStatus();
}

bool ControllerCore::Stands(const std::string& job, const Planning& planning) {
  const JobMachine* const machine = Find(job);
  if (machine == nullptr || machine->job().state() != v1::Job::PENDING) return false;
  for (size_t i = 0; i < planning.placements.size(); ++i) {
    const auto node = nodes_.find(NodeId(planning.placements[i].node()));
    if (node == nodes_.end() || !node->second.TakesTrainers()) return false;
    if (!google::protobuf::util::MessageDifferencer::Equals(node->second.node.inventory(),
                                                            planning.nodes[i])) {
      return false;
    }
  }
  return true;
}

absl::Status ControllerCore::OnPlanned(store::WriteTransaction& transaction, const std::string& job,
                                       uint64_t ticket, const absl::StatusOr<MadePlan>& made,
                                       absl::Time now) {
  schedule_due_ = true;
  const auto found = planning_.find(job);
  if (found == planning_.end() || found->second.ticket != ticket) return absl::OkStatus();
  const Planning planning = std::move(found->second);
  planning_.erase(found);
  if (!Stands(job, planning)) return absl::OkStatus();
  JobMachine& machine = *Find(job);
  if (!made.ok()) {
    machine.Reject(absl::StrCat("no plan: ", std::string(made.status().message())), now);
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(const uint64_t token, transaction.Next(store::Counter::kFencingToken));
  if (!machine.job().has_model_shape()) {
    *machine.mutable_job()->mutable_model_shape() = made->shape;
  }
  machine.Place(planning.placements, made->plan, token, now);
  plans_->Started(machine.job(), made->plan, planning.nodes);
  return absl::OkStatus();
}

absl::StatusOr<PlanRequest> ControllerCore::PreparePreview(const v1::JobSpec& spec,
                                                           std::string* pending_reason) const {
  RETURN_IF_ERROR(CheckDirectory(spec));
  v1::Job job;
  *job.mutable_spec() = spec;
  // It comes after everything that waits already.
  SetTime(absl::InfiniteFuture(), job.mutable_create_time());
  std::vector<scheduler::Request> waiting = {scheduler::MakeRequest(job)};
  waiting.back().id.clear();  // not the waiting job of the same name, if there is one
  for (const auto& [id, machine] : machines_) {
    if (machine->job().state() == v1::Job::PENDING && !planning_.contains(id)) {
      waiting.push_back(scheduler::MakeRequest(machine->job()));
    }
  }
  PlanRequest request = {.spec = spec, .is_preview = true};
  for (scheduler::Decision& decision : scheduler::Schedule(std::move(waiting), Slots())) {
    if (!decision.id.empty()) continue;
    request.placements = std::move(decision.placements);
    *pending_reason = std::move(decision.pending_reason);
  }
  if (request.placements.empty()) {  // as if one node had room for all
    v1::Placement& placement = request.placements.emplace_back();
    placement.set_node("nodes/any");
    placement.set_trainers(spec.resources().trainers());
  }
  request.nodes = Inventories(request.placements);
  return request;
}

// --- Writing down.

ControllerCore::SentCommand& ControllerCore::Remember(const std::string& node,
                                                      const v1::Command& command) {
  return unacknowledged_[command.command_id()] = {.node = node,
                                                  .job = command.job(),
                                                  .attempt = command.attempt(),
                                                  .token = command.fencing_token(),
                                                  .is_start = command.has_start()};
}

void ControllerCore::JudgeNodes(const JobMachine& machine, const Effects& effects, absl::Time now) {
  for (const std::string& name : effects.nodes_that_served) {
    if (const auto node = nodes_.find(NodeId(name)); node != nodes_.end()) {
      node->second.failures.Clear();
    }
  }
  for (const Effects::NodeFailure& failure : effects.node_failures) {
    const auto node = nodes_.find(NodeId(failure.node));
    if (node == nodes_.end()) continue;
    NodeRecord& record = node->second;
    // A job that fails on two nodes is to blame itself.
    bool failed_elsewhere = false;
    for (auto& [id, other] : nodes_) {
      if (id == node->first || !other.failures.Forget(machine.job().uid())) continue;
      failed_elsewhere = true;
    }
    if (failed_elsewhere) continue;
    record.failures.Add(machine.job().uid(), now);
    const size_t jobs = record.failures.JobsSince(now - options_.set_aside_window);
    const bool is_last = std::none_of(nodes_.begin(), nodes_.end(), [&](const auto& entry) {
      return &entry.second != &record && entry.second.TakesTrainers();
    });
    if (jobs < options_.set_aside_after_jobs || is_last) continue;
    record.set_aside_until = now + options_.set_aside_for;
    record.failures.Clear();
    record.set_aside_reason = absl::StrFormat(
        "set aside until %s: attempts of %d jobs failed here one after the other, the last (%s): "
        "%s; ringctl undrain %s takes it back at once",
        absl::FormatTime(absl::RFC3339_sec, record.set_aside_until, absl::UTCTimeZone()), jobs,
        machine.job().name(), failure.message, node->first);
    spdlog::warn("{} is {}", failure.node, record.set_aside_reason);
  }
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

bool ControllerCore::KnowToMeasure(const v1::Attempt& attempt) const {
  return std::all_of(attempt.placements().begin(), attempt.placements().end(),
                     [&](const v1::Placement& placement) {
                       const auto record = nodes_.find(NodeId(placement.node()));
                       return record != nodes_.end() &&
                              record->second.node.worker_version() == kVersion;
                     });
}

absl::Status ControllerCore::Flush(store::WriteTransaction& transaction, JobMachine& machine,
                                   absl::Time now) {
  Effects effects = machine.Take();
  JudgeNodes(machine, effects, now);
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
    SentCommand& sent = Remember(node, effect.command);
    const auto record = nodes_.find(node);
    if (record == nodes_.end() || record->second.session == nullptr) continue;
    sent.sent_on = record->second.session.get();
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
  // What changed may make room, which Flush() notes.
  for (const auto& [id, machine] : machines_) {
    RETURN_IF_ERROR(Flush(transaction, *machine, now));
  }
  if (schedule_due_) RETURN_IF_ERROR(Schedule(transaction));
  for (const auto& [id, machine] : machines_) {
    RETURN_IF_ERROR(Flush(transaction, *machine, now));
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
