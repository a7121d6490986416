// ringctl and a coordinator that do not agree on TLS, over real connections.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <sstream>

#include "absl/strings/str_cat.h"
#include "base/testing/test_certificates.h"
#include "cli/app.h"
#include "ringleader/v1/node_service.grpc.pb.h"

namespace ringleader::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class MismatchTest : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(certificates_.ok()); }

  // Listens with this certificate; without one in plain text.
  void Serve(const TlsOptions& options, const std::string& host = "127.0.0.1") {
    if (server_ != nullptr) server_->Shutdown();
    auto credentials = ServerCredentials(options, {.host = host, .port = 0, .path = ""});
    ASSERT_TRUE(credentials.ok()) << credentials.status();
    grpc::ServerBuilder builder;
    builder.RegisterService(&service_);
    int port = 0;
    builder.AddListeningPort(host + ":0", *credentials, &port);
    server_ = builder.BuildAndStart();
    address_ = absl::StrCat(host, ":", port);
  }

  // What is said to one who calls with these files; nothing is tried again.
  std::string Complaint(const TlsOptions& options, const std::string& verb = "nodes") {
    std::vector<std::string> arguments = {verb, "--address", address_};
    const auto add = [&](const char* flag, const std::string& value) {
      if (!value.empty()) arguments.insert(arguments.end(), {flag, value});
    };
    add("--tls-cert", options.cert_path);
    add("--tls-key", options.key_path);
    add("--tls-ca", options.ca_path);
    std::ostringstream out, err;
    Context context{
        .out = out, .err = err, .environment = [](const char*) { return std::nullopt; }};
    EXPECT_EQ(RunRingctl(arguments, std::move(context)), kForbidden) << err.str();
    EXPECT_THAT(err.str(), Not(HasSubstr("no coordinator answers")));
    EXPECT_THAT(err.str(), Not(HasSubstr("is away")));
    return err.str();
  }

  const TestCertificates certificates_;
  v1::NodeService::Service service_;
  std::unique_ptr<grpc::Server> server_;
  std::string address_;
};

// A proxy for downloads, which stands in the environment of many machines, is not on the way.
TEST_F(MismatchTest, AProxyForTheWebIsNotAsked) {
  Serve({});
  const auto code = [this] {
    std::ostringstream out, err;
    return RunRingctl(
        {"nodes", "--address", address_, "--retry-for", "0"},
        {.out = out, .err = err, .environment = [](const char*) { return std::nullopt; }});
  };
  for (const char* name : {"http_proxy", "https_proxy"}) setenv(name, "http://127.0.0.1:1", 1);
  EXPECT_EQ(code(), kInternal);                   // from the service, which does nothing
  setenv("grpc_proxy", "http://127.0.0.1:1", 1);  // one that was meant
  EXPECT_EQ(code(), kUnavailable);
  for (const char* name : {"http_proxy", "https_proxy", "grpc_proxy"}) unsetenv(name);
}

TEST_F(MismatchTest, IsCalledThat) {
  Serve(certificates_.Options("server"));
  EXPECT_THAT(Complaint({}),
              HasSubstr(absl::StrCat("TLS mismatch with the coordinator at ", address_,
                                     ": it speaks TLS, and this side plain text")));
  EXPECT_THAT(Complaint(certificates_.Options("client", "other")),
              HasSubstr("its certificate is not accepted here ("));
  EXPECT_THAT(
      Complaint(certificates_.Options("stranger")),
      HasSubstr("it does not accept the certificate in " + certificates_.File("stranger.crt")));
  EXPECT_THAT(Complaint({}, "health"), HasSubstr("it speaks TLS, and this side plain text"));
  Serve({});
  EXPECT_THAT(Complaint(certificates_.Options("client")),
              HasSubstr("it speaks plain text, and this side TLS"));
}

// The certificate is for localhost and 127.0.0.1.
TEST_F(MismatchTest, AnotherNameIsNamed) {
  Serve(certificates_.Options("server"), "127.0.0.2");
  const std::string complaint = Complaint(certificates_.Options("client"));
  EXPECT_THAT(complaint, HasSubstr("its certificate is not accepted here (IP address mismatch)"));
  EXPECT_THAT(complaint, HasSubstr("be for the name 127.0.0.2"));
}

}  // namespace
}  // namespace ringleader::cli
