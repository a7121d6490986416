// The page beside a gRPC port with roles: HTTPS, and a token from everybody.
#include <gmock/gmock.h>
#include <httplib.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "coordinator/api/testing/access_fixture.h"
#include "coordinator/page/page_server.h"

namespace ringleader::page {
namespace {

using api::testing::AccessTest;
using api::testing::Certificates;
using api::testing::Client;
using ::testing::HasSubstr;

class PageAccessTest : public AccessTest {
 protected:
  PageAccessTest() {
    auto page = PageServer::Start({.listen = api::testing::kListen,
                                   .tls = Certificates().Options("server"),
                                   .has_roles = true},
                                  server_->InProcessChannel());
    EXPECT_TRUE(page.ok()) << page.status();
    page_ = *std::move(page);
    client_ = std::make_unique<httplib::SSLClient>("127.0.0.1", page_->port());
    client_->set_ca_cert_path(Certificates().File("ca.crt").c_str());
    client_->enable_server_certificate_verification(true);
  }

  httplib::Result Get(const std::string& path, const std::string& authorization = "") {
    httplib::Headers headers;
    if (!authorization.empty()) headers.emplace("Authorization", authorization);
    httplib::Result result = client_->Get(path, headers);
    EXPECT_TRUE(result) << path << ": " << httplib::to_string(result.error());
    return result;
  }
  int Status(const std::string& path, const std::string& authorization = "") {
    return Get(path, authorization)->status;
  }
  std::string Token(v1::Role role, const std::string& user) {
    const std::string text = NewToken();
    const grpc::Status made = As("root").CreateToken(text, role, user);
    EXPECT_TRUE(made.ok()) << made.error_message();
    return text;
  }

  std::unique_ptr<PageServer> page_;
  std::unique_ptr<httplib::SSLClient> client_;
};

TEST_F(PageAccessTest, WhoShowsNoTokenSeesThePageAndNoData) {
  EXPECT_EQ(Status("/"), 200);
  for (const char* path :
       {"/api/jobs", "/api/nodes", "/api/jobs/a", "/api/jobs/a/history", "/api/jobs/a/logs"}) {
    const httplib::Result refused = Get(path);
    EXPECT_EQ(refused->status, 401) << path;
    EXPECT_EQ(refused->get_header_value("WWW-Authenticate"), "Bearer");
  }
}

TEST_F(PageAccessTest, ATokenOpensWhatItsRoleMayRead) {
  ASSERT_TRUE(As("alice").Create("a").ok());
  const std::string viewer = "Bearer " + Token(v1::VIEWER, "board");
  for (const char* path :
       {"/api/jobs", "/api/nodes", "/api/jobs/a", "/api/jobs/a/history", "/api/jobs/a/logs"}) {
    EXPECT_EQ(Status(path, viewer), 200) << path;
  }
  EXPECT_THAT(Get("/api/jobs", viewer)->body, HasSubstr("jobs/a"));
  EXPECT_EQ(Status("/api/jobs", "bearer " + Token(v1::USER, "bob")), 200);
}

TEST_F(PageAccessTest, WhatIsNoTokenIsRefused) {
  const std::string token = Token(v1::VIEWER, "board");
  for (const std::string& wrong :
       {std::string("Bearer "), std::string("Bearer guess"), "Basic " + token, token,
        "Bearer " + token + "x", std::string("Bearer \x01\xff")}) {
    EXPECT_EQ(Status("/api/jobs", wrong), 401) << wrong;
  }
  // It is the admin's to take back, at once.
  v1::ListTokensResponse tokens;
  Client admin = As("root");
  ASSERT_TRUE(admin.access->ListTokens(Client::Context().get(), {}, &tokens).ok());
  ASSERT_EQ(tokens.tokens_size(), 1);
  v1::RevokeTokenRequest request;
  request.set_name(tokens.tokens(0).name());
  EXPECT_EQ(Status("/api/jobs", "Bearer " + token), 200);
  ASSERT_TRUE(admin.access->RevokeToken(Client::Context().get(), request, &admin.token).ok());
  EXPECT_EQ(Status("/api/jobs", "Bearer " + token), 401);
}

TEST_F(PageAccessTest, PlainTextIsNotAnswered) {
  httplib::Client plain("127.0.0.1", page_->port());
  plain.set_read_timeout(10);
  const httplib::Result result = plain.Get("/");
  EXPECT_TRUE(!result || result->status != 200);
}

}  // namespace
}  // namespace ringleader::page
