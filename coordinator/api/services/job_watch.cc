#include "coordinator/api/services/job_watch.h"

#include <utility>

#include "base/status_macros.h"
#include "proto/states.h"

namespace ringleader::api {
namespace {

// Steps, or evaluations, in one message, as far as they fit into a page.
constexpr int kStepsPerMessage = 200;

class JobWatch : public PulledStream<v1::WatchJobResponse> {
 public:
  JobWatch(StreamHub* hub, const grpc::CallbackServerContext& context,
           const v1::WatchJobRequest& request)
      : PulledStream(hub, context, "JobService", "WatchJob", request.name()),
        include_steps_(request.include_steps()),
        after_step_(request.after_step()),
        seen_revision_(request.after_revision()),
        step_sequence_(request.after_reports().step_sequence()),
        eval_sequence_(request.after_reports().eval_sequence()) {
    absl::StatusOr<std::string> id = store::JobIdFromName(request.name());
    if (id.ok()) id_ = *id;
    Start(context, id_, id.status());
  }

 private:
  absl::StatusOr<Next> Produce(v1::WatchJobResponse* response) override {
    v1::Job job;
    store::StepPage steps;
    store::EvalPage evals;
    RETURN_IF_ERROR(store().Read([&](store::ReadTransaction& t) -> absl::Status {
      ASSIGN_OR_RETURN(job, t.GetJob(id_));
      if (!include_steps_) return absl::OkStatus();
      ASSIGN_OR_RETURN(steps, t.ListSteps(id_, after_step_, step_sequence_, kStepsPerMessage));
      ASSIGN_OR_RETURN(evals, t.ListEvals(id_, eval_sequence_, kStepsPerMessage));
      return absl::OkStatus();
    }));
    // A job that was deleted and created again under its name is another one.
    if (uid_.empty()) uid_ = job.uid();
    if (uid_ != job.uid()) return absl::NotFoundError(job.name() + " was deleted");

    const bool terminal = IsTerminal(job.state());
    const bool all_reports = !steps.more && !evals.more;
    step_sequence_ = steps.last_sequence;
    eval_sequence_ = evals.last_sequence;
    for (v1::StepReport& step : steps.steps) *response->add_steps() = std::move(step);
    for (v1::EvalReport& eval : evals.evals) *response->add_evals() = std::move(eval);
    if (include_steps_) {
      response->mutable_reports()->set_step_sequence(step_sequence_);
      response->mutable_reports()->set_eval_sequence(eval_sequence_);
      response->set_has_all_reports(all_reports);
      // From here on a lower one is trained again.
      if (all_reports) after_step_ = 0;
    }
    // The final state comes last, with or after the last step: who sees it has seen everything.
    if (job.revision() > seen_revision_ && (!terminal || all_reports)) {
      seen_revision_ = job.revision();
      *response->mutable_job() = std::move(job);
    }
    if (response->has_job() || response->steps_size() > 0 || response->evals_size() > 0)
      return Next::kWrite;
    return terminal ? Next::kEnd : Next::kWait;
  }

  const bool include_steps_;
  uint64_t after_step_;
  std::string id_;
  std::string uid_;
  uint64_t seen_revision_;
  uint64_t step_sequence_;
  uint64_t eval_sequence_;
};

}  // namespace

grpc::ServerWriteReactor<v1::WatchJobResponse>* NewJobWatch(
    StreamHub* hub, const grpc::CallbackServerContext& context,
    const v1::WatchJobRequest& request) {
  return new JobWatch(hub, context, request);
}

}  // namespace ringleader::api
