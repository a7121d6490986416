// Mutual TLS between all processes: coordinator, workers, witnesses.
#include <gmock/gmock.h>

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

}  // namespace
}  // namespace ringleader::faults
