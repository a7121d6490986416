// One job's state machine as pure logic: no clock, no store, no network. Intents, reports and the
// passing of time go in; the new record and the commands to send come out. The controller commits
// both in one transaction.
//
//   PENDING → STARTING → RUNNING → SUCCEEDED            every rank completed
//      ↑          ↘  UNKNOWN  ↙                         a worker is out of sight, or back
//   RETRYING ← (attempt FAILED or FENCED) → FAILED      budget used up, or not retryable
//   PAUSING → PAUSED → PENDING       CANCELLING → CANCELLED
//
// An attempt is over when its outcome is known. Its ranks may outlive it on a worker that is out of
// sight; the next attempt is placed only when every rank of the last one is known to be dead: its
// exit was reported, its worker process was replaced, or it was out of sight for adoption_timeout,
// after which the worker has killed it by itself.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "coordinator/lifecycle/job/options.h"
#include "coordinator/lifecycle/job/step_merger.h"
#include "ringleader/v1/job.pb.h"
#include "ringleader/v1/plan.pb.h"
#include "ringleader/v1/worker_control.pb.h"

namespace ringleader::lifecycle {

// Why a job is CANCELLING that is to leave a last checkpoint; which one it left is said when it
// has.
inline constexpr char kCancelledWithCheckpoint[] =
    "cancelled by a user; a last checkpoint is written";

// checkpoint.directory without "..", doubled slashes and a slash at its end.
std::string CheckpointFolder(const v1::JobSpec& spec);

// A process that runs no longer, or never will.
bool Dead(const v1::RankStatus& rank);

bool Holds(const v1::Placement& placement, int64_t rank);
// The attempt's part on "nodes/{id}"; null if it has none there.
const v1::Placement* PlacementOn(const v1::Attempt& attempt, std::string_view node);

// A job's record keeps so many attempts, the newest.
inline constexpr int kAttemptsKept = 32;
inline constexpr int kPlanChangesKept = 32;  // of an attempt

struct Effects {
  struct NodeCommand {
    std::string node;  // "nodes/{id}"
    v1::Command command;
  };
  std::vector<NodeCommand> commands;
  // Attempts of which nothing runs any longer: what no worker acknowledged is void.
  std::set<uint32_t> over;
  bool job_changed = false;
  std::set<uint32_t> changed_attempts;    // by number
  std::set<uint32_t> forgotten_attempts;  // likewise: not in the record any more

  bool any() const {
    return job_changed || !changed_attempts.empty() || !commands.empty() || !steps.empty();
  }
  std::vector<v1::StepReport> steps;  // merged, to be recorded
  std::vector<StepMerger::Origin> released;
  std::vector<std::string> transitions;  // a line each, for the log
  std::vector<v1::Job::State> entered;
  std::vector<v1::Attempt::State> ended;
  // Attempts that ended by the own fault of a rank, and could be tried again: where, and how.
  struct NodeFailure {
    std::string node;  // "nodes/{id}"
    std::string message;
  };
  std::vector<NodeFailure> node_failures;
  std::vector<std::string> nodes_that_served;  // an attempt there completed a step
};

// Its methods are in job_machine.cc (what users and the scheduler ask, contact with nodes),
// job_outcome.cc (how attempts end) and job_progress.cc (what they report of their training).
class JobMachine {
 public:
  // `job`: new, or as the store has it; then Adopt() comes next. `options` must outlive the
  // machine.
  JobMachine(v1::Job job, const Options* options);
  // The coordinator was away, for nobody knows how long, and its clock may have been set meanwhile:
  // what is stored says when things were to happen by a clock that is gone. Time-outs start anew,
  // and a retry waits no longer than its back-off.
  void Adopt(absl::Time now);

  const v1::Job& job() const { return job_; }
  // checkpoint.directory, spelt one way; empty where the job has none.
  const std::string& checkpoint_folder() const { return checkpoint_folder_; }
  uint64_t spec_bytes() const { return spec_bytes_; }  // of its specification, as it is sent
  v1::Job* mutable_job() { return &job_; }             // for what the store sets
  // The last attempt; null before the first.
  const v1::Attempt* attempt() const;
  bool RunsOn(const v1::Placement& placement) const;  // some rank there is not dead
  // Its outcome is known and nothing of it runs: there is nothing left to do.
  bool Finished() const;
  // What happened since the last call.
  const Effects& effects() const { return effects_; }
  Effects Take();

  // What users ask for. FAILED_PRECONDITION says which state would allow it.
  // `checkpoint`: the trainers write one before they leave.
  absl::Status Cancel(absl::Time now, bool checkpoint = false);
  absl::Status Pause(absl::Time now);
  // A paused job, or one that failed, goes on from its newest checkpoint.
  absl::Status Resume(absl::Time now);

  // Has the ranks trace their next steps.
  absl::Status Profile(uint32_t steps);

  // What the scheduler decides about a PENDING job.
  void Wait(const std::string& reason);
  // `slots_since`: when the job was given its slots, from when on its plan was made.
  void Place(const std::vector<v1::Placement>& placements, const v1::StepPlan& plan,
             uint64_t fencing_token, absl::Time now,
             absl::Time slots_since = absl::InfiniteFuture());
  void Reject(const std::string& reason, absl::Time now);  // it can never run
  // The attempt, if it has ranks on `node`, writes a checkpoint and moves elsewhere.
  void MoveOff(const std::string& node, const std::string& reason);
  // A plan for later steps, to rank 0.
  void Replan(const v1::StepPlan& plan);

  // What workers report of the current attempt.
  void OnReady(const v1::TrainerReady& ready, absl::Time now);
  void OnExit(const v1::TrainerExited& exited, absl::Time now);
  // `later`: not for anything in the job; the attempt counts for no retry. Either way the node gets
  // no attempt of this job for a while.
  void OnStartRefused(const std::string& node, const std::string& why, absl::Time now,
                      bool later = false);
  // A command for the node is not sent again, because each session in which it was sent ended.
  void OnDeadlyCommand(const std::string& node, bool is_start, absl::Time now);
  // Ranks on the node that are not `running` there ended, and what became of them is not known.
  void OnEndsLost(const std::string& node, const std::set<uint32_t>& running,
                  const std::string& how, absl::Time now);
  // The worker process that started the trainers is dead, and they with it. `how`: for users.
  void OnWorkerDied(const std::string& node, const std::string& how, absl::Time now);
  // Returns the merged report when this one completes a step.
  std::optional<v1::StepReport> OnStep(v1::StepReport report, StepMerger::Origin origin);
  // The same of an attempt that is over, from a worker that was out of sight meanwhile. Fills the
  // record where the next attempt, going by the checkpoint, left steps out; beyond what any attempt
  // is known to have trained, by rank 0's word alone.
  void OnLateStep(uint32_t attempt, v1::StepReport report);
  // Ranks that are slow now, without their nodes. What is known of those before is replaced.
  void NameSlowRanks(std::vector<v1::SlowRank> slow);
  void OnEval(const v1::EvalReport& eval);
  void OnCheckpoint(const v1::CheckpointNotice& checkpoint);
  void OnModelExported(const std::string& path);

  // Whether ranks trained past the step that this version of the plan was to change without it, or
  // failed in it.
  bool Missed(uint64_t plan_version) const;
  // Ids of nodes on which a rank of the last attempt was slow.
  std::set<std::string> SlowNodes() const;
  // Ids of nodes that refused this job a moment ago.
  std::set<std::string> AvoidedNodes() const;
  // Forgets those whose time is over. Returns whether there were any.
  bool EndAvoidance(absl::Time now);

  // `last_heard` of a node whose lease ran out; unset when it is (again) in sight, or said hello.
  void OnSight(const std::string& node, std::optional<absl::Time> last_heard, absl::Time now);
  // Time has passed.
  void Tick(absl::Time now);

 private:
  v1::Attempt* current();
  v1::Attempt* live();
  bool AllDead() const;
  void AttemptChanged() { effects_.changed_attempts.insert(attempt()->number()); }
  const v1::Placement* PlacementOf(uint32_t rank) const;
  bool OutOfSight(const v1::Placement& placement) const;

  void SetState(v1::Job::State state, const std::string& reason, absl::Time now);
  void SetReason(const std::string& reason);
  void SetRank(uint32_t rank, v1::RankStatus::State state);
  void UpdateSight(absl::Time now);
  void Connect(absl::Time now);
  void Stop(v1::StopTrainers::Mode mode, const std::string& reason);
  void Send(const v1::Placement& placement, v1::Command command);
  // The attempt has failed. `collateral`: this sign of it is not the cause; a better one may come.
  void Blame(v1::Failure failure, bool collateral, absl::Time now);
  // The ranks of `placement` that were alive are LOST, except for `running`; the failure names the
  // first of them, or none (-1) if there is none.
  v1::Failure Lose(const v1::Placement& placement, const std::string& how,
                   const std::set<uint32_t>& running = {});
  void Fence(absl::Time now);
  void CheckStart(absl::Time now);
  // Ends the attempt and moves the job on, as far as what is known allows.
  void Settle(absl::Time now);
  void End(absl::Time now);
  void Retry(absl::Time now);
  void NameLostNode(v1::Attempt* attempt);
  // Which of the announced changes ranks took, by what they report.
  void SettlePlanChanges(v1::Attempt* attempt, const v1::StepReport& merged);
  // A change whose first step no rank got through may be why the attempt failed (its shape may want
  // more memory): the next one does without.
  static void LeaveOutWhatEndedIt(v1::Attempt* attempt);
  void RecordStep(v1::Attempt* attempt, const v1::StepReport& merged);
  void UpdateProgress(const v1::StepReport& merged);
  // Tokens that were trained before the step.
  uint64_t TokensBefore(const v1::StepReport& merged) const;

  const Options* const options_;
  v1::Job job_;
  const std::string checkpoint_folder_;
  const uint64_t spec_bytes_;  // a specification never changes
  Effects effects_;
  StepMerger merger_;
  std::map<std::string, absl::Time> out_of_sight_;  // node → last heard
  std::map<std::string, absl::Time> avoid_;         // node → until when it gets no attempt
  uint32_t refusals_ = 0;                           // in a row
  // Facts about the current attempt that are not stored: a restarted coordinator needs none of
  // them.
  std::optional<absl::Time> failing_since_;
  absl::Time start_deadline_ = absl::InfiniteFuture();
  v1::StopTrainers::Mode stop_mode_ = v1::StopTrainers::MODE_UNSPECIFIED;
  double mean_step_seconds_ = 0, mean_step_tokens_ = 0;
  // Step → tokens trained by then: of the newest steps, and of those with a checkpoint.
  std::map<uint64_t, uint64_t> recent_tokens_, tokens_at_;
};

}  // namespace ringleader::lifecycle
