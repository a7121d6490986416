// A server in this process with the real store and controller, and clients of it over real gRPC.
#pragma once

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/testing/fake_clock.h"
#include "base/testing/temp_dir.h"
#include "coordinator/api/server.h"
#include "coordinator/lifecycle/testing/fixed_plan.h"
#include "coordinator/limits/client_limits.h"
#include "coordinator/store/sqlite/sqlite_store.h"
#include "coordinator/store/testing/forwarding_store.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "jobspec/jobspec.h"
#include "prometheus/registry.h"
#include "ringleader/v1/job_service.grpc.pb.h"
#include "ringleader/v1/log_service.grpc.pb.h"
#include "ringleader/v1/node_service.grpc.pb.h"

namespace ringleader::api::testing {

// A call that should end by itself must not hang the test instead.
inline constexpr std::chrono::seconds kDeadline(60);

inline v1::JobSpec Spec(const std::string& name) {
  auto spec = jobspec::ParseJobFile(absl::StrCat("name: ", name, R"(
model: {config: /job/config.json, init: random}
data: {train: /job/train, eval: /job/eval, sequence_length: 16384}
attention: {pattern: vertical_slash, select: top_p}
parallelism: {context: 4, data: 1}
training: {steps: 40}
checkpoint: {directory: /job/checkpoints/)",
                                                 name, R"(}
resources: {trainers: 4}
)"),
                                    {});
  EXPECT_TRUE(spec.ok()) << spec.status();
  return spec.value_or(v1::JobSpec());
}

class ServerTest : public ::testing::Test {
 protected:
  ServerTest() { Start({.listen = Loopback(), .check_files = false}); }
  static Address Loopback() { return {.host = "127.0.0.1", .port = 0, .path = ""}; }

  // `wrap`: what the server is given in place of the store.
  void Start(const ServerOptions& options, const limits::Options& limits = {},
             const session::SessionOptions& sessions = {},
             const std::function<store::Store*(store::Store*)>& wrap = {}) {
    server_.reset();
    workers_.reset();
    limits_.reset();
    controller_.reset();
    store_.reset();
    auto store = store::OpenSqliteStore({.path = database_,
                                         .log_bytes_per_job = log_bytes_per_job_,
                                         .reserve_bytes = reserve_bytes_});
    ASSERT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
    auto controller =
        lifecycle::JobController::Create({}, store_.get(), &plans_, Clock::Real(), nullptr);
    ASSERT_TRUE(controller.ok()) << controller.status();
    controller_ = *std::move(controller);
    controller_->Start();
    registry_ = std::make_shared<prometheus::Registry>();
    limits_ = std::make_unique<limits::Limits>(limits, &clock_, registry_.get());
    workers_ = std::make_unique<session::WorkerControlService>(controller_.get(), Clock::Real(),
                                                               limits_.get(), sessions);
    auto server =
        Server::Start(options, controller_.get(), workers_.get(),
                      wrap ? wrap(store_.get()) : store_.get(), limits_.get(), registry_.get());
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    Connect(grpc::InsecureChannelCredentials());
  }
  void Connect(const std::shared_ptr<grpc::ChannelCredentials>& credentials) {
    // A channel of its own: a cached one to an earlier server's port would back off.
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    channel_ = grpc::CreateCustomChannel(absl::StrCat("127.0.0.1:", server_->port()), credentials,
                                         arguments);
    jobs_ = v1::JobService::NewStub(channel_);
    logs_ = v1::LogService::NewStub(channel_);
    nodes_ = v1::NodeService::NewStub(channel_);
  }

  static std::unique_ptr<grpc::ClientContext> Context() {
    auto context = std::make_unique<grpc::ClientContext>();
    context->set_deadline(std::chrono::system_clock::now() + kDeadline);
    return context;
  }
  grpc::Status Create(const std::string& name, v1::Job* job, const std::string& request_id = "") {
    v1::CreateJobRequest request;
    *request.mutable_spec() = Spec(name);
    request.set_request_id(request_id);
    return jobs_->CreateJob(Context().get(), request, job);
  }
  v1::Job Created(const std::string& name) {
    v1::Job job;
    const grpc::Status status = Create(name, &job);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return job;
  }
  grpc::Status Get(const std::string& name, v1::Job* job) {
    v1::GetJobRequest request;
    request.set_name(name);
    return jobs_->GetJob(Context().get(), request, job);
  }
  grpc::Status Cancel(const std::string& name, v1::Job* job, const std::string& etag = "") {
    v1::CancelJobRequest request;
    request.set_name(name);
    request.set_etag(etag);
    return jobs_->CancelJob(Context().get(), request, job);
  }
  // A watch of a job. If it was let in, the first message has come.
  struct OpenWatch {
    std::unique_ptr<grpc::ClientContext> context;
    std::unique_ptr<grpc::ClientReader<v1::WatchJobResponse>> stream;
    bool is_admitted = false;
  };
  OpenWatch Watch(const std::string& name) {
    OpenWatch watch;
    watch.context = Context();
    v1::WatchJobRequest request;
    request.set_name(name);
    watch.stream = jobs_->WatchJob(watch.context.get(), request);
    v1::WatchJobResponse response;
    watch.is_admitted = watch.stream->Read(&response);
    return watch;
  }
  // Opens three watches of a job where only two are allowed, and returns them.
  std::vector<OpenWatch> WatchThriceWhereTwoMay(const std::string& name) {
    std::vector<OpenWatch> watches;
    for (int i = 0; i < 3; ++i) {
      watches.push_back(Watch(name));
      EXPECT_EQ(watches.back().is_admitted, i < 2);
    }
    return watches;
  }
  // What a worker's report would write.
  void Write(absl::FunctionRef<absl::Status(store::WriteTransaction&)> body) {
    const absl::Status status = store_->Write(body);
    ASSERT_TRUE(status.ok()) << status;
  }
  void PutStep(const std::string& job, uint64_t step) {
    Write([&](store::WriteTransaction& t) {
      v1::StepReport report;
      report.set_step(step);
      return t.PutStep(job, report);
    });
  }
  void Log(const std::string& job, uint32_t attempt, const std::vector<std::string>& texts) {
    Write([&](store::WriteTransaction& t) {
      std::vector<v1::LogLine> lines;
      for (const std::string& text : texts) lines.emplace_back().set_text(text);
      return t.AppendLogs(job, attempt, lines);
    });
  }
  void PutAttempt(const std::string& job, uint32_t number, v1::Attempt::State state) {
    Write([&](store::WriteTransaction& t) {
      v1::Attempt attempt;
      attempt.set_number(number);
      attempt.set_state(state);
      return t.PutAttempt(job, attempt);
    });
  }
  static std::string Reason(const grpc::Status& status) {
    google::rpc::Status details;
    google::rpc::ErrorInfo info;
    EXPECT_TRUE(details.ParseFromString(status.error_details()));
    if (details.details_size() > 0) details.details(0).UnpackTo(&info);
    return info.reason();
  }

  // The sum of a metric's series.
  double Metric(const std::string& name) const {
    double sum = 0;
    for (const prometheus::MetricFamily& family : registry_->Collect()) {
      if (family.name != name) continue;
      for (const prometheus::ClientMetric& metric : family.metric) {
        sum += metric.counter.value + metric.gauge.value;
      }
    }
    return sum;
  }

  TempDir dir_;
  std::string database_ = dir_.File("coordinator.db");
  int64_t reserve_bytes_ = 0;
  int64_t log_bytes_per_job_ = store::SqliteOptions().log_bytes_per_job;
  FakeClock clock_;  // of limits
  lifecycle::testing::FixedPlan plans_;
  std::unique_ptr<store::Store> store_;
  std::unique_ptr<lifecycle::JobController> controller_;
  std::shared_ptr<prometheus::Registry> registry_;
  std::unique_ptr<limits::Limits> limits_;
  std::unique_ptr<session::WorkerControlService> workers_;
  std::unique_ptr<Server> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::JobService::Stub> jobs_;
  std::unique_ptr<v1::LogService::Stub> logs_;
  std::unique_ptr<v1::NodeService::Stub> nodes_;
};

}  // namespace ringleader::api::testing
