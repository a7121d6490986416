#include "coordinator/api/testing/access_fixture.h"

#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "jobspec/jobspec.h"

namespace ringleader::api::testing {

const char kAccess[] = R"(
roles_in_certificates: true
certificates:
  - {common_name: old-root, role: admin, name: root}
)";

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

AccessTest::AccessTest() {
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
                                                             limits_.get());
  auto server = Start({.listen = kListen,
                       .tls = Certificates().Options("server"),
                       .access_path = dir_.File("access.yaml"),
                       .check_files = false});
  EXPECT_TRUE(server.ok()) << server.status();
  server_ = *std::move(server);
}

void AccessTest::WriteAccess(const std::string& text) {
  // The file is replaced at once, which is how editors and Kubernetes do it.
  std::ofstream(dir_.File("access.new")) << text;
  std::filesystem::rename(dir_.File("access.new"), dir_.File("access.yaml"));
}

Client AccessTest::Connect(const TlsOptions& tls, const std::string& token) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  const auto credentials = ChannelCredentials(tls, kListen, token);
  EXPECT_TRUE(credentials.ok()) << credentials.status();
  return Client(grpc::CreateCustomChannel(absl::StrCat("127.0.0.1:", server_->port()), *credentials,
                                          arguments));
}

v1::AuditRecord AccessTest::AwaitAudit(const std::string& method, const std::string& outcome) {
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

}  // namespace ringleader::api::testing
