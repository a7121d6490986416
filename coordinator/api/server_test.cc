// The services over real gRPC: a server in this process with the real store and controller, and
// clients.
#include "coordinator/api/server.h"

#include <gmock/gmock.h>
#include <google/protobuf/unknown_field_set.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "base/protocol_version.h"
#include "base/status_macros.h"
#include "base/testing/temp_dir.h"
#include "base/testing/test_certificates.h"
#include "coordinator/lifecycle/testing/fixed_plan.h"
#include "coordinator/store/sqlite_store.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "jobspec/jobspec.h"
#include "prometheus/registry.h"
#include "ringleader/v1/job_service.grpc.pb.h"
#include "ringleader/v1/log_service.grpc.pb.h"
#include "ringleader/v1/node_service.grpc.pb.h"
#include "ringleader/v1/worker_control.grpc.pb.h"

namespace ringleader::api {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A call that should end by itself must not hang the test instead.
constexpr std::chrono::seconds kDeadline(60);

v1::JobSpec Spec(const std::string& name) {
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
  ServerTest() {
    Start({.listen = {.host = "127.0.0.1", .port = 0, .path = ""}, .check_files = false});
  }

  void Start(const ServerOptions& options) {
    server_.reset();
    workers_.reset();
    controller_.reset();
    store_.reset();
    auto store = store::OpenSqliteStore({.path = dir_.File("coordinator.db")});
    ASSERT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
    auto controller =
        lifecycle::JobController::Create({}, store_.get(), &plans_, Clock::Real(), nullptr);
    ASSERT_TRUE(controller.ok()) << controller.status();
    controller_ = *std::move(controller);
    controller_->Start();
    workers_ = std::make_unique<session::WorkerControlService>(controller_.get(), Clock::Real());
    registry_ = std::make_shared<prometheus::Registry>();
    auto server =
        Server::Start(options, controller_.get(), workers_.get(), store_.get(), registry_.get());
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

  TempDir dir_;
  lifecycle::testing::FixedPlan plans_;
  std::unique_ptr<store::Store> store_;
  std::unique_ptr<lifecycle::JobController> controller_;
  std::unique_ptr<session::WorkerControlService> workers_;
  std::shared_ptr<prometheus::Registry> registry_;
  std::unique_ptr<Server> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::JobService::Stub> jobs_;
  std::unique_ptr<v1::LogService::Stub> logs_;
  std::unique_ptr<v1::NodeService::Stub> nodes_;
};

TEST_F(ServerTest, CreatesAndGets) {
  const v1::Job created = Created("a");
  EXPECT_EQ(created.name(), "jobs/a");
  EXPECT_EQ(created.state(), v1::Job::PENDING);
  EXPECT_FALSE(created.uid().empty());
  EXPECT_FALSE(created.etag().empty());
  EXPECT_TRUE(created.spec().training().has_beta1());  // defaults are filled in
  v1::Job job;
  ASSERT_TRUE(Get("jobs/a", &job).ok());
  EXPECT_EQ(job.uid(), created.uid());
  EXPECT_GT(job.create_time().seconds(), 0);

  const grpc::Status missing = Get("jobs/b", &job);
  EXPECT_EQ(missing.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(missing.error_message(), "jobs/b does not exist");
  EXPECT_EQ(Reason(missing), "RESOURCE_NOT_FOUND");
  EXPECT_EQ(Get("b", &job).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(Create("a", &job).error_code(), grpc::StatusCode::ALREADY_EXISTS);
}

TEST_F(ServerTest, RepeatedRequestGetsTheFirstReply) {
  v1::Job first, again;
  ASSERT_TRUE(Create("a", &first, "request-1").ok());
  ASSERT_TRUE(Create("a", &again, "request-1").ok());
  EXPECT_EQ(again.uid(), first.uid());
  EXPECT_EQ(Create("b", &again, "request-1").error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(Create("a", &again, "request-2").error_code(), grpc::StatusCode::ALREADY_EXISTS);
  // Also from a coordinator that was started again in between.
  Start({.listen = {.host = "127.0.0.1", .port = 0, .path = ""}, .check_files = false});
  ASSERT_TRUE(Create("a", &again, "request-1").ok());
  EXPECT_EQ(again.uid(), first.uid());
}

TEST_F(ServerTest, RefusesASpecificationThatCannotWork) {
  v1::CreateJobRequest request;
  *request.mutable_spec() = Spec("a");
  request.mutable_spec()->mutable_resources()->set_trainers(3);
  v1::Job job;
  const grpc::Status status = jobs_->CreateJob(Context().get(), request, &job);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("trainers"));

  v1::ValidateJobRequest validate;
  *validate.mutable_spec() = request.spec();
  v1::ValidateJobResponse response;
  EXPECT_EQ(jobs_->ValidateJob(Context().get(), validate, &response).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  *validate.mutable_spec() = Spec("a");
  ASSERT_TRUE(jobs_->ValidateJob(Context().get(), validate, &response).ok());
  EXPECT_THAT(response.pending_reason(), HasSubstr("4"));
  EXPECT_EQ(Get("jobs/a", &job).error_code(), grpc::StatusCode::NOT_FOUND);  // nothing was created
}

TEST_F(ServerTest, ListsInPagesAndByFilter) {
  for (const char* name : {"a", "b", "c", "d", "e"}) Created(name);
  v1::Job job;
  ASSERT_TRUE(Cancel("jobs/b", &job).ok());
  v1::ListJobsRequest request;
  request.set_page_size(2);
  std::vector<std::string> names;
  v1::ListJobsResponse response;
  do {
    ASSERT_TRUE(jobs_->ListJobs(Context().get(), request, &response).ok());
    EXPECT_EQ(response.total_size(), 5);
    for (const v1::Job& listed : response.jobs()) names.push_back(listed.spec().name());
    request.set_page_token(response.next_page_token());
  } while (!response.next_page_token().empty());
  EXPECT_THAT(names, ElementsAre("e", "d", "c", "b", "a"));

  request.clear_page_token();
  request.set_filter("state=CANCELLED");
  ASSERT_TRUE(jobs_->ListJobs(Context().get(), request, &response).ok());
  ASSERT_EQ(response.jobs_size(), 1);
  EXPECT_EQ(response.jobs(0).name(), "jobs/b");

  request.clear_filter();
  ASSERT_TRUE(jobs_->ListJobs(Context().get(), request, &response).ok());
  request.set_page_token(response.next_page_token());
  request.set_filter("state=PENDING");
  const grpc::Status changed = jobs_->ListJobs(Context().get(), request, &response);
  EXPECT_EQ(changed.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(changed.error_message(), HasSubstr("the filter differs"));
}

TEST_F(ServerTest, TransitionsCheckStateAndEtag) {
  const v1::Job created = Created("a");
  v1::Job job;
  EXPECT_EQ(Cancel("jobs/a", &job, "stale").error_code(), grpc::StatusCode::ABORTED);
  v1::DeleteJobRequest remove;
  remove.set_name("jobs/a");
  google::protobuf::Empty empty;
  EXPECT_EQ(jobs_->DeleteJob(Context().get(), remove, &empty).error_code(),
            grpc::StatusCode::FAILED_PRECONDITION);
  ASSERT_TRUE(Cancel("jobs/a", &job, created.etag()).ok());
  EXPECT_EQ(job.state(), v1::Job::CANCELLED);
  v1::ResumeJobRequest resume;
  resume.set_name("jobs/a");
  EXPECT_EQ(jobs_->ResumeJob(Context().get(), resume, &job).error_code(),
            grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_TRUE(jobs_->DeleteJob(Context().get(), remove, &empty).ok());
  EXPECT_EQ(Get("jobs/a", &job).error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(ServerTest, PausesAndResumesAJobThatWaits) {
  Created("a");
  v1::Job job;
  v1::PauseJobRequest pause;
  pause.set_name("jobs/a");
  ASSERT_TRUE(jobs_->PauseJob(Context().get(), pause, &job).ok());
  EXPECT_EQ(job.state(), v1::Job::PAUSED);
  v1::ResumeJobRequest resume;
  resume.set_name("jobs/a");
  ASSERT_TRUE(jobs_->ResumeJob(Context().get(), resume, &job).ok());
  EXPECT_EQ(job.state(), v1::Job::PENDING);
}

TEST_F(ServerTest, WatchSendsTheJobThenEveryChangeAndEnds) {
  Created("a");
  v1::WatchJobRequest request;
  request.set_name("jobs/a");
  request.set_include_steps(true);
  request.set_after_step(1);
  const auto context = Context();
  const auto stream = jobs_->WatchJob(context.get(), request);
  v1::WatchJobResponse response;
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_EQ(response.job().state(), v1::Job::PENDING);
  PutStep("a", 1);  // not asked for
  PutStep("a", 2);
  ASSERT_TRUE(stream->Read(&response));
  ASSERT_EQ(response.steps_size(), 1);
  EXPECT_EQ(response.steps(0).step(), 2u);
  v1::Job job;
  ASSERT_TRUE(Cancel("jobs/a", &job).ok());
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_EQ(response.job().state(), v1::Job::CANCELLED);
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(ServerTest, WatchResumesBehindARevision) {
  const v1::Job created = Created("a");
  v1::WatchJobRequest request;
  request.set_name("jobs/a");
  v1::Job job;
  ASSERT_TRUE(Cancel("jobs/a", &job).ok());
  request.set_after_revision(job.revision() - 1);
  {
    const auto context = Context();
    const auto stream = jobs_->WatchJob(context.get(), request);
    v1::WatchJobResponse response;
    ASSERT_TRUE(stream->Read(&response));
    EXPECT_EQ(response.job().state(), v1::Job::CANCELLED);
    EXPECT_FALSE(stream->Read(&response));
    EXPECT_TRUE(stream->Finish().ok());
  }
  request.set_after_revision(job.revision());  // has seen it all
  const auto context = Context();
  const auto stream = jobs_->WatchJob(context.get(), request);
  v1::WatchJobResponse response;
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_TRUE(stream->Finish().ok());
}

// More steps than fit one message, all of them before the final state.
TEST_F(ServerTest, WatchSendsEveryStepOfAFinishedJob) {
  Created("a");
  for (uint64_t step = 1; step <= 450; ++step) PutStep("a", step);
  v1::Job job;
  ASSERT_TRUE(Cancel("jobs/a", &job).ok());
  v1::WatchJobRequest request;
  request.set_name("jobs/a");
  request.set_include_steps(true);
  const auto context = Context();
  const auto stream = jobs_->WatchJob(context.get(), request);
  v1::WatchJobResponse response;
  uint64_t steps = 0;
  bool ended = false;
  while (stream->Read(&response)) {
    EXPECT_FALSE(ended);
    for (const v1::StepReport& step : response.steps()) EXPECT_EQ(step.step(), ++steps);
    ended = response.has_job() && response.job().state() == v1::Job::CANCELLED;
  }
  EXPECT_TRUE(ended);
  EXPECT_EQ(steps, 450u);
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(ServerTest, WatchOfADeletedOrUnknownJobEnds) {
  v1::WatchJobRequest request;
  request.set_name("jobs/a");
  v1::WatchJobResponse response;
  {
    const auto context = Context();
    const auto stream = jobs_->WatchJob(context.get(), request);
    EXPECT_FALSE(stream->Read(&response));
    EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::NOT_FOUND);
  }
  Created("a");
  const auto context = Context();
  const auto stream = jobs_->WatchJob(context.get(), request);
  ASSERT_TRUE(stream->Read(&response));
  Write([](store::WriteTransaction& t) { return t.DeleteJob("a"); });
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::NOT_FOUND);
}

// Many watchers, most of which never read: no thread each, and none holds up the others or the end
// of the server.
TEST_F(ServerTest, ManyIdleWatchersCostNobodyElse) {
  Created("a");
  v1::WatchJobRequest request;
  request.set_name("jobs/a");
  request.set_include_steps(true);
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<grpc::ClientReader<v1::WatchJobResponse>>> idle;
  for (int i = 0; i < 300; ++i) {
    contexts.push_back(Context());
    idle.push_back(jobs_->WatchJob(contexts.back().get(), request));
  }
  const auto context = Context();
  const auto reader = jobs_->WatchJob(context.get(), request);
  v1::WatchJobResponse response;
  uint64_t seen = 0;
  for (uint64_t step = 1; step <= 20; ++step) {
    PutStep("a", step);
    while (seen < step) {
      ASSERT_TRUE(reader->Read(&response));
      if (response.steps_size() > 0) seen = response.steps(response.steps_size() - 1).step();
    }
  }
  server_->Shutdown();
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  for (auto& context_of_idle : contexts) context_of_idle->TryCancel();
}

TEST_F(ServerTest, TailFollowsAnAttemptToItsEnd) {
  Created("a");
  PutAttempt("a", 1, v1::Attempt::FAILED);
  Log("a", 1, {"old"});
  PutAttempt("a", 2, v1::Attempt::RUNNING);
  Log("a", 2, {"one", "two"});
  v1::TailLogsRequest request;
  request.set_job("jobs/a");
  request.set_rank(-1);
  request.set_follow(true);
  request.set_last_lines(1);
  const auto context = Context();
  const auto stream = logs_->TailLogs(context.get(), request);
  v1::TailLogsResponse response;
  ASSERT_TRUE(stream->Read(&response));
  ASSERT_EQ(response.lines_size(), 1);
  EXPECT_EQ(response.lines(0).text(), "two");
  Log("a", 2, {"three"});
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_EQ(response.lines(0).text(), "three");
  EXPECT_EQ(response.lines(0).attempt(), 2u);
  PutAttempt("a", 2, v1::Attempt::SUCCEEDED);
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(ServerTest, TailReadsOneAttemptFromAnOffset) {
  Created("a");
  PutAttempt("a", 1, v1::Attempt::FAILED);
  PutAttempt("a", 2, v1::Attempt::RUNNING);
  Log("a", 1, {"x", "y", "z"});
  v1::TailLogsRequest request;
  request.set_job("jobs/a");
  request.set_attempt(1);
  request.set_rank(-1);
  request.set_after_offset(1);
  v1::TailLogsResponse response;
  {
    const auto context = Context();
    const auto stream = logs_->TailLogs(context.get(), request);
    ASSERT_TRUE(stream->Read(&response));
    ASSERT_EQ(response.lines_size(), 2);
    EXPECT_EQ(response.lines(0).text(), "y");
    EXPECT_FALSE(stream->Read(&response));
    EXPECT_TRUE(stream->Finish().ok());
  }
  request.set_attempt(3);
  const auto context = Context();
  const auto stream = logs_->TailLogs(context.get(), request);
  EXPECT_FALSE(stream->Read(&response));
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_THAT(status.error_message(), HasSubstr("has no attempt 3"));
}

TEST_F(ServerTest, NodesAreListedAndUnknownOnesNamed) {
  v1::ListNodesResponse response;
  ASSERT_TRUE(nodes_->ListNodes(Context().get(), {}, &response).ok());
  EXPECT_EQ(response.nodes_size(), 0);
  v1::DrainNodeRequest request;
  request.set_name("nodes/absent");
  v1::Node node;
  EXPECT_EQ(nodes_->DrainNode(Context().get(), request, &node).error_code(),
            grpc::StatusCode::NOT_FOUND);
}

// A coordinator and a worker of different releases part before either has changed anything.
TEST_F(ServerTest, WorkersOfAnotherProtocolVersionAreRefused) {
  const auto workers = v1::WorkerControl::NewStub(channel_);
  const auto answer = [&](uint32_t version) {
    const auto context = Context();
    const auto stream = workers->Session(context.get());
    v1::WorkerMessage message;
    message.mutable_hello()->set_node("nodes/n1");
    message.mutable_hello()->set_incarnation("folder.process");
    message.mutable_hello()->set_protocol_version(version);
    stream->Write(message);
    v1::CoordinatorMessage reply;
    if (stream->Read(&reply)) {
      EXPECT_EQ(reply.welcome().protocol_version(), kProtocolVersion);
      context->TryCancel();
    }
    return stream->Finish();
  };
  for (const uint32_t version : {0u, kProtocolVersion + 1}) {
    const grpc::Status refused = answer(version);
    EXPECT_EQ(refused.error_code(), grpc::StatusCode::FAILED_PRECONDITION) << version;
    EXPECT_THAT(
        refused.error_message(),
        HasSubstr(absl::StrCat("the worker of nodes/n1 speaks protocol version ", version)));
  }
  v1::ListNodesResponse response;
  ASSERT_TRUE(nodes_->ListNodes(Context().get(), {}, &response).ok());
  EXPECT_EQ(response.nodes_size(), 0);
  EXPECT_EQ(answer(kProtocolVersion).error_code(), grpc::StatusCode::CANCELLED);
}

// A newer ringctl may ask for what this coordinator has no name for: dropping it would train
// something else.
TEST_F(ServerTest, ASpecificationWithUnknownFieldsIsRefused) {
  v1::CreateJobRequest request;
  *request.mutable_spec() = Spec("newer");
  v1::AttentionSpec& attention = *request.mutable_spec()->mutable_attention();
  attention.GetReflection()->MutableUnknownFields(&attention)->AddVarint(9999, 1);
  v1::Job job;
  const grpc::Status status = jobs_->CreateJob(Context().get(), request, &job);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("fields that this coordinator does not know"));
}

// One message to a method that this build has no stub of, and the first one back.
std::string RawCall(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                    const std::string& bytes) {
  class Call : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
   public:
    void OnReadDone(bool) override { context.TryCancel(); }
    void OnDone(const grpc::Status&) override { done.Notify(); }
    grpc::ClientContext context;
    grpc::ByteBuffer reply;
    absl::Notification done;
  } call;
  call.context.set_deadline(std::chrono::system_clock::now() + kDeadline);
  grpc::GenericStub stub(channel);
  stub.PrepareBidiStreamingCall(&call.context, method, {}, &call);
  const grpc::Slice slice(bytes);
  const grpc::ByteBuffer request(&slice, 1);
  call.StartRead(&call.reply);
  call.StartWrite(&request);
  call.StartCall();
  call.done.WaitForNotification();
  std::vector<grpc::Slice> slices;
  std::string text;
  if (call.reply.Dump(&slices).ok()) {
    for (const grpc::Slice& part : slices)
      text.append(reinterpret_cast<const char*>(part.begin()), part.size());
  }
  return text;
}

TEST_F(ServerTest, HealthAndReflection) {
  const std::string serving("\x08\x01");  // HealthCheckResponse{status: SERVING}
  const std::string job_service = "ringleader.v1.JobService";
  const std::string request =
      absl::StrCat("\x0a", std::string(1, static_cast<char>(job_service.size())), job_service);
  EXPECT_EQ(RawCall(channel_, "/grpc.health.v1.Health/Check", ""), serving);
  EXPECT_EQ(RawCall(channel_, "/grpc.health.v1.Health/Check", request), serving);
  EXPECT_EQ(RawCall(channel_, "/grpc.health.v1.Health/Check", "\x0a\x01x"), "");  // NOT_FOUND
  const std::string services =
      RawCall(channel_, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
              std::string("\x3a\x00", 2));  // list_services
  for (const char* name : {"JobService", "LogService", "NodeService", "WorkerControl"}) {
    EXPECT_THAT(services, HasSubstr(absl::StrCat("ringleader.v1.", name)));
  }
}

TEST_F(ServerTest, PortInUseIsSaid) {
  const auto second =
      Server::Start({.listen = {.host = "127.0.0.1", .port = server_->port(), .path = ""}},
                    controller_.get(), workers_.get(), store_.get(), registry_.get());
  EXPECT_EQ(second.status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("is in use by another program"));
}

TEST_F(ServerTest, MutualTls) {
  const TestCertificates certificates;
  ASSERT_TRUE(certificates.ok());
  const Address listen{.host = "127.0.0.1", .port = 0, .path = ""};
  Start({.listen = listen, .tls = certificates.Options("server"), .check_files = false});
  v1::ListJobsResponse response;
  const auto list = [&](const TlsOptions& options) {
    const auto credentials = ChannelCredentials(options, listen);
    EXPECT_TRUE(credentials.ok()) << credentials.status();
    Connect(*credentials);
    return jobs_->ListJobs(Context().get(), {}, &response).error_code();
  };
  EXPECT_EQ(list(certificates.Options("client")), grpc::StatusCode::OK);
  EXPECT_EQ(list(certificates.Options("stranger")),
            grpc::StatusCode::UNAVAILABLE);  // server refuses it
  EXPECT_EQ(list(certificates.Options("client", "other")),
            grpc::StatusCode::UNAVAILABLE);            // it refuses the server
  EXPECT_EQ(list({}), grpc::StatusCode::UNAVAILABLE);  // plain text
}

TEST_F(ServerTest, TooManyStreamsAreRefused) {
  Start({.listen = {.host = "127.0.0.1", .port = 0, .path = ""},
         .check_files = false,
         .max_streams = 2});
  Created("a");
  v1::WatchJobRequest request;
  request.set_name("jobs/a");
  v1::WatchJobResponse response;
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<grpc::ClientReader<v1::WatchJobResponse>>> streams;
  for (int i = 0; i < 3; ++i) {
    contexts.push_back(Context());
    streams.push_back(jobs_->WatchJob(contexts.back().get(), request));
    EXPECT_EQ(streams.back()->Read(&response), i < 2);
  }
  EXPECT_EQ(streams[2]->Finish().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  // One that ends makes room.
  contexts[0]->TryCancel();
  streams[0]->Finish();
  bool admitted = false;
  while (!admitted) {
    contexts.push_back(Context());
    streams.push_back(jobs_->WatchJob(contexts.back().get(), request));
    admitted = streams.back()->Read(&response);
  }
}

}  // namespace
}  // namespace ringleader::api
