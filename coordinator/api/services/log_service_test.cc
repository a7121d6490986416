// LogService over real gRPC.
#include "coordinator/api/testing/server_fixture.h"

namespace ringleader::api {
namespace {

using ::testing::HasSubstr;

class LogServiceTest : public testing::ServerTest {
 protected:
  // A line of a rank of job a's first attempt.
  void LogOf(int rank, const std::string& text) {
    v1::LogLine line;
    line.set_rank(rank);
    line.set_text(text);
    const absl::Status written =
        store_->Write([&](store::WriteTransaction& t) { return t.AppendLogs("a", 1, {line}); });
    ASSERT_TRUE(written.ok()) << written;
  }
};

TEST_F(LogServiceTest, TailFollowsAnAttemptToItsEnd) {
  Created("a");
  PutAttempt("a", 1, v1::Attempt::FAILED);
  Log("a", 1, {"old"});
  PutAttempt("a", 2, v1::Attempt::RUNNING);
  Log("a", 2, {"one", "two"});
  v1::TailLogsRequest request;
  request.set_job("jobs/a");
  request.set_rank(-1);
  request.set_follow(true);
  request.set_last_lines(1);
  const auto context = Context();
  const auto stream = logs_->TailLogs(context.get(), request);
  v1::TailLogsResponse response;
  ASSERT_TRUE(stream->Read(&response));
  ASSERT_EQ(response.lines_size(), 1);
  EXPECT_EQ(response.lines(0).text(), "two");
  Log("a", 2, {"three"});
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_EQ(response.lines(0).text(), "three");
  EXPECT_EQ(response.lines(0).attempt(), 2u);
  PutAttempt("a", 2, v1::Attempt::SUCCEEDED);
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(LogServiceTest, TailReadsOneAttemptFromAnOffset) {
  Created("a");
  PutAttempt("a", 1, v1::Attempt::FAILED);
  PutAttempt("a", 2, v1::Attempt::RUNNING);
  Log("a", 1, {"x", "y", "z"});
  v1::TailLogsRequest request;
  request.set_job("jobs/a");
  request.set_attempt(1);
  request.set_rank(-1);
  request.set_after_offset(1);
  v1::TailLogsResponse response;
  {
    const auto context = Context();
    const auto stream = logs_->TailLogs(context.get(), request);
    ASSERT_TRUE(stream->Read(&response));
    ASSERT_EQ(response.lines_size(), 2);
    EXPECT_EQ(response.lines(0).text(), "y");
    EXPECT_FALSE(stream->Read(&response));
    EXPECT_TRUE(stream->Finish().ok());
  }
  request.set_attempt(3);
  const auto context = Context();
  const auto stream = logs_->TailLogs(context.get(), request);
  EXPECT_FALSE(stream->Read(&response));
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_THAT(status.error_message(), HasSubstr("has no attempt 3"));
}

// Pages of the log are full of another rank's lines.
TEST_F(LogServiceTest, TheLinesOfARankAreFoundBehindMuchOfAnother) {
  Created("a");
  PutAttempt("a", 1, v1::Attempt::FAILED);
  LogOf(1, "hello");
  for (int i = 0; i < 300; ++i) LogOf(0, std::string(10'000, 'x'));
  LogOf(1, "fatal");
  for (const uint32_t last_lines : {0u, 1u}) {
    v1::TailLogsRequest request;
    request.set_job("jobs/a");
    request.set_rank(1);
    request.set_last_lines(last_lines);
    const auto context = Context();
    const auto stream = logs_->TailLogs(context.get(), request);
    v1::TailLogsResponse response;
    std::vector<std::string> texts;
    while (stream->Read(&response)) {
      for (const v1::LogLine& line : response.lines()) texts.push_back(line.text());
    }
    EXPECT_TRUE(stream->Finish().ok());
    EXPECT_EQ(texts, last_lines == 1 ? std::vector<std::string>{"fatal"}
                                     : (std::vector<std::string>{"hello", "fatal"}));
  }
}

// Lines that went for want of room are told, however many pages of other ranks' come first.
TEST_F(LogServiceTest, LinesThatAreGoneAreToldBehindMuchOfAnotherRank) {
  log_bytes_per_job_ = int64_t{3} << 20;
  Start({.listen = Loopback(), .check_files = false});
  Created("a");
  PutAttempt("a", 1, v1::Attempt::FAILED);
  LogOf(1, "hello");
  for (int i = 0; i < 500; ++i) LogOf(0, std::string(10'000, 'x'));
  LogOf(1, "fatal");
  v1::TailLogsRequest request;
  request.set_job("jobs/a");
  request.set_rank(1);
  request.set_after_offset(1);
  const auto context = Context();
  const auto stream = logs_->TailLogs(context.get(), request);
  v1::TailLogsResponse response;
  std::vector<std::string> texts;
  uint64_t dropped = 0;
  while (stream->Read(&response)) {
    for (const v1::LogLine& line : response.lines()) texts.push_back(line.text());
    dropped += response.dropped();
  }
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(texts, std::vector<std::string>{"fatal"});
  EXPECT_GT(dropped, 100u);
}

TEST_F(LogServiceTest, ARankThatTheAttemptDoesNotHaveIsAnError) {
  Created("a");
  ASSERT_TRUE(store_
                  ->Write([](store::WriteTransaction& t) {
                    v1::Attempt attempt;
                    attempt.set_number(1);
                    attempt.add_ranks();
                    attempt.add_ranks();
                    return t.PutAttempt("a", attempt);
                  })
                  .ok());
  const auto of_rank = [&](int32_t rank) {
    v1::TailLogsRequest request;
    request.set_job("jobs/a");
    request.set_rank(rank);
    v1::TailLogsResponse response;
    const auto context = Context();
    const auto stream = logs_->TailLogs(context.get(), request);
    while (stream->Read(&response)) continue;
    return stream->Finish();
  };
  EXPECT_TRUE(of_rank(1).ok());
  EXPECT_EQ(of_rank(2).error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(of_rank(9).error_message(), "attempt 1 of jobs/a has no rank 9; its ranks are 0 to 1");
}

// A call that is made again after its connection broke is about the job that it was about.
TEST_F(LogServiceTest, AJobThatGotTheNameMeanwhileIsAnother) {
  Created("a");
  v1::TailLogsRequest request;
  request.set_job("jobs/a");
  request.set_rank(-1);
  request.set_follow(true);
  v1::TailLogsResponse response;
  {
    // Before there is a line.
    const auto context = Context();
    const auto stream = logs_->TailLogs(context.get(), request);
    ASSERT_TRUE(stream->Read(&response));
    EXPECT_EQ(response.lines_size(), 0);
    context->TryCancel();
    stream->Finish();
  }
  v1::Job job;
  ASSERT_TRUE(Get("jobs/a", &job).ok());
  ASSERT_FALSE(response.job_uid().empty());
  EXPECT_EQ(response.job_uid(), job.uid());
  const auto ends_with = [&](const std::string& uid) {
    request.set_job_uid(uid);
    request.set_follow(false);
    const auto context = Context();
    const auto stream = logs_->TailLogs(context.get(), request);
    while (stream->Read(&response)) continue;
    return stream->Finish();
  };
  EXPECT_TRUE(ends_with(job.uid()).ok());
  const grpc::Status other = ends_with("a-of-before");
  EXPECT_EQ(other.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_THAT(other.error_message(), HasSubstr("was deleted"));
}

}  // namespace
}  // namespace ringleader::api
