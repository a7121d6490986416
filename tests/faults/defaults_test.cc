// Faults with every time-out as it is unless a user says otherwise.
#include <gmock/gmock.h>

#include "absl/time/clock.h"
#include "tests/faults/cluster.h"

namespace ringleader::faults {
namespace {

class DefaultsTest : public Cluster {
 protected:
  DefaultsTest() {
    coordinator_flags_.clear();
    worker_flags_.clear();
  }
};

TEST_F(DefaultsTest, TrainingGoesOnWhileTheCoordinatorIsLostFor30Seconds) {
  StartCoordinator();
  StartWorker("a", 2);
  StartWorker("b", 2);
  Submit(Spec("job", 4, 400, {{"fake-step-ms", "100"}, {"fake-hold", "390"}}));
  AwaitStep("job", 20);
  KillCoordinator();
  const absl::Time killed = absl::Now();
  const std::vector<AuditLine> before = Audit("job");
  // Steps that ended half a minute after the coordinator did.
  ASSERT_TRUE(Eventually([&] { return Audit("job").back().time >= killed + absl::Seconds(30); },
                         absl::Seconds(90)));
  EXPECT_GE(Audit("job").back().step, before.back().step + 100);
  StartCoordinator();
  Await("job", [&](const v1::Job& job) {
    return job.state() == v1::Job::RUNNING && job.progress().step() > before.back().step;
  });
  LetGo("job");
  const v1::Job job = AwaitState("job", v1::Job::SUCCEEDED, absl::Seconds(90));
  EXPECT_EQ(job.attempts_size(), 1);
  EXPECT_EQ(job.retries_used(), 0);
  ExpectUnbrokenRecord("job", 400);
  EXPECT_EQ(LogLines("job").size(), 4u * 400u);
}

TEST_F(DefaultsTest, AKilledWorkerThatHeldAllRanksIsReplacedWithin15Seconds) {
  StartCoordinator();
  StartWorker("a", 2);
  Submit(Spec("job", 2, 60, {{"fake-step-ms", "50"}, {"fake-hold", "12"}}));
  AwaitStep("job", 12);
  KillWorker("a");
  const v1::Job failed = Await(
      "job", [](const v1::Job& job) { return job.attempts(0).state() == v1::Attempt::FAILED; },
      absl::Seconds(15));
  EXPECT_EQ(failed.attempts(0).failure().rank(), 0);
  LetGo("job");
  StartWorker("b", 2);
  const v1::Job job = AwaitState("job", v1::Job::SUCCEEDED);
  ASSERT_EQ(job.attempts_size(), 2);
  EXPECT_GE(job.attempts(1).first_step(), 10u);
  ExpectUnbrokenRecord("job", 60);
}

}  // namespace
}  // namespace ringleader::faults
