// Mutual TLS between all processes: coordinator, workers, witnesses.
#include <gmock/gmock.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/files.h"
#include "tests/faults/cluster.h"
#include "tests/faults/tcp_proxy.h"

namespace ringleader::faults {
namespace {

using ::testing::HasSubstr;

class TlsTest : public Cluster {
 protected:
  TlsTest() { certificates_ = std::make_unique<TestCertificates>(); }

  int Nodes() {
    CallContext context;
    v1::ListNodesResponse response;
    EXPECT_TRUE(nodes_->ListNodes(&context, {}, &response).ok());
    return response.nodes_size();
  }
};

TEST_F(TlsTest, AJobRunsAndTheDeathOfItsWorkerIsTestified) {
  ASSERT_TRUE(certificates_->ok());
  StartCoordinator();
  StartWorker("a", 2);
  Submit(Spec("job", 2, 60, {{"fake-step-ms", "30"}, {"fake-hold", "12"}}));
  AwaitStep("job", 12);
  KillWorker("a");
  // Nobody but the witness can tell, over a connection of its own.
  const v1::Job failed = AwaitFailure("job");
  LetGo("job");
  EXPECT_THAT(failed.attempts(0).failure().message(), ::testing::HasSubstr("worker process died"));
  StartWorker("b", 2);
  EXPECT_EQ(AwaitState("job", v1::Job::SUCCEEDED).attempts_size(), 2);
  ExpectUnbrokenRecord("job", 60);

  certificates_.reset();
  StartWorker("plain", 2);
  // It was not let in, and stays to try again.
  EXPECT_TRUE(Eventually([&] {
    return absl::StrContains(ReadFile(dir() + "/worker-plain.log").value_or(""),
                             "no session with the coordinator: ");
  }));
  EXPECT_TRUE(WorkerRuns("plain"));
  EXPECT_EQ(Nodes(), 2);
}

// A client far away, and ten of them at once on this machine: the time that one try to connect is
// given is no back-off.
TEST_F(TlsTest, RingctlConnectsOverALongWayEveryTime) {
  ASSERT_TRUE(certificates_->ok());
  StartCoordinator();
  const TcpProxy proxy(coordinator_port(), 0, absl::Milliseconds(100));
  const TlsOptions tls = certificates_->Options("client");
  std::atomic<int> calls = 0;
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 10; ++caller) {
    callers.emplace_back([&, caller] {
      const std::string said = absl::StrCat(dir(), "/said-", caller);
      for (int call = 0; call < 10; ++call) {
        const std::string command = absl::StrCat(
            bin(), "/ringctl --address ", proxy.address(), " --tls-cert ", tls.cert_path,
            " --tls-key ", tls.key_path, " --tls-ca ", tls.ca_path, " nodes >/dev/null 2>", said);
        const int status = std::system(command.c_str());
        const absl::StatusOr<std::string> text = ReadFile(said);
        EXPECT_EQ(status, 0) << *text;
        EXPECT_EQ(*text, "") << "it did not come through at the first try";
        ++calls;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(calls, 100);
}

TEST_F(TlsTest, AMismatchIsNamed) {
  ASSERT_TRUE(certificates_->ok());
  StartCoordinator();
  const auto say = [&](const std::string& flags) {
    const std::string said = dir() + "/said";
    const std::string command = absl::StrCat(
        bin(), "/ringctl --address 127.0.0.1:", coordinator_port(), flags, " nodes 2>", said);
    EXPECT_NE(std::system(command.c_str()), 0);
    const std::string text = ReadFile(said).value_or("");
    // gRPC would log each handshake that fails, for its developers.
    for (const absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
      EXPECT_TRUE(absl::StartsWith(line, "ringctl: ")) << line;
    }
    return text;
  };
  EXPECT_THAT(say(""), HasSubstr("it speaks TLS, and this side plain text: give --tls-ca"));
  const TlsOptions tls = certificates_->Options("client");
  const std::string flags =
      absl::StrCat(" --tls-cert ", tls.cert_path, " --tls-key ", tls.key_path, " --tls-ca ");
  EXPECT_THAT(say(flags + certificates_->Options("client", "other").ca_path),
              HasSubstr("its certificate is not accepted here"));
  const std::unique_ptr<TestCertificates> kept = std::move(certificates_);
  KillCoordinator();
  StartCoordinator();
  EXPECT_THAT(say(flags + tls.ca_path), HasSubstr("it speaks plain text, and this side TLS"));
}

TEST_F(TlsTest, WithRolesAJobRunsOnItsNodesAndNoWorkerPretendsToBeAnother) {
  ASSERT_TRUE(certificates_->Sign("ca", "client", {.more_names = ",URI:ringleader://admin/root"}));
  for (const char* node : {"a", "b"}) {
    const std::string name = std::string(",URI:ringleader://node/") + node;
    ASSERT_TRUE(certificates_->Sign("ca", node, {.more_names = name}));
  }
  access_path_ = dir() + "/access.yaml";
  std::ofstream(access_path_) << "roles_in_certificates: true\n";
  certificate_of_ = {{"a", "a"}, {"b", "b"}, {"forged", "a"}};
  StartCoordinator();
  StartWorker("a", 2);
  StartWorker("forged", 2);  // another name than its certificate has
  StartWorker("client", 2);  // an admin, and no node
  const v1::Job submitted =
      Submit(Spec("job", 2, 60, {{"fake-step-ms", "30"}, {"fake-hold", "12"}}));
  EXPECT_EQ(submitted.owner(), "root");
  AwaitStep("job", 12);
  EXPECT_EQ(Nodes(), 1);
  // They were told why, and do not try again.
  EXPECT_TRUE(Eventually([&] { return !WorkerRuns("forged") && !WorkerRuns("client"); }));
  EXPECT_THAT(ReadFile(dir() + "/worker-forged.log").value_or(""),
              HasSubstr("refused by the coordinator"));
  KillWorker("a");
  // Its witness has the node's certificate.
  AwaitFailure("job");
  LetGo("job");
  StartWorker("b", 2);
  EXPECT_EQ(AwaitState("job", v1::Job::SUCCEEDED).attempts_size(), 2);
  ExpectUnbrokenRecord("job", 60);
}

}  // namespace
}  // namespace ringleader::faults
