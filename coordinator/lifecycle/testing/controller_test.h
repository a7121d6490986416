// A controller with a store of its own, whose disk may fill up, a clock that the test moves, and
// workers that say what it tells them to.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/metrics/metrics.h"
#include "base/process/version.h"
#include "base/testing/fake_clock.h"
#include "base/testing/temp_dir.h"
#include "coordinator/lifecycle/job_controller.h"
#include "coordinator/lifecycle/testing/fixed_plan.h"
#include "coordinator/store/sqlite/sqlite_store.h"

namespace ringleader::lifecycle::testing {

class FakeSession : public session::Session {
 public:
  FakeSession(std::string node, std::string incarnation, const Clock* clock)
      : node_(std::move(node)),
        incarnation_(std::move(incarnation)),
        certificate_("uri ringleader://node/" + node_),
        clock_(clock) {}

  const std::string& node() const override { return node_; }
  const std::string& incarnation() const override { return incarnation_; }
  std::string certificate() const override { return certificate_; }
  absl::Time last_heard() const override { return heard_ ? *heard_ : clock_->Now(); }
  void Send(v1::CoordinatorMessage message) override { sent_.push_back(std::move(message)); }
  void Taken() override { ++taken_; }
  void Close(const absl::Status& status) override { closed_ = status; }
  bool shut() const override { return shut_; }
  void Shut() { shut_ = true; }

  int taken() const { return taken_; }
  void ShowNoCertificate() { certificate_.clear(); }
  void FallSilent() { heard_ = clock_->Now(); }
  void HearAgain() { heard_.reset(); }
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
  std::string certificate_;
  const Clock* const clock_;
  std::optional<absl::Time> heard_;
  std::optional<absl::Status> closed_;
  bool shut_ = false;
  int taken_ = 0;
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
  absl::Status Write(absl::FunctionRef<absl::Status(store::WriteTransaction&)> body,
                     store::Need need) override {
    return store_->Write(
        [&](store::WriteTransaction& transaction) {
          const absl::Status status = body(transaction);
          return full ? absl::ResourceExhaustedError("the disk is full") : status;
        },
        need);
  }
  absl::Status Space() override {
    return scarce ? absl::ResourceExhaustedError("the disk is full") : absl::OkStatus();
  }
  uint64_t revision() const override { return store_->revision(); }
  std::unique_ptr<Subscription> Subscribe(
      std::function<void(const store::Change&)> listener) override {
    return store_->Subscribe(std::move(listener));
  }

  void MoveTo(store::Store* store) { store_ = store; }

  std::atomic<bool> full = false;    // no commit succeeds
  std::atomic<bool> scarce = false;  // there is room for what must be written, and no more

 private:
  store::Store* store_;
};

class ControllerTest : public ::testing::Test {
 protected:
  ControllerTest() : sqlite_(Open()), store_(sqlite_.get()) { Restart(); }

  // Of a plan that is made at once.
  absl::StatusOr<JobController::Preview> PreviewOf(const v1::JobSpec& spec) {
    absl::StatusOr<JobController::Preview> got = absl::UnknownError("not told");
    controller_->PreviewJob(spec, {}, "", [&](auto preview) { got = std::move(preview); });
    return got;
  }

  std::unique_ptr<store::Store> Open() {
    auto store = store::OpenSqliteStore({.path = dir_.File("db")});
    EXPECT_TRUE(store.ok()) << store.status();
    return *std::move(store);
  }

  // Another coordinator on the same store.
  void Restart() {
    controller_.reset();
    auto controller = JobController::Create(options_, &store_, &plans_, &clock_, metrics_.get());
    ASSERT_TRUE(controller.ok()) << controller.status();
    controller_ = *std::move(controller);
  }

  // What blocks until its batch is through, and whatever follows from that at once.
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
    controller_->RunOnce();
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
  absl::StatusOr<v1::Job> CreateIn(const std::string& name, const std::string& directory) {
    v1::JobSpec spec = Spec(name);
    spec.mutable_checkpoint()->set_directory(directory);
    return Do([&] { return controller_->CreateJob(spec, {}); });
  }

  std::shared_ptr<FakeSession> Connect(const std::string& node, const std::string& incarnation,
                                       const std::vector<v1::RunningAttempt>& running = {},
                                       uint64_t acknowledged = 0) {
    auto session = std::make_shared<FakeSession>(node, incarnation, &clock_);
    v1::WorkerHello hello;
    hello.set_node("nodes/" + node);
    hello.set_incarnation(incarnation);
    hello.set_version(worker_version_);
    hello.mutable_inventory()->set_trainers(2);
    hello.set_acknowledged_sequence(acknowledged);
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
    EXPECT_THAT(commands, ::testing::SizeIs(1));
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
  FixedPlan plans_;
  std::unique_ptr<store::Store> sqlite_;
  FlakyStore store_;
  std::unique_ptr<Metrics> metrics_;  // none, unless a test makes them before a Restart()
  std::unique_ptr<JobController> controller_;
  std::string worker_version_ = std::string(kVersion);
  uint32_t attempt_ = 1;  // whose, in Say()
  uint64_t token_ = 0;
};

}  // namespace ringleader::lifecycle::testing
