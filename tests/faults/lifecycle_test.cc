// What users and machines do to jobs on purpose, and trainers that fail by themselves.
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/faults/cluster.h"

namespace ringleader::faults {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class LifecycleTest : public Cluster {
 protected:
  v1::Node Node(const std::string& name) {
    CallContext context;
    v1::ListNodesResponse response;
    EXPECT_TRUE(nodes_->ListNodes(&context, {}, &response).ok());
    for (const v1::Node& node : response.nodes()) {
      if (node.name() == "nodes/" + name) return node;
    }
    return {};
  }
};

TEST_F(LifecycleTest, PauseAndResume) {
  StartCoordinator();
  StartWorker("a", 2);
  Submit(Spec("job", 2, 60, {{"fake-step-ms", "20"}, {"fake-hold", "50"}}));
  AwaitStep("job", 7);
  v1::PauseJobRequest pause;
  pause.set_name("jobs/job");
  CallContext pause_context;
  v1::Job pausing;
  ASSERT_TRUE(jobs_->PauseJob(&pause_context, pause, &pausing).ok());
  const v1::Job paused = AwaitState("job", v1::Job::PAUSED);
  EXPECT_EQ(paused.attempts(0).state(), v1::Attempt::PAUSED);
  EXPECT_THAT(paused.state_reason(), HasSubstr("resumes from the checkpoint of step"));
  LetGo("job");
  // Its trainers are free for others.
  Submit(Spec("other", 2, 5));
  AwaitState("other", v1::Job::SUCCEEDED);

  v1::ResumeJobRequest request;
  request.set_name("jobs/job");
  CallContext context;
  v1::Job resumed;
  ASSERT_TRUE(jobs_->ResumeJob(&context, request, &resumed).ok());
  const v1::Job job = AwaitState("job", v1::Job::SUCCEEDED);
  ASSERT_EQ(job.attempts_size(), 2);
  // Not a step was lost.
  EXPECT_EQ(job.attempts(1).first_step(), job.attempts(0).last_step());
  EXPECT_EQ(job.retries_used(), 0);
  ExpectUnbrokenRecord("job", 60);
}

TEST_F(LifecycleTest, CancelEndsTrainersInSeconds) {
  StartCoordinator();
  StartWorker("a", 2);
  Submit(Spec("job", 2, 10'000));
  AwaitStep("job", 3);
  const int pid = PidOf("job", 1);
  v1::CancelJobRequest request;
  request.set_name("jobs/job");
  CallContext context;
  v1::Job job;
  ASSERT_TRUE(jobs_->CancelJob(&context, request, &job).ok());
  AwaitState("job", v1::Job::CANCELLED);
  EXPECT_NE(kill(pid, 0), 0);
}

TEST_F(LifecycleTest, DrainMovesJobsElsewhere) {
  StartCoordinator();
  StartWorker("a", 2);
  Submit(Spec("job", 2, 100, {{"fake-step-ms", "30"}, {"fake-hold", "90"}}));
  AwaitStep("job", 7);
  StartWorker("b", 2);
  ASSERT_TRUE(Eventually([&] { return Node("b").state() == v1::Node::READY; }));
  v1::DrainNodeRequest request;
  request.set_name("nodes/a");
  CallContext context;
  v1::Node node;
  ASSERT_TRUE(nodes_->DrainNode(&context, request, &node).ok());
  Await("job", [](const v1::Job& job) { return job.attempts_size() == 2; });
  LetGo("job");
  const v1::Job job = AwaitState("job", v1::Job::SUCCEEDED);
  ASSERT_EQ(job.attempts_size(), 2);
  EXPECT_EQ(job.attempts(1).placements(0).node(), "nodes/b");
  EXPECT_EQ(Node("a").state(), v1::Node::DRAINED);
  ExpectUnbrokenRecord("job", 100);
}

TEST_F(LifecycleTest, SigtermOfAWorkerIsADrain) {
  StartCoordinator();
  StartWorker("a", 2);
  Submit(Spec("job", 2, 100, {{"fake-step-ms", "30"}, {"fake-hold", "90"}}));
  AwaitStep("job", 7);
  StartWorker("b", 2);
  ASSERT_TRUE(Eventually([&] { return Node("b").state() == v1::Node::READY; }));
  TerminateWorker("a");
  EXPECT_TRUE(Eventually([&] { return !WorkerRuns("a"); }));
  LetGo("job");
  const v1::Job job = AwaitState("job", v1::Job::SUCCEEDED);
  ASSERT_EQ(job.attempts_size(), 2);
  EXPECT_EQ(job.attempts(1).first_step(), job.attempts(0).last_step());
  EXPECT_EQ(job.retries_used(), 0);
  ExpectUnbrokenRecord("job", 100);
}

TEST_F(LifecycleTest, SigtermOfAWorkerAloneStillWritesACheckpoint) {
  GiveTimeToComeBack();
  StartCoordinator();
  StartWorker("a", 2);
  Submit(Spec("job", 2, 400, {{"fake-step-ms", "20"}}));
  AwaitStep("job", 7);
  KillCoordinator();
  TerminateWorker("a");
  EXPECT_TRUE(Eventually([&] { return !WorkerRuns("a"); }));
  const uint64_t reached = Audit("job").back().step;
  StartCoordinator();
  StartWorker("a", 2);
  const v1::Job job = Await("job", [](const v1::Job& job) { return job.attempts_size() == 2; });
  Await("job", [](const v1::Job& job) { return job.attempts(1).last_step() > 0; });
  EXPECT_GE(Get("job").attempts(1).first_step(), reached);
}

TEST_F(LifecycleTest, AHungTrainerIsKilledAndNamed) {
  worker_flags_["--pulse-timeout"] = 2;
  StartCoordinator();
  StartWorker("a", 4);
  Submit(Spec("job", 4, 20, {{"fake-hang", "1.12"}}));
  const v1::Job failed = AwaitFailure("job");
  EXPECT_EQ(failed.attempts(0).failure().rank(), 1);
  EXPECT_THAT(failed.attempts(0).failure().message(), HasSubstr("no sign of life"));
  AwaitState("job", v1::Job::SUCCEEDED);
  ExpectUnbrokenRecord("job", 20);
}

// Its peers wait for it and look no different: one of them may be killed in its place.
TEST_F(LifecycleTest, ATrainerThatGetsNoFurtherIsKilled) {
  worker_flags_["--hang-timeout"] = 2;
  StartCoordinator();
  StartWorker("a", 4);
  Submit(Spec("job", 4, 20, {{"fake-stall", "1.12"}}));
  const v1::Job failed = AwaitFailure("job");
  EXPECT_THAT(failed.attempts(0).failure().message(), HasSubstr("no progress for 2s in step"));
  AwaitState("job", v1::Job::SUCCEEDED);
  ExpectUnbrokenRecord("job", 20);
}

TEST_F(LifecycleTest, AJobThatNeverGetsFurtherRunsOutOfRetries) {
  StartCoordinator();
  StartWorker("a", 2);
  v1::JobSpec spec = Spec("job", 2, 20, {{"fake-crash-always", "1.12"}});
  spec.mutable_scheduling()->set_max_retries(2);
  Submit(spec);
  const v1::Job job = AwaitState("job", v1::Job::FAILED);
  // The first attempt made progress; the others repeat its steps.
  EXPECT_EQ(job.attempts_size(), 3);
  EXPECT_THAT(job.state_reason(), HasSubstr("rank 1 on nodes/a"));
  EXPECT_THAT(job.state_reason(), HasSubstr("no retries left"));
}

TEST_F(LifecycleTest, AnErrorThatNoRetryMendsEndsTheJob) {
  StartCoordinator();
  StartWorker("a", 2);
  Submit(Spec("job", 2, 20, {{"fake-refuse", "1"}}));
  const v1::Job job = AwaitState("job", v1::Job::FAILED);
  EXPECT_EQ(job.attempts_size(), 1);
  EXPECT_THAT(job.state_reason(), HasSubstr("model.config: not to my taste"));
}

TEST_F(LifecycleTest, WaitingJobsStartByPriority) {
  StartCoordinator();
  Submit(Spec("low", 2, 5));
  v1::JobSpec urgent = Spec("urgent", 2, 5);
  urgent.mutable_scheduling()->set_priority(10);
  Submit(urgent);
  for (const char* job : {"low", "urgent"}) {
    Await(job, [](const v1::Job& job) {
      return absl::StrContains(job.state_reason(), "no worker has connected yet");
    });
  }
  StartWorker("a", 2);
  AwaitState("low", v1::Job::SUCCEEDED);
  AwaitState("urgent", v1::Job::SUCCEEDED);
  EXPECT_LT(Audit("urgent").front().time, Audit("low").front().time);
}

TEST_F(LifecycleTest, AWorkerStartsNoJobThatReadsOrWritesElsewhere) {
  allowed_paths_ = {"/nowhere", dir() + "/outside"};
  StartCoordinator();
  StartWorker("a", 2);
  Submit(Spec("job", 2, 20));
  const v1::Job refused = AwaitFailure("job");
  EXPECT_THAT(refused.attempts(0).failure().message(),
              ::testing::HasSubstr("where jobs may read and write (--allow-path)"));
}

// With a real worker, its socket and its folders. Only root can do so.
TEST_F(LifecycleTest, TrainersRunAsTheUserThatTheirWorkerIsToldAndDieWithIt) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root";
  constexpr uid_t kNobody = 65534;
  run_as_ = "nobody";
  fs::permissions(dir(), fs::perms::others_exec, fs::perm_options::add);
  StartCoordinator();
  StartWorker("a", 2);
  const v1::JobSpec spec = Spec("job", 2, 60, {{"fake-step-ms", "30"}, {"fake-hold", "12"}});
  fs::create_directories(spec.checkpoint().directory());
  ASSERT_EQ(chown(spec.checkpoint().directory().c_str(), kNobody, kNobody), 0);
  Submit(spec);
  AwaitStep("job", 12);
  int trainers = 0;
  for (const int pid : TrainerPids("a")) {
    struct stat process {};
    ASSERT_EQ(stat(absl::StrCat("/proc/", pid).c_str(), &process), 0);
    trainers += process.st_uid == kNobody;
  }
  EXPECT_EQ(trainers, 2);
  KillWorker("a");
  // Its witness says so once the last of them is gone.
  AwaitFailure("job");
  LetGo("job");
  StartWorker("a", 2);
  AwaitState("job", v1::Job::SUCCEEDED);
  ExpectUnbrokenRecord("job", 60);
}

}  // namespace
}  // namespace ringleader::faults
