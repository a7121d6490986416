// ringctl health, against gRPC's own health service.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "cli/app.h"
#include "ringleader/v1/node_service.grpc.pb.h"

namespace ringleader::cli {
namespace {

using ::testing::HasSubstr;

struct Result {
  int code;
  std::string out;
  std::string err;
};

Result Health(const std::string& address, const std::string& format = "table") {
  std::ostringstream out, err;
  Context context{.out = out, .err = err, .environment = [](const char*) { return std::nullopt; }};
  const int code = RunRingctl({"health", "--address", address, "-o", format}, std::move(context));
  return {code, out.str(), err.str()};
}

TEST(HealthTest, ServingStoppingAndGone) {
  grpc::EnableDefaultHealthCheckService(true);
  v1::NodeService::Service service;  // a server wants one besides health
  grpc::ServerBuilder builder;
  builder.RegisterService(&service);
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  ASSERT_NE(server, nullptr);
  const std::string address = absl::StrCat("127.0.0.1:", port);

  const Result serves = Health(address);
  EXPECT_EQ(serves.code, kOk) << serves.err;
  EXPECT_EQ(serves.out, absl::StrCat(address, " serves\n"));
  nlohmann::json expected = {{"address", address}, {"status", "SERVING"}, {"takes_jobs", true}};
  EXPECT_EQ(nlohmann::json::parse(Health(address, "json").out), expected);

  server->GetHealthCheckService()->SetServingStatus("ringleader.v1.JobService", false);
  const Result takes_none = Health(address);
  EXPECT_EQ(takes_none.code, kOk) << takes_none.err;
  EXPECT_THAT(takes_none.out, HasSubstr(" serves; it takes no jobs"));
  expected["takes_jobs"] = false;
  EXPECT_EQ(nlohmann::json::parse(Health(address, "json").out), expected);

  server->GetHealthCheckService()->SetServingStatus(false);
  const Result stops = Health(address);
  EXPECT_EQ(stops.code, kUnavailable);
  EXPECT_THAT(stops.err, HasSubstr("is starting or stopping"));

  server->Shutdown();
  const Result gone = Health(address);
  EXPECT_EQ(gone.code, kUnavailable);
  EXPECT_THAT(gone.err, HasSubstr(absl::StrCat("no coordinator answers at ", address)));
}

}  // namespace
}  // namespace ringleader::cli
