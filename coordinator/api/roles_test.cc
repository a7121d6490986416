// What each role may do, over real gRPC and TLS.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "base/protocol_version.h"
#include "coordinator/access/method_table.h"
#include "coordinator/api/testing/access_fixture.h"
#include "ringleader/v1/log_service.pb.h"

namespace ringleader::api::testing {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;

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

TEST_F(AccessTest, EveryMethodThatChangesSomethingRefusesAViewer) {
  const std::shared_ptr<grpc::Channel> board = As("board").channel;
  int methods = 0;
  for (const auto& [path, method] : ServedMethods()) {
    const std::string& name = method->name();
    if (name.starts_with("Get") || name == "ListJobs" || name == "ListNodes" ||
        name == "ListLatency" || name == "WatchJob" || name == "TailLogs") {
      continue;
    }
    EXPECT_EQ(CallRaw(board, path).error_code(), StatusCode::PERMISSION_DENIED) << path;
    ++methods;
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

// Of those who share a cluster nobody puts jobs before the others' unasked; after them anybody may.
TEST_F(AccessTest, APriorityAboveZeroIsAnAdminsToGive) {
  Client alice = As("alice"), root = As("root");
  const auto create = [](Client& client, const std::string& name, int priority) {
    v1::CreateJobRequest request;
    *request.mutable_spec() = Spec(name);
    request.mutable_spec()->mutable_scheduling()->set_priority(priority);
    request.set_protocol_version(kProtocolVersion);
    return client.jobs->CreateJob(Client::Context().get(), request, &client.job);
  };
  const grpc::Status refused = create(alice, "first", 1);
  EXPECT_EQ(refused.error_code(), StatusCode::PERMISSION_DENIED);
  EXPECT_THAT(refused.error_message(), HasSubstr("scheduling.priority: 1"));
  EXPECT_TRUE(create(alice, "last", -1000).ok());
  EXPECT_TRUE(create(alice, "usual", 0).ok());
  EXPECT_TRUE(create(root, "first", 1000).ok());
}

TEST_F(AccessTest, NobodyGetsTheReplyToSomebodyElsesRequest) {
  ASSERT_TRUE(As("alice").Create("x", "request-1").ok());
  Client bob = As("bob");
  EXPECT_EQ(bob.Create("x", "request-1").error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(bob.job.uid(), "");
  EXPECT_TRUE(As("alice").Create("x", "request-1").ok());
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

TEST_F(AccessTest, TheTableHoldsForEveryMethodAndRole) {
  const std::vector<std::pair<v1::Role, std::string>> callers = {
      {v1::ADMIN, "root"}, {v1::USER, "bob"}, {v1::VIEWER, "board"}, {v1::NODE, "a"}};
  int methods = 0;
  for (const auto& [path, method] : ServedMethods()) {
    for (const auto& [role, name] : callers) {
      const absl::Status may = access::CheckMethod(path, {.role = role, .name = name});
      const StatusCode code = CallRaw(As(name).channel, path).error_code();
      EXPECT_EQ(code == StatusCode::PERMISSION_DENIED, !may.ok()) << path << " as " << name;
    }
    ++methods;
  }
  EXPECT_GE(methods, 20);
}

}  // namespace
}  // namespace ringleader::api::testing
