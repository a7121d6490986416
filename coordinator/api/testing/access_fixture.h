// What tests of roles share: a server in this process with TLS and an access file, and callers with
// certificates and tokens of every kind.
#pragma once

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>

#include "base/net/token.h"
#include "base/testing/temp_dir.h"
#include "base/testing/test_certificates.h"
#include "coordinator/api/server.h"
#include "coordinator/api/testing/raw_call.h"
#include "coordinator/lifecycle/testing/fixed_plan.h"
#include "coordinator/store/sqlite/sqlite_store.h"
#include "prometheus/registry.h"
#include "ringleader/v1/access_service.grpc.pb.h"
#include "ringleader/v1/job_service.grpc.pb.h"
#include "ringleader/v1/node_service.grpc.pb.h"
#include "ringleader/v1/worker_control.grpc.pb.h"

namespace ringleader::api::testing {

using grpc::StatusCode;

inline constexpr std::chrono::seconds kDeadline(30);
inline const Address kListen{.host = "127.0.0.1", .port = 0, .path = ""};

// Trusts the roles in certificates, and names one that has none.
extern const char kAccess[];

// One for all tests, for certificates take a while to make: alice and carol (users of project
// ocean), bob (user of project desert), board (a viewer), a (a node), root (an admin, by kAccess),
// client (without a role) and forged (an admin, says another authority).
const TestCertificates& Certificates();

v1::JobSpec Spec(const std::string& name);

// What one caller has: a connection of its own, and all services.
struct Client {
  explicit Client(std::shared_ptr<grpc::Channel> connection)
      : channel(std::move(connection)),
        jobs(v1::JobService::NewStub(channel)),
        nodes(v1::NodeService::NewStub(channel)),
        access(v1::AccessService::NewStub(channel)),
        workers(v1::WorkerControl::NewStub(channel)) {}

  static std::unique_ptr<grpc::ClientContext> Context() {
    auto context = std::make_unique<grpc::ClientContext>();
    context->set_deadline(std::chrono::system_clock::now() + kDeadline);
    return context;
  }
  grpc::Status List(const std::string& filter = "") {
    v1::ListJobsRequest request;
    request.set_filter(filter);
    return jobs->ListJobs(Context().get(), request, &listed);
  }
  grpc::Status Create(const std::string& name, const std::string& request_id = "") {
    v1::CreateJobRequest request;
    *request.mutable_spec() = Spec(name);
    request.set_request_id(request_id);
    return jobs->CreateJob(Context().get(), request, &job);
  }
  template <typename Request>
  StatusCode Change(grpc::Status (v1::JobService::Stub::*method)(grpc::ClientContext*,
                                                                 const Request&, v1::Job*),
                    const std::string& name) {
    Request request;
    request.set_name(name);
    const std::unique_ptr<grpc::ClientContext> context = Context();
    return (jobs.get()->*method)(context.get(), request, &job).error_code();
  }
  StatusCode Cancel(const std::string& name) {
    return Change(&v1::JobService::Stub::CancelJob, name);
  }
  StatusCode Delete(const std::string& name) {
    v1::DeleteJobRequest request;
    request.set_name(name);
    google::protobuf::Empty reply;
    return jobs->DeleteJob(Context().get(), request, &reply).error_code();
  }
  grpc::Status CreateToken(const std::string& text, v1::Role role, const std::string& user,
                           uint64_t lifetime_seconds = 3600) {
    v1::CreateTokenRequest request;
    request.set_sha256(TokenHash(text));
    request.set_role(role);
    request.set_user(user);
    request.set_lifetime_seconds(lifetime_seconds);
    return access->CreateToken(Context().get(), request, &token);
  }
  grpc::Status Audit(v1::ListAuditRecordsRequest request = {}) {
    request.set_page_size(1000);
    return access->ListAuditRecords(Context().get(), request, &audit);
  }

  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<v1::JobService::Stub> jobs;
  std::unique_ptr<v1::NodeService::Stub> nodes;
  std::unique_ptr<v1::AccessService::Stub> access;
  std::unique_ptr<v1::WorkerControl::Stub> workers;
  // Replies.
  v1::Job job;
  v1::Token token;
  v1::ListJobsResponse listed;
  v1::ListAuditRecordsResponse audit;
};

class AccessTest : public ::testing::Test {
 protected:
  AccessTest();

  absl::StatusOr<std::unique_ptr<Server>> Start(const ServerOptions& options) {
    return Server::Start(options, controller_.get(), workers_.get(), store_.get(), limits_.get(),
                         registry_.get());
  }
  void WriteAccess(const std::string& text);
  // A connection of its own.
  Client Connect(const TlsOptions& tls, const std::string& token = "");
  Client As(const std::string& name) { return Connect(Certificates().Options(name)); }
  Client WithToken(const std::string& text) {
    TlsOptions tls;
    tls.ca_path = Certificates().File("ca.crt");
    return Connect(tls, text);
  }
  // Waits until the log holds a record of this outcome; calls that fail are noted after they end.
  v1::AuditRecord AwaitAudit(const std::string& method, const std::string& outcome);

  TempDir dir_;
  lifecycle::testing::FixedPlan plans_;
  std::unique_ptr<store::Store> store_;
  std::unique_ptr<lifecycle::JobController> controller_;
  std::shared_ptr<prometheus::Registry> registry_;
  std::unique_ptr<limits::Limits> limits_;
  std::unique_ptr<session::WorkerControlService> workers_;
  std::unique_ptr<Server> server_;
};

}  // namespace ringleader::api::testing
