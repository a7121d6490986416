// What the controller writes down and says, message by message, and what of it outlasts a commit
// that failed.
#include "coordinator/lifecycle/testing/controller_test.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <prometheus/registry.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/protocol_version.h"
#include "base/testing/equals_text.h"
#include "proto/timestamps.h"

namespace ringleader::lifecycle {
namespace {

using ::testing::ElementsAre;
using testing::FakeSession;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class ControllerMessagesTest : public testing::ControllerTest {
 protected:
  // The test's clock begins here.
  static constexpr int64_t kBegin = int64_t{24} * 365 * 50 * 3600;

  static v1::AttemptEvent Exited(uint32_t rank, bool retryable) {
    v1::AttemptEvent event;
    event.mutable_trainer_exited()->set_rank(rank);
    event.mutable_trainer_exited()->set_outcome(v1::TrainerExited::FAILED);
    event.mutable_trainer_exited()->set_retryable(retryable);
    return event;
  }
  static v1::AttemptEvent Eval(uint64_t step, double seconds) {
    v1::AttemptEvent event;
    event.mutable_eval()->set_step(step);
    event.mutable_eval()->set_seconds(seconds);
    return event;
  }
  static v1::AttemptEvent Checkpoint(uint64_t step, double seconds) {
    v1::AttemptEvent event;
    event.mutable_checkpoint()->set_step(step);
    event.mutable_checkpoint()->set_seconds(seconds);
    return event;
  }
  std::vector<uint64_t> Evals() {
    std::vector<uint64_t> steps;
    const absl::Status read = sqlite_->Read([&](store::ReadTransaction& transaction) {
      const auto page = transaction.ListEvals("j", 0, 100);
      for (const v1::EvalReport& eval : page->evals) steps.push_back(eval.step());
      return page.status();
    });
    EXPECT_TRUE(read.ok()) << read;
    return steps;
  }
};

TEST_F(ControllerMessagesTest, AJobIsCreatedWithAllThatIsKnownOfIt) {
  v1::ModelShape shape;
  shape.set_layers(7);
  const absl::StatusOr<v1::Job> created = Do([&] {
    return controller_->CreateJob(Spec("j"), {}, {.owner = "alice", .project = "ocean"}, shape);
  });
  ASSERT_TRUE(created.ok()) << created.status();
  const std::string expected = absl::StrFormat(
      R"(name: "jobs/j" uid: "j-%x" etag: "1" owner: "alice" project: "ocean" state: PENDING
         spec { name: "j" resources { trainers: 2 } training { steps: 10 }
                scheduling { max_retries: 1 } }
         model_shape { layers: 7 } progress { total_steps: 10 } sequence: 1 revision: 1
         create_time { seconds: %d } pending_time { seconds: %d })",
      kBegin * 1'000'000'000, kBegin, kBegin);
  EXPECT_THAT(*created, EqualsText(expected));
}

TEST_F(ControllerMessagesTest, AWorkerIsToldAllThatItLivesBy) {
  worker_version_ = "0.0.9";
  const auto session = Connect("a", "folder.1");
  session->Commands();
  EXPECT_THAT(session->welcome(),
              EqualsText(absl::StrFormat("epoch: 1 lease_milliseconds: 10000 "
                                         "heartbeat_milliseconds: 2000 fence_milliseconds: 90000 "
                                         "protocol_version: %d",
                                         kProtocolVersion)));
  worker_version_ = std::string(kVersion);
  RunJob();  // another session, which got as far as 3
  EXPECT_THAT(controller_->ListNodes(),
              ElementsAre(EqualsText(absl::StrFormat(
                  R"(name: "nodes/a" state: READY inventory { trainers: 2 } trainers_in_use: 2
                     jobs: "jobs/j" last_heartbeat_time { seconds: %d } create_time { seconds: %d }
                     worker_version: "%s" session_epoch: 2 fence_milliseconds: 90000
                     certificate: "uri ringleader://node/a")",
                  kBegin, kBegin, std::string(kVersion)))));
}

TEST_F(ControllerMessagesTest, AStrayIsStoppedByItsOwnNameAndToken) {
  v1::RunningAttempt stray;
  stray.set_job("gone");
  stray.set_attempt(4);
  stray.set_fencing_token(77);
  stray.add_ranks(1);
  const auto session = Connect("a", "folder.1", {stray});
  EXPECT_THAT(session->Commands(), ElementsAre(EqualsText(
                                       R"(job: "gone" attempt: 4 fencing_token: 77
         stop { mode: ABORT grace_milliseconds: 5000 reason: "the attempt was given up" })")));
  // It holds its slot until it has ended, or is not there any more.
  ASSERT_TRUE(Create("j").ok());
  EXPECT_THAT(session->Commands(), IsEmpty());
  EXPECT_THAT(Connect("a", "folder.1")->Commands(), SizeIs(1));
}

TEST_F(ControllerMessagesTest, EvaluationsAndCheckpointsAreTakenInTheirRange) {
  const auto session = RunJob();
  uint64_t sequence = 3;
  for (const uint64_t step : {0, 10, 11}) {
    for (const double seconds : {0.0, -1.0}) {
      Say(session, ++sequence, Eval(step, seconds));
      Say(session, ++sequence, Checkpoint(step, seconds));
    }
  }
  EXPECT_THAT(Evals(), ElementsAre(0, 10));
  EXPECT_EQ(Job().first_eval().step(), 0u);
  EXPECT_EQ(Job().last_eval().step(), 10u);
  EXPECT_EQ(Job().progress().checkpoint_step(), 10u);
  Say(session, ++sequence, Checkpoint(9, -1));
  Say(session, ++sequence, Eval(9, -1));
  EXPECT_EQ(Job().last_eval().step(), 10u);
  EXPECT_THAT(Evals(), SizeIs(2));
  EXPECT_EQ(session->acknowledged(), sequence);
}

// The first attempt's last reports come when the second runs elsewhere.
TEST_F(ControllerMessagesTest, StepsOfAnEarlierAttemptFillTheRecordOfTheJobThatGoesOn) {
  auto session = RunJob();
  Say(session, 4, Step(1, 0));
  Say(session, 5, Step(1, 1));
  Say(session, 6, Exited(0, true));
  Say(session, 7, Exited(1, true));
  clock_.Advance(options_.retry_backoff);
  controller_->RunOnce();
  ASSERT_EQ(Job().attempts_size(), 2);
  Say(session, 8, Step(2, 0));
  EXPECT_THAT(Steps(), ElementsAre(1, 2));
  // Its ends and what it saved are no word about the second.
  Say(session, 9, Exited(0, true));
  Say(session, 10, Ready(0));
  Say(session, 11, Eval(2, 1));
  Say(session, 12, Checkpoint(2, 1));
  EXPECT_EQ(Job().attempts(1).ranks(0).state(), v1::RankStatus::STARTING);
  EXPECT_FALSE(Job().has_last_eval());
  EXPECT_EQ(Job().progress().checkpoint_step(), 0u);
  Say(session, 13, Log("its last words"));
  EXPECT_THAT(LogTexts(), ElementsAre("its last words"));
}

TEST_F(ControllerMessagesTest, ANodeThatFindsRoomIsUsedAtOnce) {
  auto session = Connect("a", "folder.1");
  ASSERT_TRUE(Do([&] { return controller_->CreateJob(Spec("j", 3), {}); }).ok());
  EXPECT_THAT(session->Commands(), IsEmpty());
  v1::WorkerMessage message;
  message.set_sequence(1);
  message.mutable_inventory()->set_trainers(3);
  controller_->OnMessage(session, message);
  controller_->RunOnce();
  EXPECT_THAT(session->Commands(), SizeIs(1));
}

TEST_F(ControllerMessagesTest, TheReplyIsTheRecordThatWasWritten) {
  RunJob();
  const absl::StatusOr<v1::Job> paused =
      Do([&] { return controller_->PauseJob("j", "", {}, nullptr); });
  ASSERT_TRUE(paused.ok()) << paused.status();
  EXPECT_EQ(paused->state(), v1::Job::PAUSING);
  EXPECT_EQ(paused->ShortDebugString(), Job().ShortDebugString());
}

TEST_F(ControllerMessagesTest, AStateThatIsNoneIsRefusedWithTheDatabase) {
  ASSERT_TRUE(Create("j").ok());
  v1::Job job = Job();
  for (const int state : {0, 99}) {
    job.set_state(static_cast<v1::Job::State>(state));
    ASSERT_TRUE(
        store_
            .Write(
                [&](store::WriteTransaction& transaction) { return transaction.UpdateJob(&job); },
                store::Need::kVital)
            .ok());
    const absl::Status refused =
        JobController::Create(options_, &store_, &plans_, &clock_, nullptr).status();
    EXPECT_TRUE(absl::IsDataLoss(refused)) << refused;
    EXPECT_THAT(std::string(refused.message()),
                HasSubstr(absl::StrCat("jobs/j is in state ", state)));
  }
}

TEST_F(ControllerMessagesTest, AfterAGapNothingMoreOfTheSessionIsTaken) {
  auto session = RunJob();
  Say(session, 5, Log("too early"));
  ASSERT_TRUE(session->closed().has_value());
  EXPECT_THAT(std::string(session->closed()->message()), HasSubstr("sequence 5 came after 3"));
  Say(session, 4, Log("of a session that is over"));
  EXPECT_THAT(LogTexts(), IsEmpty());
}

// It comes again where its acknowledgement was lost; what has changed since stays.
TEST_F(ControllerMessagesTest, WhatWasTakenInIsNotTakenInAgain) {
  auto session = RunJob();
  const auto trainers = [this] { return controller_->ListNodes().at(0).inventory().trainers(); };
  v1::WorkerMessage message;
  for (const uint64_t sequence : {4, 5}) {
    message.set_sequence(sequence);
    message.mutable_inventory()->set_trainers(static_cast<uint32_t>(sequence));
    controller_->OnMessage(session, message);
    controller_->RunOnce();
    EXPECT_EQ(trainers(), sequence);
  }
  message.set_sequence(4);
  message.mutable_inventory()->set_trainers(4);
  controller_->OnMessage(session, message);
  controller_->RunOnce();
  EXPECT_EQ(trainers(), 5u);
  EXPECT_FALSE(session->closed().has_value());
  Restart();
  EXPECT_EQ(trainers(), 5u) << "it was written down";
}

TEST_F(ControllerMessagesTest, AMessageThatSaysNothingChangesNothing) {
  auto session = RunJob();
  v1::WorkerMessage message;
  message.set_sequence(4);
  controller_->OnMessage(session, message);
  controller_->RunOnce();
  EXPECT_EQ(controller_->ListNodes().at(0).state(), v1::Node::READY);
  EXPECT_EQ(Job().attempts(0).state(), v1::Attempt::RUNNING);
  EXPECT_EQ(session->acknowledged(), 4);
}

TEST_F(ControllerMessagesTest, RanksLearnNamesOnlyWhereThereAreRoles) {
  for (const bool roles : {true, false}) {
    auto session = std::make_shared<FakeSession>("a", roles ? "f.1" : "f.2", &clock_);
    if (!roles) session->ShowNoCertificate();
    v1::WorkerHello hello;
    hello.set_node("nodes/a");
    hello.set_incarnation(session->incarnation());
    hello.mutable_inventory()->set_trainers(2);
    controller_->OnHello(session, hello);
    controller_->RunOnce();
    if (roles) {
      ASSERT_TRUE(Create("j").ok());
    }
    clock_.Advance(options_.retry_backoff);  // the first one's process is gone
    controller_->RunOnce();
    const v1::Command start = session->Commands().back();
    attempt_ = start.attempt();
    token_ = start.fencing_token();
    Acknowledge(session, 1, start.command_id());
    Say(session, 2, Ready(0));
    Say(session, 3, Ready(1));
    const std::vector<v1::Command> connect = session->Commands();
    ASSERT_THAT(connect, SizeIs(1));
    EXPECT_THAT(connect[0].connect(),
                EqualsText(absl::StrCat("addresses: 'host:1' addresses: 'host:1'",
                                        roles ? "certificates: 'uri ringleader://node/a' "
                                                "certificates: 'uri ringleader://node/a'"
                                              : "")));
    session->FallSilent();
    clock_.Advance(options_.lease + absl::Milliseconds(1));
  }
}

TEST_F(ControllerMessagesTest, ThePlannerHearsWhichJobsBeganAndWhichAreOver) {
  auto session = RunJob();
  EXPECT_THAT(plans_.started, ElementsAre("jobs/j"));
  ASSERT_THAT(plans_.started_on, SizeIs(1));
  EXPECT_EQ(plans_.started_on[0].trainers(), 2u);
  EXPECT_THAT(plans_.forgotten, IsEmpty());
  Say(session, 4, Exited(0, false));
  EXPECT_THAT(plans_.forgotten, IsEmpty());
  Say(session, 5, Exited(1, false));
  EXPECT_EQ(Job().state(), v1::Job::FAILED);
  EXPECT_THAT(plans_.forgotten, ElementsAre("jobs/j"));
}

// Its rank was given up for lost beside the job's failure, and its end makes room at last.
TEST_F(ControllerMessagesTest, TheEndOfAnAttemptThatWasOverMakesRoomAtOnce) {
  auto session = RunJob();
  session->FallSilent();
  Say(session, 4, Exited(0, false));
  clock_.Advance(options_.lease + options_.blame_window + absl::Seconds(1));
  controller_->RunOnce();
  clock_.Advance(options_.blame_window);
  controller_->RunOnce();
  ASSERT_EQ(Job().state(), v1::Job::FAILED);
  const absl::Status deleted = Do([&] { return controller_->DeleteJob("j", "", {}, nullptr); });
  EXPECT_THAT(std::string(deleted.message()),
              HasSubstr("FAILED, but trainers of it may still be alive"));
  v1::RunningAttempt running = Running();
  running.clear_ranks();
  running.add_ranks(1);
  session = Connect("a", "folder.1", {running}, 4);
  session->Commands();
  ASSERT_TRUE(Create("next").ok());
  EXPECT_EQ(Job("next").state(), v1::Job::PENDING);
  Say(session, 5, Exited(1, false));
  const std::vector<v1::Command> commands = session->Commands();
  ASSERT_THAT(commands, SizeIs(1));
  EXPECT_EQ(commands[0].job(), "next");
  const auto no = [](const v1::Job& job) { return absl::PermissionDeniedError(job.name()); };
  EXPECT_EQ(Do([&] { return controller_->DeleteJob("j", "", {}, no); }),
            absl::PermissionDeniedError("jobs/j"));
  EXPECT_TRUE(Do([&] { return controller_->DeleteJob("j", "", {}, nullptr); }).ok());
}

TEST_F(ControllerMessagesTest, NothingIsSaidOfWhatCouldNotBeWritten) {
  auto session = Connect("a", "folder.1");
  session->Commands();
  store_.full = true;
  EXPECT_FALSE(Create("j").ok());
  auto other = Connect("b", "folder.2");
  store_.full = false;
  controller_->RunOnce();
  ASSERT_TRUE(Create("k").ok());
  EXPECT_THAT(session->Commands(), IsEmpty());
  EXPECT_THAT(other->Commands(), IsEmpty());
  EXPECT_EQ(other->welcome().epoch(), 0u);
  ASSERT_TRUE(session->closed().has_value());
  EXPECT_TRUE(absl::IsUnavailable(*session->closed())) << "it has to say hello again";
}

TEST_F(ControllerMessagesTest, APlanWhoseBeginningWasNotWrittenIsMadeAnew) {
  Connect("a", "folder.1");
  plans_.held = true;
  ASSERT_TRUE(Create("j").ok());
  ASSERT_THAT(plans_.waiting, SizeIs(1));
  store_.full = true;
  EXPECT_FALSE(Create("k").ok());
  store_.full = false;
  EXPECT_TRUE(*plans_.waiting[0].request.is_overtaken);
  auto again = Connect("a", "folder.1");
  ASSERT_THAT(plans_.waiting, SizeIs(2));
  plans_.waiting[0].done(testing::FixedPlan::Made());
  controller_->RunOnce();
  EXPECT_THAT(again->Commands(), IsEmpty()) << "nobody waits for that one";
  plans_.waiting[1].done(testing::FixedPlan::Made());
  controller_->RunOnce();
  EXPECT_THAT(again->Commands(), SizeIs(1));
}

TEST_F(ControllerMessagesTest, AnAttemptStaysUnknownAcrossARestartUntilItsLastNodeSaysHello) {
  auto a = Connect("a", "a.1"), b = Connect("b", "b.1");
  ASSERT_TRUE(Do([&] { return controller_->CreateJob(Spec("j", 4), {}); }).ok());
  const v1::Command starts[] = {a->Commands().at(0), b->Commands().at(0)};
  token_ = starts[0].fencing_token();
  Acknowledge(a, 1, starts[0].command_id());
  Acknowledge(b, 1, starts[1].command_id());
  for (const uint32_t rank : {0, 1}) Say(a, 2 + rank, Ready(rank));
  for (const uint32_t rank : {2, 3}) Say(b, rank, Ready(rank));
  ASSERT_EQ(Job().state(), v1::Job::RUNNING);
  b->FallSilent();
  clock_.Advance(options_.lease + absl::Milliseconds(1));
  controller_->RunOnce();
  ASSERT_EQ(Job().state(), v1::Job::UNKNOWN);
  Restart();
  v1::RunningAttempt on_a = Running(), on_b = Running();
  on_b.clear_ranks();
  on_b.add_ranks(2);
  on_b.add_ranks(3);
  a = Connect("a", "a.1", {on_a}, 3);
  EXPECT_EQ(Job().state(), v1::Job::UNKNOWN);
  b = Connect("b", "b.1", {on_b}, 3);
  EXPECT_EQ(Job().state(), v1::Job::RUNNING);
}

TEST_F(ControllerMessagesTest, AQueuedJobSaysWhatIsFreeAsNodesComeAndGo) {
  auto session = Connect("a", "folder.1");
  ASSERT_TRUE(Do([&] { return controller_->CreateJob(Spec("j", 4), {}); }).ok());
  const std::string before = Job().state_reason();
  session->FallSilent();
  clock_.Advance(options_.lease + absl::Milliseconds(1));
  controller_->RunOnce();
  EXPECT_NE(Job().state_reason(), before);
}

TEST_F(ControllerMessagesTest, WhatHappensIsCounted) {
  metrics_ = std::make_unique<Metrics>("test");
  Restart();
  auto session = RunJob();
  Say(session, 4, Step(1, 0));
  Say(session, 5, Step(1, 1));
  session->FallSilent();
  clock_.Advance(options_.lease + absl::Milliseconds(1));
  controller_->RunOnce();
  session = Connect("a", "folder.1", {Running()}, 5);
  Say(session, 6, Exited(0, false));
  Say(session, 7, Exited(1, false));
  store_.full = true;
  EXPECT_FALSE(Create("k").ok());
  store_.full = false;
  std::map<std::string, double> counted;
  for (const prometheus::MetricFamily& family : metrics_->registry().Collect()) {
    if (family.type != prometheus::MetricType::Counter) continue;
    for (const prometheus::ClientMetric& metric : family.metric) {
      const std::string label = metric.label.empty() ? "" : metric.label[0].value;
      if (metric.counter.value > 0) counted[family.name + label] = metric.counter.value;
    }
  }
  const std::string prefix = "ringleader_coordinator_";
  EXPECT_EQ(counted[prefix + "worker_sessions_total"], 2);
  EXPECT_EQ(counted[prefix + "leases_expired_total"], 1);
  EXPECT_EQ(counted[prefix + "steps_recorded_total"], 1);
  EXPECT_EQ(counted[prefix + "job_transitions_totalPENDING"], 1) << "the store was full for k";
  EXPECT_EQ(counted[prefix + "job_transitions_totalRUNNING"], 2) << "it was out of sight between";
  EXPECT_EQ(counted[prefix + "job_transitions_totalUNKNOWN"], 1);
  EXPECT_EQ(counted[prefix + "job_transitions_totalFAILED"], 1);
  EXPECT_EQ(counted[prefix + "attempts_ended_totalFAILED"], 1);
  EXPECT_GE(counted[prefix + "failed_batches_total"], 1);
  EXPECT_EQ(counted[prefix + "batch_items_total"], 13) << "plans of both jobs are two";
}

// More than a batch takes.
TEST_F(ControllerMessagesTest, WhatCameBeforeTheStopIsTakenIn) {
  constexpr int kEvents = 5000;
  auto session = RunJob();
  for (int i = 0; i < kEvents; ++i) {
    v1::AttemptEvent event = i + 1 < kEvents ? Step(1, /*rank=*/0) : Log("the last words");
    event.set_job("j");
    event.set_attempt(1);
    event.set_fencing_token(token_);
    v1::WorkerMessage message;
    message.set_sequence(static_cast<uint64_t>(4 + i));
    *message.mutable_event() = std::move(event);
    controller_->OnMessage(session, message);
  }
  controller_->Stop();
  EXPECT_THAT(LogTexts(), ElementsAre("the last words"));
}

}  // namespace
}  // namespace ringleader::lifecycle
