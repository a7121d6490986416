// What JobController's thread works on: all unfinished jobs and all nodes, and how requests, events
// and the passing of time change them inside a store transaction. Not thread-safe.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "coordinator/lifecycle/job/job_machine.h"
#include "coordinator/lifecycle/job/options.h"
#include "coordinator/lifecycle/job_controller.h"
#include "coordinator/lifecycle/lifecycle_metrics.h"
#include "coordinator/lifecycle/nodes/node_table.h"
#include "coordinator/lifecycle/planning/plan_source.h"
#include "coordinator/lifecycle/planning/plans_under_way.h"
#include "coordinator/lifecycle/reports/ended_attempts.h"
#include "coordinator/lifecycle/reports/warnings.h"
#include "coordinator/session/session.h"
#include "coordinator/store/store.h"

namespace ringleader::lifecycle {

// After a method failed, or its transaction did, the core no longer agrees with the store: Drop()
// and Load() it again; until that succeeds nothing else may be asked of it but ListNodes() and
// PreparePreview(). Its methods are in controller_core.cc (what users ask, the passing of time, the
// commit), controller_planning.cc (where attempts run, and by which plan), controller_nodes.cc
// (drains, nodes that are set aside), controller_sessions.cc (workers that come and go) and
// controller_events.cc (what they report).
class ControllerCore {
 public:
  // Plan `ticket` is made, or cannot be. Called on any thread, perhaps after the core is gone; what
  // it brings is to reach OnPlanned() in a later batch.
  using OnMade =
      std::function<void(const std::string& job, uint64_t ticket, absl::StatusOr<MadePlan> made)>;

  // Both pointers must outlive the core.
  ControllerCore(const Options& options, PlanSource* plans, LifecycleMetrics* metrics,
                 OnMade on_made)
      : options_(options), plans_(plans), metrics_(metrics), on_made_(std::move(on_made)) {}

  // What is in memory counts no longer, and nothing of it is told. Sessions are closed, and
  // told of the `cause`: workers reconnect and say what runs.
  void Drop(const absl::Status& cause);
  // Takes over what is stored. Nodes get a lease from `now` on.
  absl::Status Load(store::ReadTransaction& transaction, absl::Time now);

  // While there is hardly room for what must be written, why jobs wait is not written anew: it
  // changes for all of them whenever slots do, and each is as large as its specification.
  void SetScarce(bool is_scarce);
  // Leases, back-offs and other time-outs; changes memory only. Returns whether there is now
  // something to commit.
  bool Tick(absl::Time now);

  // --- Within a transaction, between Tick() and Commit().

  absl::StatusOr<v1::Job> CreateJob(store::WriteTransaction& transaction, const v1::JobSpec& spec,
                                    const v1::ModelShape& shape, const Ownership& ownership,
                                    absl::Time now);
  using Intent = std::function<absl::Status(JobMachine&, absl::Time)>;
  absl::StatusOr<v1::Job> ChangeJob(store::WriteTransaction& transaction, std::string_view id,
                                    std::string_view etag, const JobCheck& may,
                                    const Intent& intent, absl::Time now);
  absl::Status DeleteJob(store::WriteTransaction& transaction, std::string_view id,
                         std::string_view etag, const JobCheck& may);
  absl::StatusOr<v1::Node> SetDraining(store::WriteTransaction& transaction, std::string_view id,
                                       bool draining);

  absl::Status OnHello(store::WriteTransaction& transaction,
                       const std::shared_ptr<session::Session>& session,
                       const v1::WorkerHello& hello, absl::Time now);
  absl::Status OnMessage(store::WriteTransaction& transaction,
                         const std::shared_ptr<session::Session>& session,
                         v1::WorkerMessage& message, absl::Time now);
  absl::Status OnClosed(store::WriteTransaction& transaction,
                        const std::shared_ptr<session::Session>& session, absl::Time now);
  // Returns whether the news was taken in; false while the session of that process is still open.
  absl::StatusOr<bool> OnDeath(store::WriteTransaction& transaction, const std::string& node,
                               const std::string& incarnation, absl::Time now);

  // Starts the attempt whose plan this is, unless something has overtaken it: the job or a node has
  // changed, or the core was loaded anew.
  absl::Status OnPlanned(store::WriteTransaction& transaction, const std::string& job,
                         uint64_t ticket, const absl::StatusOr<MadePlan>& made, absl::Time now);

  // Has plans made for what can be placed, and writes all changes. What may be told once the
  // transaction is durable lies in `outbox` then.
  absl::Status Commit(store::WriteTransaction& transaction, absl::Time now);
  // Tells it: acknowledgements, commands.
  void Publish();
  // Lines for the log, to be written where nobody waits.
  std::vector<std::string> TakeWarnings(absl::Time now) { return warnings_.Take(now); }

  std::vector<v1::Node> ListNodes() const;
  // Where a job of this specification would run, as if one node had room for all if none has, and
  // why it would wait; the latter is empty if it would not. FAILED_PRECONDITION where another job
  // has its checkpoint folder.
  absl::StatusOr<PlanRequest> PreparePreview(const v1::JobSpec& spec, const std::string& owner,
                                             std::string* pending_reason) const;
  const std::map<std::string, std::unique_ptr<JobMachine>, std::less<>>& machines() const {
    return machines_;
  }
  const std::map<std::string, NodeRecord, std::less<>>& nodes() const { return nodes_; }

 private:
  struct SentCommand {
    std::string node;
    std::string job;
    uint32_t attempt = 0;
    uint64_t token = 0;
    bool is_start = false;
    bool is_stop = false;
    const session::Session* sent_on = nullptr;  // last; only compared
    int sessions_ended = 0;                     // right after it was sent, perhaps by it
  };

  JobMachine* Find(std::string_view job);
  // The machine whose current attempt has this number and token; null if it is another's.
  JobMachine* FindAttempt(std::string_view job, uint32_t attempt, uint64_t token);
  absl::Status OnEvent(store::WriteTransaction& transaction, NodeRecord& record, uint64_t sequence,
                       bool seen, v1::AttemptEvent& event, absl::Time now);
  // Whether the node can know what the event says: of an attempt that has ranks there, under its
  // token, of these ranks, and of steps that the job has, unless it has ended.
  absl::StatusOr<bool> IsGenuine(store::ReadTransaction& transaction, const NodeRecord& record,
                                 const v1::AttemptEvent& event);
  // The worker process of the node whose hello was taken last, by whichever coordinator; empty:
  // none.
  static absl::StatusOr<std::string> NewestIncarnation(store::ReadTransaction& transaction,
                                                       const std::string& node,
                                                       const NodeRecord& record);
  absl::Status CheckIdentity(const NodeRecord& record, const std::string& known,
                             const session::Session& session, absl::Time now) const;
  // `applied`: the sequence up to which its events have been taken in.
  void SendWelcome(const std::shared_ptr<session::Session>& session, uint64_t epoch,
                   uint64_t applied);
  // What was sent to `node` and has not been acknowledged, but for starts of ranks that are dead:
  // those go.
  absl::Status SendAgain(store::WriteTransaction& transaction, const std::string& node,
                         const std::shared_ptr<session::Session>& session);
  // Where the ranks are that it was to start, if none of them is to run any longer; else null.
  const v1::Placement* DeadRanksOf(const SentCommand& start);
  // `job`'s current attempt was sent to `node`, and no worker has said yet that it got it.
  bool StartPending(const std::string& node, const std::string& job) const;
  absl::Status OnStep(store::WriteTransaction& transaction, NodeRecord& record, uint64_t sequence,
                      v1::AttemptEvent& event);
  // The same of a job that has ended.
  absl::Status OnStepOfTheEnded(store::WriteTransaction& transaction, const NodeRecord& record,
                                const v1::AttemptEvent& event);
  absl::Status OnCheckpoint(store::WriteTransaction& transaction, JobMachine& machine,
                            v1::CheckpointNotice& checkpoint, absl::Time now);
  absl::Status OnAck(store::WriteTransaction& transaction, NodeRecord& record,
                     const v1::CommandAck& ack, absl::Time now);
  absl::Status AppendLogs(store::WriteTransaction& transaction, v1::AttemptEvent& event);
  // Stops what the worker runs and should not.
  void StopStrays(NodeRecord& record, const v1::WorkerHello& hello);
  void StopAttempt(const NodeRecord& record, const std::string& job, uint32_t attempt,
                   uint64_t token);
  // The node took up a start late: these ranks of it count as dead.
  void OnStrays(NodeRecord& record, const std::string& job, uint32_t attempt, uint64_t token,
                const std::vector<uint32_t>& ranks);
  // The worker was told that messages were taken in of which the store knows nothing, for it was
  // put back from a backup. Ranks of ours that run there no more ended meanwhile.
  absl::Status OnLostMessages(store::WriteTransaction& transaction, const std::string& node,
                              const v1::WorkerHello& hello, uint64_t applied, absl::Time now);

  void CountTrainers();
  std::vector<scheduler::NodeSlots> Slots() const;
  bool restored() const { return restored_until_ != absl::InfinitePast(); }
  absl::Status Schedule(store::ReadTransaction& transaction, absl::Time now);
  struct Reason {
    std::string job, text;
  };
  // Says why jobs wait, at once or soon: a new reason is a new record, with all of the
  // specification, and a long queue has another for each job whenever slots change.
  void Wait(std::vector<Reason> reasons, absl::Time now);
  std::vector<v1::NodeInventory> Inventories(const std::vector<v1::Placement>& placements) const;

  // An attempt whose plan is being made. It holds its slots until the plan is there.
  struct Planning {
    uint64_t ticket = 0;
    std::vector<v1::Placement> placements;
    std::vector<v1::NodeInventory> nodes;  // as the plan sees them
    std::shared_ptr<std::atomic<bool>> is_overtaken;
    absl::Time since;
  };
  absl::Status BeginPlanning(store::ReadTransaction& transaction, JobMachine& machine,
                             const std::vector<v1::Placement>& placements, absl::Time now);
  // Whether all ranks of the attempt are of this release, which measures links together.
  bool KnowToMeasure(const v1::Attempt& attempt) const;
  // Hands what is stored of the machines to the planner.
  absl::Status ReadMeasurements(store::ReadTransaction& transaction);
  // Tells the planner of an attempt that began under an earlier coordinator.
  absl::Status RestorePlan(store::ReadTransaction& transaction, const JobMachine& machine);
  // Keeps what a rank 0 measured, unless it cannot have.
  absl::Status OnMeasurements(store::WriteTransaction& transaction, const NodeRecord& record,
                              const JobMachine& machine, const v1::Measurements& measured);
  // Whether an attempt may still begin so.
  bool Stands(const std::string& job, const Planning& planning);
  absl::Status Flush(store::WriteTransaction& transaction, JobMachine& machine, absl::Time now);
  // Sets nodes aside that fail one job after another.
  void JudgeNodes(const JobMachine& machine, const Effects& effects, absl::Time now);
  // No other job writes into the job's checkpoint folder, as far as paths tell.
  absl::Status CheckDirectory(const v1::JobSpec& spec) const;
  // One more job that has not ended is within the bounds; RESOURCE_EXHAUSTED where it is not.
  absl::Status CheckRoom(const std::string& owner, const v1::JobSpec& spec) const;
  absl::Status UpdateDrains(store::WriteTransaction& transaction);
  bool IsToBeForgotten(const NodeRecord& record, absl::Time now) const;
  absl::Status ForgetNodes(store::WriteTransaction& transaction, absl::Time now);
  absl::Status StoreLastHeard(store::WriteTransaction& transaction);
  // So that trainers know from whose nodes to take streams.
  void AddCertificates(const v1::Attempt& attempt, v1::ConnectPeers* peers) const;

  // What metrics count of a batch once it is on disk.
  struct Happened {
    std::vector<v1::Job::State> entered;
    std::vector<v1::Attempt::State> ended;
    size_t steps = 0;
  };

  static SentCommand Sent(const std::string& node, const v1::Command& command);

  const Options options_;
  PlanSource* const plans_;
  LifecycleMetrics* const metrics_;
  const OnMade on_made_;
  std::map<std::string, std::unique_ptr<JobMachine>, std::less<>> machines_;  // by job id
  std::map<std::string, NodeRecord, std::less<>> nodes_;                      // by node id
  std::map<uint64_t, SentCommand> unacknowledged_;                            // by command id
  std::map<std::string, Planning, std::less<>> planning_;                     // by job id
  uint64_t last_ticket_ = 0;  // never taken back, so that no old plan is taken for a new one
  // Those that were overtaken included.
  const std::shared_ptr<PlansUnderWay> plans_under_way_ = std::make_shared<PlansUnderWay>();
  EndedAttempts ended_;  // as far as this batch has asked for them
  Warnings warnings_;
  bool schedule_due_ = true;
  bool is_scarce_ = false;
  // What may be written of reasons now, when the rest is due, and with which job it begins.
  double reason_bytes_ = 0;
  std::string next_reason_of_;
  absl::Time reason_bytes_at_ = absl::InfinitePast(), reasons_due_ = absl::InfiniteFuture();
  // The store was put back from a backup: attempts that it does not know of may run until then, so
  // that none is started before. Infinitely past: it was not.
  absl::Time restored_until_ = absl::InfinitePast();

  std::vector<std::pair<std::shared_ptr<session::Session>, v1::CoordinatorMessage>> outbox_;
  Happened happened_;
};

}  // namespace ringleader::lifecycle
