// JobService: validate, call the domain or read the store, reply.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "coordinator/api/calls/pulled_stream.h"
#include "coordinator/api/calls/unary.h"
#include "coordinator/lifecycle/job_controller.h"
#include "ringleader/v1/job_service.grpc.pb.h"

namespace ringleader::api {

class JobService : public v1::JobService::CallbackService {
 public:
  // `check_files`: this machine sees the files that jobs name, so a job whose files are missing is
  // refused. `allowed_paths`: folders below which they must lie; none: anywhere.
  // `preview_patience`: how long ValidateJob waits for a plan.
  JobService(lifecycle::JobController* controller, StreamHub* hub, Unary* unary, bool check_files,
             std::vector<std::string> allowed_paths, absl::Duration preview_patience)
      : controller_(*controller),
        hub_(*hub),
        unary_(*unary),
        check_files_(check_files),
        allowed_paths_(std::move(allowed_paths)),
        preview_patience_(preview_patience) {}

  grpc::ServerUnaryReactor* CreateJob(grpc::CallbackServerContext* context,
                                      const v1::CreateJobRequest* request, v1::Job* reply) override;
  grpc::ServerUnaryReactor* GetJob(grpc::CallbackServerContext* context,
                                   const v1::GetJobRequest* request, v1::Job* reply) override;
  grpc::ServerUnaryReactor* GetJobHistory(grpc::CallbackServerContext* context,
                                          const v1::GetJobHistoryRequest* request,
                                          v1::JobHistory* reply) override;
  grpc::ServerUnaryReactor* ListJobs(grpc::CallbackServerContext* context,
                                     const v1::ListJobsRequest* request,
                                     v1::ListJobsResponse* reply) override;
  grpc::ServerUnaryReactor* DeleteJob(grpc::CallbackServerContext* context,
                                      const v1::DeleteJobRequest* request,
                                      google::protobuf::Empty* reply) override;
  grpc::ServerUnaryReactor* CancelJob(grpc::CallbackServerContext* context,
                                      const v1::CancelJobRequest* request, v1::Job* reply) override;
  grpc::ServerUnaryReactor* PauseJob(grpc::CallbackServerContext* context,
                                     const v1::PauseJobRequest* request, v1::Job* reply) override;
  grpc::ServerUnaryReactor* ResumeJob(grpc::CallbackServerContext* context,
                                      const v1::ResumeJobRequest* request, v1::Job* reply) override;
  grpc::ServerUnaryReactor* ProfileJob(grpc::CallbackServerContext* context,
                                       const v1::ProfileJobRequest* request,
                                       v1::ProfileJobResponse* reply) override;
  grpc::ServerUnaryReactor* ValidateJob(grpc::CallbackServerContext* context,
                                        const v1::ValidateJobRequest* request,
                                        v1::ValidateJobResponse* reply) override;
  grpc::ServerWriteReactor<v1::WatchJobResponse>* WatchJob(
      grpc::CallbackServerContext* context, const v1::WatchJobRequest* request) override;

 private:
  absl::Status Create(const Change& change, const v1::CreateJobRequest& request, v1::Job* reply);
  absl::Status List(const v1::ListJobsRequest& request, v1::ListJobsResponse* reply);
  // The specification with its defaults, if a job can be made of it, and its model's shape.
  struct Checked {
    v1::JobSpec spec;
    v1::ModelShape shape;
  };
  // `client`: who asks, whose share of calls on mounts that may hang this uses.
  absl::StatusOr<Checked> Check(const v1::JobSpec& spec, uint32_t protocol_version,
                                const std::string& client) const;
  absl::StatusOr<v1::ModelShape> LookAtFiles(const v1::JobSpec& spec,
                                             const std::string& client) const;
  // Asks for the plan of a job; `reply` and `answer` are of the call that waits for it.
  void Preview(Checked checked, const std::string& client, v1::ValidateJobResponse* reply,
               Unary::Answer answer);
  // Cancel, pause and resume differ only in what they call.
  template <typename Request, typename Call>
  grpc::ServerUnaryReactor* Transition(grpc::CallbackServerContext* context, const char* method,
                                       const Request* request, v1::Job* reply, Call call);

  lifecycle::JobController& controller_;
  StreamHub& hub_;
  Unary& unary_;
  const bool check_files_;
  const std::vector<std::string> allowed_paths_;
  const absl::Duration preview_patience_;
};

}  // namespace ringleader::api
