// kill -9 of whatever there is, while it matters.
#include <gmock/gmock.h>
#include <signal.h>

#include <atomic>
#include <set>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/faults/cluster.h"

namespace ringleader::faults {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;

class KillTest : public Cluster {};

TEST_F(KillTest, AnUndisturbedJobSucceeds) {
  StartCoordinator();
  StartWorker("a", 2);
  StartWorker("b", 2);
  Submit(Spec("calm", 4, 30));
  const v1::Job job = AwaitState("calm", v1::Job::SUCCEEDED);
  EXPECT_EQ(job.attempts_size(), 1);
  EXPECT_EQ(job.progress().step(), 30);
  EXPECT_EQ(job.progress().checkpoint_step(), 30);
  EXPECT_NE(job.model_directory(), "");
  // Loads of 10 to 13 tiles: max/mean.
  EXPECT_NEAR(job.progress().worker_imbalance(), 13 / 11.5, 1e-9);
  ExpectUnbrokenRecord("calm", 30);
  EXPECT_THAT(LogLines("calm"), Contains(HasSubstr("1/3: step 30 loss")));
}

TEST_F(KillTest, OfATrainer) {
  StartCoordinator();
  StartWorker("a", 2);
  StartWorker("b", 2);
  Submit(Spec("job", 4, 60, {{"fake-step-ms", "30"}, {"fake-hold", "12"}}));
  AwaitStep("job", 12);
  kill(PidOf("job", 2), SIGKILL);
  const v1::Job failed = AwaitFailure("job");
  LetGo("job");
  // The one that was killed, not those that lost their peer.
  EXPECT_EQ(failed.attempts(0).failure().rank(), 2);
  EXPECT_EQ(failed.attempts(0).failure().signal(), SIGKILL);
  EXPECT_THAT(failed.attempts(0).failure().message(), HasSubstr("SIGKILL"));
  const v1::Job job = AwaitState("job", v1::Job::SUCCEEDED);
  EXPECT_EQ(job.attempts_size(), 2);
  EXPECT_GE(job.attempts(1).first_step(), 10u);  // not from the start
  ExpectUnbrokenRecord("job", 60);
}

TEST_F(KillTest, OfAWorkerThatComesBack) {
  StartCoordinator();
  StartWorker("a", 2);
  StartWorker("b", 2);
  Submit(Spec("job", 4, 60, {{"fake-step-ms", "30"}, {"fake-hold", "12"}}));
  AwaitStep("job", 12);
  const int trainer = PidOf("job", 2);
  KillWorker("b");
  // Its trainers die with it.
  EXPECT_TRUE(Eventually([&] { return kill(trainer, 0) != 0; }));
  StartWorker("b", 2);
  const v1::Job failed = AwaitFailure("job");
  LetGo("job");
  EXPECT_EQ(failed.attempts(0).failure().rank(), 2);
  EXPECT_EQ(failed.attempts(0).failure().node(), "nodes/b");
  EXPECT_EQ(AwaitState("job", v1::Job::SUCCEEDED).attempts_size(), 2);
  ExpectUnbrokenRecord("job", 60);
}

TEST_F(KillTest, OfAWorkerThatStaysAway) {
  StartCoordinator();
  StartWorker("a", 2);
  StartWorker("b", 2);
  Submit(Spec("job", 4, 60, {{"fake-step-ms", "30"}, {"fake-hold", "12"}}));
  AwaitStep("job", 12);
  StartWorker("c", 2);
  KillWorker("b");
  const v1::Job failed = AwaitFailure("job");
  LetGo("job");
  EXPECT_EQ(failed.attempts(0).failure().node(), "nodes/b");
  const v1::Job job = AwaitState("job", v1::Job::SUCCEEDED);
  ASSERT_EQ(job.attempts_size(), 2);
  EXPECT_EQ(job.attempts(1).placements(1).node(), "nodes/c");
  ExpectUnbrokenRecord("job", 60);
}

// No other worker saw its trainers die: its witness says so.
TEST_F(KillTest, OfAWorkerThatHeldAllRanks) {
  StartCoordinator();
  StartWorker("a", 2);
  Submit(Spec("job", 2, 60, {{"fake-step-ms", "30"}, {"fake-hold", "12"}}));
  AwaitStep("job", 12);
  StartWorker("b", 2);
  KillWorker("a");
  const v1::Job failed = AwaitFailure("job");
  LetGo("job");
  EXPECT_EQ(failed.attempts(0).failure().rank(), 0);
  EXPECT_EQ(failed.attempts(0).failure().node(), "nodes/a");
  EXPECT_THAT(failed.attempts(0).failure().message(), HasSubstr("worker process died"));
  const v1::Job job = AwaitState("job", v1::Job::SUCCEEDED);
  ASSERT_EQ(job.attempts_size(), 2);
  EXPECT_EQ(job.attempts(1).placements(0).node(), "nodes/b");
  EXPECT_GE(job.attempts(1).first_step(), 10u);
  ExpectUnbrokenRecord("job", 60);
}

TEST_F(KillTest, OfAWorkerWhileTheCoordinatorIsAway) {
  coordinator_flags_["--fence-after"] = 80;
  coordinator_flags_["--adoption-timeout"] = 90;
  StartCoordinator();
  StartWorker("a", 2);
  Submit(Spec("job", 2, 60, {{"fake-step-ms", "30"}, {"fake-hold", "50"}}));
  AwaitStep("job", 12);
  KillCoordinator();
  KillWorker("a");
  StartCoordinator();
  const v1::Job failed = AwaitFailure("job");
  LetGo("job");
  EXPECT_EQ(failed.attempts(0).failure().rank(), 0);
  StartWorker("b", 2);
  EXPECT_EQ(AwaitState("job", v1::Job::SUCCEEDED).attempts_size(), 2);
}

TEST_F(KillTest, OfTheCoordinatorWhileAJobRuns) {
  // Out for longer than its lease, but not for so long that workers give up on it.
  GiveTimeToComeBack();
  StartCoordinator();
  StartWorker("a", 2);
  StartWorker("b", 2);
  Submit(Spec("job", 4, 300, {{"fake-step-ms", "40"}, {"fake-hold", "290"}}));
  AwaitStep("job", 20);
  KillCoordinator();
  // Training goes on meanwhile.
  const auto last_step = [&] {
    const std::vector<AuditLine> audit = Audit("job");
    return audit.back().step;
  };
  ASSERT_TRUE(Eventually([&] { return last_step() >= 80; }));
  StartCoordinator();
  const v1::Job adopted = Await("job", [](const v1::Job& job) {
    return job.state() == v1::Job::RUNNING && job.progress().step() > 80;
  });
  EXPECT_EQ(adopted.attempts_size(), 1);
  LetGo("job");
  const v1::Job job = AwaitState("job", v1::Job::SUCCEEDED);
  EXPECT_EQ(job.attempts_size(), 1);
  ExpectUnbrokenRecord("job", 300);
  // Nor has the log a gap: every rank printed every step.
  const std::vector<std::string> lines = LogLines("job");
  EXPECT_EQ(lines.size(), 4u * 300u);
}

TEST_F(KillTest, OfTheCoordinatorAgainAndAgain) {
  GiveTimeToComeBack();
  StartCoordinator();
  StartWorker("a", 2);
  StartWorker("b", 2);
  Submit(Spec("job", 4, 100, {{"fake-step-ms", "30"}}));
  for (const uint64_t step : {1, 10, 25, 40, 60, 80}) {
    AwaitStep("job", step);
    KillCoordinator();
    StartCoordinator();
  }
  EXPECT_EQ(AwaitState("job", v1::Job::SUCCEEDED).attempts_size(), 1);
  ExpectUnbrokenRecord("job", 100);
}

// A client that repeats what was not answered, with the same request id, against a coordinator that
// dies in between: what was acknowledged is there, and nothing is there twice.
TEST_F(KillTest, OfTheCoordinatorWhileJobsAreSubmitted) {
  StartCoordinator();
  std::atomic<int> acknowledged = 0;
  std::atomic<bool> enough = false;
  std::set<std::string> uids;
  std::thread client([&] {
    for (int i = 0; !enough; ++i) {
      v1::CreateJobRequest request;
      *request.mutable_spec() = Spec(absl::StrCat("job-", i), 2, 10);
      request.set_request_id(absl::StrCat("00000000-0000-4000-8000-", 100000000000 + i));
      while (true) {
        v1::Job job;
        CallContext context;
        context.set_wait_for_ready(true);
        const grpc::Status status = jobs_->CreateJob(&context, request, &job);
        if (status.ok()) {
          uids.insert(job.uid());
          break;
        }
        ASSERT_TRUE(status.error_code() == grpc::UNAVAILABLE) << status.error_message();
      }
      ++acknowledged;
    }
  });
  for (int round = 1; round <= 5 && !HasFailure(); ++round) {
    EXPECT_TRUE(Eventually([&] { return acknowledged >= round * 20 || HasFailure(); }));
    KillCoordinator();
    RestartCoordinator();
  }
  enough = true;
  client.join();
  EXPECT_EQ(uids.size(), static_cast<size_t>(acknowledged));
  AwaitServing();  // the last coordinator may have only begun
  v1::ListJobsRequest request;
  request.set_page_size(1000);
  v1::ListJobsResponse response;
  CallContext context;
  ASSERT_TRUE(jobs_->ListJobs(&context, request, &response).ok());
  EXPECT_EQ(response.total_size(), acknowledged);
  for (const v1::Job& job : response.jobs()) EXPECT_TRUE(uids.contains(job.uid())) << job.name();
}

}  // namespace
}  // namespace ringleader::faults
