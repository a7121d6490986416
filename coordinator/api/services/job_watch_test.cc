// JobService.WatchJob over real gRPC.
#include "absl/time/clock.h"
#include "coordinator/api/testing/server_fixture.h"

namespace ringleader::api {
namespace {

class JobWatchTest : public testing::ServerTest {};

TEST_F(JobWatchTest, WatchSendsTheJobThenEveryChangeAndEnds) {
  Created("a");
  PutStep("a", 1);  // not asked for
  PutStep("a", 2);
  v1::WatchJobRequest request;
  request.set_name("jobs/a");
  request.set_include_steps(true);
  request.set_after_step(1);
  const auto context = Context();
  const auto stream = jobs_->WatchJob(context.get(), request);
  v1::WatchJobResponse response;
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_EQ(response.job().state(), v1::Job::PENDING);
  ASSERT_EQ(response.steps_size(), 1);
  EXPECT_EQ(response.steps(0).step(), 2u);
  PutStep("a", 1);  // trained again
  ASSERT_TRUE(stream->Read(&response));
  ASSERT_EQ(response.steps_size(), 1);
  EXPECT_EQ(response.steps(0).step(), 1u);
  v1::Job job;
  ASSERT_TRUE(Cancel("jobs/a", &job).ok());
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_EQ(response.job().state(), v1::Job::CANCELLED);
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(JobWatchTest, WatchResumesBehindARevision) {
  const v1::Job created = Created("a");
  v1::WatchJobRequest request;
  request.set_name("jobs/a");
  v1::Job job;
  ASSERT_TRUE(Cancel("jobs/a", &job).ok());
  request.set_after_revision(job.revision() - 1);
  {
    const auto context = Context();
    const auto stream = jobs_->WatchJob(context.get(), request);
    v1::WatchJobResponse response;
    ASSERT_TRUE(stream->Read(&response));
    EXPECT_EQ(response.job().state(), v1::Job::CANCELLED);
    EXPECT_FALSE(stream->Read(&response));
    EXPECT_TRUE(stream->Finish().ok());
  }
  request.set_after_revision(job.revision());  // has seen it all
  const auto context = Context();
  const auto stream = jobs_->WatchJob(context.get(), request);
  v1::WatchJobResponse response;
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_TRUE(stream->Finish().ok());
}

// Steps that a later attempt trains again have lower numbers than those before them.
TEST_F(JobWatchTest, WatchGoesOnBehindTheReportsThatWereSent) {
  Created("a");
  for (const uint64_t step : {1, 2, 3}) PutStep("a", step);
  v1::WatchJobRequest request;
  request.set_name("jobs/a");
  request.set_include_steps(true);
  v1::WatchJobResponse response;
  {
    const auto context = Context();
    const auto stream = jobs_->WatchJob(context.get(), request);
    ASSERT_TRUE(stream->Read(&response));
    EXPECT_EQ(response.steps_size(), 3);
    EXPECT_TRUE(response.has_all_reports());
    context->TryCancel();
  }
  PutStep("a", 2);
  *request.mutable_after_reports() = response.reports();
  const auto context = Context();
  const auto stream = jobs_->WatchJob(context.get(), request);
  ASSERT_TRUE(stream->Read(&response));
  ASSERT_EQ(response.steps_size(), 1);
  EXPECT_EQ(response.steps(0).step(), 2u);
  context->TryCancel();
}

// More steps than fit one message, all of them before the final state.
TEST_F(JobWatchTest, WatchSendsEveryStepOfAFinishedJob) {
  Created("a");
  for (uint64_t step = 1; step <= 450; ++step) PutStep("a", step);
  v1::Job job;
  ASSERT_TRUE(Cancel("jobs/a", &job).ok());
  v1::WatchJobRequest request;
  request.set_name("jobs/a");
  request.set_include_steps(true);
  const auto context = Context();
  const auto stream = jobs_->WatchJob(context.get(), request);
  v1::WatchJobResponse response;
  uint64_t steps = 0;
  bool ended = false;
  while (stream->Read(&response)) {
    EXPECT_FALSE(ended);
    for (const v1::StepReport& step : response.steps()) EXPECT_EQ(step.step(), ++steps);
    ended = response.has_job() && response.job().state() == v1::Job::CANCELLED;
  }
  EXPECT_TRUE(ended);
  EXPECT_EQ(steps, 450u);
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(JobWatchTest, WatchOfADeletedOrUnknownJobEnds) {
  v1::WatchJobRequest request;
  request.set_name("jobs/a");
  v1::WatchJobResponse response;
  {
    const auto context = Context();
    const auto stream = jobs_->WatchJob(context.get(), request);
    EXPECT_FALSE(stream->Read(&response));
    EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::NOT_FOUND);
  }
  Created("a");
  const auto context = Context();
  const auto stream = jobs_->WatchJob(context.get(), request);
  ASSERT_TRUE(stream->Read(&response));
  Write([](store::WriteTransaction& t) { return t.DeleteJob("a"); });
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::NOT_FOUND);
}

// Many watchers, most of which never read: no thread each, and none holds up the others or the end
// of the server.
TEST_F(JobWatchTest, ManyIdleWatchersCostNobodyElse) {
  Created("a");
  v1::WatchJobRequest request;
  request.set_name("jobs/a");
  request.set_include_steps(true);
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<grpc::ClientReader<v1::WatchJobResponse>>> idle;
  for (int i = 0; i < 300; ++i) {
    contexts.push_back(Context());
    idle.push_back(jobs_->WatchJob(contexts.back().get(), request));
  }
  const auto context = Context();
  const auto reader = jobs_->WatchJob(context.get(), request);
  v1::WatchJobResponse response;
  uint64_t seen = 0;
  for (uint64_t step = 1; step <= 20; ++step) {
    PutStep("a", step);
    while (seen < step) {
      ASSERT_TRUE(reader->Read(&response));
      if (response.steps_size() > 0) seen = response.steps(response.steps_size() - 1).step();
    }
  }
  server_->Shutdown();
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  for (auto& context_of_idle : contexts) context_of_idle->TryCancel();
}

TEST_F(JobWatchTest, TooManyStreamsAreRefused) {
  Start({.listen = Loopback(), .check_files = false}, {.watches = 2});
  Created("a");
  const std::vector<OpenWatch> watches = WatchThriceWhereTwoMay("jobs/a");
  EXPECT_EQ(watches[2].stream->Finish().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  // One that ends makes room.
  watches[0].context->TryCancel();
  watches[0].stream->Finish();
  bool is_admitted = false;
  const absl::Time deadline = absl::Now() + absl::Seconds(60);
  while (!is_admitted && absl::Now() < deadline) is_admitted = Watch("jobs/a").is_admitted;
  EXPECT_TRUE(is_admitted);
}

}  // namespace
}  // namespace ringleader::api
