#include "coordinator/lifecycle/job_controller.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "base/metrics/metrics.h"
#include "base/status_macros.h"
#include "coordinator/lifecycle/batch_queue.h"
#include "coordinator/lifecycle/controller_core.h"
#include "coordinator/lifecycle/lifecycle_metrics.h"

namespace ringleader::lifecycle {
namespace {

// How often the thread looks at the clock: often enough that no time-out is late by more than a
// tenth.
absl::Duration TickInterval(const Options& options) {
  const absl::Duration shortest =
      std::min({options.lease, options.blame_window, options.retry_backoff});
  return std::clamp(shortest / 10, absl::Milliseconds(20), absl::Milliseconds(500));
}

// A full disk stays full for a while: the next try waits this long.
constexpr absl::Duration kPauseAfterFailure = absl::Milliseconds(500);

// A plan that was asked for is there: the next batch takes it, soon.
ControllerCore::OnMade IntoQueue(const std::shared_ptr<BatchQueue>& queue) {
  return [queue](const std::string& job, uint64_t ticket, absl::StatusOr<MadePlan> made) {
    queue->Push(
        {.apply =
             [job, ticket, made = std::move(made)](
                 ControllerCore& core, store::WriteTransaction& transaction, absl::Time now) {
               return core.OnPlanned(transaction, job, ticket, made, now);
             },
         .done = [](const absl::Status&) {},
         .vital = true});
  };
}

// What a preview tells once both are there: why its job would wait, which is said when nothing is
// locked any more, and its plan, which may come before that.
class PreviewAnswer {
 public:
  explicit PreviewAnswer(JobController::PreviewDone done) : done_(std::move(done)) {}

  void SetReason(std::string reason) {
    {
      absl::MutexLock lock(&mutex_);
      reason_ = std::move(reason);
      if (!made_.has_value()) return;
    }
    Tell();
  }
  void SetPlan(absl::StatusOr<MadePlan> made) {
    {
      absl::MutexLock lock(&mutex_);
      made_ = std::move(made);
      if (!reason_.has_value()) return;
    }
    Tell();
  }

 private:
  void Tell() {
    JobController::Preview preview;
    absl::Status status;
    {
      absl::MutexLock lock(&mutex_);
      status = made_->status();
      if (status.ok()) preview.plan = std::move((*made_)->plan);
      preview.pending_reason = *std::move(reason_);
    }
    if (status.ok()) {
      done_(std::move(preview));
    } else {
      done_(status);
    }
  }

  const JobController::PreviewDone done_;
  absl::Mutex mutex_;
  std::optional<std::string> reason_ ABSL_GUARDED_BY(mutex_);
  std::optional<absl::StatusOr<MadePlan>> made_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

class JobController::Impl {
 public:
  Impl(const Options& options, store::Store* store, PlanSource* plans, const Clock* clock,
       Metrics* metrics, std::function<void(const absl::Status&)> on_damage)
      : options_(options),
        store_(store),
        clock_(clock),
        on_damage_(std::move(on_damage)),
        metrics_(metrics == nullptr ? nullptr : &metrics->registry()),
        plans_(plans),
        core_(options, plans, &metrics_, IntoQueue(queue_)) {}

  ~Impl() { Stop(); }

  // Returns whether memory agrees with the store; if not, tries to read it.
  absl::Status Load() {
    absl::MutexLock lock(&core_mutex_);
    return LoadLocked();
  }

  void Start() {
    thread_ = std::thread([this] { Loop(); });
  }

  void Stop() {
    if (!queue_->Stop()) return;
    if (thread_.joinable()) thread_.join();
    do {
      RunOnce();
    } while (queue_->IsReady());
  }

  void Enqueue(BatchItem item) { queue_->Push(std::move(item)); }

  // Runs `body` in a batch, once per request id, and waits for the commit.
  template <typename Reply>
  absl::StatusOr<Reply> Call(const store::RequestKey& key,
                             const std::function<absl::StatusOr<Reply>(
                                 ControllerCore&, store::WriteTransaction&, absl::Time)>& body,
                             bool ends_batch = false) {
    absl::StatusOr<Reply> reply = absl::UnknownError("not run");
    absl::Notification done;
    Enqueue({.apply =
                 [&](ControllerCore& core, store::WriteTransaction& transaction, absl::Time now) {
                   absl::Status noted;
                   const auto once = [&]() {
                     absl::StatusOr<Reply> made = body(core, transaction, now);
                     if (made.ok() && key.audit) noted = transaction.AppendAudit(*key.audit);
                     return made;
                   };
                   reply = key.id.empty() ? once() : store::Once<Reply>(transaction, key, once);
                   if (!noted.ok()) return noted;
                   return absl::IsDataLoss(reply.status()) || absl::IsInternal(reply.status())
                              ? reply.status()
                              : absl::OkStatus();
                 },
             .done =
                 [&](const absl::Status& committed) {
                   if (!committed.ok()) reply = committed;
                   done.Notify();
                 },
             .ends_batch = ends_batch});
    done.WaitForNotification();
    return reply;
  }

  // The same of a reply that is a job. A job is large: no more is kept of the reply than which it
  // is, and a request that comes again gets that job as it is by then.
  absl::StatusOr<v1::Job> CallForJob(
      const store::RequestKey& key,
      const std::function<absl::StatusOr<v1::Job>(ControllerCore&, store::WriteTransaction&,
                                                  absl::Time)>& body) {
    std::optional<v1::Job> made;
    ASSIGN_OR_RETURN(const v1::Job kept,
                     Call<v1::Job>(key,
                                   [&](ControllerCore& core, store::WriteTransaction& transaction,
                                       absl::Time now) -> absl::StatusOr<v1::Job> {
                                     ASSIGN_OR_RETURN(made, body(core, transaction, now));
                                     v1::Job which;
                                     which.set_name(made->name());
                                     which.set_uid(made->uid());
                                     return which;
                                   }));
    return made.has_value() ? *std::move(made) : FindSameJob(store_, kept);
  }

  absl::StatusOr<v1::Job> ChangeJob(std::string_view id, std::string_view etag,
                                    const store::RequestKey& key, const JobCheck& may,
                                    const ControllerCore::Intent& intent) {
    return CallForJob(
        key, [&](ControllerCore& core, store::WriteTransaction& transaction, absl::Time now) {
          return core.ChangeJob(transaction, id, etag, may, intent, now);
        });
  }

  absl::StatusOr<v1::Node> SetDraining(std::string_view id, bool draining,
                                       const store::RequestKey& key) {
    return Call<v1::Node>(
        key, [&](ControllerCore& core, store::WriteTransaction& transaction, absl::Time) {
          return core.SetDraining(transaction, id, draining);
        });
  }

  // Returns false if what there was to write could not be written.
  bool RunOnce() {
    const bool written = RunBatch();
    std::vector<std::string> warnings;
    {
      absl::MutexLock lock(&core_mutex_);
      warnings = core_.TakeWarnings(clock_->Now());
    }
    for (const std::string& line : warnings) spdlog::warn("{}", line);
    return written;
  }

  std::vector<v1::Node> ListNodes() {
    absl::MutexLock lock(&core_mutex_);
    return core_.ListNodes();
  }

  void PreviewJob(const v1::JobSpec& spec, const v1::ModelShape& shape, const std::string& owner,
                  PreviewDone done) {
    const auto answer = std::make_shared<PreviewAnswer>(std::move(done));
    std::string pending_reason;
    absl::Status refused;
    {
      absl::MutexLock lock(&core_mutex_);
      absl::StatusOr<PlanRequest> request = core_.PreparePreview(spec, owner, &pending_reason);
      refused = request.status();
      if (request.ok()) {
        request->shape = shape;
        plans_->Plan(*std::move(request),
                     [answer](absl::StatusOr<MadePlan> made) { answer->SetPlan(std::move(made)); });
      }
    }
    if (!refused.ok()) answer->SetPlan(refused);
    answer->SetReason(std::move(pending_reason));
  }

 private:
  bool RunBatch() {
    if (const absl::Status loaded = Load(); !loaded.ok()) {
      Refuse(loaded);
      if (absl::IsDataLoss(loaded)) TellOfDamage(loaded);
      return false;
    }
    const absl::Status space = store_->Space();
    std::vector<BatchItem> batch = queue_->Take(space);
    absl::Status committed;
    {
      absl::MutexLock lock(&core_mutex_);
      core_.SetScarce(!space.ok());
      const absl::Time now = clock_->Now();
      const bool due = core_.Tick(now);
      if (!due && batch.empty()) return true;
      const absl::Time begin = absl::Now();
      committed = store_->Write(
          [&](store::WriteTransaction& transaction) -> absl::Status {
            for (BatchItem& item : batch) {
              RETURN_IF_ERROR(item.apply(core_, transaction, now));
            }
            return core_.Commit(transaction, now);
          },
          store::Need::kVital);
      metrics_.Batch(batch.size(), absl::Now() - begin, committed.ok());
      if (committed.ok()) {
        core_.Publish();
      } else {
        // Only the first of several failed tries is logged.
        if (writable_) spdlog::error("cannot write: {}", std::string(committed.message()));
        // Memory holds what never happened: what is on disk is read back, at once or later.
        core_.Drop(committed);
        loaded_ = false;
        LoadLocked().IgnoreError();
      }
      if (committed.ok() != writable_) {
        writable_ = committed.ok();
        if (writable_) spdlog::info("can write again");
      }
    }
    BatchQueue::Finish(batch, committed);
    if (absl::IsDataLoss(committed)) TellOfDamage(committed);
    return committed.ok();
  }

  // No later try would succeed.
  void TellOfDamage(const absl::Status& damage) {
    if (on_damage_) std::exchange(on_damage_, nullptr)(damage);
  }

  void Loop() {
    const absl::Duration tick = TickInterval(options_);
    while (queue_->Await(tick, options_.batch_window)) {
      if (!RunOnce()) absl::SleepFor(kPauseAfterFailure);
    }
  }

  absl::Status LoadLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(core_mutex_) {
    if (loaded_) return absl::OkStatus();
    const absl::Status read = store_->Read([&](store::ReadTransaction& transaction) {
      return core_.Load(transaction, clock_->Now());
    });
    loaded_ = read.ok();
    // Only the first of several failed tries is logged.
    if (!loaded_ && readable_) {
      spdlog::error("the store cannot be read: {}", std::string(read.message()));
    }
    readable_ = loaded_;
    return read;
  }

  // Nothing can be decided: requests are refused, and workers say hello again later. What they sent
  // before waits, and is dropped when their session proves to be over.
  void Refuse(const absl::Status& unreadable) {
    const absl::Status refusal = absl::UnavailableError(absl::StrCat(
        "the coordinator has to read its database and cannot: ", unreadable.message()));
    std::vector<BatchItem> vital = queue_->Take(refusal);
    for (const BatchItem& item : vital) {
      if (item.session != nullptr) item.session->Close(refusal);
    }
    BatchQueue::Finish(vital, refusal);
  }

  const Options options_;
  store::Store* const store_;
  const Clock* const clock_;
  std::function<void(const absl::Status&)> on_damage_;  // used where batches run
  LifecycleMetrics metrics_;
  // Plans that are still being made may outlive the controller and come here.
  const std::shared_ptr<BatchQueue> queue_ = std::make_shared<BatchQueue>();

  absl::Mutex core_mutex_;
  PlanSource* const plans_ ABSL_PT_GUARDED_BY(core_mutex_);
  ControllerCore core_ ABSL_GUARDED_BY(core_mutex_);
  bool loaded_ ABSL_GUARDED_BY(core_mutex_) = false;
  bool readable_ ABSL_GUARDED_BY(core_mutex_) = true;
  bool writable_ ABSL_GUARDED_BY(core_mutex_) = true;

  std::thread thread_;
};

absl::StatusOr<std::unique_ptr<JobController>> JobController::Create(
    const Options& options, store::Store* store, PlanSource* plans, const Clock* clock,
    Metrics* metrics, std::function<void(const absl::Status&)> on_damage) {
  if (absl::Status valid = Validate(options); !valid.ok()) return valid;
  auto impl = std::make_unique<Impl>(options, store, plans, clock, metrics, std::move(on_damage));
  if (absl::Status loaded = impl->Load(); !loaded.ok()) return loaded;
  return std::unique_ptr<JobController>(new JobController(std::move(impl)));
}

JobController::JobController(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
JobController::~JobController() = default;

void JobController::Start() {
  impl_->Start();
}
void JobController::Stop() {
  impl_->Stop();
}
void JobController::RunOnce() {
  if (impl_->RunOnce()) impl_->RunOnce();
}

absl::StatusOr<v1::Job> FindSameJob(store::Store* store, const v1::Job& which) {
  v1::Job job;
  RETURN_IF_ERROR(store->Read([&](store::ReadTransaction& transaction) -> absl::Status {
    ASSIGN_OR_RETURN(const std::string id, store::JobIdFromName(which.name()));
    ASSIGN_OR_RETURN(job, transaction.GetJob(id));
    return absl::OkStatus();
  }));
  if (job.uid() != which.uid()) {
    return absl::NotFoundError(absl::StrCat(which.name(), " was deleted since this was asked"));
  }
  return job;
}

absl::StatusOr<v1::Job> JobController::CreateJob(const v1::JobSpec& spec,
                                                 const store::RequestKey& key,
                                                 const Ownership& ownership,
                                                 const v1::ModelShape& shape) {
  return impl_->CallForJob(
      key, [&](ControllerCore& core, store::WriteTransaction& transaction, absl::Time now) {
        return core.CreateJob(transaction, spec, shape, ownership, now);
      });
}

absl::StatusOr<v1::Job> JobController::CancelJob(std::string_view id, std::string_view etag,
                                                 const store::RequestKey& key, const JobCheck& may,
                                                 bool checkpoint) {
  return impl_->ChangeJob(id, etag, key, may, [checkpoint](JobMachine& machine, absl::Time now) {
    return machine.Cancel(now, checkpoint);
  });
}

absl::StatusOr<v1::Job> JobController::PauseJob(std::string_view id, std::string_view etag,
                                                const store::RequestKey& key, const JobCheck& may) {
  return impl_->ChangeJob(id, etag, key, may, &JobMachine::Pause);
}

absl::StatusOr<v1::Job> JobController::ResumeJob(std::string_view id, std::string_view etag,
                                                 const store::RequestKey& key,
                                                 const JobCheck& may) {
  return impl_->ChangeJob(id, etag, key, may, &JobMachine::Resume);
}

absl::StatusOr<v1::Job> JobController::ProfileJob(std::string_view id, uint32_t steps,
                                                  const store::RequestKey& key,
                                                  const JobCheck& may) {
  return impl_->ChangeJob(id, "", key, may, [steps](JobMachine& machine, absl::Time) {
    return machine.Profile(steps);
  });
}

absl::Status JobController::DeleteJob(std::string_view id, std::string_view etag,
                                      const store::RequestKey& key, const JobCheck& may) {
  // The reply that is kept is the job's empty shell: DeleteJob returns nothing.
  return impl_
      ->Call<v1::Job>(
          key,
          [&](ControllerCore& core, store::WriteTransaction& transaction,
              absl::Time) -> absl::StatusOr<v1::Job> {
            absl::Status deleted = core.DeleteJob(transaction, id, etag, may);
            if (!deleted.ok()) return deleted;
            return v1::Job();
          },
          /*ends_batch=*/true)
      .status();
}

absl::StatusOr<v1::Node> JobController::DrainNode(std::string_view id,
                                                  const store::RequestKey& key) {
  return impl_->SetDraining(id, true, key);
}

absl::StatusOr<v1::Node> JobController::UndrainNode(std::string_view id,
                                                    const store::RequestKey& key) {
  return impl_->SetDraining(id, false, key);
}

std::vector<v1::Node> JobController::ListNodes() const {
  return impl_->ListNodes();
}

void JobController::PreviewJob(const v1::JobSpec& spec, const v1::ModelShape& shape,
                               const std::string& owner, PreviewDone done) const {
  impl_->PreviewJob(spec, shape, owner, std::move(done));
}

void JobController::OnHello(std::shared_ptr<session::Session> session, v1::WorkerHello hello) {
  impl_->Enqueue(
      {.apply = [session, hello = std::move(hello)](
                    ControllerCore& core, store::WriteTransaction& transaction,
                    absl::Time now) { return core.OnHello(transaction, session, hello, now); },
       .vital = true,
       .session = session});
}

void JobController::OnMessage(std::shared_ptr<session::Session> session,
                              v1::WorkerMessage message) {
  const size_t bytes = message.ByteSizeLong();
  impl_->Enqueue(
      {.apply =
           [session, message = std::move(message)](
               ControllerCore& core, store::WriteTransaction& transaction, absl::Time now) mutable {
             return core.OnMessage(transaction, session, message, now);
           },
       .session = session,
       .message_bytes = bytes});
}

void JobController::OnClosed(std::shared_ptr<session::Session> session) {
  impl_->Enqueue(
      {.apply = [session](ControllerCore& core, store::WriteTransaction& transaction,
                          absl::Time now) { return core.OnClosed(transaction, session, now); },
       .session = session});
}

void JobController::OnDeath(std::string node, std::string incarnation,
                            std::function<void(const absl::Status&)> done) {
  const auto taken_in = std::make_shared<bool>(false);
  impl_->Enqueue({.apply = [taken_in, node = std::move(node), incarnation = std::move(incarnation)](
                               ControllerCore& core, store::WriteTransaction& transaction,
                               absl::Time now) -> absl::Status {
                    ASSIGN_OR_RETURN(*taken_in, core.OnDeath(transaction, node, incarnation, now));
                    return absl::OkStatus();
                  },
                  .done =
                      [taken_in, done = std::move(done)](const absl::Status& committed) {
                        // Whatever went wrong here is no fault of the witness: it may try again.
                        done(committed.ok() && *taken_in
                                 ? absl::OkStatus()
                                 : absl::UnavailableError("not taken in yet; try again"));
                      }});
}

}  // namespace ringleader::lifecycle
