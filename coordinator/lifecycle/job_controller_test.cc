#include "coordinator/lifecycle/job_controller.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "coordinator/lifecycle/job/job_machine.h"
#include "coordinator/lifecycle/testing/controller_test.h"

namespace ringleader::lifecycle {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class JobControllerTest : public testing::ControllerTest {};

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

// Each is looked at several times a second and held in memory: they must not grow without end.
TEST_F(JobControllerTest, SpecificationsOfAllJobsTogetherAreBounded) {
  const auto spec = [&](const std::string& name, size_t mebibytes) {
    v1::JobSpec padded = Spec(name);
    (*padded.mutable_labels())["padding"] = std::string(mebibytes << 20, 'x');
    return padded;
  };
  // As if they had been submitted, and paused.
  const absl::Status written = sqlite_->Write([&](store::WriteTransaction& t) -> absl::Status {
    for (const char* name : {"a", "b"}) {
      v1::Job job;
      job.set_name(absl::StrCat("jobs/", name));
      *job.mutable_spec() = spec(name, 127);
      job.set_state(v1::Job::PAUSED);
      RETURN_IF_ERROR(t.CreateJob(&job));
    }
    return absl::OkStatus();
  });
  ASSERT_TRUE(written.ok()) << written;
  Restart();
  const auto create = [&](const std::string& name, size_t mebibytes) {
    return Do([&] { return controller_->CreateJob(spec(name, mebibytes), {}); }).status();
  };
  const absl::Status refused = create("c", 3);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("all owners together"));
  EXPECT_EQ(create("d", 1), absl::OkStatus());
}

TEST_F(JobControllerTest, JobsThatHaveNotEndedAreBounded) {
  // As if they had been submitted.
  const auto there_are = [&](const std::string& owner, int count, size_t bytes = 0) {
    const absl::Status written = sqlite_->Write([&](store::WriteTransaction& t) -> absl::Status {
      for (int i = 0; i < count; ++i) {
        v1::Job job;
        *job.mutable_spec() = Spec(absl::StrCat(owner, i));
        (*job.mutable_spec()->mutable_labels())["padding"] = std::string(bytes, 'x');
        job.set_name("jobs/" + job.spec().name());
        job.set_owner(owner);
        job.set_state(v1::Job::PENDING);
        RETURN_IF_ERROR(t.CreateJob(&job));
      }
      return absl::OkStatus();
    });
    ASSERT_TRUE(written.ok()) << written;
    Restart();
  };
  const auto create = [&](const std::string& name, const std::string& owner) {
    return Do([&] { return controller_->CreateJob(Spec(name), {}, {.owner = owner}); }).status();
  };
  const auto cancel = [&](const std::string& name) {
    return Do([&] { return controller_->CancelJob(name, "", {}); }).status();
  };
  const absl::Status failed = sqlite_->Write([&](store::WriteTransaction& t) {
    v1::Job job;
    *job.mutable_spec() = Spec("failed");
    job.set_name("jobs/failed");
    job.set_owner("alice");
    job.set_state(v1::Job::FAILED);
    return t.CreateJob(&job);
  });
  ASSERT_TRUE(failed.ok()) << failed;
  const auto resume = [&] {
    return Do([&] { return controller_->ResumeJob("failed", "", {}); }).status();
  };
  there_are("alice", 1999);
  EXPECT_EQ(create("last", "alice"), absl::OkStatus());
  const absl::Status refused = create("more", "alice");
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(refused.message(),
            "alice may have 2000 jobs that have not ended, with specifications of 64 MiB; wait "
            "until some have, or cancel some");
  EXPECT_EQ(resume(), refused);  // no less than a new one
  EXPECT_EQ(create("of-bob", "bob"), absl::OkStatus());
  EXPECT_EQ(cancel("last"), absl::OkStatus());
  EXPECT_EQ(create("more", "alice"), absl::OkStatus());

  there_are("carol", 64, 1 << 20);
  EXPECT_THAT(std::string(create("large", "carol").message()), HasSubstr("carol may have"));
  EXPECT_EQ(cancel("carol0"), absl::OkStatus());
  EXPECT_EQ(create("large", "carol"), absl::OkStatus());

  there_are("dave", 8000);  // whose queue was longer than it may be now
  for (const char* owner : {"bob", ""}) {
    EXPECT_THAT(std::string(create("one-more", owner).message()),
                HasSubstr("all owners together may have 10000 jobs"));
  }
}

TEST_F(JobControllerTest, AnOrderToAWorkerThatIsAwayIsThereWhenItIsBack) {
  controller_->OnClosed(RunJob());
  ASSERT_TRUE(Do([&] { return controller_->PauseJob("j", "", {}); }).ok());
  EXPECT_EQ(Job().state(), v1::Job::PAUSING);
  const std::vector<v1::Command> orders = Connect("a", "folder.1", {Running()}, 3)->Commands();
  ASSERT_THAT(orders, SizeIs(2));
  EXPECT_TRUE(orders[0].has_connect()) << "it was not acknowledged";
  EXPECT_EQ(orders[1].stop().mode(), v1::StopTrainers::CHECKPOINT);
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

// Leases hold, the worker may come again, requests are refused by name, and what workers report
// waits until there is space. Nothing is lost, and nothing is acknowledged before it is written.
TEST_F(JobControllerTest, WhileTheDiskIsFullTrainingGoesOn) {
  auto session = RunJob();
  const int taken = session->taken();
  store_.scarce = true;
  EXPECT_EQ(Create("refused").status().code(), absl::StatusCode::kResourceExhausted);
  Say(session, 4, Step(1, 0));
  Say(session, 5, Step(1, 1));
  Say(session, 6, Log("late"));
  EXPECT_EQ(session->acknowledged(), 3);
  EXPECT_EQ(session->taken(), taken);  // the worker may not send ever more
  EXPECT_FALSE(session->closed());
  clock_.Advance(options_.adoption_timeout * 2);
  controller_->RunOnce();
  EXPECT_EQ(Job().state(), v1::Job::RUNNING);
  // It is cut off, comes again, and sends again what was not acknowledged.
  controller_->OnClosed(session);
  auto again = Connect("a", "folder.1", {Running()});
  again->Commands();
  EXPECT_EQ(again->welcome().epoch(), 2);
  Say(again, 4, Step(1, 0));
  Say(again, 5, Step(1, 1));
  Say(again, 6, Log("late"));
  EXPECT_THAT(Steps(), IsEmpty());
  EXPECT_EQ(session->taken(), taken + 3);  // dropped: they came again
  store_.scarce = false;
  controller_->RunOnce();
  EXPECT_THAT(Steps(), ElementsAre(1));
  EXPECT_THAT(LogTexts(), ElementsAre("late"));
  EXPECT_EQ(again->acknowledged(), 6);
  EXPECT_EQ(again->taken(), 3);
  EXPECT_EQ(Job().state(), v1::Job::RUNNING);
  EXPECT_EQ(Job().attempts_size(), 1);
  EXPECT_TRUE(Create("next").ok());
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
  // The attempt goes on from the checkpoint of step 2.
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
  EXPECT_TRUE(absl::IsAborted(*session->closed()));
  EXPECT_THAT(LogTexts(), IsEmpty());
}

// Its trainers may live on, so that its state is that of its lease; that it takes none is said.
TEST_F(JobControllerTest, ANodeWithoutItsWorkerSaysSoBeforeItsLeaseRunsOut) {
  auto session = RunJob();
  EXPECT_EQ(controller_->ListNodes()[0].state_reason(), "");
  controller_->OnClosed(session);
  controller_->RunOnce();
  EXPECT_EQ(controller_->ListNodes()[0].state(), v1::Node::READY);
  EXPECT_THAT(controller_->ListNodes()[0].state_reason(), HasSubstr("its worker is not connected"));
  Connect("a", "folder.1", {Running()});
  EXPECT_EQ(controller_->ListNodes()[0].state_reason(), "");
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
  // Its trainers have as long as with any other abort to let go of what they hold.
  EXPECT_EQ(absl::Milliseconds(commands[0].stop().grace_milliseconds()), options_.abort_grace);
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

// Jobs are large, and their changes come by the thousand.
TEST_F(JobControllerTest, OfARepeatedChangeNoMoreIsKeptThanItsJob) {
  const absl::StatusOr<v1::Job> created = Create("j", "r1");
  ASSERT_TRUE(created.ok()) << created.status();
  const auto pause = [&](const std::string& request) {
    return Do([&] {
      return controller_->PauseJob("j", "",
                                   {.id = request, .method = "PauseJob", .fingerprint = "f"});
    });
  };
  const absl::StatusOr<v1::Job> paused = pause("r2");
  ASSERT_TRUE(paused.ok()) << paused.status();
  const auto kept = [&](const store::RequestKey& key) {
    std::optional<std::string> reply;
    const absl::Status read = store_.Read([&](store::ReadTransaction& t) -> absl::Status {
      auto found = t.FindReply(key);
      if (!found.ok()) return found.status();
      reply = *std::move(found);
      return absl::OkStatus();
    });
    EXPECT_TRUE(read.ok()) << read;
    return reply.value_or(std::string(1000, '?'));
  };
  EXPECT_LT(kept({.id = "r2", .method = "PauseJob", .fingerprint = "f"}).size(), 100u);
  EXPECT_LT(kept({.id = "r1", .method = "CreateJob", .fingerprint = "fingerprint"}).size(), 100u);
  const absl::StatusOr<v1::Job> second = Create("j", "r1");
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(second->uid(), created->uid());
  EXPECT_EQ(second->spec().name(), "j");
  const absl::StatusOr<v1::Job> again = pause("r2");
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->uid(), paused->uid());
  EXPECT_EQ(again->state(), v1::Job::PAUSED);
  EXPECT_EQ(again->spec().name(), "j");
}

TEST_F(JobControllerTest, TheQueueIsInTheOrderOfSubmissionWhicheverWayTheClockWasSet) {
  ASSERT_TRUE(Create("first").ok());
  clock_.Advance(-absl::Hours(1));
  ASSERT_TRUE(Create("a-second").ok());
  EXPECT_LT(Job("first").sequence(), Job("a-second").sequence());
  auto session = Connect("a", "folder.1");
  EXPECT_EQ(Job("first").state(), v1::Job::STARTING);
  EXPECT_EQ(Job("a-second").state(), v1::Job::PENDING);
}

TEST_F(JobControllerTest, TheRecordKeepsTheNewestAttempts) {
  auto session = RunJob();
  uint64_t sequence = 3;
  for (uint32_t number = 1; number < static_cast<uint32_t>(kAttemptsKept) + 4; ++number) {
    attempt_ = number;
    ASSERT_TRUE(Do([&] { return controller_->PauseJob("j", "", {}); }).ok());
    for (const uint32_t rank : {0, 1}) {
      v1::AttemptEvent event;
      event.mutable_trainer_exited()->set_rank(rank);
      event.mutable_trainer_exited()->set_outcome(v1::TrainerExited::STOPPED);
      Say(session, ++sequence, event);
    }
    ASSERT_TRUE(Do([&] { return controller_->ResumeJob("j", "", {}); }).ok());
    controller_->RunOnce();
    token_ = Job().attempts().rbegin()->fencing_token();
  }
  ASSERT_EQ(Job().attempts_size(), kAttemptsKept);
  EXPECT_EQ(Job().attempts(0).number(), 5u);
  EXPECT_EQ(Job().attempts().rbegin()->number(), static_cast<uint32_t>(kAttemptsKept) + 4);
  EXPECT_EQ(Job().state(), v1::Job::STARTING);
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
  const auto remove = [&](const std::string& etag) {
    return Do([&] { return controller_->DeleteJob("j", etag, {}); });
  };
  EXPECT_TRUE(absl::IsAborted(remove("77")));
  EXPECT_EQ(remove(Job().etag()), absl::OkStatus());
}

TEST_F(JobControllerTest, ARepeatedRequestWhoseJobIsGoneGetsNoOtherOfItsName) {
  const absl::StatusOr<v1::Job> first = Create("j", "r1");
  ASSERT_TRUE(Do([&] { return controller_->CancelJob("j", "", {}); }).ok());
  ASSERT_EQ(Do([&] { return controller_->DeleteJob("j", "", {}); }), absl::OkStatus());
  EXPECT_TRUE(absl::IsNotFound(Create("j", "r1").status()));
  clock_.Advance(absl::Seconds(1));
  ASSERT_TRUE(Create("j", "r2").ok());
  EXPECT_EQ(Create("j", "r1").status(),
            absl::NotFoundError("jobs/j was deleted since this was asked"));
}

}  // namespace
}  // namespace ringleader::lifecycle
