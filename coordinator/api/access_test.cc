// Who may do what, over real gRPC and TLS: a server in this process with an access file, and
// callers with certificates and tokens of every kind.
#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "base/net/token.h"
#include "base/protocol_version.h"
#include "base/testing/temp_dir.h"
#include "base/testing/test_certificates.h"
#include "coordinator/api/server.h"
#include "coordinator/lifecycle/testing/fixed_plan.h"
#include "coordinator/store/sqlite_store.h"
#include "jobspec/jobspec.h"
#include "prometheus/registry.h"
#include "ringleader/v1/access_service.grpc.pb.h"
#include "ringleader/v1/job_service.grpc.pb.h"
#include "ringleader/v1/log_service.pb.h"
#include "ringleader/v1/node_service.grpc.pb.h"
#include "ringleader/v1/worker_control.grpc.pb.h"

namespace ringleader::api {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

using grpc::StatusCode;

constexpr std::chrono::seconds kDeadline(30);
const Address kListen{.host = "127.0.0.1", .port = 0, .path = ""};

constexpr char kAccess[] = R"(
roles_in_certificates: true
certificates:
  - {common_name: old-root, role: admin, name: root}
)";

// One for all tests: certificates take a while to make.
const TestCertificates& Certificates() {
  static const auto* const certificates = [] {
    auto* const made = new TestCertificates;
    const auto sign = [&](const char* name, const char* uri) {
      EXPECT_TRUE(made->Sign("ca", name, {.more_names = absl::StrCat(",URI:ringleader://", uri)}));
    };
    sign("alice", "user/ocean/alice");
    sign("carol", "user/ocean/carol");
    sign("bob", "user/desert/bob");
    sign("board", "viewer/board");
    sign("a", "node/a");
    EXPECT_TRUE(made->Sign("ca", "root", {.common_name = "old-root"}));
    EXPECT_TRUE(made->Sign("other", "forged", {.more_names = ",URI:ringleader://admin/root"}));
    return made;
  }();
  return *certificates;
}

v1::JobSpec Spec(const std::string& name) {
  auto spec = jobspec::ParseJobFile(absl::StrCat("name: ", name, R"(
model: {config: /job/config.json, init: random}
data: {train: /job/train, eval: /job/eval, sequence_length: 16384}
attention: {pattern: dense}
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
    return (jobs.get()->*method)(Context().get(), request, &job).error_code();
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

// One empty message to any method: how the call ends.
grpc::Status CallRaw(const std::shared_ptr<grpc::Channel>& channel, const std::string& path) {
  struct Call : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
    void OnReadDone(bool ok) override {
      if (ok) context.TryCancel();
    }
    void OnDone(const grpc::Status& status) override {
      ended = status;
      done.Notify();
    }
    grpc::ClientContext context;
    grpc::ByteBuffer reply;
    grpc::Status ended;
    absl::Notification done;
  } call;
  call.context.set_deadline(std::chrono::system_clock::now() + kDeadline);
  grpc::GenericStub stub(channel);
  stub.PrepareBidiStreamingCall(&call.context, path, {}, &call);
  const grpc::Slice slice("");
  const grpc::ByteBuffer request(&slice, 1);
  call.StartRead(&call.reply);
  call.StartWriteLast(&request, {});
  call.StartCall();
  call.done.WaitForNotification();
  return call.ended;
}

class AccessTest : public ::testing::Test {
 protected:
  AccessTest() {
    EXPECT_TRUE(Certificates().ok());
    WriteAccess(kAccess);
    auto store = store::OpenSqliteStore({.path = dir_.File("coordinator.db")});
    EXPECT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
    controller_ =
        lifecycle::JobController::Create({}, store_.get(), &plans_, Clock::Real(), nullptr).value();
    controller_->Start();
    registry_ = std::make_shared<prometheus::Registry>();
    limits_ = std::make_unique<limits::Limits>(limits::Options(), Clock::Real(), registry_.get());
    workers_ = std::make_unique<session::WorkerControlService>(controller_.get(), Clock::Real(),
                                                               &limits_->silent_sessions);
    auto server = Start({.listen = kListen,
                         .tls = Certificates().Options("server"),
                         .access_path = dir_.File("access.yaml"),
                         .check_files = false});
    EXPECT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }

  absl::StatusOr<std::unique_ptr<Server>> Start(const ServerOptions& options) {
    return Server::Start(options, controller_.get(), workers_.get(), store_.get(), limits_.get(),
                         registry_.get());
  }
  void WriteAccess(const std::string& text) {
    // In one go, as an editor or Kubernetes does it.
    std::ofstream(dir_.File("access.new")) << text;
    std::filesystem::rename(dir_.File("access.new"), dir_.File("access.yaml"));
  }
  Client Connect(const TlsOptions& tls, const std::string& token = "") {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    const auto credentials = ChannelCredentials(tls, kListen, token);
    EXPECT_TRUE(credentials.ok()) << credentials.status();
    return Client(grpc::CreateCustomChannel(absl::StrCat("127.0.0.1:", server_->port()),
                                            *credentials, arguments));
  }
  Client As(const std::string& name) { return Connect(Certificates().Options(name)); }
  Client WithToken(const std::string& text) {
    TlsOptions tls;
    tls.ca_path = Certificates().File("ca.crt");
    return Connect(tls, text);
  }
  // Waits until the log holds a record of this outcome; calls that fail are noted after they end.
  v1::AuditRecord AwaitAudit(const std::string& method, const std::string& outcome) {
    Client root = As("root");
    v1::ListAuditRecordsRequest request;
    request.set_method(method);
    request.set_outcome(outcome);
    for (int i = 0; i < 500; ++i) {
      EXPECT_TRUE(root.Audit(request).ok());
      if (root.audit.records_size() > 0) return root.audit.records(0);
      absl::SleepFor(absl::Milliseconds(10));
    }
    ADD_FAILURE() << "no record of " << method << ": " << outcome;
    return {};
  }

  TempDir dir_;
  lifecycle::testing::FixedPlan plans_;
  std::unique_ptr<store::Store> store_;
  std::unique_ptr<lifecycle::JobController> controller_;
  std::shared_ptr<prometheus::Registry> registry_;
  std::unique_ptr<limits::Limits> limits_;
  std::unique_ptr<session::WorkerControlService> workers_;
  std::unique_ptr<Server> server_;
};

TEST_F(AccessTest, ARoleMayDoWhatItIsForAndNoMore) {
  Client board = As("board");
  EXPECT_TRUE(board.List().ok());
  const grpc::Status refused = board.Create("x");
  EXPECT_EQ(refused.error_code(), StatusCode::PERMISSION_DENIED);
  EXPECT_EQ(refused.error_message(),
            "JobService.CreateJob: viewer board may not call it; it is for the roles user, admin");
  Client node = As("a");
  EXPECT_EQ(node.List().error_code(), StatusCode::PERMISSION_DENIED);
  Client alice = As("alice");
  EXPECT_TRUE(alice.Create("x").ok());
  v1::Node drained;
  v1::DrainNodeRequest drain;
  drain.set_name("nodes/a");
  EXPECT_EQ(alice.nodes->DrainNode(Client::Context().get(), drain, &drained).error_code(),
            StatusCode::PERMISSION_DENIED);
  EXPECT_EQ(alice.CreateToken("t", v1::ADMIN, "alice").error_code(), StatusCode::PERMISSION_DENIED);
  EXPECT_EQ(alice.Audit().error_code(), StatusCode::PERMISSION_DENIED);
  EXPECT_TRUE(As("root").Audit().ok());
}

TEST_F(AccessTest, NobodyMayDoNothing) {
  // A certificate of the right authority, without a role; and a connection without certificate.
  const grpc::Status nameless = As("client").List();
  EXPECT_EQ(nameless.error_code(), StatusCode::UNAUTHENTICATED);
  EXPECT_THAT(nameless.error_message(),
              HasSubstr("(dns localhost, common_name localhost) has no role"));
  const grpc::Status garbled = WithToken("rlt_x").List();
  EXPECT_EQ(garbled.error_code(), StatusCode::UNAUTHENTICATED);
  EXPECT_THAT(garbled.error_message(), HasSubstr("the token is none of this coordinator's"));
  // Whether it is well, it tells everybody.
  EXPECT_THAT(CallRaw(As("client").channel, "/grpc.health.v1.Health/Check").error_code(),
              AnyOf(StatusCode::OK, StatusCode::CANCELLED));
}

TEST_F(AccessTest, CertificatesOfAnotherAuthorityAndExpiredOnesDoNotConnect) {
  EXPECT_EQ(As("forged").List().error_code(), StatusCode::UNAVAILABLE);
  // Expires while its owner runs: made good for the start, then replaced by what has expired.
  const TestCertificates& certificates = Certificates();
  ASSERT_TRUE(
      certificates.Sign("ca", "late", {.more_names = ",URI:ringleader://admin/late", .days = -1}));
  grpc::SslCredentialsOptions expired;
  const auto read = [&](const std::string& name) {
    std::ifstream file(certificates.File(name));
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  expired.pem_root_certs = read("ca.crt");
  expired.pem_cert_chain = read("late.crt");
  expired.pem_private_key = read("late.key");
  Client late(grpc::CreateChannel(absl::StrCat("127.0.0.1:", server_->port()),
                                  grpc::SslCredentials(expired)));
  EXPECT_EQ(late.List().error_code(), StatusCode::UNAVAILABLE);
}

TEST_F(AccessTest, EveryMethodThatChangesSomethingRefusesAViewer) {
  const std::shared_ptr<grpc::Channel> board = As("board").channel;
  int methods = 0;
  for (const auto* file :
       {v1::CreateJobRequest::descriptor()->file(), v1::ListNodesRequest::descriptor()->file(),
        v1::CreateTokenRequest::descriptor()->file(), v1::WorkerMessage::descriptor()->file()}) {
    for (int s = 0; s < file->service_count(); ++s) {
      for (int m = 0; m < file->service(s)->method_count(); ++m) {
        const std::string name = file->service(s)->method(m)->name();
        if (name.starts_with("Get") || name == "ListJobs" || name == "ListNodes" ||
            name == "WatchJob") {
          continue;
        }
        const std::string path = absl::StrCat("/", file->service(s)->full_name(), "/", name);
        EXPECT_EQ(CallRaw(board, path).error_code(), StatusCode::PERMISSION_DENIED) << path;
        ++methods;
      }
    }
  }
  EXPECT_GE(methods, 14);
}

TEST_F(AccessTest, AMethodWithoutARowIsRefusedToAdmins) {
  const std::shared_ptr<grpc::Channel> root = As("root").channel;
  for (const char* path : {"/ringleader.v1.JobService/Added", "/x.Y/Z", "/"}) {
    EXPECT_EQ(CallRaw(root, path).error_code(), StatusCode::PERMISSION_DENIED) << path;
  }
  EXPECT_EQ(CallRaw(root, "/ringleader.v1.PeerExchange/Stream").error_code(),
            StatusCode::PERMISSION_DENIED);
}

TEST_F(AccessTest, OthersMayLookAtAJobAndLeaveItAlone) {
  Client alice = As("alice"), bob = As("bob"), carol = As("carol"), root = As("root");
  ASSERT_TRUE(alice.Create("x").ok());
  EXPECT_EQ(alice.job.owner(), "alice");
  EXPECT_EQ(alice.job.project(), "ocean");
  EXPECT_TRUE(bob.List("owner=alice AND project=ocean").ok());
  EXPECT_EQ(bob.listed.total_size(), 1);
  EXPECT_TRUE(bob.List("owner!=alice").ok());
  EXPECT_EQ(bob.listed.total_size(), 0);

  using Stub = v1::JobService::Stub;
  EXPECT_EQ(bob.Change(&Stub::PauseJob, "jobs/x"), StatusCode::PERMISSION_DENIED);
  EXPECT_EQ(bob.Change(&Stub::ResumeJob, "jobs/x"), StatusCode::PERMISSION_DENIED);
  EXPECT_EQ(bob.Cancel("jobs/x"), StatusCode::PERMISSION_DENIED);
  EXPECT_EQ(bob.Delete("jobs/x"), StatusCode::PERMISSION_DENIED);
  v1::ProfileJobRequest profile;
  profile.set_name("jobs/x");
  profile.set_steps(1);
  v1::ProfileJobResponse profiled;
  EXPECT_EQ(bob.jobs->ProfileJob(Client::Context().get(), profile, &profiled).error_code(),
            StatusCode::PERMISSION_DENIED);
  v1::GetJobRequest get;
  get.set_name("jobs/x");
  ASSERT_TRUE(bob.jobs->GetJob(Client::Context().get(), get, &bob.job).ok());
  EXPECT_EQ(bob.job.state(), v1::Job::PENDING);

  EXPECT_EQ(carol.Cancel("jobs/x"), StatusCode::OK);
  EXPECT_EQ(bob.Delete("jobs/x"), StatusCode::PERMISSION_DENIED);
  EXPECT_EQ(root.Delete("jobs/x"), StatusCode::OK);
}

TEST_F(AccessTest, NobodyGetsTheReplyToSomebodyElsesRequest) {
  ASSERT_TRUE(As("alice").Create("x", "request-1").ok());
  Client bob = As("bob");
  EXPECT_EQ(bob.Create("x", "request-1").error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(bob.job.uid(), "");
  EXPECT_TRUE(As("alice").Create("x", "request-1").ok());
}

TEST_F(AccessTest, ATokenStandsForItsUserUntilItIsRevoked) {
  Client root = As("root");
  ASSERT_TRUE(root.CreateToken("rlt_secret", v1::USER, "dave").ok());
  EXPECT_THAT(root.token.name(), StartsWith("tokens/"));
  EXPECT_EQ(root.token.creator(), "root");
  Client dave = WithToken("rlt_secret");
  ASSERT_TRUE(dave.Create("x").ok());
  EXPECT_EQ(dave.job.owner(), "dave");
  EXPECT_EQ(dave.Audit().error_code(), StatusCode::PERMISSION_DENIED);
  // It counts beside a certificate, too, and most of all when it is wrong.
  EXPECT_EQ(Connect(Certificates().Options("root"), "rlt_secret").Audit().error_code(),
            StatusCode::PERMISSION_DENIED);
  EXPECT_EQ(Connect(Certificates().Options("root"), "rlt_other").List().error_code(),
            StatusCode::UNAUTHENTICATED);

  v1::WatchJobRequest watch;
  watch.set_name("jobs/x");
  const auto context = Client::Context();
  const auto stream = dave.jobs->WatchJob(context.get(), watch);
  v1::WatchJobResponse seen;
  ASSERT_TRUE(stream->Read(&seen));
  v1::RevokeTokenRequest revoke;
  revoke.set_name(root.token.name());
  ASSERT_TRUE(root.access->RevokeToken(Client::Context().get(), revoke, &root.token).ok());
  while (stream->Read(&seen)) continue;
  EXPECT_EQ(stream->Finish().error_code(), StatusCode::UNAVAILABLE);
  EXPECT_EQ(dave.List().error_code(), StatusCode::UNAUTHENTICATED);
  EXPECT_EQ(root.access->RevokeToken(Client::Context().get(), revoke, &root.token).error_code(),
            StatusCode::NOT_FOUND);
}

TEST_F(AccessTest, ATokenExpiresAndItsTextIsNowhereOnDisk) {
  Client root = As("root");
  ASSERT_TRUE(root.CreateToken("rlt_short-lived", v1::VIEWER, "erin", 1).ok());
  ASSERT_TRUE(root.CreateToken("rlt_kept-for-long", v1::VIEWER, "erin").ok());
  absl::SleepFor(absl::Milliseconds(2100));
  const grpc::Status late = WithToken("rlt_short-lived").List();
  EXPECT_EQ(late.error_code(), StatusCode::UNAUTHENTICATED);
  EXPECT_THAT(late.error_message(), HasSubstr("expired at"));
  EXPECT_TRUE(WithToken("rlt_kept-for-long").List().ok());
  for (const char* name : {"coordinator.db", "coordinator.db-wal"}) {
    std::ifstream file(dir_.File(name), std::ios::binary);
    const std::string bytes(std::istreambuf_iterator<char>(file), {});
    EXPECT_EQ(bytes.find("kept-for-long"), std::string::npos) << name;
  }
}

TEST_F(AccessTest, TokensThatCannotBeAreRefused) {
  Client root = As("root");
  EXPECT_THAT(root.CreateToken("t", v1::NODE, "a").error_message(), HasSubstr("has a certificate"));
  EXPECT_THAT(root.CreateToken("t", v1::USER, "a\nb").error_message(), HasSubstr("user: give"));
  EXPECT_THAT(root.CreateToken("t", v1::USER, "").error_message(), HasSubstr("user: give"));
  EXPECT_THAT(root.CreateToken("t", v1::USER, "a", 0).error_message(), HasSubstr("366 days"));
  EXPECT_THAT(root.CreateToken("t", v1::USER, "a", uint64_t{1} << 40).error_message(),
              HasSubstr("366 days"));
  v1::CreateTokenRequest request;
  request.set_sha256("short");
  EXPECT_EQ(root.access->CreateToken(Client::Context().get(), request, &root.token).error_code(),
            StatusCode::INVALID_ARGUMENT);
}

TEST_F(AccessTest, HeadersThatAreGarbledOrHugeAreRefused) {
  const auto list_with = [&](Client& client, const std::vector<std::string>& headers,
                             const std::string& bulk = "") {
    const auto context = Client::Context();
    for (const std::string& header : headers) context->AddMetadata("authorization", header);
    if (!bulk.empty()) context->AddMetadata("bulk", bulk);
    return client.jobs->ListJobs(context.get(), {}, &client.listed).error_code();
  };
  Client root = As("root");
  for (const char* header : {"", "Bearer", "Bearer ", "Basic cm9vdDpyb290", "Bearer a b c"}) {
    EXPECT_EQ(list_with(root, {header}), StatusCode::UNAUTHENTICATED) << header;
  }
  EXPECT_EQ(list_with(root, {"Bearer a", "Bearer b"}), StatusCode::UNAUTHENTICATED);
  EXPECT_EQ(list_with(root, {}, std::string(200'000, 'x')), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_TRUE(As("root").List().ok());
}

TEST_F(AccessTest, ANodeSpeaksForItselfAlone) {
  const auto hello = [&](const std::string& as, const std::string& node) {
    Client client = As(as);
    const auto context = Client::Context();
    const auto stream = client.workers->Session(context.get());
    v1::WorkerMessage message;
    message.mutable_hello()->set_node("nodes/" + node);
    message.mutable_hello()->set_incarnation("f.1");
    message.mutable_hello()->set_protocol_version(kProtocolVersion);
    stream->Write(message);
    v1::CoordinatorMessage answer;
    if (stream->Read(&answer)) {
      EXPECT_TRUE(answer.has_welcome());
      context->TryCancel();
      stream->Finish();
      return grpc::Status::OK;
    }
    return stream->Finish();
  };
  EXPECT_TRUE(hello("a", "a").ok());
  const grpc::Status forged = hello("a", "b");
  EXPECT_EQ(forged.error_code(), StatusCode::PERMISSION_DENIED);
  EXPECT_THAT(forged.error_message(), HasSubstr("node a may not speak for nodes/b"));
  EXPECT_EQ(hello("root", "a").error_code(), StatusCode::PERMISSION_DENIED);
  const v1::AuditRecord noted = AwaitAudit("Session", "PERMISSION_DENIED");
  EXPECT_THAT(noted.method(), "WorkerControl.Session");

  const auto death = [&](const std::string& node) {
    Client client = As("a");
    v1::ReportDeathRequest request;
    request.set_node("nodes/" + node);
    request.set_incarnation("f.1");
    v1::ReportDeathResponse response;
    return client.workers->ReportDeath(Client::Context().get(), request, &response).error_code();
  };
  EXPECT_EQ(death("b"), StatusCode::PERMISSION_DENIED);
  EXPECT_NE(death("a"), StatusCode::PERMISSION_DENIED);
  EXPECT_EQ(AwaitAudit("ReportDeath", "PERMISSION_DENIED").resource(), "nodes/b");
}

TEST_F(AccessTest, TheAccessFileIsTakenUpWithoutARestart) {
  Client bob = As("bob");
  ASSERT_TRUE(bob.Create("x").ok());
  v1::WatchJobRequest watch;
  watch.set_name("jobs/x");
  const auto context = Client::Context();
  const auto stream = bob.jobs->WatchJob(context.get(), watch);
  v1::WatchJobResponse seen;
  ASSERT_TRUE(stream->Read(&seen));

  WriteAccess("roles_in_certificates: [");  // a slip: what was said before stays
  absl::SleepFor(absl::Milliseconds(2500));
  EXPECT_TRUE(bob.List().ok());
  std::filesystem::remove(dir_.File("access.yaml"));
  absl::SleepFor(absl::Milliseconds(1500));
  EXPECT_TRUE(bob.List().ok());

  WriteAccess(std::string(kAccess) + "  - {uri: \"ringleader://user/desert/bob\", role: none}\n");
  while (stream->Read(&seen)) continue;
  EXPECT_EQ(stream->Finish().error_code(), StatusCode::UNAVAILABLE);
  const grpc::Status out = bob.List();
  EXPECT_EQ(out.error_code(), StatusCode::UNAUTHENTICATED);
  EXPECT_THAT(out.error_message(), HasSubstr("shut out"));
  EXPECT_TRUE(As("alice").List().ok());
}

TEST_F(AccessTest, WhoDidWhatIsInTheAuditLog) {
  Client alice = As("alice");
  ASSERT_TRUE(alice.Create("x", "request-1").ok());
  ASSERT_TRUE(alice.Create("x", "request-1").ok());  // the same again is no second change
  v1::AuditRecord created = AwaitAudit("CreateJob", "OK");
  EXPECT_EQ(created.caller(), "alice");
  EXPECT_EQ(created.role(), v1::USER);
  EXPECT_EQ(created.method(), "JobService.CreateJob");
  EXPECT_EQ(created.resource(), "jobs/x");
  EXPECT_EQ(created.request_id(), "request-1");
  EXPECT_THAT(created.address(), StartsWith("ipv4:127.0.0.1:"));
  EXPECT_THAT(created.credential(), HasSubstr("certificate CN=localhost"));
  EXPECT_NEAR(static_cast<double>(created.time().seconds()),
              static_cast<double>(absl::ToUnixSeconds(absl::Now())), 60);

  As("bob").Delete("jobs/x");
  const v1::AuditRecord refused = AwaitAudit("DeleteJob", "PERMISSION_DENIED");
  EXPECT_EQ(refused.caller(), "bob");
  EXPECT_THAT(refused.address(), StartsWith("ipv4:127.0.0.1:"));
  EXPECT_THAT(refused.message(), HasSubstr("jobs/x belongs to alice (project ocean)"));
  alice.Cancel("jobs/absent");
  EXPECT_EQ(AwaitAudit("CancelJob", "NOT_FOUND").resource(), "jobs/absent");
  (void)As("board").Create("y");
  const v1::AuditRecord turned_away = AwaitAudit("CreateJob", "PERMISSION_DENIED");
  EXPECT_EQ(turned_away.caller(), "board");
  EXPECT_THAT(turned_away.address(), StartsWith("client grpc-c++"));
  (void)As("client").List();
  EXPECT_EQ(AwaitAudit("ListJobs", "UNAUTHENTICATED").caller(), "");

  v1::ListAuditRecordsRequest of_alice;
  of_alice.set_caller("alice");
  Client root = As("root");
  ASSERT_TRUE(root.Audit(of_alice).ok());
  ASSERT_EQ(root.audit.records_size(), 2);  // CancelJob, CreateJob
  EXPECT_EQ(root.audit.records(1).method(), "JobService.CreateJob");
}

TEST_F(AccessTest, AuditPagesFollowEachOther) {
  Client root = As("root");
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(root.Create(absl::StrCat("j", i)).ok());
  v1::ListAuditRecordsRequest request;
  request.set_page_size(2);
  std::vector<std::string> resources;
  do {
    v1::ListAuditRecordsResponse page;
    ASSERT_TRUE(root.access->ListAuditRecords(Client::Context().get(), request, &page).ok());
    for (const auto& record : page.records()) resources.push_back(record.resource());
    request.set_page_token(page.next_page_token());
  } while (!request.page_token().empty());
  EXPECT_THAT(resources, ElementsAre("jobs/j4", "jobs/j3", "jobs/j2", "jobs/j1", "jobs/j0"));
  request.set_page_token("x");
  v1::ListAuditRecordsResponse page;
  EXPECT_EQ(root.access->ListAuditRecords(Client::Context().get(), request, &page).error_code(),
            StatusCode::INVALID_ARGUMENT);
}

TEST_F(AccessTest, OffLoopbackNothingStartsWithoutRoles) {
  const Address everywhere{.host = "0.0.0.0", .port = 0, .path = ""};
  const auto complaint = [&](const ServerOptions& options) {
    const auto server = Start(options);
    EXPECT_EQ(server.status().code(), absl::StatusCode::kFailedPrecondition);
    return std::string(server.status().message());
  };
  EXPECT_THAT(complaint({.listen = everywhere, .tls = Certificates().Options("server")}),
              AllOf(HasSubstr("--listen 0.0.0.0:0"), HasSubstr("give --access FILE")));
  TlsOptions insecure;
  insecure.insecure = true;
  EXPECT_THAT(complaint({.listen = everywhere, .tls = insecure}), HasSubstr("give --access FILE"));
  EXPECT_THAT(
      complaint({.listen = everywhere, .tls = insecure, .access_path = dir_.File("access.yaml")}),
      HasSubstr("plain_text_is_admin: true"));
  std::ofstream(dir_.File("open.yaml")) << "plain_text_is_admin: true\n";
  EXPECT_TRUE(
      Start({.listen = everywhere, .tls = insecure, .access_path = dir_.File("open.yaml")}).ok());
  std::ofstream(dir_.File("wrong.yaml")) << "roles: all\n";
  EXPECT_THAT(
      std::string(
          Start({.listen = kListen, .access_path = dir_.File("wrong.yaml")}).status().message()),
      HasSubstr("unknown key roles"));
}

}  // namespace
}  // namespace ringleader::api
