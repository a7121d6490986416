// The page beside a gRPC port with roles: HTTPS, and a certificate or a token from everybody.
#include <gmock/gmock.h>
#include <httplib.h>
#include <openssl/bio.h>
#include <openssl/ssl.h>

#include <fstream>
#include <iterator>
#include <string>

#include "absl/strings/escaping.h"
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
                                   .has_roles = true,
                                   .voucher = server_->voucher()},
                                  server_->InProcessChannel());
    EXPECT_TRUE(page.ok()) << page.status();
    page_ = *std::move(page);
    client_ = Browser();
  }

  // Returns a client with the certificate of this name, or without one if it is empty.
  std::unique_ptr<httplib::SSLClient> Browser(const std::string& name = "") {
    auto browser = name.empty()
                       ? std::make_unique<httplib::SSLClient>("127.0.0.1", page_->port())
                       : std::make_unique<httplib::SSLClient>("127.0.0.1", page_->port(),
                                                              Certificates().File(name + ".crt"),
                                                              Certificates().File(name + ".key"));
    browser->set_ca_cert_path(Certificates().File("ca.crt").c_str());
    browser->enable_server_certificate_verification(true);
    return browser;
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

TEST_F(PageAccessTest, ACertificateOpensWhatItsRoleMayRead) {
  ASSERT_TRUE(As("alice").Create("a").ok());
  for (const char* name : {"alice", "board", "root"}) {
    client_ = Browser(name);
    for (const char* path : {"/", "/api/jobs", "/api/nodes", "/api/jobs/a", "/api/jobs/a/history",
                             "/api/jobs/a/logs"}) {
      EXPECT_EQ(Status(path), 200) << name << " " << path;
    }
  }
  client_ = Browser("a");  // a node
  EXPECT_EQ(Status("/api/jobs"), 403);
  client_ = Browser("client");  // of the authority, and without a role
  EXPECT_EQ(Status("/api/jobs"), 401);
  v1::AuditRecord refused = AwaitAudit("JobService.ListJobs", "PERMISSION_DENIED");
  EXPECT_EQ(refused.caller(), "a");
  EXPECT_EQ(refused.role(), v1::NODE);
}

TEST_F(PageAccessTest, ATokenCountsBesideACertificate) {
  client_ = Browser("root");
  EXPECT_EQ(Status("/api/jobs", "Bearer guess"), 401);
  client_ = Browser("a");
  EXPECT_EQ(Status("/api/jobs", "Bearer " + Token(v1::VIEWER, "board")), 200);
}

TEST_F(PageAccessTest, CertificatesOfAnotherAuthorityAndExpiredOnesDoNotConnect) {
  ASSERT_TRUE(Certificates().Sign("ca", "late",
                                  {.more_names = ",URI:ringleader://admin/late", .days = -1}));
  for (const char* name : {"forged", "late"}) {
    const httplib::Result result = Browser(name)->Get("/api/jobs");
    EXPECT_TRUE(!result || result->status == 401) << name << " " << result->status;
  }
}

// Whoever reaches the gRPC port can write any metadata; what the page says there takes its voucher.
TEST_F(PageAccessTest, NobodyElseVouchesForACertificate) {
  httplib::Headers headers = {{"ringleader-voucher", server_->voucher()},
                              {"ringleader-certificate-bin", "x"}};
  EXPECT_EQ(client_->Get("/api/jobs", headers)->status, 401);
  std::ifstream file(Certificates().File("root.crt"));
  const std::string pem(std::istreambuf_iterator<char>(file), {});
  std::string der;
  const size_t begin = pem.find('\n');
  std::string base64 = pem.substr(begin, pem.find("-----END") - begin);
  std::erase(base64, '\n');
  ASSERT_TRUE(absl::Base64Unescape(base64, &der));
  for (const std::string& guess : {std::string(), NewToken(), server_->voucher()}) {
    const auto context = Client::Context();
    if (!guess.empty()) context->AddMetadata("ringleader-voucher", guess);
    context->AddMetadata("ringleader-certificate-bin", der);
    v1::ListJobsResponse reply;
    const grpc::Status status = As("client").jobs->ListJobs(context.get(), {}, &reply);
    const bool right = guess == server_->voucher();
    EXPECT_EQ(status.error_code(), right ? grpc::StatusCode::OK : grpc::StatusCode::UNAUTHENTICATED)
        << status.error_message();
  }
}

TEST_F(PageAccessTest, OtherSitesGetNothingByABrowsersCertificate) {
  client_ = Browser("root");
  for (const char* site : {"cross-site", "same-site"}) {
    EXPECT_EQ(client_->Get("/api/jobs", {{"Sec-Fetch-Site", site}})->status, 403) << site;
  }
  for (const char* site : {"same-origin", "none"}) {
    EXPECT_EQ(client_->Get("/api/jobs", {{"Sec-Fetch-Site", site}})->status, 200) << site;
  }
}

TEST_F(PageAccessTest, HeadersWithoutEndAreNotTakenIn) {
  const auto ask = [&](int lines) {
    httplib::Headers headers;
    for (int i = 0; i < lines; ++i) headers.emplace(absl::StrCat("X-", i), std::string(100, 'x'));
    return Browser("root")->Get("/api/jobs", headers);
  };
  EXPECT_EQ(ask(100)->status, 200);
  const httplib::Result endless = ask(10'000);
  EXPECT_FALSE(endless) << endless->status;
  // What counts is a request, not what a connection sends in all its requests.
  client_ = Browser("root");
  client_->set_keep_alive(true);
  const httplib::Headers padding = {{"X", std::string(4000, 'x')}};
  for (int i = 0; i < 40; ++i) EXPECT_EQ(client_->Get("/api/jobs", padding)->status, 200) << i;
}

// What TLS answers by itself, here new keys, does not make a request shorter.
TEST_F(PageAccessTest, NewKeysInTheMiddleOfHeadersDoNotHelp) {
  const std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)> context(SSL_CTX_new(TLS_client_method()),
                                                                  &SSL_CTX_free);
  SSL_CTX_set_min_proto_version(context.get(), TLS1_3_VERSION);
  const std::unique_ptr<BIO, decltype(&BIO_free_all)> connection(BIO_new_ssl_connect(context.get()),
                                                                 &BIO_free_all);
  BIO_set_conn_hostname(connection.get(), absl::StrCat("127.0.0.1:", page_->port()).c_str());
  ASSERT_EQ(BIO_do_connect(connection.get()), 1);
  SSL* ssl = nullptr;
  BIO_get_ssl(connection.get(), &ssl);
  const std::string line = absl::StrCat("X: ", std::string(995, 'x'), "\r\n");
  const auto send = [&](const std::string& text) {
    return SSL_write(ssl, text.data(), static_cast<int>(text.size())) > 0;
  };
  bool is_open = send("GET / HTTP/1.1\r\n");
  EXPECT_TRUE(is_open);
  int lines = 0;
  for (; is_open && lines < 8000; ++lines) {
    if (lines % 32 == 0) SSL_key_update(ssl, SSL_KEY_UPDATE_REQUESTED);
    is_open = send(line);
  }
  EXPECT_FALSE(is_open) << lines << " KB of headers were taken in";
}

TEST_F(PageAccessTest, PlainTextIsNotAnswered) {
  httplib::Client plain("127.0.0.1", page_->port());
  plain.set_read_timeout(10);
  const httplib::Result result = plain.Get("/");
  EXPECT_TRUE(!result || result->status != 200);
}

}  // namespace
}  // namespace ringleader::page
