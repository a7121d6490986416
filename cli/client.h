// Calls to the coordinator, made again while it is away.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cli/context.h"
#include "ringleader/v1/access_service.pb.h"
#include "ringleader/v1/job_service.pb.h"
#include "ringleader/v1/log_service.pb.h"
#include "ringleader/v1/node_service.pb.h"

namespace ringleader::cli {

// A random id for CreateJobRequest and its kin: the coordinator recognises a call that is made
// again by it, so that one whose reply was lost is not applied twice.
std::string NewRequestId();

// "jobs/x" and "nodes/x" from "x" or from themselves.
std::string JobName(const std::string& id);
std::string NodeName(const std::string& id);

// PERMISSION_DENIED says what is wrong where the context's TLS and that of whoever listens at its
// address do not fit; OK also where nobody does.
absl::Status CheckTls(const Context& context);

// Statuses are the coordinator's, with its message; UNAVAILABLE says where nobody answered,
// PERMISSION_DENIED what is wrong where the two sides do not agree on TLS.
// Mutating requests must carry a request_id. Blocks; one thread.
class Client {
 public:
  virtual ~Client() = default;

  virtual absl::StatusOr<v1::Job> CreateJob(const v1::CreateJobRequest& request) = 0;
  virtual absl::StatusOr<v1::Job> GetJob(const v1::GetJobRequest& request) = 0;
  // All pages up to `limit` jobs.
  virtual absl::StatusOr<v1::ListJobsResponse> ListJobs(const std::string& filter, int limit) = 0;
  virtual absl::Status DeleteJob(const v1::DeleteJobRequest& request) = 0;
  virtual absl::StatusOr<v1::Job> CancelJob(const v1::CancelJobRequest& request) = 0;
  virtual absl::StatusOr<v1::Job> PauseJob(const v1::PauseJobRequest& request) = 0;
  virtual absl::StatusOr<v1::Job> ResumeJob(const v1::ResumeJobRequest& request) = 0;
  virtual absl::StatusOr<v1::ProfileJobResponse> ProfileJob(
      const v1::ProfileJobRequest& request) = 0;
  virtual absl::StatusOr<v1::ValidateJobResponse> ValidateJob(
      const v1::ValidateJobRequest& request) = 0;
  virtual absl::StatusOr<v1::ListNodesResponse> ListNodes() = 0;
  virtual absl::StatusOr<v1::ListLatencyResponse> ListLatency() = 0;
  virtual absl::StatusOr<v1::Node> DrainNode(const v1::DrainNodeRequest& request) = 0;
  virtual absl::StatusOr<v1::Node> UndrainNode(const v1::UndrainNodeRequest& request) = 0;
  virtual absl::StatusOr<v1::Token> CreateToken(const v1::CreateTokenRequest& request) = 0;
  virtual absl::StatusOr<v1::ListTokensResponse> ListTokens() = 0;
  virtual absl::StatusOr<v1::Token> RevokeToken(const v1::RevokeTokenRequest& request) = 0;
  // All pages up to `limit` records.
  virtual absl::StatusOr<v1::ListAuditRecordsResponse> ListAuditRecords(
      v1::ListAuditRecordsRequest request, int limit) = 0;

  // Streams until the coordinator ends them. While it is away they wait, and go on after the last
  // revision, step and offset that they have handed over; nothing is handed over twice. A watch
  // ends as soon as on_response returns false, too.
  virtual absl::Status WatchJob(
      v1::WatchJobRequest request,
      const std::function<bool(const v1::WatchJobResponse&)>& on_response) = 0;
  virtual absl::Status TailLogs(
      v1::TailLogsRequest request,
      const std::function<bool(const v1::TailLogsResponse&)>& on_response) = 0;
};

}  // namespace ringleader::cli
