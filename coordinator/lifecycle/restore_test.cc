// The database is put back from a backup while workers live: they know more than it does.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "coordinator/lifecycle/testing/controller_test.h"
#include "coordinator/store/upkeep/backup.h"
#include "proto/timestamps.h"

namespace ringleader::lifecycle {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class RestoreTest : public testing::ControllerTest {
 protected:
  void BackUp() { ASSERT_TRUE(store::BackUp(dir_.File("db"), dir_.File("copy")).ok()); }
  // Another coordinator, on what BackUp() wrote.
  void Restore() {
    controller_.reset();
    sqlite_.reset();
    for (const char* suffix : {"-wal", "-shm"}) std::filesystem::remove(dir_.File("db") + suffix);
    std::filesystem::rename(dir_.File("copy"), dir_.File("db"));
    sqlite_ = Open();
    store_.MoveTo(sqlite_.get());
    Restart();
  }
};

TEST_F(RestoreTest, AWorkerGoesOnWhereItIsAndTheGapIsSaid) {
  auto session = RunJob();
  ASSERT_TRUE(Create("waits").ok());
  BackUp();
  for (uint64_t step = 1; step <= 3; ++step) {
    for (const int32_t rank : {0, 1}) {
      Say(session, 2 + 2 * step + static_cast<uint64_t>(rank), Step(step, rank));
    }
  }
  ASSERT_EQ(session->acknowledged(), 9u);
  Restore();
  EXPECT_THAT(Steps(), IsEmpty());
  session = Connect("a", "folder.1", {Running()}, 9);
  EXPECT_EQ(Job().state(), v1::Job::RUNNING);
  Say(session, 10, Step(4, 0));
  Say(session, 11, Step(4, 1));
  EXPECT_FALSE(session->closed().has_value());
  EXPECT_EQ(session->acknowledged(), 11u);
  EXPECT_THAT(Steps(), ElementsAre(4));
  EXPECT_THAT(LogTexts(), ElementsAre(HasSubstr("messages 4 to 9 of nodes/a were taken in once")));
  const absl::Status read = sqlite_->Read([&](store::ReadTransaction& transaction) {
    const auto page = transaction.ReadLogs({.job = "j"});
    EXPECT_TRUE(page->lines.at(0).is_stderr());
    EXPECT_EQ(ToTime(page->lines.at(0).time()), clock_.Now());
    return page.status();
  });
  EXPECT_EQ(read, absl::OkStatus());
  // Once, not with every session.
  controller_->OnClosed(session);
  Connect("a", "folder.1", {Running()}, 11);
  EXPECT_THAT(LogTexts(), SizeIs(1));
}

// What the worker said of their end is lost with the old database.
TEST_F(RestoreTest, RanksThatEndedMeanwhileAreLostAndTheJobGoesOn) {
  auto session = RunJob();
  BackUp();
  v1::AttemptEvent event;
  event.mutable_trainer_exited()->set_rank(1);
  event.mutable_trainer_exited()->set_outcome(v1::TrainerExited::COMPLETED);
  Say(session, 4, event);
  Restore();
  v1::RunningAttempt running = Running();
  running.mutable_ranks()->RemoveLast();
  session = Connect("a", "folder.1", {running}, 4);
  EXPECT_EQ(Job().attempts(0).failure().rank(), 1);
  EXPECT_THAT(Job().attempts(0).failure().message(), HasSubstr("how is lost: messages 4 to 4"));
  EXPECT_EQ(Job().attempts(0).ranks(1).state(), v1::RankStatus::LOST);
  EXPECT_EQ(Job().attempts(0).ranks(0).state(), v1::RankStatus::READY);
  const std::vector<v1::Command> commands = session->Commands();
  ASSERT_FALSE(commands.empty());
  EXPECT_EQ(commands.back().stop().mode(), v1::StopTrainers::ABORT);
}

// The worker runs the job's next attempt, of which the database does not know.
TEST_F(RestoreTest, RanksOfALaterAttemptAreNotTakenForThoseThatTheDatabaseKnows) {
  auto session = RunJob();
  BackUp();
  Restore();
  v1::RunningAttempt later = Running();
  later.set_attempt(2);
  later.set_fencing_token(token_ + 1);
  session = Connect("a", "folder.1", {later}, 9);
  for (const int rank : {0, 1}) {
    EXPECT_EQ(Job().attempts(0).ranks(rank).state(), v1::RankStatus::LOST);
  }
  const std::vector<v1::Command> commands = session->Commands();
  ASSERT_FALSE(commands.empty());
  EXPECT_TRUE(commands[0].has_stop());
  EXPECT_EQ(commands[0].fencing_token(), token_ + 1);
}

// Attempts that the database does not know of may run on nodes that have not said hello.
TEST_F(RestoreTest, NothingIsStartedUntilWhatIsNotKnownHasEnded) {
  auto session = RunJob();
  BackUp();
  const uint64_t token = token_;
  Restore();
  ASSERT_TRUE(Create("k").ok());
  auto other = Connect("b", "folder.2");
  EXPECT_THAT(other->Commands(), IsEmpty());
  EXPECT_EQ(Job("k").state(), v1::Job::PENDING);
  EXPECT_THAT(Job("k").state_reason(), HasSubstr("put back from a backup"));
  // Also across a restart.
  Restart();
  other = Connect("b", "folder.2");
  clock_.Advance(options_.adoption_timeout - absl::Milliseconds(1));
  controller_->RunOnce();
  EXPECT_THAT(other->Commands(), IsEmpty());
  clock_.Advance(absl::Milliseconds(1));
  controller_->RunOnce();
  const std::vector<v1::Command> commands = other->Commands();
  ASSERT_THAT(commands, SizeIs(1));
  EXPECT_EQ(commands[0].job(), "k");
  EXPECT_GT(commands[0].fencing_token(), token + 1'000'000);
  EXPECT_GT(commands[0].command_id(), 1'000'000u);
  // It is over for good.
  Restart();
  ASSERT_TRUE(Create("l").ok());
  auto third = Connect("c", "folder.3");
  EXPECT_THAT(third->Commands(), SizeIs(1));
}

TEST_F(RestoreTest, WhatTheDatabaseDoesNotKnowIsStopped) {
  auto session = Connect("a", "folder.1");
  BackUp();
  session = RunJob();
  Restore();
  session = Connect("a", "folder.1", {Running()}, 3);
  const std::vector<v1::Command> commands = session->Commands();
  ASSERT_THAT(commands, SizeIs(1));
  EXPECT_EQ(commands[0].stop().mode(), v1::StopTrainers::ABORT);
  EXPECT_EQ(commands[0].fencing_token(), token_);
}

}  // namespace
}  // namespace ringleader::lifecycle
