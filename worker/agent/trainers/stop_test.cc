// Trainers that are told to leave, are killed, or end by themselves: when, and what is said of it.
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/wait.h>

#include "proto/timestamps.h"
#include "worker/agent/testing/supervised.h"

namespace ringleader::agent {
namespace {

using ::testing::HasSubstr;
using v1::StopTrainers;
using v1::TrainerExited;

class StopTest : public testing::SupervisedTest {
 protected:
  // Ranks that have attached.
  std::vector<std::shared_ptr<testing::RecordingConnection>> Started(uint32_t trainers) {
    EXPECT_TRUE(Do(StartOf(7, trainers)).accepted());
    std::vector<std::shared_ptr<testing::RecordingConnection>> connections;
    for (uint32_t rank = 0; rank < trainers; ++rank) {
      connections.push_back(Attach(7, rank));
      connections.back()->sent.clear();
    }
    return connections;
  }
  // How the only trainer ends; the lines of its log before that are added to `log`.
  TrainerExited ExitAfter(std::vector<std::string>* log) {
    while (!HasFailure()) {
      const v1::WorkerMessage message = Next();
      for (const v1::LogLine& line : message.event().logs().lines()) {
        log->push_back(
            absl::StrCat(line.rank(), line.is_stderr() ? " err " : " out ", line.text()));
        EXPECT_GT(ToTime(line.time()), begin_);
        EXPECT_LE(ToTime(line.time()), absl::Now());
      }
      if (message.event().has_trainer_exited()) return message.event().trainer_exited();
    }
    return {};
  }

  const absl::Time begin_ = absl::Now();
};

TEST_F(StopTest, AnAbortLeavesATrainerItsGrace) {
  const auto trainers = Started(2);
  EXPECT_TRUE(Do(StopOf(7, StopTrainers::ABORT, 5000)).accepted());
  for (const auto& trainer : trainers) {
    ASSERT_EQ(trainer->sent.size(), 1u);
    EXPECT_EQ(trainer->sent[0].stop().mode(), StopTrainers::ABORT);
    EXPECT_EQ(trainer->sent[0].stop().reason(), "rank 9 failed");
  }
  now_ += absl::Milliseconds(4999);
  ExpectNothing();
  now_ += absl::Milliseconds(1);
  for (uint32_t i = 0; i < 2; ++i) {
    const TrainerExited exited = NextExit();
    EXPECT_EQ(exited.message(), "did not leave within 5s of being told to (rank 9 failed)");
    EXPECT_TRUE(exited.collateral());
    EXPECT_EQ(exited.outcome(), TrainerExited::FAILED);
  }
  EXPECT_TRUE(supervisor_.idle());
}

TEST_F(StopTest, ATrainerThatHasNotAttachedIsKilledByAnAbortAtOnce) {
  EXPECT_TRUE(Do(StartOf(7, 1)).accepted());
  PidOf(7, 0);
  EXPECT_TRUE(Do(StopOf(7, StopTrainers::ABORT, 60'000)).accepted());
  const TrainerExited exited = NextExit();
  EXPECT_EQ(exited.message(), "rank 9 failed");
  EXPECT_TRUE(exited.collateral());
}

TEST_F(StopTest, ACheckpointIsWaitedForAndIsNobodysFailure) {
  const auto trainers = Started(1);
  EXPECT_TRUE(Do(StopOf(7, StopTrainers::CHECKPOINT, 60'000)).accepted());
  EXPECT_EQ(trainers[0]->sent[0].stop().mode(), StopTrainers::CHECKPOINT);
  now_ += absl::Seconds(59);
  ExpectNothing();
  now_ += absl::Seconds(1);
  const TrainerExited exited = NextExit();
  EXPECT_THAT(exited.message(), HasSubstr("did not leave within 1m of being told to"));
  EXPECT_FALSE(exited.collateral());
}

TEST_F(StopTest, ATrainerThatHasNotAttachedIsToldOfACheckpointWhenItDoes) {
  EXPECT_TRUE(Do(StartOf(7, 1)).accepted());
  const pid_t pid = PidOf(7, 0);
  EXPECT_TRUE(Do(StopOf(7, StopTrainers::CHECKPOINT, 60'000)).accepted());
  ExpectNothing();
  const auto trainer = Say(HelloOf(7, 0, pid));
  ASSERT_EQ(trainer->sent.size(), 2u);
  EXPECT_TRUE(trainer->sent[0].has_assignment());
  EXPECT_EQ(trainer->sent[1].stop().mode(), StopTrainers::CHECKPOINT);
}

TEST_F(StopTest, AnAbortShortensAGraceAndNeverLengthensIt) {
  Started(1);
  EXPECT_TRUE(Do(StopOf(7, StopTrainers::CHECKPOINT, 60'000)).accepted());
  EXPECT_TRUE(Do(StopOf(7, StopTrainers::ABORT, 2000)).accepted());
  EXPECT_TRUE(Do(StopOf(7, StopTrainers::ABORT, 90'000)).accepted());
  now_ += absl::Milliseconds(1999);
  ExpectNothing();
  now_ += absl::Milliseconds(1);
  EXPECT_TRUE(NextExit().collateral());
}

TEST_F(StopTest, WhoAsksForACheckpointAgainSaysAnewHowLongItMayTake) {
  Started(1);
  EXPECT_TRUE(Do(StopOf(7, StopTrainers::CHECKPOINT, 2000)).accepted());
  EXPECT_TRUE(Do(StopOf(7, StopTrainers::CHECKPOINT, 60'000)).accepted());
  now_ += absl::Milliseconds(59'999);
  ExpectNothing();
  now_ += absl::Milliseconds(1);
  EXPECT_THAT(NextExit().message(), HasSubstr("did not leave within 1m of being told to"));
}

// The rank that failed first is the reason for the abort, not a casualty of it.
TEST_F(StopTest, WhoEndedBeforeTheAbortIsNoCasualty) {
  Started(2);
  const pid_t first = PidOf(7, 0);
  kill(first, SIGSEGV);
  // It is gone, and nobody has looked yet.
  siginfo_t gone{};
  ASSERT_EQ(waitid(P_PID, static_cast<id_t>(first), &gone, WEXITED | WNOWAIT), 0);
  supervisor_.OnCommand(StopOf(7, StopTrainers::ABORT, 0), now_);
  EXPECT_TRUE(Next().command_ack().accepted());
  std::map<uint32_t, TrainerExited> exits;
  for (int i = 0; i < 2; ++i) {
    const TrainerExited exited = NextExit();
    exits[exited.rank()] = exited;
  }
  EXPECT_FALSE(exits.at(0).collateral());
  EXPECT_THAT(exits.at(0).message(), HasSubstr("SIGSEGV"));
  EXPECT_TRUE(exits.at(1).collateral());
}

TEST_F(StopTest, AResultIsTheLastWord) {
  const auto trainers = Started(1);
  v1::TrainerMessage message;
  message.mutable_result()->set_outcome(TrainerExited::FAILED);
  message.mutable_result()->set_message("data.train: shard 2 is damaged");
  supervisor_.OnTrainerMessage(trainers[0], message, now_);
  ExpectNothing();  // it has not ended
  kill(PidOf(7, 0), SIGKILL);
  const TrainerExited exited = NextExit();
  EXPECT_EQ(exited.message(), "data.train: shard 2 is damaged");
  EXPECT_FALSE(exited.retryable());
  EXPECT_EQ(exited.signal(), SIGKILL);
}

// What a trainer said last may still be on its way when its process is gone.
TEST_F(StopTest, AnEndIsToldWhenAllWasHeardOrAfterTwoSeconds) {
  const auto trainers = Started(1);
  const pid_t pid = PidOf(7, 0);
  kill(pid, SIGKILL);
  const absl::Time deadline = absl::Now() + absl::Seconds(20);
  while (kill(pid, 0) == 0 && absl::Now() < deadline) supervisor_.Tick(now_);
  ASSERT_NE(kill(pid, 0), 0) << "it was reaped";
  // Its pipes have ended, and its stream has not.
  for (size_t ends = 0; ends < 2 && absl::Now() < deadline;) ends += RunTasks();
  now_ += absl::Seconds(2);
  supervisor_.Tick(now_);
  EXPECT_FALSE(events_.Next(seen_, absl::ZeroDuration()).has_value());
  now_ += absl::Milliseconds(1);
  supervisor_.Tick(now_);
  const auto told = events_.Next(seen_, absl::ZeroDuration());
  ASSERT_TRUE(told.has_value()) << "its stream may never end";
  EXPECT_EQ(told->event().trainer_exited().signal(), SIGKILL);
}

TEST_F(StopTest, LastWordsAreOfStderrAndTheExitCodesAreKept) {
  // Its lines come at once.
  TrainersDo("printf 'one\\ntile 7 out of range\\n' >&2; echo on stdout; exit 3");
  EXPECT_TRUE(Do(StartOf(7, 1)).accepted());
  std::vector<std::string> lines;
  const TrainerExited exited = ExitAfter(&lines);
  EXPECT_EQ(exited.exit_code(), 3);
  EXPECT_EQ(exited.signal(), 0);
  EXPECT_EQ(exited.message(),
            "exited with code 3 without giving a reason; last line on stderr: tile 7 out of range");
  EXPECT_THAT(lines, ::testing::UnorderedElementsAre("0 err one", "0 err tile 7 out of range",
                                                     "0 out on stdout"));
}

TEST_F(StopTest, WhatIsSaidLastOnStdoutIsNoLastWord) {
  TrainersDo(
      "echo 'tile 7 out of range' >&2; while [ ! -e go ]; do sleep 0.01; done; printf end; exit 3");
  EXPECT_TRUE(Do(StartOf(7, 1)).accepted());
  EXPECT_EQ(Next().event().logs().lines(0).text(), "tile 7 out of range");
  std::ofstream(FolderOf(7, 0) + "/go").flush();
  std::vector<std::string> lines;
  EXPECT_THAT(ExitAfter(&lines).message(), HasSubstr("last line on stderr: tile 7 out of range"));
  EXPECT_THAT(lines, ::testing::ElementsAre("0 out end"));
}

TEST_F(StopTest, LastWordsAreToldWhateverSpaceFollowsThem) {
  TrainersDo("printf 'tile 7 out of range\\n\\n' >&2; exit 3");
  EXPECT_TRUE(Do(StartOf(7, 1)).accepted());
  std::vector<std::string> lines;
  EXPECT_THAT(ExitAfter(&lines).message(), HasSubstr("last line on stderr: tile 7 out of range"));
  EXPECT_THAT(lines, ::testing::ElementsAre("0 err tile 7 out of range", "0 err "));
}

TEST_F(StopTest, OfTwoReasonsToKillTheFirstIsTold) {
  Started(1);
  supervisor_.KillAll("the first");
  supervisor_.KillAll("the second");
  EXPECT_EQ(NextExit().message(), "the first");
}

TEST_F(StopTest, ATrainerThatCannotBeStartedIsAFailureWithTheReason) {
  v1::Command start = StartOf(7, 2);
  start.mutable_start()->mutable_spec()->mutable_resources()->set_engine(v1::ResourcesSpec::CUDA);
  EXPECT_TRUE(Do(start).accepted());
  for (uint32_t rank = 0; rank < 2; ++rank) {
    const TrainerExited exited = NextExit();
    EXPECT_EQ(exited.rank(), rank);
    EXPECT_EQ(exited.outcome(), TrainerExited::FAILED);
    EXPECT_THAT(exited.message(), HasSubstr("this node has 0 GPUs for 2 trainers"));
  }
  EXPECT_TRUE(supervisor_.idle());
}

TEST_F(StopTest, AWorkerThatLeavesTellsThoseWhoWereNotToldBefore) {
  const auto trainers = Started(1);
  EXPECT_TRUE(Do(StartOf(9, 1, "other")).accepted());
  const auto other = Attach(9, 0, "other");
  EXPECT_TRUE(Do(StopOf(7, StopTrainers::ABORT, 60'000)).accepted());
  trainers[0]->sent.clear();
  other->sent.clear();
  supervisor_.StopAll("drain", absl::Seconds(10), now_);
  EXPECT_TRUE(trainers[0]->sent.empty()) << "it leaves already";
  ASSERT_EQ(other->sent.size(), 1u);
  EXPECT_EQ(other->sent[0].stop().mode(), StopTrainers::CHECKPOINT);
  EXPECT_EQ(other->sent[0].stop().grace_milliseconds(), 10'000u);
  EXPECT_EQ(other->sent[0].stop().reason(), "drain");
  supervisor_.KillAll("the worker had to end");
  for (int i = 0; i < 2; ++i) EXPECT_EQ(NextExit().message(), "the worker had to end");
}

}  // namespace
}  // namespace ringleader::agent
