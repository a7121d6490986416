// Mutual TLS between all processes: coordinator, workers, witnesses.
#include <gmock/gmock.h>

#include <fstream>

#include "tests/faults/cluster.h"

namespace ringleader::faults {
namespace {

class TlsTest : public Cluster {
 protected:
  TlsTest() { certificates_ = std::make_unique<TestCertificates>(); }

  int Nodes() {
    grpc::ClientContext context;
    v1::ListNodesResponse response;
    EXPECT_TRUE(nodes_->ListNodes(&context, {}, &response).ok());
    return response.nodes_size();
  }
};

TEST_F(TlsTest, AJobRunsAndTheDeathOfItsWorkerIsTestified) {
  ASSERT_TRUE(certificates_->ok());
  StartCoordinator();
  StartWorker("a", 2);
  Submit(Spec("job", 2, 60, {{"fake-step-ms", "30"}}));
  AwaitStep("job", 12);
  KillWorker("a");
  // Nobody but the witness can tell, over a connection of its own.
  const v1::Job failed = Await(
      "job", [](const v1::Job& job) { return job.attempts(0).state() == v1::Attempt::FAILED; },
      absl::Seconds(15));
  EXPECT_THAT(failed.attempts(0).failure().message(), ::testing::HasSubstr("worker process died"));
  StartWorker("b", 2);
  EXPECT_EQ(AwaitState("job", v1::Job::SUCCEEDED).attempts_size(), 2);
  ExpectUnbrokenRecord("job", 60);

  certificates_.reset();
  StartWorker("plain", 2);
  absl::SleepFor(absl::Seconds(2));
  EXPECT_TRUE(WorkerRuns("plain"));
  EXPECT_EQ(Nodes(), 2);
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
  const v1::Job submitted = Submit(Spec("job", 2, 60, {{"fake-step-ms", "30"}}));
  EXPECT_EQ(submitted.owner(), "root");
  AwaitStep("job", 12);
  EXPECT_EQ(Nodes(), 1);
  KillWorker("a");
  // Its witness has the node's certificate.
  Await(
      "job", [](const v1::Job& job) { return job.attempts(0).state() == v1::Attempt::FAILED; },
      absl::Seconds(15));
  StartWorker("b", 2);
  EXPECT_EQ(AwaitState("job", v1::Job::SUCCEEDED).attempts_size(), 2);
  ExpectUnbrokenRecord("job", 60);
}

}  // namespace
}  // namespace ringleader::faults
