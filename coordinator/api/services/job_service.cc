#include "coordinator/api/services/job_service.h"

#include <grpc/support/time.h>
#include <grpcpp/alarm.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <iterator>
#include <memory>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/net/message_size.h"
#include "base/process/time_limit.h"
#include "base/protocol_version.h"
#include "base/status_macros.h"
#include "coordinator/api/services/job_history.h"
#include "coordinator/api/services/job_watch.h"
#include "coordinator/api/services/listing.h"
#include "coordinator/api/services/requests.h"
#include "jobspec/jobspec.h"
#include "jobspec/roots.h"
#include "jobspec/values/model_spec.h"

namespace ringleader::api {
namespace {

constexpr char kService[] = "JobService";
constexpr uint32_t kMaxProfileSteps = 100;  // a trace of more opens in no viewer

// A file system that is well answers in milliseconds, one that is busy in seconds.
constexpr absl::Duration kFilePatience = absl::Seconds(10);

lifecycle::JobCheck MayChange(const Change& change) {
  return [caller = change.caller](const v1::Job& job) { return caller.MayChange(job); };
}

}  // namespace

absl::StatusOr<JobService::Checked> JobService::Check(const v1::JobSpec& spec,
                                                      uint32_t protocol_version,
                                                      const std::string& client) const {
  if (const size_t bytes = spec.ByteSizeLong(); bytes > kMaxSpecBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("spec: ", bytes, " bytes; at most ", kMaxSpecBytes,
                     " are allowed; attention.dense_layers is what may be long"));
  }
  Checked checked = {.spec = spec, .shape = {}};
  checked.spec.DiscardUnknownFields();
  // Whoever speaks this version of the protocol knows of no field that matters to training and that
  // this program does not know. Others may.
  if (checked.spec.ByteSizeLong() != spec.ByteSizeLong() && protocol_version != kProtocolVersion) {
    return absl::InvalidArgumentError(absl::StrCat(
        "spec: it has fields that this coordinator does not know, and whoever sent it speaks "
        "protocol version ",
        protocol_version, ", this coordinator ", kProtocolVersion,
        ": install the newer release on the coordinator, or use the ringctl of this one"));
  }
  jobspec::ApplyDefaults(&checked.spec);
  RETURN_IF_ERROR(jobspec::Validate(checked.spec));
  RETURN_IF_ERROR(jobspec::CheckPaths(checked.spec, allowed_paths_, jobspec::RootCheck::kText));
  ASSIGN_OR_RETURN(checked.shape, LookAtFiles(checked.spec, client));
  RETURN_IF_ERROR(jobspec::CheckModel(checked.spec, jobspec::ModelOf(checked.shape)));
  return checked;
}

// Where only the workers see the files, it is as well if this machine does not.
absl::StatusOr<v1::ModelShape> JobService::LookAtFiles(const v1::JobSpec& spec,
                                                       const std::string& client) const {
  if (check_files_) {
    const std::string paths =
        absl::StrJoin({spec.model().init(), spec.model().config(), spec.data().train(),
                       spec.data().eval(), spec.checkpoint().directory()},
                      " ");
    RETURN_IF_ERROR(WithTimeLimit(
        client, kFilePatience, absl::StrCat("looking for the job's files, ", paths),
        [spec, roots = allowed_paths_]() -> absl::Status {
          RETURN_IF_ERROR(jobspec::CheckPaths(spec, roots, jobspec::RootCheck::kFiles));
          return jobspec::CheckFiles(spec);
        }));
  }
  absl::StatusOr<v1::ModelShape> shape =
      jobspec::ReadModelShape(spec.model(), client, kFilePatience);
  if (!shape.ok() && !check_files_) return v1::ModelShape();
  return shape;
}

grpc::ServerUnaryReactor* JobService::CreateJob(grpc::CallbackServerContext* context,
                                                const v1::CreateJobRequest* request,
                                                v1::Job* reply) {
  return unary_.RunCheckedChange(
      context, kService, "CreateJob", absl::StrCat("jobs/", request->spec().name()), *request,
      *reply,
      [this, request, reply](const Change& change) { return Create(change, *request, reply); });
}

absl::Status JobService::Create(const Change& change, const v1::CreateJobRequest& request,
                                v1::Job* reply) {
  ASSIGN_OR_RETURN(const store::RequestKey key, KeyOf(change, request));
  // A repeated request gets its job even if the files have gone since.
  std::optional<std::string> earlier;
  RETURN_IF_ERROR(hub_.store().Read([&](store::ReadTransaction& t) -> absl::Status {
    ASSIGN_OR_RETURN(earlier, t.FindReply(key));
    return absl::OkStatus();
  }));
  if (v1::Job which; earlier.has_value() && which.ParseFromString(*earlier)) {
    ASSIGN_OR_RETURN(*reply, lifecycle::FindSameJob(&hub_.store(), which));
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(const Checked checked,
                   Check(request.spec(), request.protocol_version(), change.caller.name));
  RETURN_IF_ERROR(change.caller.MaySubmit(checked.spec));
  lifecycle::Ownership ownership;
  if (!change.caller.local) {
    ownership = {.owner = change.caller.name, .project = change.caller.project};
  }
  ASSIGN_OR_RETURN(*reply, controller_.CreateJob(checked.spec, key, ownership, checked.shape));
  return absl::OkStatus();
}

grpc::ServerUnaryReactor* JobService::GetJob(grpc::CallbackServerContext* context,
                                             const v1::GetJobRequest* request, v1::Job* reply) {
  return unary_.Run(context, kService, "GetJob", request->name(), *reply,
                    [this, request, reply]() -> absl::Status {
                      ASSIGN_OR_RETURN(const std::string id, store::JobIdFromName(request->name()));
                      return hub_.store().Read([&](store::ReadTransaction& t) -> absl::Status {
                        ASSIGN_OR_RETURN(*reply, t.GetJob(id));
                        return absl::OkStatus();
                      });
                    });
}

grpc::ServerUnaryReactor* JobService::GetJobHistory(grpc::CallbackServerContext* context,
                                                    const v1::GetJobHistoryRequest* request,
                                                    v1::JobHistory* reply) {
  // It looks at thousands of reports.
  return unary_.RunCheck(context, kService, "GetJobHistory", request->name(), /*bytes=*/0, *reply,
                         [this, request, reply](const access::Caller&) {
                           return hub_.store().Read([&](store::ReadTransaction& t) {
                             return ReadJobHistory(t, *request, reply);
                           });
                         });
}

grpc::ServerUnaryReactor* JobService::ListJobs(grpc::CallbackServerContext* context,
                                               const v1::ListJobsRequest* request,
                                               v1::ListJobsResponse* reply) {
  const auto list = [this, request, reply] { return List(*request, reply); };
  // Labels of every job are looked up.
  if (!absl::StrContains(request->filter(), std::string(kLabelPrefix))) {
    return unary_.Run(context, kService, "ListJobs", "", *reply, list);
  }
  return unary_.RunCheck(context, kService, "ListJobs", "", /*bytes=*/0, *reply,
                         [list](const access::Caller&) { return list(); });
}

absl::Status JobService::List(const v1::ListJobsRequest& request, v1::ListJobsResponse* reply) {
  const std::string arguments = absl::StrCat("ListJobs\n", request.filter());
  store::JobQuery query;
  ASSIGN_OR_RETURN(query.limit, PageSize(request.page_size()));
  ASSIGN_OR_RETURN(query.terms, ParseJobFilter(request.filter()));
  ASSIGN_OR_RETURN(const std::string place, ParsePageToken(request.page_token(), arguments));
  if (!place.empty() && !absl::SimpleAtoi(place, &query.before_sequence)) {
    return absl::InvalidArgumentError("page_token: not one that this method gave out");
  }
  store::JobPage page;
  RETURN_IF_ERROR(hub_.store().Read([&](store::ReadTransaction& t) -> absl::Status {
    ASSIGN_OR_RETURN(page, t.ListJobs(query));
    return absl::OkStatus();
  }));
  std::vector<v1::Job> jobs = std::move(page.jobs);
  std::ranges::move(page.damaged, std::back_inserter(jobs));
  std::ranges::sort(jobs, std::greater(), &v1::Job::sequence);
  for (v1::Job& job : jobs) *reply->add_jobs() = std::move(job);
  reply->set_total_size(static_cast<int32_t>(page.total));
  if (page.last_sequence != 0) {
    reply->set_next_page_token(MakePageToken(absl::StrCat(page.last_sequence), arguments));
  }
  return absl::OkStatus();
}

template <typename Request, typename Call>
grpc::ServerUnaryReactor* JobService::Transition(grpc::CallbackServerContext* context,
                                                 const char* method, const Request* request,
                                                 v1::Job* reply, Call call) {
  return unary_.RunChange(
      context, kService, method, request->name(), *request, *reply,
      [this, request, reply, call](const Change& change) -> absl::Status {
        ASSIGN_OR_RETURN(const std::string id, store::JobIdFromName(request->name()));
        ASSIGN_OR_RETURN(const store::RequestKey key, KeyOf(change, *request));
        ASSIGN_OR_RETURN(*reply, call(controller_, id, request->etag(), key, MayChange(change)));
        return absl::OkStatus();
      });
}

grpc::ServerUnaryReactor* JobService::CancelJob(grpc::CallbackServerContext* context,
                                                const v1::CancelJobRequest* request,
                                                v1::Job* reply) {
  return Transition(
      context, "CancelJob", request, reply,
      [checkpoint = request->checkpoint()](
          lifecycle::JobController& controller, const std::string& id, const std::string& etag,
          const store::RequestKey& key, const lifecycle::JobCheck& may) {
        return controller.CancelJob(id, etag, key, may, checkpoint);
      });
}

grpc::ServerUnaryReactor* JobService::PauseJob(grpc::CallbackServerContext* context,
                                               const v1::PauseJobRequest* request, v1::Job* reply) {
  return Transition(
      context, "PauseJob", request, reply,
      [](lifecycle::JobController& controller, const std::string& id, const std::string& etag,
         const store::RequestKey& key,
         const lifecycle::JobCheck& may) { return controller.PauseJob(id, etag, key, may); });
}

grpc::ServerUnaryReactor* JobService::ResumeJob(grpc::CallbackServerContext* context,
                                                const v1::ResumeJobRequest* request,
                                                v1::Job* reply) {
  return Transition(
      context, "ResumeJob", request, reply,
      [](lifecycle::JobController& controller, const std::string& id, const std::string& etag,
         const store::RequestKey& key,
         const lifecycle::JobCheck& may) { return controller.ResumeJob(id, etag, key, may); });
}

grpc::ServerUnaryReactor* JobService::DeleteJob(grpc::CallbackServerContext* context,
                                                const v1::DeleteJobRequest* request,
                                                google::protobuf::Empty* reply) {
  return unary_.RunChange(
      context, kService, "DeleteJob", request->name(), *request, *reply,
      [this, request](const Change& change) -> absl::Status {
        ASSIGN_OR_RETURN(const std::string id, store::JobIdFromName(request->name()));
        ASSIGN_OR_RETURN(const store::RequestKey key, KeyOf(change, *request));
        return controller_.DeleteJob(id, request->etag(), key, MayChange(change));
      });
}

grpc::ServerUnaryReactor* JobService::ProfileJob(grpc::CallbackServerContext* context,
                                                 const v1::ProfileJobRequest* request,
                                                 v1::ProfileJobResponse* reply) {
  return unary_.RunChange(
      context, kService, "ProfileJob", request->name(), *request, *reply,
      [this, request, reply](const Change& change) -> absl::Status {
        ASSIGN_OR_RETURN(const std::string id, store::JobIdFromName(request->name()));
        ASSIGN_OR_RETURN(const store::RequestKey key, KeyOf(change, *request));
        if (request->steps() < 1 || request->steps() > kMaxProfileSteps) {
          return absl::InvalidArgumentError(absl::StrCat(
              "steps: ", request->steps(), " is not allowed; give 1 to ", kMaxProfileSteps));
        }
        ASSIGN_OR_RETURN(const v1::Job job,
                         controller_.ProfileJob(id, request->steps(), key, MayChange(change)));
        reply->set_directory(job.spec().checkpoint().directory() + "/profiles");
        return absl::OkStatus();
      });
}

grpc::ServerUnaryReactor* JobService::ValidateJob(grpc::CallbackServerContext* context,
                                                  const v1::ValidateJobRequest* request,
                                                  v1::ValidateJobResponse* reply) {
  return unary_.RunLateCheck(
      context, kService, "ValidateJob", absl::StrCat("jobs/", request->spec().name()),
      request->ByteSizeLong(), *reply,
      [this, request, reply](const access::Caller& caller, Unary::Answer answer) {
        absl::StatusOr<Checked> checked =
            Check(request->spec(), request->protocol_version(), caller.name);
        if (checked.ok()) {
          Preview(*std::move(checked), caller.name, reply, std::move(answer));
        } else {
          answer(checked.status());
        }
      });
}

void JobService::Preview(Checked checked, const std::string& client, v1::ValidateJobResponse* reply,
                         Unary::Answer answer) {
  // Of the plan and the end of patience the first has the call, which is over for the other.
  const auto is_answered = std::make_shared<std::atomic<bool>>(false);
  const auto alarm = std::make_shared<grpc::Alarm>();
  alarm->Set(
      gpr_time_add(
          gpr_now(GPR_CLOCK_MONOTONIC),
          gpr_time_from_millis(absl::ToInt64Milliseconds(preview_patience_), GPR_TIMESPAN)),
      [is_answered, answer](bool is_due) {
        if (!is_due || is_answered->exchange(true)) return;
        answer(absl::DeadlineExceededError("the plan takes too long; try again in a moment"));
      });
  const auto spec = std::make_shared<v1::JobSpec>(std::move(checked.spec));
  controller_.PreviewJob(*spec, checked.shape, client,
                         [is_answered, alarm, answer = std::move(answer), spec,
                          reply](absl::StatusOr<lifecycle::JobController::Preview> preview) {
                           if (is_answered->exchange(true)) return;
                           if (preview.ok()) {
                             *reply->mutable_spec() = std::move(*spec);
                             *reply->mutable_plan() = std::move(preview->plan);
                             reply->set_pending_reason(std::move(preview->pending_reason));
                           }
                           answer(preview.status());
                         });
}

grpc::ServerWriteReactor<v1::WatchJobResponse>* JobService::WatchJob(
    grpc::CallbackServerContext* context, const v1::WatchJobRequest* request) {
  return NewJobWatch(&hub_, *context, *request);
}

}  // namespace ringleader::api
