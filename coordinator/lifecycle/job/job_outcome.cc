// How attempts end: which rank is to blame, when the outcome is known, what follows for the job.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/back_off.h"
#include "base/net/message_size.h"
#include "coordinator/lifecycle/job/job_machine.h"
#include "jobspec/fields/text.h"
#include "proto/states.h"
#include "proto/timestamps.h"

namespace ringleader::lifecycle {

using v1::Attempt;
using v1::Job;
using v1::RankStatus;
using v1::StopTrainers;
using v1::TrainerExited;

namespace {

std::string Describe(const v1::Failure& failure) {
  if (failure.rank() < 0) return failure.message();
  return absl::StrFormat("rank %d on %s: %s", failure.rank(), failure.node(), failure.message());
}

std::string HowItDied(const TrainerExited& exited) {
  if (!TrainerExited::Outcome_IsValid(exited.outcome())) {
    return absl::StrFormat("ended with outcome %d, which this coordinator does not know",
                           static_cast<int>(exited.outcome()));
  }
  if (!exited.message().empty()) {
    return jobspec::Shortened(exited.message(), kMaxExitMessageBytes);
  }
  if (exited.signal() != 0) return absl::StrFormat("killed by signal %d", exited.signal());
  return absl::StrFormat("exited with code %d without a word", exited.exit_code());
}

v1::Failure Retryable(int rank, const std::string& node, const std::string& message) {
  v1::Failure failure;
  failure.set_rank(rank);
  failure.set_node(node);
  failure.set_message(message);
  failure.set_retryable(true);
  return failure;
}

bool AnyRank(const Attempt& attempt, RankStatus::State state) {
  return std::any_of(attempt.ranks().begin(), attempt.ranks().end(),
                     [&](const RankStatus& rank) { return rank.state() == state; });
}

}  // namespace

void JobMachine::OnReady(const v1::TrainerReady& ready, absl::Time now) {
  Attempt* const attempt = live();
  if (attempt == nullptr || ready.rank() >= static_cast<uint32_t>(attempt->ranks_size())) return;
  RankStatus* const rank = attempt->mutable_ranks(static_cast<int>(ready.rank()));
  if (rank->state() != RankStatus::STARTING) return;
  rank->set_state(RankStatus::READY);
  rank->set_address(ready.address());
  AttemptChanged();
  if (attempt->state() != Attempt::STOPPING) Connect(now);
}

void JobMachine::OnExit(const TrainerExited& exited, absl::Time now) {
  Attempt* const attempt = current();
  if (attempt == nullptr || exited.rank() >= static_cast<uint32_t>(attempt->ranks_size())) return;
  if (Dead(attempt->ranks(static_cast<int>(exited.rank())))) return;
  switch (exited.outcome()) {
    case TrainerExited::COMPLETED:
      SetRank(exited.rank(), RankStatus::COMPLETED);
      break;
    case TrainerExited::STOPPED:
      SetRank(exited.rank(), RankStatus::STOPPED);
      // The rank left unasked, e.g. because its worker is shutting down while this coordinator was
      // away: the others cannot go on alone.
      if (IsLive(attempt->state()) && attempt->state() != Attempt::STOPPING) {
        Stop(StopTrainers::CHECKPOINT, absl::StrFormat("rank %d left", exited.rank()));
      }
      break;
    case TrainerExited::FAILED:
    case TrainerExited::OUTCOME_UNSPECIFIED:
    default: {  // an unknown outcome is a failure that names it
      SetRank(exited.rank(), RankStatus::FAILED);
      v1::Failure failure;
      failure.set_rank(static_cast<int32_t>(exited.rank()));
      failure.set_node(PlacementOf(exited.rank())->node());
      failure.set_message(HowItDied(exited));
      failure.set_exit_code(exited.exit_code());
      failure.set_signal(exited.signal());
      failure.set_retryable(exited.retryable());
      Blame(std::move(failure), exited.collateral(), now);
    }
  }
  Settle(now);
}

void JobMachine::OnStartRefused(const std::string& node, const std::string& why, absl::Time now,
                                bool later) {
  avoid_[node] = now + BackOff(options_->refusal_pause, options_->max_retry_backoff, ++refusals_);
  // An attempt that has ended waits for ranks of which nothing was heard: these never began.
  if (attempt() == nullptr) return;
  for (const v1::Placement& placement : attempt()->placements()) {
    if (placement.node() != node) continue;
    for (uint32_t i = 0; i < placement.trainers(); ++i) {
      const uint32_t rank = placement.first_rank() + i;
      if (!Dead(attempt()->ranks(static_cast<int>(rank)))) SetRank(rank, RankStatus::FAILED);
    }
    v1::Failure failure = Retryable(static_cast<int>(placement.first_rank()), node,
                                    absl::StrCat("the worker did not start it: ", why));
    failure.set_refused(later && !attempt()->has_failure());
    Blame(std::move(failure), false, now);
  }
  Settle(now);
}

// Whatever of a start came to be is a stray at the worker's next hello.
void JobMachine::OnDeadlyCommand(const std::string& node, bool is_start, absl::Time now) {
  if (attempt() == nullptr) return;
  for (const v1::Placement& placement : attempt()->placements()) {
    if (placement.node() != node) continue;
    for (uint32_t i = 0; is_start && i < placement.trainers(); ++i) {
      const uint32_t rank = placement.first_rank() + i;
      if (!Dead(attempt()->ranks(static_cast<int>(rank)))) SetRank(rank, RankStatus::FAILED);
    }
    v1::Failure failure =
        Retryable(static_cast<int>(placement.first_rank()), node,
                  absl::StrCat("the worker's session ended each time that it was sent ",
                               is_start ? "the job" : "a command for the job",
                               ", which is not sent again: look into the worker's log"));
    failure.set_retryable(false);
    Blame(std::move(failure), false, now);
  }
  Settle(now);
}

v1::Failure JobMachine::Lose(const v1::Placement& placement, const std::string& how,
                             const std::set<uint32_t>& running) {
  int first = -1;
  for (uint32_t i = 0; i < placement.trainers(); ++i) {
    const uint32_t rank = placement.first_rank() + i;
    if (Dead(attempt()->ranks(static_cast<int>(rank))) || running.contains(rank)) continue;
    if (first < 0) first = static_cast<int>(rank);
    SetRank(rank, RankStatus::LOST);
  }
  return Retryable(first, placement.node(), how);
}

void JobMachine::OnWorkerDied(const std::string& node, const std::string& how, absl::Time now) {
  if (attempt() == nullptr) return;
  for (const v1::Placement& placement : attempt()->placements()) {
    if (placement.node() != node || !RunsOn(placement)) continue;
    Blame(Lose(placement, how), false, now);
  }
  Settle(now);
}

void JobMachine::OnEndsLost(const std::string& node, const std::set<uint32_t>& running,
                            const std::string& how, absl::Time now) {
  if (attempt() == nullptr) return;
  for (const v1::Placement& placement : attempt()->placements()) {
    if (placement.node() != node) continue;
    v1::Failure failure = Lose(placement, how, running);
    if (failure.rank() >= 0) Blame(std::move(failure), false, now);
  }
  Settle(now);
}

void JobMachine::Blame(v1::Failure failure, bool collateral, absl::Time now) {
  Attempt* const attempt = live();
  if (attempt == nullptr || job_.state() == Job::CANCELLING) return;
  const bool better = !attempt->has_failure() || (attempt->failure().collateral() && !collateral);
  if (!better) return;
  if (!failing_since_) failing_since_ = now;
  failure.set_collateral(collateral);
  const std::string reason = Describe(failure);
  *attempt->mutable_failure() = std::move(failure);
  AttemptChanged();
  if (job_.state() != Job::PAUSING) {
    SetReason(collateral ? "a trainer failed; waiting to hear which was the first"
                         : absl::StrCat("stopping the others: ", reason));
  }
  Stop(StopTrainers::ABORT, collateral ? "another rank failed" : reason);
}

void JobMachine::Fence(absl::Time now) {
  if (attempt() == nullptr) return;
  for (const v1::Placement& placement : attempt()->placements()) {
    const auto seen = out_of_sight_.find(placement.node());
    if (seen == out_of_sight_.end() || now - seen->second < options_->adoption_timeout) continue;
    if (!RunsOn(placement)) continue;
    v1::Failure failure =
        Lose(placement, absl::StrFormat("its node was out of sight for %s",
                                        absl::FormatDuration(options_->adoption_timeout)));
    failure.set_fenced(!attempt()->has_failure());
    Blame(std::move(failure), false, now);
  }
}

void JobMachine::CheckStart(absl::Time now) {
  if (live() == nullptr || attempt()->state() != Attempt::STARTING) return;
  if (now < start_deadline_) return;
  for (int rank = 0; rank < attempt()->ranks_size(); ++rank) {
    if (attempt()->ranks(rank).state() != RankStatus::STARTING) continue;
    Blame(Retryable(rank, PlacementOf(static_cast<uint32_t>(rank))->node(),
                    absl::StrFormat("not ready %s after it was placed",
                                    absl::FormatDuration(options_->start_timeout))),
          false, now);
    return;
  }
}

void JobMachine::Settle(absl::Time now) {
  if (Attempt* const attempt = live()) {
    bool known = AllDead();
    if (!known && attempt->has_failure() && failing_since_ &&
        now - *failing_since_ >= options_->blame_window) {
      // Ranks on nodes that are out of sight will report nothing more.
      known = std::all_of(attempt->placements().begin(), attempt->placements().end(),
                          [&](const v1::Placement& placement) {
                            return OutOfSight(placement) || !RunsOn(placement);
                          });
    }
    if (!known) return;
    End(now);
  }
  if (job_.attempts().empty() || AllDead()) {
    switch (job_.state()) {
      case Job::CANCELLING: {
        std::string reason = job_.state_reason();
        if (reason == kCancelledWithCheckpoint) {
          const uint64_t step = job_.progress().checkpoint_step();
          reason = step == 0
                       ? "cancelled by a user; no checkpoint was written"
                       : absl::StrFormat("cancelled by a user; the newest checkpoint is of step %d",
                                         step);
        }
        SetState(Job::CANCELLED, reason, now);
        break;
      }
      case Job::PAUSING:
        SetState(Job::PAUSED,
                 job_.progress().checkpoint_step() == 0
                     ? "no checkpoint yet: resumes from the start"
                     : absl::StrFormat("resumes from the checkpoint of step %d",
                                       job_.progress().checkpoint_step()),
                 now);
        break;
      case Job::RETRYING:
        if (now >= ToTime(job_.retry_time())) SetState(Job::PENDING, "", now);
        break;
      case Job::STARTING:
      case Job::RUNNING:
      case Job::UNKNOWN:  // the attempt is over: it moved off a node
        SetState(Job::PENDING, "", now);
        break;
      case Job::PENDING:
      case Job::PAUSED:
      case Job::CANCELLED:
      case Job::SUCCEEDED:
      case Job::FAILED:
      case Job::STATE_UNSPECIFIED:
      default:  // the last two: ControllerCore::Load() refuses them
        break;
    }
  }
}

// A collateral failure is all that is known, and a node is gone: that is where it began.
void JobMachine::NameLostNode(Attempt* attempt) {
  if (!attempt->failure().collateral()) return;
  for (const v1::Placement& placement : attempt->placements()) {
    if (!OutOfSight(placement) || !RunsOn(placement)) continue;
    *attempt->mutable_failure() =
        Retryable(static_cast<int>(placement.first_rank()), placement.node(),
                  "contact with its node was lost, and other ranks lost their connection");
    return;
  }
}

void JobMachine::End(absl::Time now) {
  Attempt* const attempt = current();
  const uint64_t trained =
      attempt->last_step() > 0 ? attempt->last_step() : job_.progress().checkpoint_step();
  for (const StepMerger::Unfinished& step : merger_.Finish(trained, &effects_.released)) {
    if (step.is_believed) {
      RecordStep(attempt, step.merged);
    } else {
      SettlePlanChanges(attempt, step.merged);
    }
  }
  AttemptChanged();
  SetTime(now, attempt->mutable_end_time());
  const auto end = [&](Attempt::State state, const std::string& reason) {
    attempt->set_state(state);
    attempt->set_state_reason(reason);
    effects_.ended.push_back(state);
  };

  if (AllDead() &&
      std::all_of(attempt->ranks().begin(), attempt->ranks().end(),
                  [](const RankStatus& rank) { return rank.state() == RankStatus::COMPLETED; })) {
    attempt->clear_failure();
    end(Attempt::SUCCEEDED, "");
    SetState(Job::SUCCEEDED, "", now);
    return;
  }
  if (job_.state() == Job::CANCELLING) {
    end(Attempt::CANCELLED, job_.state_reason());
    return;
  }
  // The first rank to leave in order takes the connections of the others along.
  if (attempt->failure().collateral() && AnyRank(*attempt, RankStatus::STOPPED))
    attempt->clear_failure();
  if (!attempt->has_failure()) {
    end(Attempt::PAUSED, attempt->state_reason());
    return;
  }
  NameLostNode(attempt);
  LeaveOutWhatEndedIt(attempt);
  const v1::Failure& failure = attempt->failure();
  if (failure.rank() >= 0 && failure.retryable() && !failure.refused() &&
      attempt->ranks(failure.rank()).state() == RankStatus::FAILED) {
    effects_.node_failures.push_back({failure.node(), failure.message()});
  }
  end(failure.fenced() ? Attempt::FENCED : Attempt::FAILED, Describe(attempt->failure()));
  Retry(now);
}

void JobMachine::Retry(absl::Time now) {
  const v1::Failure& failure = attempt()->failure();
  const std::string what =
      absl::StrFormat("attempt %d failed: %s", attempt()->number(), Describe(failure));
  if (!failure.retryable()) {
    SetState(Job::FAILED, what, now);
    return;
  }
  if (job_.state() == Job::PAUSING) return;
  if (failure.refused()) {
    // A coordinator that was started meanwhile does not know for how long.
    const absl::Time until =
        avoid_.try_emplace(failure.node(), now + options_->refusal_pause).first->second;
    SetTime(now + options_->retry_backoff, job_.mutable_retry_time());
    SetState(Job::RETRYING,
             absl::StrFormat("%s; it does not count as a retry, and goes elsewhere for %s", what,
                             absl::FormatDuration(absl::Trunc(until - now, absl::Seconds(1)))),
             now);
    return;
  }
  const uint32_t used = job_.retries_used() + 1;
  job_.set_retries_used(used);
  const uint32_t budget = job_.spec().scheduling().max_retries();
  if (used > budget) {
    SetState(Job::FAILED,
             absl::StrFormat("%s; no retries left (scheduling.max_retries: %d without a step "
                             "completed between them)",
                             what, budget),
             now);
    return;
  }
  SetTime(now + BackOff(options_->retry_backoff, options_->max_retry_backoff, used),
          job_.mutable_retry_time());
  std::string reason = absl::StrFormat("%s; retry %d of %d", what, used, budget);
  for (const v1::Placement& placement : attempt()->placements()) {
    if (!RunsOn(placement)) continue;
    absl::StrAppend(&reason, ", once the trainers on ", placement.node(),
                    " are known to be dead (at the latest ",
                    absl::FormatDuration(options_->adoption_timeout), " after it was last heard)");
  }
  SetState(Job::RETRYING, reason, now);
}

}  // namespace ringleader::lifecycle
