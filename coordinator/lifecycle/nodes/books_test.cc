// What the coordinator writes down of attempts, checkpoints, sessions and nodes, and of whom it
// takes it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "coordinator/lifecycle/testing/controller_test.h"

namespace ringleader::lifecycle {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using testing::FakeSession;
using ::testing::Gt;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Lt;
using ::testing::SizeIs;

class BooksTest : public testing::ControllerTest {
 protected:
  // Does what RunJob does, with this spec.
  std::shared_ptr<FakeSession> Run(const v1::JobSpec& spec) {
    auto session = Connect("a", "folder.1");
    EXPECT_TRUE(Do([&] { return controller_->CreateJob(spec, {}); }).ok());
    controller_->RunOnce();
    const std::vector<v1::Command> commands = session->Commands();
    EXPECT_THAT(commands, SizeIs(1));
    token_ = commands.at(0).fencing_token();
    Acknowledge(session, 1, commands[0].command_id());
    Say(session, 2, Ready(0));
    Say(session, 3, Ready(1));
    return session;
  }
  static v1::AttemptEvent Exited(uint32_t rank, v1::TrainerExited::Outcome outcome) {
    v1::AttemptEvent event;
    event.mutable_trainer_exited()->set_rank(rank);
    event.mutable_trainer_exited()->set_outcome(outcome);
    event.mutable_trainer_exited()->set_retryable(true);
    return event;
  }
  static v1::AttemptEvent Checkpoint(uint64_t step) {
    v1::AttemptEvent event;
    event.mutable_checkpoint()->set_step(step);
    return event;
  }
  static v1::AttemptEvent Eval(uint64_t step) {
    v1::AttemptEvent event;
    event.mutable_eval()->set_step(step);
    return event;
  }
  std::vector<uint64_t> Checkpoints() {
    std::vector<uint64_t> steps;
    const absl::Status read = sqlite_->Read([&](store::ReadTransaction& transaction) {
      const auto found = transaction.ListCheckpoints("j");
      for (const v1::CheckpointNotice& each : *found) steps.push_back(each.step());
      return found.status();
    });
    EXPECT_TRUE(read.ok()) << read;
    return steps;
  }
  v1::Node Node(const std::string& id) {
    for (const v1::Node& node : controller_->ListNodes()) {
      if (node.name() == "nodes/" + id) return node;
    }
    ADD_FAILURE() << id << " is not listed";
    return {};
  }
  void Pass(absl::Duration time) {
    clock_.Advance(time);
    controller_->RunOnce();
  }
};

TEST_F(BooksTest, AReportBelongsToTheAttemptWithItsToken) {
  auto session = RunJob();
  const uint64_t own = token_;
  uint64_t sequence = 3;
  for (const uint64_t token : {own - 1, own + 1}) {
    token_ = token;
    for (const v1::AttemptEvent& event :
         {Step(1, 0), Step(1, 1), Checkpoint(3), Eval(3), Exited(0, v1::TrainerExited::FAILED),
          Exited(1, v1::TrainerExited::COMPLETED)}) {
      Say(session, ++sequence, event);
    }
  }
  token_ = own;
  attempt_ = 2;  // and with its number
  Say(session, ++sequence, Exited(0, v1::TrainerExited::FAILED));
  EXPECT_EQ(Job().state(), v1::Job::RUNNING);
  EXPECT_EQ(Job().attempts(0).ranks(0).state(), v1::RankStatus::READY);
  EXPECT_EQ(Job().attempts(0).ranks(1).state(), v1::RankStatus::READY);
  EXPECT_EQ(Job().progress().checkpoint_step(), 0u);
  EXPECT_FALSE(Job().has_last_eval());
  EXPECT_THAT(Steps(), IsEmpty());
  EXPECT_THAT(Checkpoints(), IsEmpty());
  EXPECT_EQ(session->acknowledged(), sequence) << "or it would come again for ever";
}

TEST_F(BooksTest, ReadinessOfAnotherTokenStartsNothing) {
  auto session = Connect("a", "folder.1");
  ASSERT_TRUE(Create("j").ok());
  controller_->RunOnce();
  token_ = session->Commands().at(0).fencing_token() + 1;
  Say(session, 1, Ready(0));
  Say(session, 2, Ready(1));
  EXPECT_EQ(Job().state(), v1::Job::STARTING);
  EXPECT_EQ(Job().attempts(0).ranks(0).state(), v1::RankStatus::STARTING);
}

TEST_F(BooksTest, AsManyCheckpointsAreRecordedAsTrainersKeep) {
  v1::JobSpec spec = Spec("j");
  spec.mutable_checkpoint()->set_keep_last(2);
  auto session = Run(spec);
  Say(session, 4, Checkpoint(2));
  Say(session, 5, Checkpoint(6));
  EXPECT_THAT(Checkpoints(), ElementsAre(2, 6));
  Say(session, 6, Checkpoint(4));
  EXPECT_THAT(Checkpoints(), ElementsAre(4, 6));
  Say(session, 7, Checkpoint(8));
  EXPECT_THAT(Checkpoints(), ElementsAre(6, 8));
  EXPECT_EQ(Job().progress().checkpoint_step(), 8u);
}

TEST_F(BooksTest, WhereAllAreKeptAllAreRecorded) {
  auto session = RunJob();
  for (uint64_t step = 1; step <= 5; ++step) Say(session, 3 + step, Checkpoint(step));
  EXPECT_THAT(Checkpoints(), SizeIs(5));
}

TEST_F(BooksTest, ANewProcessTakesThePlaceOfASilentSession) {
  auto silent = RunJob();
  silent->FallSilent();
  Pass(options_.lease + absl::Milliseconds(1));
  ASSERT_FALSE(silent->closed().has_value()) << "its connection is open";
  auto next = Connect("a", "folder.2");
  EXPECT_FALSE(next->closed().has_value());
  ASSERT_TRUE(silent->closed().has_value());
  EXPECT_EQ(*silent->closed(), absl::AbortedError("another session of this node has begun"));
  EXPECT_EQ(Job().attempts(0).state(), v1::Attempt::FAILED);
  EXPECT_THAT(Job().state_reason(), HasSubstr("its worker was restarted"));
  // What the old one says from now on counts no more, and its end takes nothing along.
  Say(silent, 4, Log("late"));
  controller_->OnClosed(silent);
  Pass(options_.retry_backoff);
  EXPECT_THAT(LogTexts(), IsEmpty());
  const std::vector<v1::Command> commands = next->Commands();
  ASSERT_FALSE(commands.empty());
  EXPECT_TRUE(commands.back().has_start());
  EXPECT_EQ(commands.back().attempt(), 2u);
}

TEST_F(BooksTest, ANewProcessBesideALivingSessionIsRefused) {
  auto living = RunJob();
  living->FallSilent();
  Pass(options_.lease);
  auto next = Connect("a", "folder.2");
  ASSERT_TRUE(next->closed().has_value());
  EXPECT_EQ(next->closed()->code(), absl::StatusCode::kAlreadyExists);
  EXPECT_FALSE(living->closed().has_value());
  EXPECT_EQ(Job().state(), v1::Job::RUNNING);
}

TEST_F(BooksTest, AReportThatWaitsForOtherRanksIsAskedForAgainAfterAReconnect) {
  auto session = RunJob();
  Say(session, 4, Step(1, 0));
  Say(session, 5, Log("once"));
  EXPECT_EQ(session->acknowledged(), 3u);
  auto again = Connect("a", "folder.1", {Running()});
  again->Commands();
  EXPECT_EQ(again->welcome().applied_sequence(), 3u);
  EXPECT_EQ(Job().state(), v1::Job::RUNNING);
  // The process sends again what was not acknowledged; nothing counts twice.
  Say(again, 4, Step(1, 0));
  Say(again, 5, Log("once"));
  EXPECT_LE(again->acknowledged(), 3u);
  Say(again, 6, Step(1, 1));
  EXPECT_EQ(again->acknowledged(), 6u);
  EXPECT_THAT(Steps(), ElementsAre(1));
  EXPECT_THAT(LogTexts(), ElementsAre("once"));
}

// Its step was recorded, and the worker did not hear so before the coordinator was gone.
TEST_F(BooksTest, AReportOfARecordedStepThatComesAgainAfterARestartIsLetGo) {
  auto session = RunJob();
  Say(session, 4, Step(1, 0));
  Say(session, 5, Step(1, 1));
  Restart();
  session = Connect("a", "folder.1", {Running()}, 3);
  Say(session, 4, Step(1, 0));
  EXPECT_EQ(session->acknowledged(), 4u);
  Say(session, 5, Step(1, 1));
  EXPECT_EQ(session->acknowledged(), 5u);
  EXPECT_THAT(Steps(), ElementsAre(1));
}

// No other rank's report is waited for, and the job has no other attempt yet.
TEST_F(BooksTest, AReportOfAnAttemptThatIsOverIsRecordedAtOnce) {
  auto session = RunJob();
  Say(session, 4, Step(1, 0));
  controller_->OnClosed(session);
  Pass(options_.lease + absl::Seconds(1));
  Pass(options_.adoption_timeout);
  ASSERT_EQ(Job().attempts(0).state(), v1::Attempt::FENCED);
  EXPECT_THAT(Steps(), ElementsAre(1));
  session = Connect("a", "folder.1", {}, 3);
  Say(session, 4, Step(1, 0));
  Say(session, 5, Step(2, 0));
  EXPECT_THAT(Steps(), ElementsAre(1, 2));
  EXPECT_EQ(session->acknowledged(), 5u);
}

TEST_F(BooksTest, AMessageThatIsMissingIsAskedFor) {
  auto session = RunJob();
  Say(session, 5, Log("after the one that is missing"));
  ASSERT_TRUE(session->closed().has_value());
  EXPECT_EQ(session->closed()->code(), absl::StatusCode::kAborted);
  EXPECT_EQ(session->acknowledged(), 3u);
  auto again = Connect("a", "folder.1", {Running()});
  Say(again, 4, Log("missing"));
  Say(again, 5, Log("after the one that is missing"));
  EXPECT_THAT(LogTexts(), ElementsAre("missing", "after the one that is missing"));
}

TEST_F(BooksTest, TheEndOfAnOlderSessionIsNotTheNewOnes) {
  auto first = Connect("a", "folder.1");
  auto second = Connect("a", "folder.1");
  controller_->OnClosed(first);
  controller_->RunOnce();
  ASSERT_TRUE(Create("j").ok());
  controller_->RunOnce();
  EXPECT_THAT(second->Commands(), SizeIs(1));
  EXPECT_THAT(first->Commands(), IsEmpty());
}

TEST_F(BooksTest, WhatAnEndedAttemptWasToldIsNotRepeated) {
  auto session = RunJob();
  ASSERT_TRUE(Do([&] { return controller_->CancelJob("j", "", {}); }).ok());
  EXPECT_THAT(session->Commands(), SizeIs(2)) << "addresses, and an abort";
  Say(session, 4, Exited(0, v1::TrainerExited::FAILED));
  Say(session, 5, Exited(1, v1::TrainerExited::FAILED));
  ASSERT_EQ(Job().state(), v1::Job::CANCELLED);
  EXPECT_THAT(Connect("a", "folder.1")->Commands(), IsEmpty());
  Restart();
  EXPECT_THAT(Connect("a", "folder.1")->Commands(), IsEmpty());
}

TEST_F(BooksTest, LastWordsAreKeptWhenTheJobHasEnded) {
  auto session = RunJob();
  Say(session, 4, Exited(0, v1::TrainerExited::COMPLETED));
  Say(session, 5, Exited(1, v1::TrainerExited::COMPLETED));
  ASSERT_EQ(Job().state(), v1::Job::SUCCEEDED);
  Say(session, 6, Log("the last line"));
  EXPECT_THAT(LogTexts(), ElementsAre("the last line"));
  EXPECT_EQ(session->acknowledged(), 6u);
}

TEST_F(BooksTest, ADrainedNodeIsEmptiedAndGetsNothing) {
  EXPECT_EQ(Do([&] { return controller_->DrainNode("a", {}); }).status(),
            absl::NotFoundError("nodes/a does not exist"));
  auto session = RunJob();
  session->Commands();
  EXPECT_EQ(Node("a").trainers_in_use(), 2u);
  EXPECT_THAT(Node("a").jobs(), ElementsAre("jobs/j"));
  ASSERT_TRUE(Do([&] { return controller_->DrainNode("a", {}); }).ok());
  EXPECT_EQ(Node("a").state(), v1::Node::DRAINING);
  EXPECT_EQ(Node("a").state_reason(), "drained by a user");
  const std::vector<v1::Command> stop = session->Commands();
  ASSERT_THAT(stop, SizeIs(1));
  EXPECT_EQ(stop[0].stop().mode(), v1::StopTrainers::CHECKPOINT);
  Say(session, 4, Exited(0, v1::TrainerExited::STOPPED));
  EXPECT_EQ(Node("a").state(), v1::Node::DRAINING);
  Say(session, 5, Exited(1, v1::TrainerExited::STOPPED));
  controller_->RunOnce();
  EXPECT_EQ(Node("a").state(), v1::Node::DRAINED);
  EXPECT_EQ(Job().state(), v1::Job::PENDING);
  EXPECT_THAT(session->Commands(), IsEmpty());
  Restart();
  session = Connect("a", "folder.1");
  EXPECT_EQ(Node("a").state(), v1::Node::DRAINED) << "a drain outlives the coordinator";
  EXPECT_THAT(session->Commands(), IsEmpty());
  ASSERT_TRUE(Do([&] { return controller_->UndrainNode("a", {}); }).ok());
  controller_->RunOnce();
  EXPECT_EQ(Node("a").state(), v1::Node::READY);
  EXPECT_EQ(Node("a").state_reason(), "");
  EXPECT_THAT(session->Commands(), SizeIs(1));
}

TEST_F(BooksTest, ADrainOutlivesTheCoordinatorWhileTrainersRunThereAndSoDoesItsEnd) {
  RunJob();
  ASSERT_TRUE(Do([&] { return controller_->DrainNode("a", {}); }).ok());
  Restart();
  EXPECT_EQ(Node("a").state(), v1::Node::DRAINING);
  EXPECT_EQ(Node("a").state_reason(), "drained by a user");
  ASSERT_TRUE(Do([&] { return controller_->UndrainNode("a", {}); }).ok());
  Restart();
  EXPECT_EQ(Node("a").state(), v1::Node::READY);
}

TEST_F(BooksTest, AWorkerThatShutsDownDoesSoBehindABrokenConnectionToo) {
  auto session = Connect("a", "folder.1");
  v1::WorkerMessage message;
  message.set_sequence(1);
  message.mutable_drain()->set_reason("SIGTERM");
  controller_->OnMessage(session, message);
  controller_->OnClosed(session);
  session = Connect("a", "folder.1");
  ASSERT_TRUE(Create("j").ok());
  EXPECT_THAT(session->Commands(), IsEmpty());
  EXPECT_EQ(Node("a").state_reason(), "its worker is shutting down");
}

TEST_F(BooksTest, AWorkerThatShutsDownIsLeftInPeaceUntilItsNextProcess) {
  auto session = RunJob();
  session->Commands();
  v1::WorkerMessage message;
  message.set_sequence(4);
  message.mutable_drain()->set_reason("SIGTERM");
  controller_->OnMessage(session, message);
  controller_->RunOnce();
  EXPECT_EQ(Node("a").state(), v1::Node::DRAINING);
  EXPECT_EQ(Node("a").state_reason(), "its worker is shutting down");
  ASSERT_THAT(session->Commands(), SizeIs(1));
  Say(session, 5, Exited(0, v1::TrainerExited::STOPPED));
  Say(session, 6, Exited(1, v1::TrainerExited::STOPPED));
  controller_->RunOnce();
  EXPECT_EQ(Node("a").state(), v1::Node::DRAINED);
  EXPECT_THAT(session->Commands(), IsEmpty());
  controller_->OnClosed(session);
  auto next = Connect("a", "folder.2");
  EXPECT_EQ(Node("a").state(), v1::Node::READY);
  EXPECT_THAT(next->Commands(), SizeIs(1));
}

// The rows of all jobs that wait would soon be more than what is kept in reserve.
TEST_F(BooksTest, WhyJobsWaitIsNotWrittenWhileSpaceIsScarce) {
  ASSERT_TRUE(Do([&] { return controller_->CreateJob(Spec("j", 4), {}); }).ok());
  controller_->RunOnce();
  const std::string reason = Job().state_reason();
  const uint64_t revision = Job().revision();
  store_.scarce = true;
  Connect("a", "folder.1");
  controller_->RunOnce();
  EXPECT_EQ(Job().revision(), revision);
  store_.scarce = false;
  controller_->RunOnce();
  EXPECT_NE(Job().state_reason(), reason);
}

// Each has another reason whenever slots change.
TEST_F(BooksTest, WhyJobsOfALongQueueWaitIsWrittenALittleAtATime) {
  constexpr int kJobs = 40;
  for (int i = 0; i < kJobs; ++i) {
    v1::JobSpec spec = Spec(absl::StrCat("j", i), 4);
    (*spec.mutable_labels())["large"] = std::string(400'000, 'x');
    ASSERT_TRUE(Do([&] { return controller_->CreateJob(spec, {}); }).ok());
  }
  controller_->RunOnce();
  auto written = [this, before = std::vector<uint64_t>(kJobs)]() mutable {
    int count = 0;
    for (int i = 0; i < kJobs; ++i) {
      const uint64_t revision = Job(absl::StrCat("j", i)).revision();
      count += revision == std::exchange(before[i], revision) ? 0 : 1;
    }
    return count;
  };
  EXPECT_EQ(written(), kJobs);
  EXPECT_NE(Job("j39").state_reason(), "") << "the first is there at once";
  Connect("a", "folder.1");
  controller_->RunOnce();
  const int at_once = written();
  EXPECT_THAT(at_once, AllOf(Gt(0), Lt(kJobs / 2)));
  int soon = 0, seconds = 0;
  for (int more = 1; more > 0; ++seconds) {
    clock_.Advance(absl::Seconds(1));
    controller_->RunOnce();
    soon += more = written();
  }
  EXPECT_EQ(at_once + soon, kJobs);
  EXPECT_THAT(seconds, AllOf(Gt(2), Lt(10)));
  EXPECT_EQ(Job("j39").state_reason().substr(0, 20), Job("j0").state_reason().substr(0, 20));
}

TEST_F(BooksTest, AGpuWithAFaultTakesNoTrainersAndTheNodeSaysWhy) {
  auto session = RunJob();
  const auto say = [&](uint64_t sequence, uint32_t trainers, const char* fault) {
    v1::WorkerMessage message;
    message.set_sequence(sequence);
    message.mutable_inventory()->set_trainers(trainers);
    message.mutable_inventory()->add_gpus()->set_uuid("GPU-0");
    message.mutable_inventory()->mutable_gpus(0)->set_fault(fault);
    controller_->OnMessage(session, message);
    controller_->RunOnce();
  };
  say(4, 1, "XID 79");
  EXPECT_EQ(Node("a").state(), v1::Node::READY);
  EXPECT_EQ(Node("a").state_reason(), "GPU-0 takes no trainers: XID 79");
  EXPECT_EQ(Job().state(), v1::Job::RUNNING) << "what runs goes on";
  Say(session, 5, Exited(0, v1::TrainerExited::FAILED));
  Say(session, 6, Exited(1, v1::TrainerExited::FAILED));
  session->Commands();
  clock_.Advance(absl::Hours(1));
  controller_->RunOnce();
  controller_->RunOnce();
  EXPECT_THAT(Job().state_reason(), HasSubstr("can take 1 in all"));
  EXPECT_THAT(session->Commands(), IsEmpty());

  say(7, 0, "XID 79");
  EXPECT_EQ(Node("a").state(), v1::Node::DRAINED);
  ASSERT_TRUE(Do([&] { return controller_->DrainNode("a", {}); }).ok());
  EXPECT_EQ(Node("a").state_reason(), "drained by a user; GPU-0 takes no trainers: XID 79");
  ASSERT_TRUE(Do([&] { return controller_->UndrainNode("a", {}); }).ok());
  // After its reset.
  say(8, 2, "");
  EXPECT_EQ(Node("a").state(), v1::Node::READY);
  EXPECT_EQ(Node("a").state_reason(), "");
  EXPECT_THAT(session->Commands(), SizeIs(1));
}

TEST_F(BooksTest, ANodeOutOfSightSaysSinceWhen) {
  auto session = Connect("a", "folder.1");
  session->FallSilent();
  Pass(options_.lease);
  EXPECT_EQ(Node("a").state(), v1::Node::READY);
  Pass(absl::Milliseconds(1));
  EXPECT_EQ(Node("a").state(), v1::Node::UNREACHABLE);
  EXPECT_THAT(Node("a").state_reason(), HasSubstr("no word since "));
  ASSERT_TRUE(Create("j").ok());
  controller_->RunOnce();
  EXPECT_EQ(Job().state(), v1::Job::PENDING);
  Connect("a", "folder.1");
  EXPECT_EQ(Node("a").state(), v1::Node::READY);
  EXPECT_EQ(Job().state(), v1::Job::STARTING);
}

// The connection of a silent worker ends late, which is no word of the worker.
TEST_F(BooksTest, TheEndOfASessionRenewsNoLease) {
  auto session = Connect("a", "folder.1");
  session->FallSilent();
  clock_.Advance(options_.lease);
  controller_->OnClosed(session);
  controller_->RunOnce();
  EXPECT_EQ(Node("a").state(), v1::Node::READY);
  Pass(absl::Milliseconds(1));
  EXPECT_EQ(Node("a").state(), v1::Node::UNREACHABLE);
}

TEST_F(BooksTest, AnEventOfNoKindEndsTheSession) {
  auto session = RunJob();
  Say(session, 4, {});
  ASSERT_TRUE(session->closed().has_value());
  EXPECT_EQ(session->closed()->code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Job().state(), v1::Job::RUNNING);
}

}  // namespace
}  // namespace ringleader::lifecycle
