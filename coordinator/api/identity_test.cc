// How callers show who they are, over real gRPC and TLS: certificates, tokens, and several callers
// on one connection.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <fstream>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/protocol_version.h"
#include "coordinator/api/testing/access_fixture.h"
#include "coordinator/store/testing/forwarding_store.h"

namespace ringleader::api::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

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

// The handshake looks at the date once; the connection may last for months.
TEST_F(AccessTest, ACertificateThatExpiresEndsWhatItHasOpened) {
  const TestCertificates& certificates = Certificates();
  ASSERT_TRUE(
      certificates.Sign("ca", "brief", {.more_names = ",URI:ringleader://node/b", .seconds = 12}));
  const Client brief = As("brief");
  const auto session_context = Client::Context();
  const auto session = brief.workers->Session(session_context.get());
  v1::WorkerMessage hello;
  hello.mutable_hello()->set_node("nodes/b");
  hello.mutable_hello()->set_incarnation("folder.process");
  hello.mutable_hello()->set_protocol_version(kProtocolVersion);
  ASSERT_TRUE(session->Write(hello));
  v1::CoordinatorMessage answer;
  ASSERT_TRUE(session->Read(&answer));
  while (session->Read(&answer)) continue;
  EXPECT_EQ(session->Finish().error_code(), StatusCode::UNAVAILABLE);
  // Over the connection that was opened while it was valid.
  const auto again_context = Client::Context();
  const auto again = brief.workers->Session(again_context.get());
  again->Write(hello);
  EXPECT_FALSE(again->Read(&answer));
  const grpc::Status refused = again->Finish();
  EXPECT_EQ(refused.error_code(), StatusCode::UNAUTHENTICATED);
  EXPECT_THAT(refused.error_message(), HasSubstr("certificate of this connection expired at"));
  EXPECT_NE(As("a").List().error_code(), StatusCode::UNAUTHENTICATED);
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

// A store whose disk is full, or cannot be read.
class TroubledStore : public store::testing::ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  absl::Status Read(absl::FunctionRef<absl::Status(store::ReadTransaction&)> body) override {
    return is_unreadable ? absl::UnavailableError("no answer") : ForwardingStore::Read(body);
  }
  absl::Status Write(absl::FunctionRef<absl::Status(store::WriteTransaction&)> body,
                     store::Need need) override {
    if (is_full && need == store::Need::kOrdinary) return Space();
    return ForwardingStore::Write(body, need);
  }
  absl::Status Space() override {
    return is_full ? absl::ResourceExhaustedError("the disk is full") : absl::OkStatus();
  }
  std::atomic<bool> is_full = false;
  std::atomic<bool> is_unreadable = false;
};

TEST_F(AccessTest, ATokenIsRevokedWhateverTroubleTheStoreIsIn) {
  server_.reset();
  TroubledStore troubled(store_.get());
  const absl::Cleanup stop = [&] { server_.reset(); };
  auto server =
      Server::Start({.listen = kListen,
                     .tls = Certificates().Options("server"),
                     .access_path = dir_.File("access.yaml"),
                     .check_files = false},
                    controller_.get(), workers_.get(), &troubled, limits_.get(), registry_.get());
  ASSERT_TRUE(server.ok()) << server.status();
  server_ = *std::move(server);
  Client root = As("root");
  const auto revoke = [&](const v1::Token& token) {
    v1::RevokeTokenRequest request;
    request.set_name(token.name());
    v1::Token revoked;
    return root.access->RevokeToken(Client::Context().get(), request, &revoked).error_code();
  };
  const std::string first = NewToken(), second = NewToken();
  ASSERT_TRUE(root.CreateToken(first, v1::USER, "dave").ok());
  const v1::Token firsts = root.token;
  ASSERT_TRUE(root.CreateToken(second, v1::USER, "dave").ok());
  ASSERT_TRUE(WithToken(second).List().ok());

  troubled.is_full = true;
  EXPECT_EQ(revoke(firsts), StatusCode::OK);
  EXPECT_EQ(WithToken(first).List().error_code(), StatusCode::UNAUTHENTICATED);
  troubled.is_full = false;
  // It is gone from the store, and the coordinator does not know yet.
  troubled.is_unreadable = true;
  EXPECT_EQ(revoke(root.token), StatusCode::UNAVAILABLE);
  troubled.is_unreadable = false;
  EXPECT_EQ(revoke(root.token), StatusCode::NOT_FOUND);
  EXPECT_EQ(WithToken(second).List().error_code(), StatusCode::UNAUTHENTICATED);
}

TEST_F(AccessTest, ATokenExpiresAndItsTextIsNowhereOnDisk) {
  Client root = As("root");
  ASSERT_TRUE(root.CreateToken("rlt_kept-for-long", v1::VIEWER, "erin").ok());
  const absl::Time begun = absl::Now();
  ASSERT_TRUE(root.CreateToken("rlt_short-lived", v1::VIEWER, "erin", 1).ok());
  grpc::Status late;
  const absl::Time give_up = absl::Now() + absl::Seconds(60);
  while (late.ok() && absl::Now() < give_up) late = WithToken("rlt_short-lived").List();
  EXPECT_EQ(late.error_code(), StatusCode::UNAUTHENTICATED);
  EXPECT_THAT(late.error_message(), HasSubstr("expired at"));
  EXPECT_GE(absl::Now() - begun, absl::Seconds(1)) << "it was good for less than was asked for";
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

// A proxy, or a program that serves several people, has one connection for them all.
TEST_F(AccessTest, CallersOfOneConnectionAreToldApart) {
  Client root = As("root");
  ASSERT_TRUE(root.CreateToken("rlt_ann", v1::ADMIN, "ann").ok());
  ASSERT_TRUE(root.CreateToken("rlt_ben", v1::USER, "ben").ok());
  ASSERT_TRUE(As("alice").Create("x").ok());
  const Client shared = As("client");
  const auto context_of = [](const std::string& token) {
    auto context = Client::Context();
    context->AddMetadata("authorization", "Bearer " + token);
    return context;
  };
  const auto cancel = [&](const std::string& token) {
    v1::CancelJobRequest request;
    request.set_name("jobs/x");
    v1::Job job;
    return shared.jobs->CancelJob(context_of(token).get(), request, &job).error_code();
  };
  v1::ListTokensResponse tokens;
  ASSERT_TRUE(shared.access->ListTokens(context_of("rlt_ann").get(), {}, &tokens).ok());
  EXPECT_EQ(cancel("rlt_ben"), StatusCode::PERMISSION_DENIED);
  EXPECT_EQ(AwaitAudit("CancelJob", "PERMISSION_DENIED").caller(), "ben");
  EXPECT_EQ(cancel("rlt_ann"), StatusCode::OK);
}

TEST_F(AccessTest, AStreamEndsWithTheTokenThatOpenedIt) {
  Client root = As("root");
  ASSERT_TRUE(root.Create("x").ok());
  ASSERT_TRUE(root.CreateToken("rlt_brief", v1::VIEWER, "erin", 6).ok());
  Client erin = WithToken("rlt_brief");
  v1::WatchJobRequest watch;
  watch.set_name("jobs/x");
  const auto context = Client::Context();
  const auto stream = erin.jobs->WatchJob(context.get(), watch);
  v1::WatchJobResponse seen;
  ASSERT_TRUE(stream->Read(&seen));
  while (stream->Read(&seen)) continue;
  EXPECT_EQ(stream->Finish().error_code(), StatusCode::UNAVAILABLE);
  EXPECT_EQ(erin.List().error_code(), StatusCode::UNAUTHENTICATED);
}

}  // namespace
}  // namespace ringleader::api::testing
