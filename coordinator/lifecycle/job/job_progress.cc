// What running attempts report of their training, and what the job's record makes of it.
#include <algorithm>
#include <cmath>
#include <ranges>
#include <utility>

#include "coordinator/lifecycle/job/job_machine.h"
#include "proto/timestamps.h"

namespace ringleader::lifecycle {
namespace {

// Weight of the newest step in the mean step time: smooth, yet it follows within ten steps.
constexpr double kStepTimeWeight = 0.2;
// A checkpoint is reported when it is written, some steps after its own.
constexpr size_t kStepsRemembered = 1024;

}  // namespace

std::optional<v1::StepReport> JobMachine::OnStep(v1::StepReport report, StepMerger::Origin origin) {
  v1::Attempt* const attempt = live();
  std::optional<v1::StepReport> merged =
      merger_.Add(std::move(report), std::move(origin), &effects_.released);
  if (!merged) return std::nullopt;
  uint64_t furthest = 0;  // over all attempts
  for (const v1::Attempt& earlier : job_.attempts()) {
    furthest = std::max(furthest, earlier.last_step());
  }
  // Steps that are trained again after a failure are no progress: a job that fails at the same step
  // each time must run out of retries.
  if (merged->step() > furthest) job_.set_retries_used(0);
  refusals_ = 0;
  for (const v1::Placement& placement : attempt->placements()) {
    effects_.nodes_that_served.push_back(placement.node());
  }
  RecordStep(attempt, *merged);
  return merged;
}

void JobMachine::SettlePlanChanges(v1::Attempt* attempt, const v1::StepReport& merged) {
  for (v1::PlanChange& change : *attempt->mutable_plan_changes()) {
    if (change.state() != v1::PlanChange::ANNOUNCED) continue;
    const bool is_over =
        merged.plan_version() > change.version() ||
        (merged.plan_version() < change.version() && merged.step() >= change.effective_step());
    if (merged.plan_version() != change.version() && !is_over) continue;
    change.set_state(is_over ? v1::PlanChange::MISSED : v1::PlanChange::IN_FORCE);
  }
}

void JobMachine::LeaveOutWhatEndedIt(v1::Attempt* attempt) {
  for (v1::PlanChange& change : *attempt->mutable_plan_changes()) {
    if (change.state() == v1::PlanChange::ANNOUNCED &&
        attempt->last_step() + 1 >= change.effective_step()) {
      change.set_state(v1::PlanChange::MISSED);
    }
  }
}

bool JobMachine::Missed(uint64_t plan_version) const {
  // Versions begin anew with an attempt that had no checkpoint to go on from.
  for (const v1::Attempt& attempt : job_.attempts() | std::views::reverse) {
    for (const v1::PlanChange& change : attempt.plan_changes()) {
      if (change.version() == plan_version) return change.state() == v1::PlanChange::MISSED;
    }
  }
  return false;
}

void JobMachine::NameSlowRanks(std::vector<v1::SlowRank> slow) {
  v1::Attempt* const attempt = live();
  if (attempt == nullptr) return;
  const auto& known = attempt->slow_ranks();
  const auto is_known = [&](const v1::SlowRank& rank) {
    return std::ranges::any_of(known, [&](const v1::SlowRank& other) {
      return other.rank() == rank.rank() && other.step() == rank.step();
    });
  };
  if (known.size() == std::ssize(slow) && std::ranges::all_of(slow, is_known)) return;
  attempt->clear_slow_ranks();
  for (v1::SlowRank& rank : slow) {
    if (const v1::Placement* const placement = PlacementOf(rank.rank())) {
      rank.set_node(placement->node());
      *attempt->add_slow_ranks() = std::move(rank);
    }
  }
  AttemptChanged();
}

void JobMachine::OnLateStep(uint32_t number, v1::StepReport report) {
  v1::Attempt* late = nullptr;
  bool was_trained = false;
  for (v1::Attempt& attempt : *job_.mutable_attempts()) {
    if (attempt.number() == number) {
      late = &attempt;
    } else if (attempt.number() > number && attempt.last_step() > 0) {
      if (report.step() > attempt.first_step()) return;  // trained again since
      was_trained = true;                                // for a later attempt began after it
    }
  }
  if (late == nullptr || report.step() <= late->last_step()) return;
  // Of a step that was trained one rank's word will do, for loss and tokens are global. How far the
  // attempt came, rank 0 says, as it does of its checkpoints.
  if (!was_trained && report.rank() != 0) return;
  RecordStep(late, MergeSteps({std::move(report)}));
}

void JobMachine::RecordStep(v1::Attempt* attempt, const v1::StepReport& merged) {
  SettlePlanChanges(attempt, merged);
  if (attempt->last_step() == 0) {
    attempt->set_first_step(merged.step() - 1);
    const absl::Time began = ToTime(merged.time()) - absl::Seconds(merged.step_seconds());
    SetTime(std::max(absl::UnixEpoch(), began), attempt->mutable_train_time());
  }
  attempt->set_last_step(merged.step());
  effects_.changed_attempts.insert(attempt->number());
  effects_.steps.push_back(merged);
  if (attempt == current()) UpdateProgress(merged);
}

uint64_t JobMachine::TokensBefore(const v1::StepReport& merged) const {
  const v1::Progress& progress = job_.progress();
  const uint64_t step = std::max<uint64_t>(1, merged.step()) - 1;
  if (step == progress.step()) return progress.tokens();
  // Steps are trained again from a checkpoint. One of before the coordinator was restarted is taken
  // to lie on a line.
  if (const auto found = tokens_at_.find(step); found != tokens_at_.end()) return found->second;
  const double each = progress.step() == 0 ? static_cast<double>(merged.tokens())
                                           : static_cast<double>(progress.tokens()) /
                                                 static_cast<double>(progress.step());
  // A worker may report what it likes.
  return static_cast<uint64_t>(std::min(std::round(each * static_cast<double>(step)), 0x1p62));
}

void JobMachine::UpdateProgress(const v1::StepReport& merged) {
  const v1::TrainingSpec& training = job_.spec().training();
  v1::Progress* const progress = job_.mutable_progress();
  progress->set_tokens(TokensBefore(merged) + merged.tokens());
  progress->set_step(merged.step());
  recent_tokens_.insert_or_assign(merged.step(), progress->tokens());
  if (recent_tokens_.size() > kStepsRemembered) recent_tokens_.erase(recent_tokens_.begin());
  progress->set_total_steps(training.steps());
  progress->set_loss(merged.loss());
  if (merged.step() == 1) progress->set_first_loss(merged.loss());
  progress->set_worker_imbalance(merged.worker_imbalance());
  progress->set_ring_imbalance(merged.ring_imbalance());
  const double weight = mean_step_seconds_ == 0 ? 1 : kStepTimeWeight;
  mean_step_seconds_ += weight * (merged.step_seconds() - mean_step_seconds_);
  mean_step_tokens_ += weight * (static_cast<double>(merged.tokens()) - mean_step_tokens_);
  if (mean_step_seconds_ > 0) {
    progress->set_tokens_per_second(mean_step_tokens_ / mean_step_seconds_);
  }
  const uint64_t left = training.steps() > merged.step() ? training.steps() - merged.step() : 0;
  progress->set_eta_seconds(static_cast<double>(left) * mean_step_seconds_);
}

void JobMachine::OnEval(const v1::EvalReport& eval) {
  // A resumed attempt may evaluate again; the first evaluation is that of the lowest step.
  if (!job_.has_first_eval() || eval.step() <= job_.first_eval().step()) {
    *job_.mutable_first_eval() = eval;
  }
  *job_.mutable_last_eval() = eval;
  effects_.job_changed = true;
}

void JobMachine::OnCheckpoint(const v1::CheckpointNotice& checkpoint) {
  job_.mutable_progress()->set_checkpoint_step(
      std::max(job_.progress().checkpoint_step(), checkpoint.step()));
  if (const auto found = recent_tokens_.find(checkpoint.step()); found != recent_tokens_.end()) {
    tokens_at_.insert_or_assign(found->first, found->second);
  }
  effects_.job_changed = true;
}

void JobMachine::OnModelExported(const std::string& path) {
  job_.set_model_directory(path);
  effects_.job_changed = true;
}

}  // namespace ringleader::lifecycle
