#include "coordinator/lifecycle/job_controller.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/temp_dir.h"
#include "coordinator/lifecycle/testing/fixed_plan.h"
#include "coordinator/store/sqlite_store.h"

namespace ringleader::lifecycle {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class FakeSession : public session::Session {
 public:
  FakeSession(std::string node, std::string incarnation, const Clock* clock)
      : node_(std::move(node)), incarnation_(std::move(incarnation)), clock_(clock) {}

  const std::string& node() const override { return node_; }
  const std::string& incarnation() const override { return incarnation_; }
  absl::Time last_heard() const override { return heard_ ? *heard_ : clock_->Now(); }
  void Send(v1::CoordinatorMessage message) override { sent_.push_back(std::move(message)); }
  void Close(const absl::Status& status) override { closed_ = status; }

  void FallSilent() { heard_ = clock_->Now(); }
  const std::optional<absl::Status>& closed() const { return closed_; }

  // What came since the last call.
  std::vector<v1::Command> Commands() {
    std::vector<v1::Command> commands;
    for (const v1::CoordinatorMessage& message : std::exchange(sent_, {})) {
      if (message.has_command()) commands.push_back(message.command());
      if (message.has_welcome()) welcome_ = message.welcome();
      acknowledged_ = std::max(acknowledged_, message.acknowledged_sequence());
    }
    return commands;
  }
  uint64_t acknowledged() {
    Commands();
    return acknowledged_;
  }
  const v1::Welcome& welcome() const { return welcome_; }

 private:
  const std::string node_;
  const std::string incarnation_;
  const Clock* const clock_;
  std::optional<absl::Time> heard_;
  std::optional<absl::Status> closed_;
  std::vector<v1::CoordinatorMessage> sent_;
  v1::Welcome welcome_;
  uint64_t acknowledged_ = 0;
};

// A store whose disk fills up now and then.
class FlakyStore : public store::Store {
 public:
  explicit FlakyStore(store::Store* store) : store_(store) {}
  absl::Status Read(absl::FunctionRef<absl::Status(store::ReadTransaction&)> body) override {
    return store_->Read(body);
  }
  absl::Status Write(absl::FunctionRef<absl::Status(store::WriteTransaction&)> body) override {
    return store_->Write([&](store::WriteTransaction& transaction) {
      const absl::Status status = body(transaction);
      return full ? absl::ResourceExhaustedError("the disk is full") : status;
    });
  }
  uint64_t revision() const override { return store_->revision(); }
  std::unique_ptr<Subscription> Subscribe(
      std::function<void(const store::Change&)> listener) override {
    return store_->Subscribe(std::move(listener));
  }

  std::atomic<bool> full = false;

 private:
  store::Store* const store_;
};

class JobControllerTest : public ::testing::Test {
 protected:
  JobControllerTest() : sqlite_(Open()), store_(sqlite_.get()) { Restart(); }

  std::unique_ptr<store::Store> Open() {
    auto store = store::OpenSqliteStore({.path = dir_.File("db")});
    EXPECT_TRUE(store.ok()) << store.status();
    return *std::move(store);
  }

  // Another coordinator on the same store.
  void Restart() {
    controller_.reset();
    auto controller = JobController::Create(options_, &store_, &plans_, &clock_, nullptr);
    ASSERT_TRUE(controller.ok()) << controller.status();
    controller_ = *std::move(controller);
  }

  // What blocks until its batch is through.
  template <typename Call>
  auto Do(Call call) -> decltype(call()) {
    decltype(call()) result = absl::UnknownError("not run");
    std::atomic<bool> done = false;
    std::thread caller([&] {
      result = call();
      done = true;
    });
    while (!done) controller_->RunOnce();
    caller.join();
    return result;
  }

  v1::JobSpec Spec(const std::string& name, uint32_t trainers = 2) {
    v1::JobSpec spec;
    spec.set_name(name);
    spec.mutable_resources()->set_trainers(trainers);
    spec.mutable_training()->set_steps(10);
    spec.mutable_scheduling()->set_max_retries(1);
    return spec;
  }
  absl::StatusOr<v1::Job> Create(const std::string& name, const std::string& request = "") {
    return Do([&] {
      return controller_->CreateJob(Spec(name), {request, "CreateJob", "fingerprint"});
    });
  }

  std::shared_ptr<FakeSession> Connect(const std::string& node, const std::string& incarnation,
                                       const std::vector<v1::RunningAttempt>& running = {}) {
    auto session = std::make_shared<FakeSession>(node, incarnation, &clock_);
    v1::WorkerHello hello;
    hello.set_node("nodes/" + node);
    hello.set_incarnation(incarnation);
    hello.mutable_inventory()->set_trainers(2);
    for (const v1::RunningAttempt& attempt : running) *hello.add_attempts() = attempt;
    controller_->OnHello(session, hello);
    controller_->RunOnce();
    return session;
  }

  void Say(const std::shared_ptr<FakeSession>& session, uint64_t sequence, v1::AttemptEvent event) {
    event.set_job("j");
    event.set_attempt(attempt_);
    event.set_fencing_token(token_);
    v1::WorkerMessage message;
    message.set_sequence(sequence);
    *message.mutable_event() = std::move(event);
    controller_->OnMessage(session, message);
    controller_->RunOnce();
  }
  // What a witness is told.
  absl::Status Witness(const std::string& incarnation, const std::string& node = "a") {
    absl::Status answer = absl::UnknownError("no answer");
    controller_->OnDeath(node, incarnation, [&](const absl::Status& status) { answer = status; });
    controller_->RunOnce();
    return answer;
  }
  void Acknowledge(const std::shared_ptr<FakeSession>& session, uint64_t sequence,
                   uint64_t command_id) {
    v1::WorkerMessage message;
    message.set_sequence(sequence);
    message.mutable_command_ack()->set_command_id(command_id);
    message.mutable_command_ack()->set_accepted(true);
    controller_->OnMessage(session, message);
    controller_->RunOnce();
  }
  static v1::AttemptEvent Ready(uint32_t rank) {
    v1::AttemptEvent event;
    event.mutable_trainer_ready()->set_rank(rank);
    event.mutable_trainer_ready()->set_address("host:1");
    return event;
  }
  static v1::AttemptEvent Step(uint64_t step, int32_t rank) {
    v1::AttemptEvent event;
    event.mutable_step()->set_step(step);
    event.mutable_step()->set_rank(rank);
    return event;
  }
  static v1::AttemptEvent Log(const std::string& text) {
    v1::AttemptEvent event;
    event.mutable_logs()->add_lines()->set_text(text);
    return event;
  }

  // Job j on node a, started and acknowledged; the next sequence is 4.
  std::shared_ptr<FakeSession> RunJob() {
    auto session = Connect("a", "folder.1");
    EXPECT_TRUE(Create("j").ok());
    controller_->RunOnce();
    const std::vector<v1::Command> commands = session->Commands();
    EXPECT_THAT(commands, SizeIs(1));
    token_ = commands.at(0).fencing_token();
    Acknowledge(session, 1, commands[0].command_id());
    Say(session, 2, Ready(0));
    Say(session, 3, Ready(1));
    EXPECT_EQ(Job().state(), v1::Job::RUNNING);
    return session;
  }
  v1::RunningAttempt Running() const {
    v1::RunningAttempt running;
    running.set_job("j");
    running.set_attempt(1);
    running.set_fencing_token(token_);
    running.add_ranks(0);
    running.add_ranks(1);
    return running;
  }

  v1::Job Job(const std::string& id = "j") {
    v1::Job job;
    const absl::Status read = sqlite_->Read([&](store::ReadTransaction& transaction) {
      absl::StatusOr<v1::Job> found = transaction.GetJob(id);
      if (!found.ok()) return found.status();
      job = *std::move(found);
      return absl::OkStatus();
    });
    EXPECT_TRUE(read.ok()) << read;
    return job;
  }
  std::vector<uint64_t> Steps() {
    std::vector<uint64_t> steps;
    const absl::Status read = sqlite_->Read([&](store::ReadTransaction& transaction) {
      const absl::StatusOr<store::StepPage> found = transaction.ListSteps("j", 0, 0, 100);
      for (const v1::StepReport& step : found->steps) steps.push_back(step.step());
      return absl::OkStatus();
    });
    EXPECT_TRUE(read.ok()) << read;
    return steps;
  }
  std::vector<std::string> LogTexts() {
    std::vector<std::string> texts;
    const absl::Status read = sqlite_->Read([&](store::ReadTransaction& transaction) {
      const absl::StatusOr<store::LogPage> page = transaction.ReadLogs({.job = "j"});
      for (const v1::LogLine& line : page->lines) texts.push_back(line.text());
      return absl::OkStatus();
    });
    EXPECT_TRUE(read.ok()) << read;
    return texts;
  }

  const TempDir dir_;
  Options options_;
  FakeClock clock_;
  testing::FixedPlan plans_;
  std::unique_ptr<store::Store> sqlite_;
  FlakyStore store_;
  std::unique_ptr<JobController> controller_;
  uint32_t attempt_ = 1;  // whose, in Say()
  uint64_t token_ = 0;
};

TEST_F(JobControllerTest, WelcomesAWorkerWithItsTimes) {
  auto session = Connect("a", "folder.1");
  session->Commands();
  EXPECT_EQ(session->welcome().epoch(), 1);
  EXPECT_EQ(session->welcome().lease_milliseconds(), 10'000);
  EXPECT_EQ(session->welcome().fence_milliseconds(), 90'000);
  const std::vector<v1::Node> nodes = controller_->ListNodes();
  ASSERT_THAT(nodes, SizeIs(1));
  EXPECT_EQ(nodes[0].state(), v1::Node::READY);
}

TEST_F(JobControllerTest, CommandsAreRepeatedUntilTheyAreAcknowledged) {
  auto first = Connect("a", "folder.1");
  ASSERT_TRUE(Create("j").ok());
  controller_->RunOnce();
  const std::vector<v1::Command> start = first->Commands();
  ASSERT_THAT(start, SizeIs(1));
  EXPECT_TRUE(start[0].has_start());
  controller_->OnClosed(first);
  auto second = Connect("a", "folder.1");
  const std::vector<v1::Command> again = second->Commands();
  ASSERT_THAT(again, SizeIs(1));
  EXPECT_EQ(again[0].command_id(), start[0].command_id());
  Acknowledge(second, 1, again[0].command_id());
  EXPECT_EQ(second->acknowledged(), 1);
  EXPECT_THAT(Connect("a", "folder.1")->Commands(), IsEmpty());
}

TEST_F(JobControllerTest, AReportIsAcknowledgedOnceItsStepIsRecorded) {
  auto session = RunJob();
  EXPECT_EQ(session->acknowledged(), 3);
  Say(session, 4, Step(1, 0));
  Say(session, 5, Log("behind it"));
  EXPECT_EQ(session->acknowledged(), 3);  // 4 is not on disk yet
  Say(session, 6, Step(1, 1));
  EXPECT_EQ(session->acknowledged(), 6);
  EXPECT_THAT(Steps(), ElementsAre(1));
  EXPECT_EQ(Job().progress().step(), 1);
}

TEST_F(JobControllerTest, ARestartedCoordinatorAdoptsWhatRunsAndLosesNoStep) {
  auto session = RunJob();
  Say(session, 4, Step(1, 0));
  Say(session, 5, Log("once"));
  Restart();
  auto again = Connect("a", "folder.1", {Running()});
  const std::vector<v1::Command> repeated = again->Commands();
  ASSERT_THAT(repeated, SizeIs(1));
  EXPECT_TRUE(repeated[0].has_connect());  // which was not acknowledged
  EXPECT_EQ(Job().state(), v1::Job::RUNNING);
  // All that was not acknowledged comes again.
  Say(again, 4, Step(1, 0));
  Say(again, 5, Log("once"));
  Say(again, 6, Step(1, 1));
  EXPECT_THAT(Steps(), ElementsAre(1));
  EXPECT_THAT(LogTexts(), ElementsAre("once"));
  EXPECT_EQ(again->acknowledged(), 6);
}

// What was applied before the restart is not acknowledged before it has come again: some of it may
// have been waiting for other ranks.
TEST_F(JobControllerTest, ARestartedCoordinatorAcknowledgesNoReportThatItHasNotGot) {
  auto session = RunJob();
  Say(session, 4, Log("before"));
  Say(session, 5, Step(1, 0));
  Say(session, 6, Step(2, 0));
  EXPECT_EQ(session->acknowledged(), 4);
  Restart();
  auto again = Connect("a", "folder.1", {Running()});
  Say(again, 4, Log("before"));
  EXPECT_EQ(again->acknowledged(), 4);
  Say(again, 5, Step(1, 0));
  EXPECT_EQ(again->acknowledged(), 4);
  Say(again, 6, Step(2, 0));
  Say(again, 7, Step(1, 1));
  EXPECT_EQ(again->acknowledged(), 5);
  Say(again, 8, Step(2, 1));
  EXPECT_EQ(again->acknowledged(), 8);
  EXPECT_THAT(Steps(), ElementsAre(1, 2));
}

TEST_F(JobControllerTest, AnotherProcessOfTheWorkerMeansThatItsTrainersAreDead) {
  auto old = RunJob();
  controller_->OnClosed(old);
  Connect("a", "folder.2");
  EXPECT_EQ(Job().attempts(0).state(), v1::Attempt::FAILED);
  EXPECT_EQ(Job().state(), v1::Job::RETRYING);
  EXPECT_THAT(Job().state_reason(), HasSubstr("its worker was restarted"));
  clock_.Advance(options_.retry_backoff);
  controller_->RunOnce();
  EXPECT_EQ(Job().attempts_size(), 2);
  EXPECT_GT(Job().attempts(1).fencing_token(), token_);
}

TEST_F(JobControllerTest, StepsOfAFencedWorkerFillTheRecordAlsoAfterTheJobHasEnded) {
  auto old = RunJob();
  Say(old, 4, Step(1, 0));
  Say(old, 5, Step(1, 1));
  controller_->OnClosed(old);
  controller_->RunOnce();
  clock_.Advance(options_.adoption_timeout);
  controller_->RunOnce();
  EXPECT_EQ(Job().attempts(0).state(), v1::Attempt::FENCED);
  const uint64_t old_token = token_;
  auto next = Connect("b", "other.1");
  clock_.Advance(options_.retry_backoff);
  controller_->RunOnce();
  const std::vector<v1::Command> commands = next->Commands();
  ASSERT_THAT(commands, SizeIs(1));
  token_ = commands[0].fencing_token();
  attempt_ = 2;
  Acknowledge(next, 1, commands[0].command_id());
  uint64_t sequence = 2;
  for (const uint32_t rank : {0u, 1u}) Say(next, sequence++, Ready(rank));
  // From the checkpoint of step 2.
  for (const int32_t rank : {0, 1}) Say(next, sequence++, Step(3, rank));
  for (const uint32_t rank : {0u, 1u}) {
    v1::AttemptEvent completed;
    completed.mutable_trainer_exited()->set_rank(rank);
    completed.mutable_trainer_exited()->set_outcome(v1::TrainerExited::COMPLETED);
    Say(next, sequence++, completed);
  }
  EXPECT_EQ(Job().state(), v1::Job::SUCCEEDED);
  auto back = Connect("a", "folder.1");
  attempt_ = 1;
  token_ = old_token;
  Say(back, 6, Step(2, 0));
  Say(back, 7, Step(3, 0));
  token_ = old_token + 100;  // of another job of this name
  Say(back, 8, Step(4, 0));
  EXPECT_EQ(back->acknowledged(), 8);
  EXPECT_THAT(Steps(), ElementsAre(1, 3, 2));
}

TEST_F(JobControllerTest, AWitnessedDeathFailsTheAttemptOnceItsLastWordsAreIn) {
  auto session = RunJob();
  // What the process said last may still be on its way.
  EXPECT_TRUE(absl::IsUnavailable(Witness("folder.1")));
  EXPECT_EQ(Job().state(), v1::Job::RUNNING);
  Say(session, 4, Step(1, 0));
  Say(session, 5, Step(1, 1));
  controller_->OnClosed(session);
  EXPECT_TRUE(Witness("folder.1").ok());
  EXPECT_EQ(Job().attempts(0).state(), v1::Attempt::FAILED);
  EXPECT_EQ(Job().attempts(0).failure().rank(), 0);
  EXPECT_THAT(Job().attempts(0).failure().message(), HasSubstr("its worker process died"));
  EXPECT_EQ(Job().state(), v1::Job::RETRYING);
  EXPECT_THAT(Steps(), ElementsAre(1));
}

TEST_F(JobControllerTest, AWitnessedDeathIsTakenInWhenOnlyTheConnectionLingers) {
  auto session = RunJob();
  session->FallSilent();
  clock_.Advance(options_.lease + absl::Seconds(1));
  controller_->RunOnce();
  EXPECT_EQ(Job().state(), v1::Job::UNKNOWN);
  EXPECT_TRUE(Witness("folder.1").ok());
  EXPECT_EQ(Job().attempts(0).state(), v1::Attempt::FAILED);
}

TEST_F(JobControllerTest, AWitnessSpeaksOfItsOwnWorkerOnly) {
  auto session = RunJob();
  controller_->OnClosed(session);
  EXPECT_TRUE(Witness("folder.0").ok());
  EXPECT_TRUE(Witness("folder.1", "nobody").ok());
  EXPECT_EQ(Job().state(), v1::Job::RUNNING);
  // A coordinator that has heard neither process looks it up.
  Restart();
  EXPECT_TRUE(Witness("folder.0").ok());
  EXPECT_EQ(Job().state(), v1::Job::RUNNING);
  EXPECT_TRUE(Witness("folder.1").ok());
  EXPECT_EQ(Job().attempts(0).state(), v1::Attempt::FAILED);
}

// The start may be in the hands of a later process, whose hello the last coordinator heard.
TEST_F(JobControllerTest, AWitnessOfAnEarlierProcessProvesNothingAfterARestart) {
  auto first = Connect("a", "folder.1");
  Say(first, 1, Log("something, so that the store knows this process"));
  controller_->OnClosed(first);
  Connect("a", "folder.2");
  ASSERT_TRUE(Create("j").ok());
  controller_->RunOnce();
  EXPECT_EQ(Job().state(), v1::Job::STARTING);
  Restart();
  EXPECT_TRUE(Witness("folder.1").ok());
  EXPECT_EQ(Job().state(), v1::Job::STARTING);
}

TEST_F(JobControllerTest, AnotherWorkerOfTheSameNameProvesNothing) {
  auto session = RunJob();
  // Beside one that is alive.
  EXPECT_TRUE(absl::IsAlreadyExists(*Connect("a", "folder.2")->closed()));
  EXPECT_FALSE(session->closed().has_value());
  // In place of one that is not, but from elsewhere: the old trainers may be alive.
  controller_->OnClosed(session);
  EXPECT_TRUE(absl::IsFailedPrecondition(*Connect("a", "elsewhere.1")->closed()));
  EXPECT_EQ(Job().state(), v1::Job::RUNNING);
  // A coordinator that has heard neither yet knows as much.
  Restart();
  EXPECT_TRUE(absl::IsFailedPrecondition(*Connect("a", "elsewhere.1")->closed()));
  EXPECT_EQ(Job().state(), v1::Job::RUNNING);
  session = Connect("a", "folder.1", {Running()});
  EXPECT_FALSE(session->closed().has_value());
  // One that could not write begins anew in the same way.
  store_.full = true;
  Say(session, 4, Log("lost"));
  store_.full = false;
  EXPECT_TRUE(absl::IsFailedPrecondition(*Connect("a", "elsewhere.1")->closed()));
  EXPECT_EQ(Job().state(), v1::Job::RUNNING);
  clock_.Advance(options_.adoption_timeout);
  controller_->RunOnce();
  EXPECT_EQ(Job().attempts(0).state(), v1::Attempt::FENCED);
  EXPECT_FALSE(Connect("a", "elsewhere.1")->closed().has_value());
}

TEST_F(JobControllerTest, AWorkerThatWasRestartedWithItsCoordinatorIsLetIn) {
  RunJob();
  Restart();
  EXPECT_FALSE(Connect("a", "folder.2")->closed().has_value());
  EXPECT_EQ(Job().attempts(0).state(), v1::Attempt::FAILED);
  EXPECT_THAT(Job().state_reason(), HasSubstr("its worker was restarted"));
}

// Whose hello was taken last counts, not who came first or said more.
TEST_F(JobControllerTest, AWorkerThatTookItsPlaceBackIsKnownAfterARestart) {
  auto first = Connect("a", "folder.1");
  Say(first, 1, Log("something, so that the store knows this process"));
  controller_->OnClosed(first);
  controller_->OnClosed(Connect("a", "elsewhere.1"));
  Connect("a", "folder.1");
  ASSERT_TRUE(Create("j").ok());
  controller_->RunOnce();
  EXPECT_EQ(Job().state(), v1::Job::STARTING);
  Restart();
  EXPECT_TRUE(absl::IsFailedPrecondition(*Connect("a", "elsewhere.1")->closed()));
  EXPECT_FALSE(Connect("a", "folder.1")->closed().has_value());
  EXPECT_EQ(Job().state(), v1::Job::STARTING);
}

TEST_F(JobControllerTest, WhatOlderSessionsSayCountsNoMore) {
  auto old = RunJob();
  auto session = Connect("a", "folder.1", {Running()});
  EXPECT_TRUE(old->closed().has_value());
  Say(old, 4, Log("from the grave"));
  EXPECT_THAT(LogTexts(), IsEmpty());
  Say(session, 4, Log("alive"));
  EXPECT_THAT(LogTexts(), ElementsAre("alive"));
}

TEST_F(JobControllerTest, AGapInTheSequencesEndsTheSession) {
  auto session = RunJob();
  Say(session, 6, Log("4 and 5 are missing"));
  ASSERT_TRUE(session->closed().has_value());
  EXPECT_TRUE(absl::IsDataLoss(*session->closed()));
  EXPECT_THAT(LogTexts(), IsEmpty());
}

TEST_F(JobControllerTest, SilenceIsUnknownThenFencedAndStraysAreStopped) {
  auto session = RunJob();
  session->FallSilent();
  clock_.Advance(options_.lease + absl::Seconds(1));
  controller_->RunOnce();
  EXPECT_EQ(Job().state(), v1::Job::UNKNOWN);
  EXPECT_EQ(controller_->ListNodes()[0].state(), v1::Node::UNREACHABLE);
  clock_.Advance(options_.adoption_timeout);
  controller_->RunOnce();
  EXPECT_EQ(Job().attempts(0).state(), v1::Attempt::FENCED);
  // It should have died, and has not.
  auto back = Connect("a", "folder.1", {Running()});
  const std::vector<v1::Command> commands = back->Commands();
  ASSERT_THAT(commands, SizeIs(1));
  EXPECT_EQ(commands[0].stop().mode(), v1::StopTrainers::ABORT);
  EXPECT_EQ(commands[0].fencing_token(), token_);
  // Until it is gone, its place is taken.
  clock_.Advance(options_.retry_backoff);
  controller_->RunOnce();
  EXPECT_EQ(Job().state(), v1::Job::PENDING);
  for (uint32_t rank : {0, 1}) {
    v1::AttemptEvent event;
    event.mutable_trainer_exited()->set_rank(rank);
    Say(back, 4 + rank, event);
  }
  EXPECT_EQ(Job().state(), v1::Job::STARTING);
}

TEST_F(JobControllerTest, AShortSilenceChangesNothing) {
  auto session = RunJob();
  session->FallSilent();
  clock_.Advance(options_.lease + absl::Seconds(1));
  controller_->RunOnce();
  Connect("a", "folder.1", {Running()});
  EXPECT_EQ(Job().state(), v1::Job::RUNNING);
  EXPECT_EQ(Job().attempts_size(), 1);
}

TEST_F(JobControllerTest, ARepeatedRequestGetsTheFirstReply) {
  const absl::StatusOr<v1::Job> first = Create("j", "r1");
  ASSERT_TRUE(first.ok());
  const absl::StatusOr<v1::Job> second = Create("j", "r1");
  ASSERT_TRUE(second.ok());
  EXPECT_EQ(first->uid(), second->uid());
  EXPECT_TRUE(absl::IsAlreadyExists(Create("j", "r2").status()));
}

TEST_F(JobControllerTest, WhatCannotBeWrittenNeverHappened) {
  auto session = RunJob();
  store_.full = true;
  const absl::StatusOr<v1::Job> refused = Create("other");
  EXPECT_TRUE(absl::IsResourceExhausted(refused.status())) << refused.status();
  EXPECT_TRUE(session->closed().has_value());
  store_.full = false;
  auto again = Connect("a", "folder.1", {Running()});
  EXPECT_EQ(Job().state(), v1::Job::RUNNING);
  EXPECT_TRUE(Create("other").ok());
  Say(again, 4, Log("still here"));
  EXPECT_EQ(again->acknowledged(), 4);
}

TEST_F(JobControllerTest, AWaitingJobSaysWhyInNumbers) {
  Connect("a", "folder.1");
  const absl::StatusOr<v1::Job> job = Do([&] { return controller_->CreateJob(Spec("j", 5), {}); });
  ASSERT_TRUE(job.ok());
  controller_->RunOnce();
  EXPECT_EQ(Job().state(), v1::Job::PENDING);
  EXPECT_THAT(Job().state_reason(), HasSubstr("needs 5 trainers; the 1 node"));
}

TEST_F(JobControllerTest, OnlyEndedJobsAreDeleted) {
  auto session = RunJob();
  const auto remove = [&] {
    return Do([&]() -> absl::StatusOr<int> {
             const absl::Status status = controller_->DeleteJob("j", "", {});
             if (!status.ok()) return status;
             return 0;
           })
        .status();
  };
  EXPECT_THAT(std::string(remove().message()), HasSubstr("jobs/j is RUNNING"));
  ASSERT_TRUE(Do([&] { return controller_->CancelJob("j", "", {}); }).ok());
  for (uint32_t rank : {0, 1}) {
    v1::AttemptEvent event;
    event.mutable_trainer_exited()->set_rank(rank);
    Say(session, 4 + rank, event);
  }
  EXPECT_EQ(Job().state(), v1::Job::CANCELLED);
  EXPECT_TRUE(remove().ok());
}

TEST_F(JobControllerTest, AnotherEtagIsRefused) {
  ASSERT_TRUE(Create("j").ok());
  const auto cancel = [&](const std::string& etag) {
    return Do([&] { return controller_->CancelJob("j", etag, {}); }).status();
  };
  EXPECT_TRUE(absl::IsAborted(cancel("77")));
  EXPECT_TRUE(cancel(Job().etag()).ok());
}

TEST(OptionsTest, ContradictionsAreNamed) {
  Options options;
  EXPECT_TRUE(Validate(options).ok());
  options.fence_after = options.adoption_timeout;
  EXPECT_THAT(std::string(Validate(options).message()), HasSubstr("--adoption-timeout"));
  options = {};
  options.lease = options.heartbeat_interval;
  EXPECT_THAT(std::string(Validate(options).message()), HasSubstr("--lease"));
}

}  // namespace
}  // namespace ringleader::lifecycle
