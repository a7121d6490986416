// The coordinator's core: takes what users ask and what workers report, decides, writes it down,
// and only then lets anyone know.
//
// One thread owns all decisions. Requests and events queue up for it; it takes what has queued as
// one batch, applies it in one store transaction, and after the commit answers requests,
// acknowledges events and sends commands (rule 1: durable before visible). If the commit fails,
// nothing of the batch happened: requests fail, sessions are closed so that workers send their
// events again, and the state is read back from the store.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "coordinator/lifecycle/job/options.h"
#include "coordinator/lifecycle/planning/plan_source.h"
#include "coordinator/session/session.h"
#include "coordinator/store/store.h"
#include "ringleader/v1/job.pb.h"
#include "ringleader/v1/node.pb.h"

namespace ringleader {
class Metrics;
}

namespace ringleader::lifecycle {

// Whose a job is; empty on a coordinator without roles.
struct Ownership {
  std::string owner = {};
  std::string project = {};
};

// Whether the caller may change this job: asked in the transaction that would. Empty: yes.
using JobCheck = std::function<absl::Status(const v1::Job&)>;

// The job that `which` names, as it is by now; NOT_FOUND where it is gone, or another has its name.
absl::StatusOr<v1::Job> FindSameJob(store::Store* store, const v1::Job& which);

// Thread-safe. Calls that return a Job or a Node block until their batch is on disk (milliseconds):
// call them from a thread that may wait. Job and node ids come without "jobs/" and "nodes/".
// Reading jobs, steps and logs needs no controller: read the store.
class JobController : public session::SessionListener {
 public:
  // Takes up the unfinished jobs in `store`. All must outlive the controller; `metrics` may be
  // null. `on_damage` is called once, from the controller's thread, if what is stored turns out to
  // be damaged later, so that nothing can be decided or written any more.
  static absl::StatusOr<std::unique_ptr<JobController>> Create(
      const Options& options, store::Store* store, PlanSource* plans, const Clock* clock,
      Metrics* metrics, std::function<void(const absl::Status&)> on_damage = {});
  ~JobController() override;

  // Starts the thread. Before, nothing is decided; events and requests queue up.
  void Start();
  // Answers what has queued and ends the thread. Trainers run on. Later calls fail with
  // UNAVAILABLE.
  void Stop();

  // `spec` has been validated and has its defaults; `shape`: of its model, zeros if that is not
  // known. ALREADY_EXISTS if the id is taken, RESOURCE_EXHAUSTED while too many have not ended.
  absl::StatusOr<v1::Job> CreateJob(const v1::JobSpec& spec, const store::RequestKey& key,
                                    const Ownership& ownership = {},
                                    const v1::ModelShape& shape = {});

  // The five below: NOT_FOUND; what `may` says; FAILED_PRECONDITION where the job's state does not
  // allow it (says which would); ABORTED where `etag` is set and not the job's.
  //
  // Cancelling a cancelled job, pausing a paused one and resuming a running one change nothing.
  // `checkpoint`: the trainers write one before they leave; to cancel again without ends the wait.
  absl::StatusOr<v1::Job> CancelJob(std::string_view id, std::string_view etag,
                                    const store::RequestKey& key, const JobCheck& may = {},
                                    bool checkpoint = false);
  absl::StatusOr<v1::Job> PauseJob(std::string_view id, std::string_view etag,
                                   const store::RequestKey& key, const JobCheck& may = {});
  absl::StatusOr<v1::Job> ResumeJob(std::string_view id, std::string_view etag,
                                    const store::RequestKey& key, const JobCheck& may = {});
  // Has the ranks of a RUNNING job trace their next steps; changes nothing else.
  absl::StatusOr<v1::Job> ProfileJob(std::string_view id, uint32_t steps,
                                     const store::RequestKey& key, const JobCheck& may = {});
  // Terminal jobs only: the record and its logs go, checkpoints and models stay on disk.
  absl::Status DeleteJob(std::string_view id, std::string_view etag, const store::RequestKey& key,
                         const JobCheck& may = {});

  // Nothing new is placed on the node; attempts on it write a checkpoint, stop, and are placed
  // elsewhere.
  absl::StatusOr<v1::Node> DrainNode(std::string_view id, const store::RequestKey& key);
  absl::StatusOr<v1::Node> UndrainNode(std::string_view id, const store::RequestKey& key);

  // Returns nodes by id, with what is not stored: last heartbeat, trainers in use, reachability.
  std::vector<v1::Node> ListNodes() const;

  // What would happen to a job of this specification now, without creating it. `done` is called
  // once, when the plan is there, on any thread, also before this has returned. RESOURCE_EXHAUSTED
  // when others of `owner` wait for theirs; further errors say why no plan can be made.
  struct Preview {
    v1::StepPlan plan;
    std::string pending_reason;  // empty: it would start at once
  };
  using PreviewDone = std::function<void(absl::StatusOr<Preview>)>;
  void PreviewJob(const v1::JobSpec& spec, const v1::ModelShape& shape, const std::string& owner,
                  PreviewDone done) const;

  void OnHello(std::shared_ptr<session::Session> session, v1::WorkerHello hello) override;
  void OnMessage(std::shared_ptr<session::Session> session, v1::WorkerMessage message) override;
  void OnClosed(std::shared_ptr<session::Session> session) override;
  void OnDeath(std::string node, std::string incarnation,
               std::function<void(const absl::Status&)> done) override;

  // Tests call this in place of Start(). It runs one batch with a look at the clock, and another
  // for the plans that it asked for.
  void RunOnce();

 private:
  class Impl;
  explicit JobController(std::unique_ptr<Impl> impl);

  const std::unique_ptr<Impl> impl_;
};

}  // namespace ringleader::lifecycle
