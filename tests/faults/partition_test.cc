// The worker is alive and the link is gone.
#include <gmock/gmock.h>
#include <signal.h>

#include <memory>

#include "absl/time/clock.h"
#include "tests/faults/cluster.h"
#include "tests/faults/tcp_proxy.h"

namespace ringleader::faults {
namespace {

using ::testing::HasSubstr;

class PartitionTest : public Cluster {};

TEST_F(PartitionTest, AShortOneIsWaitedOut) {
  GiveTimeToComeBack();
  StartCoordinator();
  TcpProxy proxy(coordinator_port());
  StartWorker("a", 2);
  StartWorker("b", 2, proxy.address());
  Submit(Spec("job", 4, 150, {{"fake-step-ms", "30"}, {"fake-hold", "140"}}));
  AwaitStep("job", 10);
  proxy.Cut();
  const v1::Job unknown = AwaitState("job", v1::Job::UNKNOWN);
  EXPECT_THAT(unknown.state_reason(), HasSubstr("no word from nodes/b, where ranks 2-3"));
  EXPECT_EQ(unknown.attempts(0).state(), v1::Attempt::UNKNOWN);
  proxy.Heal();
  AwaitState("job", v1::Job::RUNNING);
  LetGo("job");
  const v1::Job job = AwaitState("job", v1::Job::SUCCEEDED);
  EXPECT_EQ(job.attempts_size(), 1);
  ExpectUnbrokenRecord("job", 150);
}

TEST_F(PartitionTest, ALongOneIsFencedAndTheOldTrainersAreDeadBeforeNewOnesStart) {
  StartCoordinator();
  TcpProxy proxy(coordinator_port());
  StartWorker("b", 2, proxy.address());
  Submit(Spec("job", 2, 400, {{"fake-step-ms", "30"}, {"fake-hold", "390"}}));
  AwaitStep("job", 10);
  StartWorker("c", 2);
  const int old_trainers[] = {PidOf("job", 0), PidOf("job", 1)};
  proxy.Cut();
  AwaitState("job", v1::Job::UNKNOWN);
  const v1::Job again = Await("job", [](const v1::Job& job) { return job.attempts_size() == 2; });
  for (const int pid : old_trainers) EXPECT_FALSE(Runs(pid)) << "trains still";
  EXPECT_EQ(again.attempts(0).state(), v1::Attempt::FENCED);
  EXPECT_THAT(again.attempts(0).failure().message(), HasSubstr("out of sight"));
  EXPECT_EQ(again.attempts(1).placements(0).node(), "nodes/c");
  AwaitStep("job", 50);
  LetGo("job");
  // Back in the network, the old worker has nothing more to say in this.
  proxy.Heal();
  EXPECT_EQ(AwaitState("job", v1::Job::SUCCEEDED).attempts_size(), 2);
  ExpectUnbrokenRecord("job", 400);
  // It takes work again.
  Submit(Spec("next", 4, 10));
  AwaitState("next", v1::Job::SUCCEEDED);
}

// Silence is no proof of death, and no lost connection either: only the witness's word ends the
// wait, and it has to get through.
TEST_F(PartitionTest, AKilledWorkerBehindOneIsUnknownUntilItsWitnessIsHeard) {
  coordinator_flags_["--fence-after"] = 80;
  coordinator_flags_["--adoption-timeout"] = 90;
  StartCoordinator();
  TcpProxy proxy(coordinator_port());
  StartWorker("b", 2, proxy.address());
  Submit(Spec("job", 2, 100, {{"fake-step-ms", "30"}, {"fake-hold", "90"}}));
  AwaitStep("job", 10);
  proxy.Cut();
  KillWorker("b");
  AwaitState("job", v1::Job::UNKNOWN);
  StartWorker("c", 2);
  proxy.Heal();
  const v1::Job again = Await("job", [](const v1::Job& job) { return job.attempts_size() == 2; });
  EXPECT_EQ(again.attempts(0).state(), v1::Attempt::FAILED);
  EXPECT_EQ(again.attempts(0).failure().rank(), 0);
  LetGo("job");
  AwaitState("job", v1::Job::SUCCEEDED);
}

// The connection breaks while worker and trainers live: they go on.
TEST_F(PartitionTest, AResetConnectionIsNoDeath) {
  GiveTimeToComeBack();
  StartCoordinator();
  auto proxy = std::make_unique<TcpProxy>(coordinator_port());
  const std::string address = proxy->address();
  const int port = proxy->port();
  StartWorker("b", 2, address);
  Submit(Spec("job", 2, 200, {{"fake-step-ms", "30"}, {"fake-hold", "190"}}));
  AwaitStep("job", 10);
  proxy.reset();  // closes every connection
  AwaitState("job", v1::Job::UNKNOWN);
  proxy = std::make_unique<TcpProxy>(coordinator_port(), port);
  LetGo("job");
  EXPECT_EQ(AwaitState("job", v1::Job::SUCCEEDED).attempts_size(), 1);
  ExpectUnbrokenRecord("job", 200);
}

// Without the ring across both sides, the worker's own clock is all that protects the job.
TEST_F(PartitionTest, OfOneOfTwoWorkersFailsTheAttemptOnBothSides) {
  StartCoordinator();
  TcpProxy proxy(coordinator_port());
  StartWorker("a", 2);
  StartWorker("b", 2, proxy.address());
  Submit(Spec("job", 4, 300, {{"fake-step-ms", "30"}, {"fake-hold", "290"}}));
  AwaitStep("job", 10);
  StartWorker("c", 2);
  proxy.Cut();
  const v1::Job again = Await("job", [](const v1::Job& job) { return job.attempts_size() == 2; });
  EXPECT_EQ(again.attempts(0).failure().node(), "nodes/b");
  LetGo("job");
  AwaitState("job", v1::Job::SUCCEEDED);
  ExpectUnbrokenRecord("job", 300);
}

}  // namespace
}  // namespace ringleader::faults
