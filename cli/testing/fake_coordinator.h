// A coordinator in this process that says what a test tells it to, over real gRPC.
#pragma once

#include <grpcpp/grpcpp.h>

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "ringleader/v1/access_service.grpc.pb.h"
#include "ringleader/v1/job_service.grpc.pb.h"
#include "ringleader/v1/log_service.grpc.pb.h"
#include "ringleader/v1/node_service.grpc.pb.h"

namespace ringleader::cli {

// What it holds survives Stop() and Start(), as a coordinator's database does.
class FakeCoordinator final : public v1::AccessService::Service,
                              public v1::JobService::Service,
                              public v1::LogService::Service,
                              public v1::NodeService::Service {
 public:
  FakeCoordinator() { Start(); }
  ~FakeCoordinator() override { Stop(); }

  // Listens on the same port each time.
  void Start();
  void Stop();
  int port() const { return port_; }
  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }

  // What tests set up and look at.
  std::map<std::string, v1::Job> jobs;
  std::vector<v1::Node> nodes;
  v1::ListLatencyResponse measured;
  std::vector<v1::WatchJobResponse> watch;  // sent in order, filtered by what was seen
  std::vector<v1::LogLine> log;
  std::string log_uid;  // of whose job it is
  v1::ValidateJobResponse validation;
  // The next so many calls apply, and then their reply is lost.
  int lose_replies = 0;
  grpc::Status refusal;  // of the calls that may lose their reply, as long as it is no OK
  // Streams break off with UNAVAILABLE after so many messages, once each.
  std::vector<int> break_streams_after;
  std::function<void()> on_watch;  // called as each WatchJob arrives
  int created = 0;
  std::vector<std::string> request_ids;
  std::vector<v1::CancelJobRequest> cancel_requests;
  std::vector<v1::WatchJobRequest> watch_requests;
  std::vector<v1::TailLogsRequest> log_requests;
  std::vector<std::string> filters;  // of ListJobs
  std::vector<v1::CreateTokenRequest> token_requests;
  std::map<std::string, v1::Token> tokens;
  std::vector<v1::AuditRecord> audit;
  std::vector<v1::ListAuditRecordsRequest> audit_requests;

 private:
  using Context = grpc::ServerContext;

  grpc::Status CreateJob(Context*, const v1::CreateJobRequest*, v1::Job*) override;
  grpc::Status GetJob(Context*, const v1::GetJobRequest*, v1::Job*) override;
  grpc::Status ListJobs(Context*, const v1::ListJobsRequest*, v1::ListJobsResponse*) override;
  grpc::Status DeleteJob(Context*, const v1::DeleteJobRequest*, google::protobuf::Empty*) override;
  grpc::Status CancelJob(Context*, const v1::CancelJobRequest*, v1::Job*) override;
  grpc::Status ProfileJob(Context*, const v1::ProfileJobRequest*, v1::ProfileJobResponse*) override;
  grpc::Status PauseJob(Context*, const v1::PauseJobRequest*, v1::Job*) override;
  grpc::Status ResumeJob(Context*, const v1::ResumeJobRequest*, v1::Job*) override;
  grpc::Status ValidateJob(Context*, const v1::ValidateJobRequest*,
                           v1::ValidateJobResponse*) override;
  grpc::Status WatchJob(Context*, const v1::WatchJobRequest*,
                        grpc::ServerWriter<v1::WatchJobResponse>*) override;
  grpc::Status TailLogs(Context*, const v1::TailLogsRequest*,
                        grpc::ServerWriter<v1::TailLogsResponse>*) override;
  grpc::Status ListNodes(Context*, const v1::ListNodesRequest*, v1::ListNodesResponse*) override;
  grpc::Status ListLatency(Context*, const v1::ListLatencyRequest*,
                           v1::ListLatencyResponse*) override;
  grpc::Status DrainNode(Context*, const v1::DrainNodeRequest*, v1::Node*) override;
  grpc::Status UndrainNode(Context*, const v1::UndrainNodeRequest*, v1::Node*) override;

  grpc::Status CreateToken(Context*, const v1::CreateTokenRequest*, v1::Token*) override;
  grpc::Status ListTokens(Context*, const v1::ListTokensRequest*, v1::ListTokensResponse*) override;
  grpc::Status RevokeToken(Context*, const v1::RevokeTokenRequest*, v1::Token*) override;
  grpc::Status ListAuditRecords(Context*, const v1::ListAuditRecordsRequest*,
                                v1::ListAuditRecordsResponse*) override;

  grpc::Status Move(const std::string& name, const std::string& request_id, v1::Job::State to,
                    v1::Job* reply);
  grpc::Status SetNode(const std::string& name, v1::Node::State to, v1::Node* reply);
  grpc::Status Reply(grpc::Status status);
  int NextBreak();

  absl::Mutex mutex_;
  std::unique_ptr<grpc::Server> server_;
  int port_ = 0;
};

}  // namespace ringleader::cli
