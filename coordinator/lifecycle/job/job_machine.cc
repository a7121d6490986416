#include "coordinator/lifecycle/job/job_machine.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/back_off.h"
#include "coordinator/lifecycle/job/wire_time.h"
#include "coordinator/store/store.h"
#include "jobspec/values/attention_spec.h"
#include "proto/states.h"
#include "proto/timestamps.h"

namespace ringleader::lifecycle {
namespace {

using v1::Attempt;
using v1::Job;
using v1::RankStatus;
using v1::StopTrainers;

std::string Ranks(const v1::Placement& placement) {
  if (placement.trainers() == 1) return absl::StrCat("rank ", placement.first_rank());
  return absl::StrFormat("ranks %d-%d", placement.first_rank(),
                         placement.first_rank() + placement.trainers() - 1);
}

absl::Status NotAllowed(const Job& job, const std::string& what, const std::string& instead) {
  return absl::FailedPreconditionError(absl::StrFormat(
      "%s is %s and cannot be %s; %s", job.name(), Job::State_Name(job.state()), what, instead));
}

}  // namespace

bool Dead(const RankStatus& rank) {
  return rank.state() >= RankStatus::COMPLETED;
}

bool Holds(const v1::Placement& placement, int64_t rank) {
  return rank >= placement.first_rank() &&
         rank < int64_t{placement.first_rank()} + placement.trainers();
}

const v1::Placement* PlacementOn(const v1::Attempt& attempt, std::string_view node) {
  const auto found = std::find_if(attempt.placements().begin(), attempt.placements().end(),
                                  [&](const auto& p) { return p.node() == node; });
  return found == attempt.placements().end() ? nullptr : &*found;
}

std::string CheckpointFolder(const v1::JobSpec& spec) {
  std::string path =
      std::filesystem::path(spec.checkpoint().directory()).lexically_normal().string();
  if (path.size() > 1 && path.ends_with('/')) path.pop_back();
  return path;
}

JobMachine::JobMachine(Job job, const Options* options)
    : options_(options),
      job_(std::move(job)),
      checkpoint_folder_(CheckpointFolder(job_.spec())),
      spec_bytes_(job_.spec().ByteSizeLong()) {
  if (const Attempt* last = attempt()) {
    merger_ = StepMerger(static_cast<uint32_t>(last->ranks_size()), last->last_step());
    if (IsLive(last->state()) && last->has_failure()) {
      failing_since_ = absl::InfinitePast();
      stop_mode_ = StopTrainers::ABORT;
    }
  }
}

void JobMachine::Adopt(absl::Time now) {
  start_deadline_ = now + options_->start_timeout;
  if (job_.state() == Job::RETRYING) {
    const absl::Time latest =
        now + BackOff(options_->retry_backoff, options_->max_retry_backoff, job_.retries_used());
    if (ToTime(job_.retry_time()) > latest) {
      SetTime(latest, job_.mutable_retry_time());
      effects_.job_changed = true;
    }
  }
}

const Attempt* JobMachine::attempt() const {
  return job_.attempts().empty() ? nullptr : &*job_.attempts().rbegin();
}

Attempt* JobMachine::current() {
  return job_.attempts().empty() ? nullptr : job_.mutable_attempts(job_.attempts_size() - 1);
}

Attempt* JobMachine::live() {
  Attempt* last = current();
  return last != nullptr && IsLive(last->state()) ? last : nullptr;
}

bool JobMachine::AllDead() const {
  const Attempt* last = attempt();
  return last == nullptr || std::all_of(last->ranks().begin(), last->ranks().end(), Dead);
}

bool JobMachine::Finished() const {
  return IsTerminal(job_.state()) && AllDead();
}

bool JobMachine::RunsOn(const v1::Placement& placement) const {
  for (uint32_t i = 0; i < placement.trainers(); ++i) {
    if (!Dead(attempt()->ranks(static_cast<int>(placement.first_rank() + i)))) return true;
  }
  return false;
}

const v1::Placement* JobMachine::PlacementOf(uint32_t rank) const {
  for (const v1::Placement& placement : attempt()->placements()) {
    if (Holds(placement, rank)) return &placement;
  }
  return nullptr;
}

bool JobMachine::OutOfSight(const v1::Placement& placement) const {
  return out_of_sight_.contains(placement.node());
}

Effects JobMachine::Take() {
  return std::exchange(effects_, {});
}

void JobMachine::SetReason(const std::string& reason) {
  if (job_.state_reason() == reason) return;
  job_.set_state_reason(reason);
  effects_.job_changed = true;
}

void JobMachine::SetState(Job::State state, const std::string& reason, absl::Time now) {
  SetReason(reason);
  if (job_.state() == state) return;
  effects_.transitions.push_back(
      absl::StrFormat("%s: %s -> %s%s", job_.name(), Job::State_Name(job_.state()),
                      Job::State_Name(state), reason.empty() ? "" : absl::StrCat(": ", reason)));
  effects_.entered.push_back(state);
  job_.set_state(state);
  if (state == Job::RUNNING && !job_.has_start_time()) SetTime(now, job_.mutable_start_time());
  if (IsTerminal(state)) SetTime(now, job_.mutable_end_time());
  if (state == Job::PENDING) SetTime(now, job_.mutable_pending_time());
  uint64_t version = 0;
  (void)absl::SimpleAtoi(job_.etag(), &version);
  job_.set_etag(absl::StrCat(version + 1));
  effects_.job_changed = true;
}

void JobMachine::SetRank(uint32_t rank, RankStatus::State state) {
  RankStatus* status = current()->mutable_ranks(static_cast<int>(rank));
  status->set_state(state);
  status->clear_address();
  AttemptChanged();
  if (!AllDead()) return;
  effects_.over.insert(attempt()->number());
  effects_.commands.clear();
}

absl::Status JobMachine::Cancel(absl::Time now, bool checkpoint) {
  const bool waits = job_.state() == Job::CANCELLING;
  if (job_.state() == Job::CANCELLED || (waits && checkpoint)) return absl::OkStatus();
  if (IsTerminal(job_.state())) return NotAllowed(job_, "cancelled", "it has ended");
  SetState(Job::CANCELLING, checkpoint ? kCancelledWithCheckpoint : "cancelled by a user", now);
  if (live() != nullptr) {
    Stop(checkpoint ? StopTrainers::CHECKPOINT : StopTrainers::ABORT, "the job was cancelled");
  }
  Settle(now);
  return absl::OkStatus();
}

absl::Status JobMachine::Pause(absl::Time now) {
  if (job_.state() == Job::PAUSED || job_.state() == Job::PAUSING) return absl::OkStatus();
  if (IsTerminal(job_.state()) || job_.state() == Job::CANCELLING) {
    return NotAllowed(job_, "paused", "only a job that waits or runs can");
  }
  SetState(Job::PAUSING, "writing a checkpoint", now);
  if (live() != nullptr) Stop(StopTrainers::CHECKPOINT, "the job was paused");
  Settle(now);
  return absl::OkStatus();
}

absl::Status JobMachine::Resume(absl::Time now) {
  if (job_.state() == Job::PAUSING) return NotAllowed(job_, "resumed", "wait until it is PAUSED");
  const bool failed = job_.state() == Job::FAILED;
  if ((IsTerminal(job_.state()) && !failed) || job_.state() == Job::CANCELLING) {
    return NotAllowed(job_, "resumed", "only one that is PAUSED or FAILED can; create a new one");
  }
  if (failed && !AllDead()) {
    return NotAllowed(job_, "resumed", "wait until its trainers are known to be dead");
  }
  if (failed) {
    job_.clear_end_time();
    job_.set_retries_used(0);
  }
  if (failed || job_.state() == Job::PAUSED) SetState(Job::PENDING, "", now);
  return absl::OkStatus();
}

absl::Status JobMachine::Profile(uint32_t steps) {
  if (job_.state() != Job::RUNNING) {
    return NotAllowed(job_, "profiled", "only a job that is RUNNING can");
  }
  v1::Command command;
  command.mutable_profile()->set_steps(steps);
  Send(*PlacementOf(0), std::move(command));
  return absl::OkStatus();
}

void JobMachine::Wait(const std::string& reason) {
  SetReason(reason);
}

void JobMachine::Reject(const std::string& reason, absl::Time now) {
  SetState(Job::FAILED, reason, now);
}

void JobMachine::Place(const std::vector<v1::Placement>& placements, const v1::StepPlan& plan,
                       uint64_t fencing_token, absl::Time now, absl::Time slots_since) {
  const uint32_t number = attempt() == nullptr ? 1 : attempt()->number() + 1;
  for (int i = 0; i <= job_.attempts_size() - kAttemptsKept; ++i) {
    effects_.forgotten_attempts.insert(job_.attempts(i).number());
  }
  job_.mutable_attempts()->DeleteSubrange(0, std::max(0, job_.attempts_size() - kAttemptsKept + 1));
  Attempt* next = job_.add_attempts();
  next->set_number(number);
  next->set_state(Attempt::STARTING);
  next->set_fencing_token(fencing_token);
  SetTime(now, next->mutable_create_time());
  if (job_.has_pending_time()) *next->mutable_queue_time() = job_.pending_time();
  SetTime(std::min(slots_since, now), next->mutable_place_time());
  *next->mutable_plan() = plan;
  next->mutable_plan()->clear_sample_weights();
  next->mutable_plan()->clear_earlier_weights();
  next->mutable_plan()->clear_earlier_shapes();
  uint32_t world_size = 0;
  for (const v1::Placement& placement : placements) {
    *next->add_placements() = placement;
    world_size += placement.trainers();
  }
  for (uint32_t rank = 0; rank < world_size; ++rank) {
    next->add_ranks()->set_state(RankStatus::STARTING);
  }
  AttemptChanged();
  merger_ = StepMerger(world_size);
  failing_since_.reset();
  start_deadline_ = now + options_->start_timeout;
  stop_mode_ = StopTrainers::MODE_UNSPECIFIED;
  mean_step_seconds_ = mean_step_tokens_ = 0;
  job_.clear_retry_time();
  SetState(Job::STARTING,
           absl::StrFormat("attempt %d: starting %d trainer%s", next->number(), world_size,
                           world_size == 1 ? "" : "s"),
           now);
  for (const v1::Placement& placement : placements) {
    v1::Command command;
    v1::StartTrainers* start = command.mutable_start();
    *start->mutable_spec() = jobspec::PlannedJob(job_.spec(), plan);
    *start->mutable_plan() = plan;
    start->set_first_rank(placement.first_rank());
    start->set_trainers(placement.trainers());
    start->set_world_size(world_size);
    start->set_ranks_per_node(placements.front().trainers());
    start->set_checkpoint_step(job_.progress().checkpoint_step());
    start->set_job_uid(job_.uid());
    start->set_owner(job_.owner());
    Send(placement, std::move(command));
  }
  UpdateSight(now);
}

void JobMachine::MoveOff(const std::string& node, const std::string& reason) {
  if (live() == nullptr || attempt()->state() == Attempt::STOPPING) return;
  for (const v1::Placement& placement : attempt()->placements()) {
    if (placement.node() != node || !RunsOn(placement)) continue;
    SetReason(absl::StrFormat("writing a checkpoint to move off %s: %s", node, reason));
    Stop(StopTrainers::CHECKPOINT, reason);
    return;
  }
}

void JobMachine::Replan(const v1::StepPlan& plan) {
  if (live() == nullptr || attempt()->state() == Attempt::STOPPING) return;
  v1::PlanChange* const change = current()->add_plan_changes();
  change->set_version(plan.version());
  change->set_effective_step(plan.effective_step());
  change->set_state(v1::PlanChange::ANNOUNCED);
  *change->mutable_ring() = plan.ring();
  change->set_layout(plan.layout());
  change->set_stripe(plan.stripe());
  *change->mutable_reasons() = plan.reasons();
  auto* const changes = current()->mutable_plan_changes();
  if (changes->size() > kPlanChangesKept) {
    changes->DeleteSubrange(0, changes->size() - kPlanChangesKept);
  }
  AttemptChanged();
  v1::Command command;
  *command.mutable_plan() = plan;
  Send(*PlacementOf(0), std::move(command));
}

void JobMachine::Send(const v1::Placement& placement, v1::Command command) {
  command.set_job(job_.spec().name());
  command.set_attempt(attempt()->number());
  command.set_fencing_token(attempt()->fencing_token());
  effects_.commands.push_back({placement.node(), std::move(command)});
}

void JobMachine::Stop(StopTrainers::Mode mode, const std::string& reason) {
  Attempt* const attempt = current();
  if (attempt->state() != Attempt::STOPPING) {
    attempt->set_state(Attempt::STOPPING);
    attempt->set_state_reason(reason);
    AttemptChanged();
  }
  // ABORT overrides CHECKPOINT, nothing overrides ABORT.
  if (stop_mode_ >= mode) return;
  stop_mode_ = mode;
  const absl::Duration grace =
      mode == StopTrainers::CHECKPOINT ? options_->checkpoint_grace : options_->abort_grace;
  for (const v1::Placement& placement : attempt->placements()) {
    if (!RunsOn(placement)) continue;
    v1::Command command;
    command.mutable_stop()->set_mode(mode);
    command.mutable_stop()->set_grace_milliseconds(WireMilliseconds(grace));
    command.mutable_stop()->set_reason(reason);
    Send(placement, std::move(command));
  }
}

void JobMachine::Connect(absl::Time now) {
  const bool all_ready =
      std::all_of(attempt()->ranks().begin(), attempt()->ranks().end(),
                  [](const RankStatus& rank) { return rank.state() == RankStatus::READY; });
  if (!all_ready) return;
  v1::Command command;
  for (const RankStatus& rank : attempt()->ranks()) {
    command.mutable_connect()->add_addresses(rank.address());
  }
  for (const v1::Placement& placement : attempt()->placements()) Send(placement, command);
  SetTime(now, current()->mutable_ready_time());
  if (attempt()->state() != Attempt::STARTING) return;
  current()->set_state(Attempt::RUNNING);
  SetState(Job::RUNNING, "", now);
}

void JobMachine::OnSight(const std::string& node, std::optional<absl::Time> last_heard,
                         absl::Time now) {
  if (last_heard) {
    out_of_sight_.insert_or_assign(node, *last_heard);
  } else {
    out_of_sight_.erase(node);
  }
  UpdateSight(now);
}

std::set<std::string> JobMachine::SlowNodes() const {
  std::set<std::string> ids;
  if (attempt() == nullptr) return ids;
  for (const v1::SlowRank& slow : attempt()->slow_ranks()) {
    ids.insert(slow.node().substr(std::string_view("nodes/").size()));
  }
  return ids;
}

std::set<std::string> JobMachine::AvoidedNodes() const {
  std::set<std::string> ids;
  for (const auto& [node, until] : avoid_) {
    ids.insert(node.substr(std::string_view("nodes/").size()));
  }
  return ids;
}

bool JobMachine::EndAvoidance(absl::Time now) {
  return std::erase_if(avoid_, [now](const auto& entry) { return entry.second <= now; }) > 0;
}

void JobMachine::UpdateSight(absl::Time now) {
  Attempt* const attempt = live();
  if (attempt == nullptr || attempt->state() == Attempt::STOPPING) return;
  for (const v1::Placement& placement : attempt->placements()) {
    if (!OutOfSight(placement) || !RunsOn(placement)) continue;
    if (attempt->state() == Attempt::UNKNOWN) return;
    const std::string reason = absl::StrFormat(
        "no word from %s, where %s may well be running; replaced after %s out of sight",
        placement.node(), Ranks(placement), absl::FormatDuration(options_->adoption_timeout));
    attempt->set_state(Attempt::UNKNOWN);
    attempt->set_state_reason(reason);
    AttemptChanged();
    SetState(Job::UNKNOWN, reason, now);
    return;
  }
  if (attempt->state() != Attempt::UNKNOWN) return;
  const bool starting =
      std::any_of(attempt->ranks().begin(), attempt->ranks().end(),
                  [](const RankStatus& rank) { return rank.state() == RankStatus::STARTING; });
  attempt->set_state(starting ? Attempt::STARTING : Attempt::RUNNING);
  attempt->clear_state_reason();
  AttemptChanged();
  SetState(starting ? Job::STARTING : Job::RUNNING, "", now);
}

void JobMachine::Tick(absl::Time now) {
  Fence(now);
  CheckStart(now);
  Settle(now);
}

}  // namespace ringleader::lifecycle
