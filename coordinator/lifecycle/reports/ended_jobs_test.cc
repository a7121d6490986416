// What workers report of jobs that have ended, or that there never were, costs next to nothing
// however much it is.
#include <spdlog/sinks/ringbuffer_sink.h>
#include <spdlog/spdlog.h>

#include <algorithm>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "coordinator/lifecycle/controller_core.h"
#include "coordinator/lifecycle/testing/controller_test.h"
#include "coordinator/store/testing/forwarding_store.h"
#include "coordinator/store/testing/forwarding_transaction.h"

namespace ringleader::lifecycle {
namespace {

using testing::FakeSession;
using ::testing::HasSubstr;
using ::testing::SizeIs;

// Counts what is read of jobs and their attempts in write transactions.
class CountingStore : public store::testing::ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  absl::Status Write(absl::FunctionRef<absl::Status(store::WriteTransaction&)> body,
                     store::Need need) override {
    return ForwardingStore::Write(
        [&](store::WriteTransaction& transaction) {
          Counting counting(&transaction, this);
          return body(counting);
        },
        need);
  }
  int jobs = 0, attempts = 0;

 private:
  class Counting : public store::testing::ForwardingTransaction {
   public:
    Counting(store::WriteTransaction* transaction, CountingStore* store)
        : ForwardingTransaction(transaction), store_(*store) {}
    absl::StatusOr<v1::Job> GetJob(std::string_view id) override {
      ++store_.jobs;
      return ForwardingTransaction::GetJob(id);
    }
    absl::StatusOr<v1::Attempt> GetAttempt(std::string_view job, uint32_t number) override {
      ++store_.attempts;
      return ForwardingTransaction::GetAttempt(job, number);
    }

   private:
    CountingStore& store_;
  };
};

class EndedJobsTest : public testing::ControllerTest {
 protected:
  static constexpr int kMany = 50'000;
  static constexpr int kBatches = 13;  // that they take

  EndedJobsTest() { spdlog::default_logger()->sinks().push_back(log_); }
  ~EndedJobsTest() override { spdlog::default_logger()->sinks().pop_back(); }

  // Job j ran on node a, and has ended; the next sequence is 6.
  std::shared_ptr<FakeSession> RunJobToItsEnd() {
    auto session = RunJob();
    for (const uint32_t rank : {0, 1}) {
      v1::AttemptEvent event;
      event.mutable_trainer_exited()->set_rank(rank);
      event.mutable_trainer_exited()->set_outcome(v1::TrainerExited::COMPLETED);
      Say(session, 4 + rank, event);
    }
    EXPECT_EQ(Job().state(), v1::Job::SUCCEEDED);
    store_.MoveTo(&counting_);
    return session;
  }
  void Push(const std::shared_ptr<FakeSession>& session, uint64_t sequence, const std::string& job,
            v1::AttemptEvent event) {
    event.set_job(job);
    event.set_attempt(1);
    event.set_fencing_token(token_);
    v1::WorkerMessage message;
    message.set_sequence(sequence);
    *message.mutable_event() = std::move(event);
    controller_->OnMessage(session, std::move(message));
  }
  // So many of the same, of which none has been taken in yet; and then all are.
  void SayManyTimes(const std::shared_ptr<FakeSession>& session, const std::string& job,
                    const v1::AttemptEvent& event) {
    for (int i = 0; i < kMany; ++i) Push(session, 6 + i, job, event);
    for (int i = 0; i < kMany && session->acknowledged() < 5 + kMany; ++i) controller_->RunOnce();
    EXPECT_EQ(session->acknowledged(), 5u + kMany);
    EXPECT_FALSE(session->closed().has_value());
    EXPECT_EQ(session->taken(), 5 + kMany);
  }
  static v1::AttemptEvent LogOfRank(int32_t rank) {
    v1::AttemptEvent event = Log("x");
    event.mutable_logs()->mutable_lines(0)->set_rank(rank);
    return event;
  }
  std::vector<std::string> Lines(const std::string& part) {
    std::vector<std::string> lines = log_->last_formatted();
    std::erase_if(lines, [&](const std::string& line) { return !absl::StrContains(line, part); });
    return lines;
  }

  const std::shared_ptr<spdlog::sinks::ringbuffer_sink_mt> log_ =
      std::make_shared<spdlog::sinks::ringbuffer_sink_mt>(100'000);
  CountingStore counting_{sqlite_.get()};
};

TEST_F(EndedJobsTest, AnAttemptIsReadOnceABatchAndTheJobNever) {
  const auto session = RunJobToItsEnd();
  SayManyTimes(session, "j", LogOfRank(1));
  EXPECT_EQ(counting_.jobs, 0);
  EXPECT_EQ(counting_.attempts, kBatches);
  EXPECT_THAT(LogTexts(), SizeIs(1000)) << "a page of them";
}

TEST_F(EndedJobsTest, WhatIsIgnoredIsToldInALineASecond) {
  const auto session = RunJobToItsEnd();
  SayManyTimes(session, "j", LogOfRank(2));
  EXPECT_EQ(counting_.jobs, 0);
  EXPECT_EQ(counting_.attempts, kBatches);
  EXPECT_THAT(Lines("attempt 1 of jobs/j what it cannot know"), SizeIs(1));
  clock_.Advance(absl::Seconds(1));
  controller_->RunOnce();
  const std::vector<std::string> lines = Lines("attempt 1 of jobs/j what it cannot know");
  ASSERT_THAT(lines, SizeIs(2));
  EXPECT_THAT(lines[0], HasSubstr("(and 4095 more like it)"));
  EXPECT_THAT(lines[1], HasSubstr("(and 45903 more like it)"));
}

TEST_F(EndedJobsTest, ThatThereIsNoSuchJobIsFoundOnceABatch) {
  const auto session = RunJobToItsEnd();
  SayManyTimes(session, "gone", LogOfRank(0));
  EXPECT_EQ(counting_.jobs, 0);
  EXPECT_EQ(counting_.attempts, kBatches);
}

// Such a name is as long as a message.
TEST_F(EndedJobsTest, ANameThatNoJobHasIsLookedUpNowhereAndToldShortly) {
  const auto session = RunJobToItsEnd();
  const std::string name = "\033[2J" + std::string(1 << 20, 'x');
  for (const uint64_t sequence : {6, 7}) Push(session, sequence, name, LogOfRank(0));
  controller_->RunOnce();
  EXPECT_EQ(session->acknowledged(), 7u);
  EXPECT_EQ(counting_.attempts, 0);
  const std::vector<std::string> lines = Lines("as which none can be called");
  ASSERT_THAT(lines, SizeIs(1));
  EXPECT_LT(lines[0].size(), 500u);
  EXPECT_THAT(lines[0], HasSubstr("\\x1b[2Jxx"));
  EXPECT_THAT(lines[0], HasSubstr("(and 1 more like it)"));
}

TEST_F(EndedJobsTest, TrainersOfAJobWithANameThatNoneHasAreToldShortly) {
  v1::RunningAttempt stray = Running();
  stray.set_job("\033[2J" + std::string(1 << 20, 'x'));
  const auto session = Connect("a", "folder.1", {stray});
  EXPECT_THAT(session->Commands(), SizeIs(1));
  const std::vector<std::string> lines = Lines("which was given up");
  ASSERT_THAT(lines, SizeIs(1));
  EXPECT_LT(lines[0].size(), 500u);
  EXPECT_THAT(lines[0], HasSubstr("\\x1b[2Jxx"));
}

TEST_F(EndedJobsTest, ThatAWorkerShutsDownIsToldOnce) {
  const auto session = RunJobToItsEnd();
  v1::WorkerMessage message;
  message.mutable_drain()->set_reason("SIGTERM");
  for (uint64_t sequence = 6; sequence < 100; ++sequence) {
    message.set_sequence(sequence);
    controller_->OnMessage(session, message);
  }
  controller_->RunOnce();
  EXPECT_EQ(session->acknowledged(), 99u);
  EXPECT_THAT(Lines("is shutting down"), SizeIs(1));
}

// The batch would fail, and with it what everybody else wants written.
TEST_F(EndedJobsTest, AJobMayBeDeletedBetweenTwoReportsOfABatch) {
  RunJobToItsEnd();
  LifecycleMetrics metrics(nullptr);
  ControllerCore core(options_, &plans_, &metrics,
                      [](const std::string&, uint64_t, const absl::StatusOr<MadePlan>&) {});
  const auto session = std::make_shared<FakeSession>("a", "folder.1", &clock_);
  const absl::Time now = clock_.Now();
  ASSERT_TRUE(
      sqlite_
          ->Read([&](store::ReadTransaction& transaction) { return core.Load(transaction, now); })
          .ok());
  const absl::Status written = sqlite_->Write([&](store::WriteTransaction& transaction) {
    core.Tick(now);
    v1::WorkerHello hello;
    hello.set_node("nodes/a");
    hello.set_incarnation("folder.1");
    absl::Status status = core.OnHello(transaction, session, hello, now);
    for (const uint64_t sequence : {6, 7}) {
      v1::WorkerMessage message;
      message.set_sequence(sequence);
      *message.mutable_event() = LogOfRank(0);
      message.mutable_event()->set_job("j");
      message.mutable_event()->set_attempt(1);
      message.mutable_event()->set_fencing_token(token_);
      status.Update(core.OnMessage(transaction, session, message, now));
      if (sequence == 6) status.Update(core.DeleteJob(transaction, "j", "", {}));
    }
    status.Update(core.Commit(transaction, now));
    return status;
  });
  EXPECT_TRUE(written.ok()) << written;
}

}  // namespace
}  // namespace ringleader::lifecycle
