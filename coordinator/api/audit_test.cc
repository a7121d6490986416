// What the audit log says of calls, over real gRPC and TLS.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "coordinator/api/testing/access_fixture.h"

namespace ringleader::api::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

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
  EXPECT_THAT(created.address(), StartsWith("127.0.0.1:"));
  EXPECT_THAT(created.credential(), HasSubstr("certificate CN=localhost"));
  EXPECT_NEAR(static_cast<double>(created.time().seconds()),
              static_cast<double>(absl::ToUnixSeconds(absl::Now())), 60);

  As("bob").Delete("jobs/x");
  const v1::AuditRecord refused = AwaitAudit("DeleteJob", "PERMISSION_DENIED");
  EXPECT_EQ(refused.caller(), "bob");
  EXPECT_THAT(refused.address(), StartsWith("127.0.0.1:"));
  EXPECT_THAT(refused.message(), HasSubstr("jobs/x belongs to alice (project ocean)"));
  alice.Cancel("jobs/absent");
  EXPECT_EQ(AwaitAudit("CancelJob", "NOT_FOUND").resource(), "jobs/absent");
  (void)As("board").Create("y");
  const v1::AuditRecord turned_away = AwaitAudit("CreateJob", "PERMISSION_DENIED");
  EXPECT_EQ(turned_away.caller(), "board");
  EXPECT_THAT(turned_away.address(), StartsWith("127.0.0.1:"));
  (void)As("client").List();
  const v1::AuditRecord nameless = AwaitAudit("ListJobs", "UNAUTHENTICATED");
  EXPECT_EQ(nameless.caller(), "");
  EXPECT_THAT(nameless.address(), StartsWith("client grpc-c++"));

  v1::ListAuditRecordsRequest of_alice;
  of_alice.set_caller("alice");
  Client root = As("root");
  ASSERT_TRUE(root.Audit(of_alice).ok());
  ASSERT_EQ(root.audit.records_size(), 2);  // CancelJob, CreateJob
  EXPECT_EQ(root.audit.records(1).method(), "JobService.CreateJob");
}

// A call that its caller's role does not allow says of what it was, too, as far as it said so.
TEST_F(AccessTest, WhatARoleMayNotIsNotedWithWhatItWasAbout) {
  Client board = As("board"), node = As("a"), alice = As("alice");
  const auto refused = [&](const std::string& method) {
    return AwaitAudit(method, "PERMISSION_DENIED");
  };
  EXPECT_FALSE(board.Create("y").ok());
  EXPECT_EQ(refused("CreateJob").resource(), "jobs/y");
  board.Cancel("jobs/x");
  EXPECT_EQ(refused("CancelJob").resource(), "jobs/x");
  board.Delete("a \x1b[2J name");
  EXPECT_EQ(refused("DeleteJob").resource(), "a \\x1b[2J name");
  v1::DrainNodeRequest drain;
  drain.set_name("nodes/b");
  v1::Node drained;
  EXPECT_FALSE(alice.nodes->DrainNode(Client::Context().get(), drain, &drained).ok());
  EXPECT_EQ(refused("DrainNode").resource(), "nodes/b");
  v1::GetJobRequest get;
  get.set_name("jobs/z");
  EXPECT_FALSE(node.jobs->GetJob(Client::Context().get(), get, &node.job).ok());
  EXPECT_EQ(refused("GetJob").resource(), "jobs/z");
  v1::ReportDeathRequest death;
  death.set_node("nodes/c");
  v1::ReportDeathResponse reported;
  EXPECT_FALSE(alice.workers->ReportDeath(Client::Context().get(), death, &reported).ok());
  EXPECT_EQ(refused("ReportDeath").resource(), "nodes/c");
  v1::WatchJobRequest watch;
  watch.set_name("jobs/w");
  const auto context = Client::Context();
  v1::WatchJobResponse news;
  EXPECT_FALSE(node.jobs->WatchJob(context.get(), watch)->Read(&news));
  EXPECT_EQ(refused("WatchJob").resource(), "jobs/w");
  EXPECT_FALSE(node.List().ok());
  EXPECT_EQ(refused("ListJobs").resource(), "");
}

// Nobody has read then what they would have changed.
TEST_F(AccessTest, ChangesThatAreTooLargeAreNoted) {
  const std::set<std::string> changes = {"JobService.CreateJob",      "JobService.DeleteJob",
                                         "JobService.CancelJob",      "JobService.PauseJob",
                                         "JobService.ResumeJob",      "JobService.ProfileJob",
                                         "NodeService.DrainNode",     "NodeService.UndrainNode",
                                         "AccessService.CreateToken", "AccessService.RevokeToken"};
  Client root = As("root");
  // Of fields that no message has.
  const auto large = [](size_t fields) {
    std::string request;
    for (size_t i = 0; i < fields; ++i) request += "\xf8\x07\x01";
    return request;
  };
  for (const auto& [path, method] : ServedMethods()) {
    if (method->client_streaming() || method->service()->name() == "WorkerControl") continue;
    const bool has_job_file =
        absl::EndsWith(path, "/CreateJob") || absl::EndsWith(path, "/ValidateJob");
    const grpc::Status refused =
        CallRaw(root.channel, path, large(has_job_file ? 1'300'000 : 7'000));
    EXPECT_EQ(refused.error_code(), StatusCode::INVALID_ARGUMENT) << path;
  }
  for (const std::string& change : changes) {
    const v1::AuditRecord refused = AwaitAudit(change, "INVALID_ARGUMENT");
    EXPECT_EQ(refused.caller(), "root");
    EXPECT_EQ(refused.role(), v1::ADMIN);
    EXPECT_THAT(refused.address(), StartsWith("127.0.0.1:"));
    EXPECT_THAT(refused.message(), HasSubstr("Request: "));
    EXPECT_THAT(refused.message(), HasSubstr("bytes"));
    EXPECT_EQ(refused.resource(), "");
    EXPECT_TRUE(refused.has_time());
  }
  ASSERT_TRUE(root.Audit().ok());
  for (const v1::AuditRecord& record : root.audit.records()) {
    EXPECT_TRUE(changes.contains(record.method())) << record.method();
  }
  // Whoever may not call a method is told so, whatever the request.
  const grpc::Status refused =
      CallRaw(As("board").channel, "/ringleader.v1.AccessService/CreateToken", large(7'000));
  EXPECT_EQ(refused.error_code(), StatusCode::PERMISSION_DENIED);
  EXPECT_EQ(AwaitAudit("CreateToken", "PERMISSION_DENIED").caller(), "board");
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
    request.set_page_size(request.page_size() + 1);  // as for the rest of a limit
  } while (!request.page_token().empty());
  EXPECT_THAT(resources, ElementsAre("jobs/j4", "jobs/j3", "jobs/j2", "jobs/j1", "jobs/j0"));
  request.set_page_token("x");
  v1::ListAuditRecordsResponse page;
  EXPECT_EQ(root.access->ListAuditRecords(Client::Context().get(), request, &page).error_code(),
            StatusCode::INVALID_ARGUMENT);
}

}  // namespace
}  // namespace ringleader::api::testing
