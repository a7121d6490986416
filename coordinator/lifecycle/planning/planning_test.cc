// Plans are made outside the controller: what happens while they are, and what becomes of those
// that something has overtaken.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "coordinator/lifecycle/controller_core.h"
#include "coordinator/lifecycle/job_controller.h"
#include "coordinator/lifecycle/lifecycle_metrics.h"
#include "coordinator/lifecycle/testing/controller_test.h"
#include "proto/timestamps.h"

namespace ringleader::lifecycle {
namespace {

using testing::FixedPlan;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class PlanningTest : public testing::ControllerTest {
 protected:
  PlanningTest() { plans_.held = true; }

  // Answers the oldest question.
  void Answer(absl::StatusOr<MadePlan> made = FixedPlan::Made()) {
    ASSERT_FALSE(plans_.waiting.empty());
    const FixedPlan::Waiting oldest = std::move(plans_.waiting.front());
    plans_.waiting.erase(plans_.waiting.begin());
    oldest.done(std::move(made));
    controller_->RunOnce();
  }
  absl::StatusOr<v1::Job> Cancel(const std::string& id) {
    return Do([&] { return controller_->CancelJob(id, "", {}); });
  }
};

TEST_F(PlanningTest, ThePlannedAttemptHoldsItsSlots) {
  auto session = Connect("a", "folder.1");
  ASSERT_TRUE(Create("j").ok());
  ASSERT_TRUE(Create("k").ok());
  ASSERT_THAT(plans_.waiting, SizeIs(1));
  ASSERT_THAT(plans_.waiting[0].request.placements, SizeIs(1));
  EXPECT_EQ(plans_.waiting[0].request.placements[0].node(), "nodes/a");
  EXPECT_EQ(Job("j").state(), v1::Job::PENDING);
  EXPECT_EQ(Job("j").state_reason(), "planning how to run on nodes/a");
  EXPECT_THAT(Job("k").state_reason(), HasSubstr("0 free on"));
  EXPECT_THAT(session->Commands(), IsEmpty());
  Answer();
  EXPECT_EQ(Job("j").state(), v1::Job::STARTING);
  EXPECT_THAT(session->Commands(), SizeIs(1));
  EXPECT_EQ(Job("k").state(), v1::Job::PENDING);
  EXPECT_THAT(plans_.waiting, IsEmpty());
}

TEST_F(PlanningTest, AnAttemptSaysHowItCameToTrain) {
  ASSERT_TRUE(Create("j").ok());
  const absl::Time submitted = clock_.Now();
  clock_.Advance(absl::Seconds(30));
  auto session = Connect("a", "folder.1");
  ASSERT_THAT(plans_.waiting, SizeIs(1));
  const absl::Time placed = clock_.Now();
  clock_.Advance(absl::Seconds(2));
  Answer();
  const absl::Time planned = clock_.Now();
  token_ = session->Commands().at(0).fencing_token();
  clock_.Advance(absl::Seconds(5));
  Say(session, 1, Ready(0));
  EXPECT_FALSE(Job("j").attempts(0).has_ready_time());
  Say(session, 2, Ready(1));
  const absl::Time ready = clock_.Now();
  clock_.Advance(absl::Seconds(60));
  for (const int32_t rank : {0, 1}) {
    v1::AttemptEvent step = Step(1, rank);
    step.mutable_step()->set_step_seconds(4);
    SetTime(ready + absl::Seconds(50), step.mutable_step()->mutable_time());
    Say(session, 3 + static_cast<uint64_t>(rank), step);
  }
  v1::AttemptEvent checkpoint;
  checkpoint.mutable_checkpoint()->set_step(1);
  SetTime(absl::UnixEpoch(), checkpoint.mutable_checkpoint()->mutable_time());
  checkpoint.mutable_checkpoint()->set_attempt(9);  // neither is the worker's to say
  Say(session, 5, checkpoint);
  const v1::Attempt attempt = Job("j").attempts(0);
  EXPECT_EQ(ToTime(attempt.queue_time()), submitted);
  EXPECT_EQ(ToTime(attempt.place_time()), placed);
  EXPECT_EQ(ToTime(attempt.create_time()), planned);
  EXPECT_EQ(ToTime(attempt.ready_time()), ready);
  EXPECT_EQ(ToTime(attempt.train_time()), ready + absl::Seconds(46));
  const absl::Status read = sqlite_->Read([&](store::ReadTransaction& t) {
    const auto notices = t.ListCheckpoints("j");
    EXPECT_THAT(*notices, SizeIs(1));
    EXPECT_EQ(ToTime(notices->at(0).time()), clock_.Now());
    EXPECT_EQ(notices->at(0).attempt(), 1u);
    return absl::OkStatus();
  });
  EXPECT_TRUE(read.ok()) << read;
}

class SlowRankTest : public testing::ControllerTest {
 protected:
  // After an attempt on node a that crashed; b is there, too.
  std::string NodeOfTheSecondAttempt() {
    auto session = RunJob();
    auto other = Connect("b", "other.1");
    uint64_t sequence = 4;
    for (const int32_t rank : {0, 1}) Say(session, sequence++, Step(1, rank));
    for (const uint32_t rank : {0u, 1u}) {
      v1::AttemptEvent crash;
      crash.mutable_trainer_exited()->set_rank(rank);
      crash.mutable_trainer_exited()->set_outcome(v1::TrainerExited::FAILED);
      crash.mutable_trainer_exited()->set_retryable(true);
      Say(session, sequence++, crash);
    }
    clock_.Advance(options_.retry_backoff);
    controller_->RunOnce();
    const v1::Job job = Job();
    return job.attempts_size() == 2 ? job.attempts(1).placements(0).node() : "none";
  }
};

TEST_F(SlowRankTest, TheNextAttemptLeavesItsNode) {
  plans_.slow.emplace_back().set_rank(1);
  EXPECT_EQ(NodeOfTheSecondAttempt(), "nodes/b");
  EXPECT_EQ(Job().attempts(0).slow_ranks(0).node(), "nodes/a");
}

TEST_F(SlowRankTest, AnAttemptWithoutOneMayGoBack) {
  EXPECT_EQ(NodeOfTheSecondAttempt(), "nodes/a");
}

// Ranks of an older release would not take their part in it.
TEST_F(PlanningTest, WorkersOfOneReleaseAloneAreAskedToMeasure) {
  for (const bool is_old : {false, true}) {
    if (is_old) worker_version_ = "0.0.9";
    auto session = Connect(is_old ? "b" : "a", "folder.1");
    ASSERT_TRUE(Create(is_old ? "old" : "new").ok());
    Answer();
    const std::vector<v1::Command> commands = session->Commands();
    ASSERT_THAT(commands, SizeIs(1));
    EXPECT_EQ(commands[0].start().has_measure(), !is_old);
  }
}

TEST_F(PlanningTest, OneWorkerOfAnotherReleaseIsReasonEnoughNotToMeasure) {
  auto of_this = Connect("a", "folder.1");
  worker_version_ = "0.0.9";
  auto of_another = Connect("b", "folder.2");
  ASSERT_TRUE(Do([&] {
                return controller_->CreateJob(Spec("j", 4), {"", "CreateJob", "fingerprint"});
              }).ok());
  EXPECT_EQ(Job().state_reason(), "planning how to run on nodes/a and 1 more");
  Answer();
  for (const auto& each : {of_this, of_another}) {
    const std::vector<v1::Command> commands = each->Commands();
    ASSERT_THAT(commands, SizeIs(1));
    ASSERT_TRUE(commands[0].has_start());
    EXPECT_FALSE(commands[0].start().has_measure());
  }
}

// The order of sums is the last attempt's where there is a checkpoint to go on from.
TEST_F(PlanningTest, AnAttemptThatResumesIsPlannedLikeTheLast) {
  auto session = Connect("a", "folder.1");
  ASSERT_TRUE(Create("j").ok());
  uint64_t sequence = 0;
  // Plans the attempt, runs it, and has it leave; returns what the next one is to keep.
  const auto run = [&](uint32_t stripe, bool saves) -> std::optional<v1::StepPlan> {
    EXPECT_THAT(plans_.waiting, SizeIs(1));
    MadePlan made = FixedPlan::Made();
    made.plan.set_stripe(stripe);
    Answer(made);
    token_ = session->Commands().back().fencing_token();  // after the order to stop
    for (const uint32_t rank : {0, 1}) Say(session, ++sequence, Ready(rank));
    v1::AttemptEvent saved;
    saved.mutable_checkpoint()->set_step(1);
    saved.mutable_checkpoint()->set_path("/checkpoints/step-1");
    if (saves) Say(session, ++sequence, saved);
    EXPECT_TRUE(Do([&] { return controller_->PauseJob("j", "", {}); }).ok());
    for (const uint32_t rank : {0, 1}) {
      v1::AttemptEvent exited;
      exited.mutable_trainer_exited()->set_rank(rank);
      exited.mutable_trainer_exited()->set_outcome(v1::TrainerExited::STOPPED);
      Say(session, ++sequence, exited);
    }
    EXPECT_EQ(Job().state(), v1::Job::PAUSED);
    EXPECT_TRUE(Do([&] { return controller_->ResumeJob("j", "", {}); }).ok());
    ++attempt_;
    EXPECT_THAT(plans_.waiting, SizeIs(1));
    return plans_.waiting.at(0).request.kept;
  };
  EXPECT_EQ(plans_.waiting.at(0).request.kept, std::nullopt);
  EXPECT_EQ(run(256, /*saves=*/false), std::nullopt);
  const std::optional<v1::StepPlan> kept = run(512, /*saves=*/true);
  ASSERT_TRUE(kept.has_value());
  EXPECT_EQ(kept->stripe(), 512u);
  EXPECT_FALSE(plans_.waiting.at(0).request.kept_was_missed);
}

TEST_F(PlanningTest, WhatWasAnnouncedTooLateIsNotKept) {
  auto session = Connect("a", "folder.1");
  ASSERT_TRUE(Create("j").ok());
  Answer();
  token_ = session->Commands().back().fencing_token();
  uint64_t sequence = 0;
  for (const uint32_t rank : {0, 1}) Say(session, ++sequence, Ready(rank));
  plans_.next.emplace();
  plans_.next->set_version(2);
  plans_.next->set_effective_step(2);
  const auto step = [&](int32_t rank, uint64_t number) {
    v1::AttemptEvent event;
    event.mutable_step()->set_rank(rank);
    event.mutable_step()->set_step(number);
    event.mutable_step()->set_plan_version(1);
    Say(session, ++sequence, event);
  };
  for (const int32_t rank : {0, 1}) step(rank, 1);
  v1::AttemptEvent saved;
  saved.mutable_checkpoint()->set_step(1);
  saved.mutable_checkpoint()->set_path("/checkpoints/step-1");
  Say(session, ++sequence, saved);
  step(1, 2);
  for (const uint32_t rank : {0, 1}) {
    v1::AttemptEvent exited;
    exited.mutable_trainer_exited()->set_rank(rank);
    exited.mutable_trainer_exited()->set_outcome(v1::TrainerExited::FAILED);
    exited.mutable_trainer_exited()->set_retryable(true);
    Say(session, ++sequence, exited);
  }
  clock_.Advance(absl::Minutes(10));
  controller_->RunOnce();
  ASSERT_THAT(plans_.waiting, SizeIs(1));
  EXPECT_EQ(plans_.waiting[0].request.kept->version(), 2u);
  EXPECT_TRUE(plans_.waiting[0].request.kept_was_missed);
}

TEST_F(PlanningTest, ACancelledJobGivesItsSlotsBackAtOnce) {
  auto session = Connect("a", "folder.1");
  ASSERT_TRUE(Create("j").ok());
  ASSERT_TRUE(Create("k").ok());
  ASSERT_TRUE(Cancel("j").ok());
  ASSERT_THAT(plans_.waiting, SizeIs(2));
  EXPECT_EQ(plans_.waiting[1].request.spec.name(), "k");
  EXPECT_TRUE(*plans_.waiting[0].request.is_overtaken);
  EXPECT_FALSE(*plans_.waiting[1].request.is_overtaken);
  Answer();  // for the job that is no more
  EXPECT_THAT(session->Commands(), IsEmpty());
  EXPECT_EQ(Job("j").state(), v1::Job::CANCELLED);
  Answer();
  EXPECT_EQ(Job("k").state(), v1::Job::STARTING);
}

// The plan of a job that is gone is not taken for that of one which got its name.
TEST_F(PlanningTest, APlanIsNotTakenForThatOfAnotherJobOfTheName) {
  auto session = Connect("a", "folder.1");
  ASSERT_TRUE(Create("j").ok());
  ASSERT_TRUE(Cancel("j").ok());
  ASSERT_TRUE(Do([&]() -> absl::Status { return controller_->DeleteJob("j", "", {}); }).ok());
  ASSERT_TRUE(Create("j").ok());
  Answer(absl::InvalidArgumentError("of the first"));
  EXPECT_EQ(Job("j").state(), v1::Job::PENDING);
  Answer();
  EXPECT_EQ(Job("j").state(), v1::Job::STARTING);
  EXPECT_THAT(session->Commands(), SizeIs(1));
}

TEST_F(PlanningTest, ANodeThatIsLostTakesItsPlansAlong) {
  auto lost = Connect("a", "folder.1");
  ASSERT_TRUE(Create("j").ok());
  controller_->OnClosed(lost);
  controller_->RunOnce();
  auto next = Connect("b", "other.1");
  ASSERT_THAT(plans_.waiting, SizeIs(2));
  Answer();  // for node a
  EXPECT_EQ(Job("j").state(), v1::Job::PENDING);
  EXPECT_EQ(Job("j").state_reason(), "planning how to run on nodes/b");
  Answer();
  EXPECT_EQ(Job("j").state(), v1::Job::STARTING);
  EXPECT_THAT(next->Commands(), SizeIs(1));
  EXPECT_THAT(lost->Commands(), IsEmpty());
}

TEST_F(PlanningTest, ANodeThatChangesIsPlannedForAnew) {
  auto session = Connect("a", "folder.1");
  ASSERT_TRUE(Create("j").ok());
  auto again = std::make_shared<testing::FakeSession>("a", "folder.1", &clock_);
  v1::WorkerHello hello;
  hello.set_node("nodes/a");
  hello.set_incarnation("folder.1");
  hello.mutable_inventory()->set_trainers(2);
  hello.mutable_inventory()->set_memory_bytes(1 << 20);
  controller_->OnHello(again, hello);
  controller_->RunOnce();
  ASSERT_THAT(plans_.waiting, SizeIs(2));
  EXPECT_EQ(plans_.waiting[1].request.nodes.at(0).memory_bytes(), 1 << 20);
  Answer();
  EXPECT_EQ(Job("j").state(), v1::Job::PENDING);
  Answer();
  EXPECT_EQ(Job("j").state(), v1::Job::STARTING);
}

TEST_F(PlanningTest, ADrainedNodeGetsNoPlannedAttempt) {
  auto session = Connect("a", "folder.1");
  ASSERT_TRUE(Create("j").ok());
  ASSERT_TRUE(Do([&] { return controller_->DrainNode("a", {}); }).ok());
  Answer();
  EXPECT_EQ(Job("j").state(), v1::Job::PENDING);
  EXPECT_THAT(session->Commands(), IsEmpty());
}

// In one batch, where nothing of the attempt is told yet.
TEST_F(PlanningTest, ANodeIsNotDrainedWhileAnAttemptBeginsThere) {
  LifecycleMetrics metrics(nullptr);
  uint64_t ticket = 0;
  ControllerCore core(options_, &plans_, &metrics,
                      [&](const std::string&, uint64_t of, const auto&) { ticket = of; });
  const absl::Time now = clock_.Now();
  const auto write = [&](auto body) {
    const absl::Status written = sqlite_->Write([&](store::WriteTransaction& t) -> absl::Status {
      RETURN_IF_ERROR(body(t));
      return core.Commit(t, now);
    });
    ASSERT_TRUE(written.ok()) << written;
  };
  write([&](store::WriteTransaction& t) -> absl::Status {
    v1::WorkerHello hello;
    hello.mutable_inventory()->set_trainers(2);
    RETURN_IF_ERROR(core.OnHello(
        t, std::make_shared<testing::FakeSession>("a", "folder.1", &clock_), hello, now));
    return core.CreateJob(t, Spec("j"), {}, {}, now).status();
  });
  ASSERT_THAT(plans_.waiting, SizeIs(1));
  plans_.waiting[0].done(FixedPlan::Made());
  write([&](store::WriteTransaction& t) -> absl::Status {
    RETURN_IF_ERROR(core.OnPlanned(t, "j", ticket, FixedPlan::Made(), now));
    ASSIGN_OR_RETURN(const v1::Node node, core.SetDraining(t, "a", true));
    EXPECT_EQ(node.state(), v1::Node::DRAINING);
    return absl::OkStatus();
  });
}

TEST_F(PlanningTest, PlansOfARestartedCoordinatorAreMadeAnew) {
  Connect("a", "folder.1");
  ASSERT_TRUE(Create("j").ok());
  Restart();
  auto session = Connect("a", "folder.1");
  ASSERT_THAT(plans_.waiting, SizeIs(2));
  Answer();  // asked by the coordinator that is gone
  EXPECT_EQ(Job("j").state(), v1::Job::PENDING);
  Answer();
  EXPECT_EQ(Job("j").state(), v1::Job::STARTING);
}

// The attempt was not written down, so it never was: another plan starts it once there is space.
TEST_F(PlanningTest, APlanThatCannotBeWrittenDownIsMadeAnew) {
  Connect("a", "folder.1");
  ASSERT_TRUE(Create("j").ok());
  store_.full = true;
  Answer();
  EXPECT_EQ(Job("j").state(), v1::Job::PENDING);
  store_.full = false;
  auto session = Connect("a", "folder.1");
  ASSERT_FALSE(plans_.waiting.empty());
  while (!plans_.waiting.empty()) Answer();
  EXPECT_EQ(Job("j").state(), v1::Job::STARTING);
  EXPECT_THAT(session->Commands(), SizeIs(1));
}

// While the disk is full, what is under way goes on in the space that is kept for it: a plan that
// were left out would never be made again, for its job counts as being planned.
TEST_F(PlanningTest, APlanThatIsMadeWhileTheDiskIsFullIsTakenUp) {
  auto session = Connect("a", "folder.1");
  ASSERT_TRUE(Create("j").ok());
  store_.scarce = true;
  Answer();
  EXPECT_EQ(Job("j").state(), v1::Job::STARTING);
  EXPECT_THAT(session->Commands(), SizeIs(1));
}

TEST_F(PlanningTest, WithoutAPlanTheJobFailsAndNoOther) {
  Connect("a", "folder.1");
  ASSERT_TRUE(Create("j").ok());
  ASSERT_TRUE(Create("k").ok());
  Answer(absl::ResourceExhaustedError("its plan takes too much"));
  EXPECT_EQ(Job("j").state(), v1::Job::FAILED);
  EXPECT_EQ(Job("j").state_reason(), "no plan: its plan takes too much");
  Answer();
  EXPECT_EQ(Job("k").state(), v1::Job::STARTING);
}

// What one owner's plans wait for is no other owner's concern.
TEST_F(PlanningTest, MorePlansThanAreMadeAtATimeWaitInTurn) {
  auto session = std::make_shared<testing::FakeSession>("a", "folder.1", &clock_);
  v1::WorkerHello hello;
  hello.set_node("nodes/a");
  hello.set_incarnation("folder.1");
  hello.mutable_inventory()->set_trainers(100);
  controller_->OnHello(session, hello);
  controller_->RunOnce();
  const auto create = [&](const std::string& name, const std::string& owner) {
    return Do([&] {
      return controller_->CreateJob(Spec(name), {"", "CreateJob", "fingerprint"}, {.owner = owner});
    });
  };
  for (int i = 0; i < 40; ++i) ASSERT_TRUE(create("j" + std::to_string(i), "alice").ok());
  EXPECT_THAT(plans_.waiting, SizeIs(8));
  EXPECT_EQ(Job("j39").state_reason(),
            "there is room; its plan comes after those of 8 other jobs of its owner");
  ASSERT_TRUE(create("k", "bob").ok());
  ASSERT_THAT(plans_.waiting, SizeIs(9));
  EXPECT_EQ(plans_.waiting[8].request.owner, "bob");
  EXPECT_EQ(plans_.waiting[0].request.owner, "alice");
  // The plan of a job that is no more counts until it is made; then it is the next one's turn.
  ASSERT_TRUE(Cancel("j0").ok());
  EXPECT_THAT(plans_.waiting, SizeIs(9));
  Answer();
  EXPECT_THAT(plans_.waiting, SizeIs(9));
  while (!plans_.waiting.empty()) Answer();
  for (int i = 1; i < 40; ++i) {
    EXPECT_EQ(Job("j" + std::to_string(i)).state(), v1::Job::STARTING) << i;
  }
}

TEST(PlansUnderWayTest, AllTogetherHaveALimitToo) {
  PlansUnderWay under_way;
  for (size_t i = 0; i < PlansUnderWay::kMax; ++i) {
    EXPECT_EQ(under_way.Wait("bob"), "");
    under_way.Begin("alice" + std::to_string(i));
  }
  EXPECT_EQ(under_way.Wait("bob"), "there is room; its plan comes after those of 128 other jobs");
  under_way.End("alice0");
  EXPECT_EQ(under_way.Wait("bob"), "");
}

TEST_F(PlanningTest, TheShapeIsReadOnceAndKept) {
  Connect("a", "folder.1");
  v1::ModelShape shape;
  shape.set_layers(7);
  ASSERT_TRUE(Do([&] { return controller_->CreateJob(Spec("j"), {}, {}, shape); }).ok());
  ASSERT_THAT(plans_.waiting, SizeIs(1));
  EXPECT_EQ(plans_.waiting[0].request.shape->layers(), 7);
  Answer();
  EXPECT_EQ(Job("j").state(), v1::Job::STARTING);
  EXPECT_EQ(Job("j").model_shape().layers(), 7);
}

TEST_F(PlanningTest, AJobOfAnEarlierReleaseKeepsTheShapeOfItsNextPlan) {
  ASSERT_TRUE(Create("j").ok());
  v1::Job old = Job("j");
  old.clear_model_shape();
  ASSERT_TRUE(sqlite_->Write([&](store::WriteTransaction& t) { return t.UpdateJob(&old); }).ok());
  Restart();
  Connect("a", "folder.1");
  ASSERT_THAT(plans_.waiting, SizeIs(1));
  EXPECT_FALSE(plans_.waiting[0].request.shape.has_value());
  MadePlan made = FixedPlan::Made();
  made.shape.set_layers(5);
  Answer(made);
  EXPECT_EQ(Job("j").model_shape().layers(), 5);
}

TEST_F(PlanningTest, APreviewHoldsUpNobody) {
  plans_.held = false;
  auto session = RunJob();
  plans_.held = true;
  absl::StatusOr<JobController::Preview> preview;
  v1::ModelShape shape;
  shape.set_layers(7);
  controller_->PreviewJob(Spec("k"), shape, "", [&](auto made) { preview = std::move(made); });
  ASSERT_EQ(plans_.asked, 2);
  Say(session, 4, Step(1, 0));
  Say(session, 5, Step(1, 1));
  EXPECT_EQ(Job().progress().step(), 1);
  EXPECT_EQ(plans_.waiting.at(0).request.shape.value_or(v1::ModelShape()).layers(), 7)
      << "config.json is not read again";
  Answer();
  ASSERT_TRUE(preview.ok()) << preview.status();
  EXPECT_EQ(preview->plan.version(), 1);
  EXPECT_THAT(preview->pending_reason, HasSubstr("0 free on"));
}

}  // namespace
}  // namespace ringleader::lifecycle
