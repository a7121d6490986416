// A trainer's end of its worker's socket, beside a worker played by the test.
#include "worker/trainer/link/agent_link.h"

#include <unistd.h>

#include <chrono>
#include <functional>
#include <future>
#include <optional>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/boot_clock.h"
#include "base/process/progress.h"
#include "base/protocol_version.h"
#include "base/testing/temp_dir.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/trainer/testing/fake_agent.h"

namespace ringleader::trainer {
namespace {

using ::testing::ElementsAre;
using testing::FakeAgent;
using ::testing::HasSubstr;
using testing::RankLog;

v1::JobSpec Spec(int context) {
  v1::JobSpec spec;
  spec.set_name("tiny");
  spec.mutable_data()->set_sequence_length(1024);
  spec.mutable_parallelism()->set_context(context);
  spec.mutable_training()->set_steps(10);
  spec.mutable_resources()->set_trainers(context);
  return spec;
}

class AgentLinkTest : public ::testing::Test {
 protected:
  TempDir directory_;
  std::string socket_ = directory_.File("agent.sock");
  absl::Mutex mutex_;
  std::string left_ ABSL_GUARDED_BY(mutex_);
  std::vector<absl::Time> leases_ ABSL_GUARDED_BY(mutex_);

  std::unique_ptr<AgentLink> Attach(uint64_t token = FakeAgent::kToken) {
    return AgentLink::Attach(
        {.socket = socket_, .rank = 0, .fencing_token = token},
        [this](const std::string& reason) {
          absl::MutexLock lock(&mutex_);
          left_ = reason;
        },
        [this](absl::Time end) {
          absl::MutexLock lock(&mutex_);
          leases_.push_back(end);
        });
  }
  std::string WaitUntilLeft() {
    absl::MutexLock lock(&mutex_);
    const auto left = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !left_.empty(); };
    mutex_.AwaitWithTimeout(absl::Condition(&left), absl::Seconds(20));
    return left_;
  }
  // Whether `holds` comes true; false after 20 s.
  static bool Becomes(const std::function<bool()>& holds) {
    const absl::Time deadline = absl::Now() + absl::Seconds(20);
    while (!holds() && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(1));
    return holds();
  }
};

TEST_F(AgentLinkTest, WalksThroughAnAttempt) {
  FakeAgent agent(socket_, Spec(1), {}, 1);
  auto link = Attach();
  const Assignment assignment = link->WaitForAssignment().value();
  EXPECT_EQ(assignment.job.name, "tiny");
  EXPECT_EQ(assignment.listen_host, "127.0.0.1");
  EXPECT_THAT(link->ReportReady("127.0.0.1:5")->addresses, ElementsAre("127.0.0.1:5"));

  link->SetPlace(3, "backward");
  StepRecord step;
  step.step = 1;
  step.loss = 2.5;
  link->ReportStep(step);
  link->ReportEval({.step = 1,
                    .outcome = {.loss = 2.0, .answers = {{"far", 4, 3, 0.5}}},
                    .dense = EvalOutcome{.loss = 1.5, .answers = {{"far", 4, 4, 0.25}}}});
  link->ReportCheckpoint(1, "/checkpoints/step-1", 10, 0.5);
  link->ReportModel("/checkpoints/model");
  EXPECT_TRUE(agent.WaitFor([](const std::vector<RankLog>& logs) {
    return !logs[0].pulses.empty() && logs[0].pulses.back().phase() == "backward";
  }));
  link->ReportResult({.kind = Result::Kind::kCompleted});
  link->Close();

  const RankLog log = agent.Finish()[0];
  ASSERT_EQ(log.steps.size(), 1u);
  EXPECT_EQ(log.steps[0].loss(), 2.5);
  ASSERT_EQ(log.evals.size(), 1u);
  EXPECT_EQ(log.evals[0].loss(), 2.0);
  EXPECT_EQ(log.evals[0].answers(0).task(), "far");
  EXPECT_EQ(log.evals[0].answers(0).right(), 3u);
  EXPECT_EQ(log.evals[0].dense().loss(), 1.5);
  EXPECT_EQ(log.evals[0].dense().answers(0).right(), 4u);
  EXPECT_EQ(log.checkpoints[0].path(), "/checkpoints/step-1");
  EXPECT_EQ(log.model_path, "/checkpoints/model");
  EXPECT_EQ(log.result->outcome(), v1::TrainerExited::COMPLETED);
  absl::MutexLock lock(&mutex_);
  EXPECT_EQ(left_, "");
}

TEST_F(AgentLinkTest, SaysItsSecretAndHearsWhoseCertificatesItsPeersHave) {
  FakeAgent agent(socket_, Spec(2), {}, 2);  // the other rank never comes
  const auto link = AgentLink::Attach(
      {.socket = socket_, .fencing_token = FakeAgent::kToken, .secret = "rlt_mine"},
      [](const std::string&) {}, [](absl::Time) {});
  ASSERT_TRUE(link->WaitForAssignment().ok());
  v1::AgentMessage message;
  for (const char* node : {"a", "b"}) {
    message.mutable_connect()->add_addresses("127.0.0.1:1");
    message.mutable_connect()->add_certificates(absl::StrCat("uri ringleader://node/", node));
  }
  agent.Send(0, message);
  EXPECT_THAT(link->ReportReady("127.0.0.1:5")->certificates,
              ElementsAre("uri ringleader://node/a", "uri ringleader://node/b"));
  EXPECT_TRUE(agent.WaitFor(
      [](const std::vector<RankLog>& logs) { return logs[0].hello->secret() == "rlt_mine"; }));
}

TEST_F(AgentLinkTest, PlansWaitUntilTaken) {
  FakeAgent agent(socket_, Spec(1), {}, 1);
  auto link = Attach();
  ASSERT_TRUE(link->WaitForAssignment().ok());
  EXPECT_EQ(link->TakePlan(), "");
  v1::AgentMessage message;
  message.mutable_plan()->set_version(5);
  message.mutable_plan()->set_effective_step(9);
  agent.Send(0, message);
  message.Clear();
  message.mutable_stop()->set_mode(v1::StopTrainers::CHECKPOINT);
  agent.Send(0, message);
  // Messages arrive in order, so the plan is there once the stop is.
  ASSERT_TRUE(Becomes([&] { return link->stop_requested(); }));
  const std::string bytes = link->TakePlan();
  EXPECT_EQ(link->ParsePlan(bytes).value().version, 5u);
  EXPECT_EQ(link->ParsePlan(bytes).value().effective_step, 9u);
  EXPECT_EQ(link->TakePlan(), "");
  EXPECT_FALSE(link->ParsePlan("\xff\xff").ok());
}

TEST_F(AgentLinkTest, LeavesAtOnceWhenToldToAbort) {
  FakeAgent agent(socket_, Spec(1), {}, 1);
  auto link = Attach();
  ASSERT_TRUE(link->WaitForAssignment().ok());
  v1::AgentMessage message;
  message.mutable_stop()->set_mode(v1::StopTrainers::ABORT);
  message.mutable_stop()->set_reason("rank 3 failed");
  agent.Send(0, message);
  EXPECT_EQ(WaitUntilLeft(), "rank 3 failed");
}

TEST_F(AgentLinkTest, HandsOnItsLeaseAndEachRenewal) {
  FakeAgent agent(socket_, Spec(1), {}, 1);
  const absl::Time first = BootNow() + absl::Hours(2), second = BootNow() + absl::Hours(3);
  agent.set_lease_end(first);
  auto link = Attach();
  ASSERT_TRUE(link->WaitForAssignment().ok());
  agent.Send(0, testing::LeaseUntil(second));
  agent.Send(0, testing::Stop(v1::StopTrainers::ABORT));
  WaitUntilLeft();  // messages arrive in order
  absl::MutexLock lock(&mutex_);
  EXPECT_THAT(leases_, ElementsAre(first, second));
}

TEST_F(AgentLinkTest, BeginsNothingWithoutALease) {
  FakeAgent agent(socket_, Spec(1), {}, 1);
  agent.set_lease_end(std::nullopt);
  EXPECT_THAT(std::string(Attach()->WaitForAssignment().status().message()), HasSubstr("no lease"));
}

TEST_F(AgentLinkTest, LeavesWhenTheWorkerIsGoneOrRefusesIt) {
  FakeAgent agent(socket_, Spec(1), {}, 1);
  auto link = Attach(/*token=*/1);
  EXPECT_THAT(WaitUntilLeft(), HasSubstr("link to the worker is gone"));
  EXPECT_FALSE(link->WaitForAssignment().ok());
}

TEST_F(AgentLinkTest, RefusesAWorkerOfAnotherProtocolVersion) {
  for (const uint32_t version : {0u, kProtocolVersion + 1}) {
    FakeAgent agent(socket_, Spec(1), {}, 1);
    agent.set_protocol_version(version);
    const absl::Status refused = Attach()->WaitForAssignment().status();
    // Not an error of the job: another attempt may find a worker of this release.
    EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable) << version;
    EXPECT_THAT(std::string(refused.message()),
                HasSubstr(absl::StrCat("speaks protocol version ", version)));
  }
}

TEST_F(AgentLinkTest, LeavesWhenToldWhatItDoesNotKnow) {
  FakeAgent agent(socket_, Spec(1), {}, 1);
  auto link = Attach();
  ASSERT_TRUE(link->WaitForAssignment().ok());
  v1::AgentMessage message;
  message.mutable_stop()->set_mode(static_cast<v1::StopTrainers::Mode>(7));
  agent.Send(0, message);
  EXPECT_THAT(WaitUntilLeft(), HasSubstr("mode 7"));
}

TEST_F(AgentLinkTest, AStopBeforeTheFirstStepEndsTheWait) {
  FakeAgent agent(socket_, Spec(2), {}, 2);  // the second rank never comes
  auto link = Attach();
  ASSERT_TRUE(link->WaitForAssignment().ok());
  std::thread stop([&] {
    agent.WaitFor([](const std::vector<RankLog>& logs) { return !logs[0].address.empty(); });
    link->RequestStop("SIGTERM");
  });
  EXPECT_TRUE(absl::IsCancelled(link->ReportReady("127.0.0.1:5").status()));
  stop.join();
}

TEST_F(AgentLinkTest, SaysWhoItIsAndWhereItListens) {
  FakeAgent agent(socket_, Spec(2), {}, 2);
  const auto first = Attach();
  const auto second = AgentLink::Attach(
      {.socket = socket_, .rank = 1, .fencing_token = FakeAgent::kToken}, [](const std::string&) {},
      [](absl::Time) {});
  EXPECT_EQ(second->WaitForAssignment().value().job.rank, 1);
  ASSERT_TRUE(first->WaitForAssignment().ok());
  // The other ranks' addresses come once all are ready, by rank.
  std::vector<std::string> peers;
  std::thread ready([&] { peers = first->ReportReady("127.0.0.1:5")->addresses; });
  const auto to_second = second->ReportReady("127.0.0.1:6");
  ready.join();
  EXPECT_THAT(peers, ElementsAre("127.0.0.1:5", "127.0.0.1:6"));
  EXPECT_EQ(to_second->addresses, peers);
  EXPECT_TRUE(agent.WaitFor([](const std::vector<RankLog>& logs) {
    const auto& hello = logs[1].hello;
    return hello.has_value() && hello->rank() == 1 &&
           hello->pid() == static_cast<uint32_t>(getpid()) &&
           hello->protocol_version() == kProtocolVersion;
  }));
}

TEST_F(AgentLinkTest, PulsesTellOfProgressWithinAPhaseAndWhoWaitsIsNotBlamed) {
  FakeAgent agent(socket_, Spec(1), {}, 1);
  const absl::Time attached = BootNow();
  auto link = Attach();
  ASSERT_TRUE(link->WaitForAssignment().ok());
  Progress::Tick();
  const uint64_t count = Progress::count();
  const auto pulses_above = [&](uint64_t progress, size_t many) {
    return agent.WaitFor([=](const std::vector<RankLog>& logs) {
      size_t above = 0;
      for (size_t i = 1; i < logs[0].pulses.size(); ++i) {
        above += logs[0].pulses[i].progress() > logs[0].pulses[i - 1].progress() &&
                 logs[0].pulses[i].progress() > progress;
      }
      return above >= many;
    });
  };
  EXPECT_TRUE(agent.WaitFor([&](const std::vector<RankLog>& logs) {
    return !logs[0].pulses.empty() && logs[0].pulses.back().progress() == count;
  }));
  Progress::Tick();
  EXPECT_TRUE(pulses_above(count, 1));
  {
    const Progress::Waiting for_others;
    EXPECT_TRUE(pulses_above(count + 1, 2));
  }
  link->Close();
  const size_t pulses = agent.Finish()[0].pulses.size();
  EXPECT_LE(static_cast<int64_t>(pulses), absl::ToInt64Seconds(BootNow() - attached));
}

TEST_F(AgentLinkTest, MeasuresWhatItIsAskedForAndTellsWhatItFound) {
  FakeAgent agent(socket_, Spec(1), {}, 1);
  v1::MeasureRequest request;
  request.set_budget_milliseconds(1500);
  agent.set_measure(request);
  auto link = Attach();
  ASSERT_TRUE(link->WaitForAssignment().ok());
  EXPECT_EQ(link->measure().budget_seconds, 1.5);
  balance::Measurements measured;
  measured.links = {{.between_nodes = true, .bytes_per_second = 3}};
  link->ReportMeasurements(measured);
  link->Close();
  const RankLog log = agent.Finish()[0];
  ASSERT_EQ(log.measurements.size(), 1u);
  ASSERT_EQ(log.measurements[0].links_size(), 1);
  EXPECT_EQ(log.measurements[0].links(0).bytes_per_second(), 3);
}

// Its slots are another attempt's by then, and nothing is left to be said.
TEST_F(AgentLinkTest, AWorkerThatKeepsTheStreamIsNotWaitedForForEver) {
  FakeAgent agent(socket_, Spec(1), {}, 1);
  agent.set_keeps_streams();
  auto link = Attach();
  ASSERT_TRUE(link->WaitForAssignment().ok());
  link->ReportResult({.kind = Result::Kind::kStopped});
  std::promise<void> promise;
  const std::future<void> closed = promise.get_future();
  std::thread([link = std::move(link), promise = std::move(promise)]() mutable {
    link.reset();
    promise.set_value();
  }).detach();
  EXPECT_EQ(closed.wait_for(std::chrono::seconds(20)), std::future_status::ready);
  EXPECT_TRUE(agent.WaitFor(
      [](const std::vector<RankLog>& logs) { return logs[0].gone && logs[0].result.has_value(); }));
}

TEST_F(AgentLinkTest, ReportsEveryFieldOfANotice) {
  FakeAgent agent(socket_, Spec(1), {}, 1);
  auto link = Attach();
  ASSERT_TRUE(link->WaitForAssignment().ok());
  link->SetPlace(3, "backward");
  link->ReportCheckpoint(4, "/checkpoints/step-4", 10, 0.5);
  link->ReportEval({.step = 4, .outcome = {.loss = 2.0, .tokens = 512}, .seconds = 0.25});
  StepRecord step;
  step.step = 5;
  link->ReportStep(step);
  EXPECT_TRUE(agent.WaitFor([](const std::vector<RankLog>& logs) {
    return !logs[0].pulses.empty() && logs[0].pulses.back().step() == 3;
  }));
  link->ReportResult({.kind = Result::Kind::kFailed,
                      .message = "rank 2 is gone",
                      .retryable = true,
                      .collateral = true});
  link->Close();
  link->ReportModel("/too/late");
  const RankLog log = agent.Finish()[0];
  ASSERT_EQ(log.checkpoints.size(), 1u);
  EXPECT_EQ(log.checkpoints[0].step(), 4u);
  EXPECT_EQ(log.checkpoints[0].bytes(), 10u);
  EXPECT_EQ(log.checkpoints[0].seconds(), 0.5);
  ASSERT_EQ(log.evals.size(), 1u);
  EXPECT_EQ(log.evals[0].tokens(), 512u);
  ASSERT_EQ(log.steps.size(), 1u);
  EXPECT_EQ(log.steps[0].step(), 5u);
  EXPECT_EQ(log.model_path, "") << "nothing is reported behind the result";
  ASSERT_TRUE(log.result.has_value());
  EXPECT_EQ(log.result->outcome(), v1::TrainerExited::FAILED);
  EXPECT_EQ(log.result->message(), "rank 2 is gone");
  EXPECT_TRUE(log.result->retryable());
  EXPECT_TRUE(log.result->collateral());
}

TEST_F(AgentLinkTest, AResultIsAStopOrAFailureOfItsOwn) {
  for (const auto& [kind, outcome] : {std::pair{Result::Kind::kStopped, v1::TrainerExited::STOPPED},
                                      {Result::Kind::kFailed, v1::TrainerExited::FAILED}}) {
    FakeAgent agent(socket_, Spec(1), {}, 1);
    auto link = Attach();
    ASSERT_TRUE(link->WaitForAssignment().ok());
    link->ReportResult({.kind = kind});
    link.reset();  // as good as Close
    const RankLog log = agent.Finish()[0];
    ASSERT_TRUE(log.result.has_value());
    EXPECT_EQ(log.result->outcome(), outcome);
    EXPECT_FALSE(log.result->retryable());
    EXPECT_FALSE(log.result->collateral());
  }
}

TEST_F(AgentLinkTest, ListensWhereItIsTold) {
  FakeAgent agent(socket_, Spec(1), {}, 1);
  agent.set_listen_host("10.0.0.7");
  EXPECT_EQ(Attach()->WaitForAssignment().value().listen_host, "10.0.0.7");
}

TEST_F(AgentLinkTest, ListensOnLoopbackWhenToldNothing) {
  FakeAgent agent(socket_, Spec(1), {}, 1);
  agent.set_listen_host("");
  EXPECT_EQ(Attach()->WaitForAssignment().value().listen_host, "127.0.0.1");
}

TEST_F(AgentLinkTest, TheNewestPlanAndTraceAreTakenOnce) {
  v1::JobSpec spec = Spec(4);
  spec.mutable_parallelism()->set_heads(2);
  FakeAgent agent(socket_, spec, {}, 1);
  auto link = Attach();
  EXPECT_FALSE(link->WaitForAssignment().ok()) << "one rank cannot be four";
  EXPECT_EQ(link->TakeProfileSteps(), 0u);
  v1::AgentMessage message;
  for (const uint32_t number : {5, 6}) {
    message.mutable_plan()->set_version(number);
    agent.Send(0, message);
    message.mutable_profile()->set_steps(number);
    agent.Send(0, message);
  }
  message.mutable_stop()->set_mode(v1::StopTrainers::CHECKPOINT);
  agent.Send(0, message);
  ASSERT_TRUE(Becomes([&] { return link->stop_requested(); }));
  EXPECT_EQ(link->TakeProfileSteps(), 6u);
  EXPECT_EQ(link->TakeProfileSteps(), 0u);
  const Plan plan = link->ParsePlan(link->TakePlan()).value();
  EXPECT_EQ(plan.version, 6u);
  EXPECT_EQ(plan.ring.inner, 2) << "of as many pairs as the assignment says";
  EXPECT_EQ(link->TakePlan(), "");
}

TEST_F(AgentLinkTest, LeavesWhenTheMessageIsOfAKindItDoesNotKnow) {
  FakeAgent agent(socket_, Spec(1), {}, 1);
  auto link = Attach();
  ASSERT_TRUE(link->WaitForAssignment().ok());
  agent.Send(0, v1::AgentMessage());
  EXPECT_THAT(WaitUntilLeft(), HasSubstr("no kind that this trainer knows"));
}

TEST_F(AgentLinkTest, AWaitEndsWithTheLinkOrAStop) {
  FakeAgent agent(socket_, Spec(2), {}, 2);
  auto link = Attach();
  ASSERT_TRUE(link->WaitForAssignment().ok());
  // Another rank that says who it is and nothing else, to be refused: the link's own end.
  auto refused = Attach(/*token=*/1);
  const absl::Status gone = refused->WaitForAssignment().status();
  EXPECT_EQ(gone,
            absl::UnavailableError("the link to the worker ended while waiting for an assignment"));
  EXPECT_EQ(refused->ReportReady("127.0.0.1:5").status(),
            absl::UnavailableError(
                "the link to the worker ended while waiting for the other ranks' addresses"));
  EXPECT_FALSE(link->stop_requested());
  link->RequestStop("SIGTERM");
  EXPECT_TRUE(link->stop_requested());
  EXPECT_EQ(link->ReportReady("127.0.0.1:5").status(),
            absl::CancelledError("asked to stop before the first step"));
}

}  // namespace
}  // namespace ringleader::trainer
