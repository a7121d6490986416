// Where attempts run and by which plan: slots, the queue, plans that are made elsewhere and come
// back.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/process/version.h"
#include "base/status_macros.h"
#include "coordinator/lifecycle/controller_core.h"
#include "google/protobuf/util/message_differencer.h"
#include "proto/states.h"

namespace ringleader::lifecycle {
namespace {

// Reports of an attempt's last steps from which a restarted coordinator learns again what it costs.
// Those before hardly count any more.
constexpr uint64_t kStepsRelearned = 128;

// Of records that are written for a new reason to wait and nothing else: at once, and from then on.
constexpr double kMostReasonBytes = 4 << 20, kReasonBytesASecond = 4 << 20;
constexpr uint64_t kReasonOverhead = 1 << 10;  // what a record has beside its specification

}  // namespace

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

void ControllerCore::SetScarce(bool is_scarce) {
  if (std::exchange(is_scarce_, is_scarce) && !is_scarce) schedule_due_ = true;
}

void ControllerCore::Wait(std::vector<Reason> reasons, absl::Time now) {
  if (is_scarce_) return;
  reason_bytes_ =
      std::min(kMostReasonBytes,
               reason_bytes_ + kReasonBytesASecond * absl::ToDoubleSeconds(now - reason_bytes_at_));
  reason_bytes_at_ = now;
  // Those go first that had to wait last time.
  std::ranges::rotate(reasons, std::ranges::find(reasons, next_reason_of_, &Reason::job));
  next_reason_of_.clear();
  for (const Reason& reason : reasons) {
    JobMachine& machine = *Find(reason.job);
    const std::string& known = machine.job().state_reason();
    if (reason.text == known) continue;
    // The first is part of what the job's coming costs anyway.
    if (!known.empty()) {
      const auto bytes = static_cast<double>(machine.spec_bytes() + kReasonOverhead);
      if (reason_bytes_ < std::min(bytes, kMostReasonBytes)) {
        if (next_reason_of_.empty()) next_reason_of_ = reason.job;
        reasons_due_ = now + absl::Seconds(1);
        continue;
      }
      reason_bytes_ -= bytes;
    }
    machine.Wait(reason.text);
  }
}

absl::Status ControllerCore::Schedule(store::ReadTransaction& transaction, absl::Time now) {
  schedule_due_ = false;
  reasons_due_ = absl::InfiniteFuture();
  std::erase_if(planning_, [&](const auto& entry) {
    return *entry.second.is_overtaken = !Stands(entry.first, entry.second);
  });
  CountTrainers();
  std::vector<scheduler::Request> waiting;
  for (const auto& [id, machine] : machines_) {
    if (machine->job().state() == v1::Job::PENDING && !planning_.contains(id)) {
      waiting.push_back(scheduler::MakeRequest(machine->job()));
      waiting.back().avoid = machine->AvoidedNodes();
      waiting.back().shun = machine->SlowNodes();
    }
  }
  std::vector<Reason> reasons;
  if (restored()) {
    for (const scheduler::Request& request : waiting) {
      reasons.push_back(
          {.job = request.id,
           .text = absl::StrCat(
               "the coordinator's database was put back from a backup: until ",
               absl::FormatTime(absl::RFC3339_sec, restored_until_, absl::UTCTimeZone()),
               " trainers may run that it does not know of, and no job is started")});
    }
    Wait(std::move(reasons), now);
    return absl::OkStatus();
  }
  if (waiting.empty()) return absl::OkStatus();
  for (const scheduler::Decision& decision : scheduler::Schedule(std::move(waiting), Slots())) {
    JobMachine& machine = *Find(decision.id);
    if (decision.placements.empty()) {
      reasons.push_back({.job = decision.id, .text = decision.pending_reason});
    } else if (const std::string wait = plans_under_way_->Wait(machine.job().owner());
               !wait.empty()) {
      reasons.push_back({.job = decision.id, .text = wait});
    } else {
      RETURN_IF_ERROR(BeginPlanning(transaction, machine, decision.placements, now));
    }
  }
  Wait(std::move(reasons), now);
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
                                           const std::vector<v1::Placement>& placements,
                                           absl::Time now) {
  const std::string& id = machine.job().spec().name();
  std::optional<v1::StepPlan> kept;
  if (machine.job().progress().checkpoint_step() > 0) {
    absl::StatusOr<std::optional<v1::StepPlan>> stored = transaction.GetPlan(id);
    // Under another plan it would add in another order than what it goes on from.
    if (absl::IsDataLoss(stored.status())) {
      machine.Reject(absl::StrCat("no plan: ", std::string(stored.status().message())), now);
      return absl::OkStatus();
    }
    if (!stored.ok()) return stored.status();
    kept = *std::move(stored);
  }
  const bool kept_was_missed = kept.has_value() && machine.Missed(kept->version());
  const uint64_t ticket = ++last_ticket_;
  Planning& planning = planning_[id];
  planning = {.ticket = ticket,
              .placements = placements,
              .nodes = Inventories(placements),
              .is_overtaken = std::make_shared<std::atomic<bool>>(false),
              .since = now};
  if (!is_scarce_) {
    machine.Wait(absl::StrFormat(
        "planning how to run on %s%s", placements.front().node(),
        placements.size() == 1 ? "" : absl::StrFormat(" and %d more", placements.size() - 1)));
  }
  const std::string& owner = machine.job().owner();
  PlanRequest request = {.spec = machine.job().spec(),
                         .owner = owner,
                         .placements = placements,
                         .nodes = planning.nodes,
                         .kept = std::move(kept),
                         .kept_was_missed = kept_was_missed,
                         .is_overtaken = planning.is_overtaken};
  if (machine.job().has_model_shape()) request.shape = machine.job().model_shape();
  plans_under_way_->Begin(owner);
  plans_->Plan(std::move(request), [on_made = on_made_, under_way = plans_under_way_, owner, id,
                                    ticket](absl::StatusOr<MadePlan> made) {
    under_way->End(owner);
    on_made(id, ticket, std::move(made));
  });
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
  if (machine.attempt() == nullptr || IsTerminal(machine.job().state())) return absl::OkStatus();
  const absl::StatusOr<std::optional<v1::StepPlan>> plan = transaction.GetPlan(id);
  if (absl::IsDataLoss(plan.status())) {
    spdlog::error("{}; {} goes on without changes of its plan",
                  std::string(plan.status().message()), machine.job().name());
    return absl::OkStatus();
  }
  if (!plan.ok()) return plan.status();
  if (!plan->has_value()) return absl::OkStatus();  // of an earlier release
  const uint64_t step = machine.job().progress().step();
  std::vector<v1::StepReport> reports;
  store::StepPage page;
  page.more = true;
  while (page.more) {
    absl::StatusOr<store::StepPage> next = transaction.ListSteps(
        id, step - std::min(step, kStepsRelearned), page.last_sequence, kStepsRelearned);
    if (absl::IsDataLoss(next.status())) {
      spdlog::error("{}; what steps cost is learned anew", std::string(next.status().message()));
      break;
    }
    if (!next.ok()) return next.status();
    page = *std::move(next);
    std::move(page.steps.begin(), page.steps.end(), std::back_inserter(reports));
  }
  const auto& placements = machine.attempt()->placements();
  plans_->Restored(machine.job(), **plan, Inventories({placements.begin(), placements.end()}),
                   reports);
  return absl::OkStatus();
}

bool ControllerCore::KnowToMeasure(const v1::Attempt& attempt) const {
  return std::all_of(attempt.placements().begin(), attempt.placements().end(),
                     [&](const v1::Placement& placement) {
                       const auto record = nodes_.find(NodeId(placement.node()));
                       return record != nodes_.end() &&
                              record->second.node.worker_version() == kVersion;
                     });
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
  machine.Place(planning.placements, made->plan, token, now, planning.since);
  plans_->Started(machine.job(), made->plan, planning.nodes);
  return absl::OkStatus();
}

absl::StatusOr<PlanRequest> ControllerCore::PreparePreview(const v1::JobSpec& spec,
                                                           const std::string& owner,
                                                           std::string* pending_reason) const {
  RETURN_IF_ERROR(CheckDirectory(spec));
  v1::Job job;
  *job.mutable_spec() = spec;
  // It comes after everything that waits already.
  job.set_sequence(std::numeric_limits<uint64_t>::max());
  std::vector<scheduler::Request> waiting = {scheduler::MakeRequest(job)};
  waiting.back().id.clear();  // not the waiting job of the same name, if there is one
  for (const auto& [id, machine] : machines_) {
    if (machine->job().state() == v1::Job::PENDING && !planning_.contains(id)) {
      waiting.push_back(scheduler::MakeRequest(machine->job()));
    }
  }
  PlanRequest request = {.spec = spec, .owner = owner, .is_preview = true};
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

}  // namespace ringleader::lifecycle
