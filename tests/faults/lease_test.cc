// Trainers end with their lease, whatever has become of their worker: no job runs twice although
// the process that should have killed its trainers does not.
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/wait.h>

#include "absl/time/clock.h"
#include "tests/faults/cluster.h"

namespace ringleader::faults {
namespace {

using ::testing::HasSubstr;

class LeaseTest : public Cluster {
 protected:
  // Job j on worker a, and b, which has room for it, beside it.
  void RunJob() {
    StartCoordinator();
    StartWorker("a", 2);
    Submit(Spec("job", 2, 400, {{"fake-step-ms", "30"}, {"fake-hold", "390"}}));
    AwaitStep("job", 10);
    StartWorker("b", 2);
    old_trainers_ = {PidOf("job", 0), PidOf("job", 1)};
  }
  // The second attempt has begun, elsewhere, and nothing of the first is left.
  void ExpectReplaced() {
    const v1::Job again = Await("job", [](const v1::Job& job) { return job.attempts_size() == 2; });
    for (const int pid : old_trainers_) EXPECT_FALSE(Runs(pid)) << "trains still";
    EXPECT_EQ(again.attempts(0).state(), v1::Attempt::FENCED);
    EXPECT_EQ(again.attempts(1).placements(0).node(), "nodes/b");
    LetGo("job");
  }
  // What its trainers told a worker that did not listen may have died with them: steps are missing
  // from the record, and none from the training.
  void ExpectUnbrokenTraining() {
    const std::vector<v1::StepReport> record = Steps("job");
    ASSERT_FALSE(record.empty());
    EXPECT_EQ(record.back().step(), 400u);
    for (const v1::StepReport& step : record) {
      EXPECT_NEAR(step.loss(), UndisturbedLoss(step.step()), 1e-12);
    }
  }

  std::vector<int> old_trainers_;
};

TEST_F(LeaseTest, AWorkerThatIsStoppedLeavesNoTrainerBehind) {
  RunJob();
  kill(WorkerPid("a"), SIGSTOP);
  ExpectReplaced();
  kill(WorkerPid("a"), SIGCONT);
  EXPECT_EQ(AwaitState("job", v1::Job::SUCCEEDED).attempts_size(), 2);
  ExpectUnbrokenTraining();
  // It takes work again.
  Submit(Spec("next", 4, 10));
  AwaitState("next", v1::Job::SUCCEEDED);
}

// Its other threads send heartbeats on; but what the coordinator tells it is not done, and what its
// trainers report goes nowhere.
TEST_F(LeaseTest, AWorkerWhoseLoopHangsPassesForNoLivingOne) {
  RunJob();
  const int loop = WorkerPid("a");  // the first thread of the process
  ASSERT_EQ(ptrace(PTRACE_SEIZE, loop, nullptr, nullptr), 0);
  ASSERT_EQ(ptrace(PTRACE_INTERRUPT, loop, nullptr, nullptr), 0);
  int status = 0;
  ASSERT_EQ(waitpid(loop, &status, __WALL), loop);
  const v1::Job unknown = AwaitState("job", v1::Job::UNKNOWN);
  EXPECT_THAT(unknown.state_reason(), HasSubstr("no word from nodes/a"));
  ExpectReplaced();
  ASSERT_EQ(ptrace(PTRACE_DETACH, loop, nullptr, nullptr), 0);
  EXPECT_EQ(AwaitState("job", v1::Job::SUCCEEDED).attempts_size(), 2);
  ExpectUnbrokenTraining();
}

// As virtual machines are paused: time has passed, and a worker that did not run has heard nothing.
TEST_F(LeaseTest, AMachineThatWasPausedHasLostNoTrainer) {
  worker_flags_["--pulse-timeout"] = 12;
  coordinator_flags_["--lease"] = 13;
  coordinator_flags_["--fence-after"] = 60;
  coordinator_flags_["--adoption-timeout"] = 90;
  RunJob();
  ASSERT_FALSE(HasFailure());  // of a process that is not there kill(2) would stop others
  const std::vector<int> all = {WorkerPid("a"), old_trainers_[0], old_trainers_[1]};
  for (const int pid : all) kill(pid, SIGSTOP);
  AwaitState("job", v1::Job::UNKNOWN);  // longer than a trainer may be silent
  kill(WorkerPid("a"), SIGCONT);
  AwaitState("job", v1::Job::RUNNING);
  for (const int pid : old_trainers_) kill(pid, SIGCONT);
  LetGo("job");
  EXPECT_EQ(AwaitState("job", v1::Job::SUCCEEDED).attempts_size(), 1);
  ExpectUnbrokenRecord("job", 400);
}

// The coordinator itself stands still for longer than a lease: that it has heard of nobody is no
// sign of anything, and what was said waits in its sockets.
TEST_F(LeaseTest, ACoordinatorThatWasStoppedTakesNobodyForDead) {
  GiveTimeToComeBack();
  StartCoordinator();
  StartWorker("a", 2);
  Submit(Spec("job", 2, 250, {{"fake-step-ms", "30"}}));
  AwaitStep("job", 10);
  kill(CoordinatorPid(), SIGSTOP);
  const absl::Time stopped = absl::Now();
  const absl::Duration long_enough = absl::Seconds(2 * coordinator_flags_["--lease"]);
  EXPECT_TRUE(Eventually([&] { return Audit("job").back().time >= stopped + long_enough; }));
  kill(CoordinatorPid(), SIGCONT);
  EXPECT_EQ(AwaitState("job", v1::Job::SUCCEEDED).attempts_size(), 1);
  ExpectUnbrokenRecord("job", 250);
}

// And for so long that trainers have ended with their lease: their job goes on, in another attempt.
TEST_F(LeaseTest, ACoordinatorThatWasStoppedForLongReplacesWhatHasEnded) {
  RunJob();
  kill(CoordinatorPid(), SIGSTOP);
  for (const int pid : old_trainers_) EXPECT_TRUE(Eventually([&] { return !Runs(pid); }));
  kill(CoordinatorPid(), SIGCONT);
  Await("job", [](const v1::Job& job) { return job.attempts_size() == 2; });
  LetGo("job");
  EXPECT_EQ(AwaitState("job", v1::Job::SUCCEEDED).attempts_size(), 2);
  ExpectUnbrokenRecord("job", 400);
}

}  // namespace
}  // namespace ringleader::faults
