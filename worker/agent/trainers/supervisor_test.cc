// Protocol versions, leases and slots of the trainers that a worker starts.
#include "worker/agent/trainers/supervisor.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <filesystem>
#include <map>
#include <memory>
#include <string>

#include "absl/cleanup/cleanup.h"
#include "base/boot_clock.h"
#include "proto/timestamps.h"
#include "worker/agent/testing/supervised.h"

namespace ringleader::agent {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using SupervisorTest = testing::SupervisedTest;

TEST_F(SupervisorTest, GivesATrainerOfItsProtocolVersionItsAssignment) {
  EXPECT_TRUE(Do(StartOf(7, 1)).accepted());
  const auto connection = Attach(7, 0);
  EXPECT_EQ(connection->closed, absl::OkStatus());
  ASSERT_EQ(connection->sent.size(), 1u);
  EXPECT_EQ(connection->sent[0].assignment().protocol_version(), kProtocolVersion);
}

TEST_F(SupervisorTest, KillsATrainerOfAnotherProtocolVersionAndSaysWhy) {
  EXPECT_TRUE(Do(StartOf(7, 1)).accepted());
  v1::TrainerMessage hello = HelloOf(7, 0, PidOf(7, 0));
  hello.mutable_hello()->set_protocol_version(0);
  const auto connection = Say(hello);
  EXPECT_EQ(connection->closed.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(connection->sent.empty());
  const v1::TrainerExited exited = NextExit();
  EXPECT_EQ(exited.outcome(), v1::TrainerExited::FAILED);
  EXPECT_TRUE(exited.retryable());
  EXPECT_THAT(exited.message(),
              HasSubstr("the trainer of rank 0 speaks protocol version 0 and its worker"));
}

TEST_F(SupervisorTest, TellsTrainersWhenTheirLeaseEnds) {
  EXPECT_TRUE(Do(StartOf(7, 1)).accepted());
  const absl::Time first = absl::UnixEpoch() + absl::Seconds(100);
  supervisor_.SetLease(first);
  const auto connection = Attach(7, 0);
  ASSERT_EQ(connection->sent.size(), 1u);
  EXPECT_EQ(connection->sent[0].assignment().lease().end_boot_nanoseconds(),
            absl::ToUnixNanos(first));
  EXPECT_EQ(connection->sent[0].assignment().fencing_token(), 7u);
  supervisor_.SetLease(first);
  EXPECT_EQ(connection->sent.size(), 1u);
  supervisor_.SetLease(first + absl::Seconds(2));
  ASSERT_EQ(connection->sent.size(), 2u);
  EXPECT_EQ(connection->sent[1].lease().end_boot_nanoseconds(),
            absl::ToUnixNanos(first + absl::Seconds(2)));
}

TEST_F(SupervisorTest, SaysOfATrainerThatItEndedWithItsLease) {
  supervisor_.SetLease(absl::UnixEpoch() + absl::Nanoseconds(1));  // long over
  EXPECT_TRUE(Do(StartOf(7, 1)).accepted());
  Attach(7, 0);
  kill(PidOf(7, 0), SIGKILL);
  EXPECT_THAT(NextExit().message(), HasSubstr("ended with its lease"));
}

// Its own fault, or its worker's reason to kill it, is told whenever it came.
TEST_F(SupervisorTest, WhatEndsATrainerAfterItsLeaseIsNotBlamedOnTheLease) {
  supervisor_.SetLease(absl::UnixEpoch() + absl::Nanoseconds(1));  // long over
  EXPECT_TRUE(Do(StartOf(7, 2)).accepted());
  Attach(7, 0);
  Attach(7, 1);
  kill(PidOf(7, 0), SIGSEGV);
  EXPECT_THAT(NextExit().message(), HasSubstr("killed by signal 11 (SIGSEGV)"));
  supervisor_.KillAll("the worker had to end");
  EXPECT_EQ(NextExit().message(), "the worker had to end");
}

// The worker stood still, and was in contact again before it looked after its trainers.
TEST_F(SupervisorTest, ALeaseThatComesTooLateSavesNobody) {
  EXPECT_TRUE(Do(StartOf(7, 1)).accepted());
  const absl::Time end = BootNow() + absl::Milliseconds(20);
  supervisor_.SetLease(end);
  Attach(7, 0);
  absl::SleepFor(end - BootNow() + absl::Milliseconds(1));
  kill(PidOf(7, 0), SIGKILL);
  supervisor_.SetLease(BootNow() + absl::Hours(1));
  EXPECT_THAT(NextExit().message(), HasSubstr("ended with its lease"));
}

TEST_F(SupervisorTest, ALeaseIsTheLastThatATrainerWasTold) {
  EXPECT_TRUE(Do(StartOf(7, 1)).accepted());
  Attach(7, 0);
  const absl::Time end = BootNow() + absl::Seconds(1);
  supervisor_.SetLease(end);
  supervisor_.SetLease(BootNow() + absl::Hours(1));
  absl::SleepFor(end - BootNow());
  kill(PidOf(7, 0), SIGKILL);
  EXPECT_THAT(NextExit().message(), HasSubstr("killed by signal 9"));
}

TEST_F(SupervisorTest, SaysNothingOfALeaseThatIsNotOver) {
  supervisor_.SetLease(BootNow() + absl::Hours(1));
  EXPECT_TRUE(Do(StartOf(7, 1)).accepted());
  Attach(7, 0);
  kill(PidOf(7, 0), SIGKILL);
  EXPECT_THAT(NextExit().message(), HasSubstr("killed by signal 9"));
}

// A rank that lingers keeps its own slot, and no other: as in the coordinator's books.
TEST_F(SupervisorTest, ARankThatEndedGivesItsSlotToAnotherJob) {
  EXPECT_TRUE(Do(StartOf(7, 2)).accepted());
  PidOf(7, 1);
  kill(PidOf(7, 0), SIGKILL);
  EXPECT_EQ(NextExit().rank(), 0u);
  EXPECT_TRUE(Do(StartOf(8, 1, "next")).accepted());
  EXPECT_GT(PidOf(8, 0, "next"), 0);
  const v1::CommandAck refused = Do(StartOf(9, 1, "third"));
  EXPECT_FALSE(refused.accepted());
  EXPECT_TRUE(refused.later());
  EXPECT_EQ(refused.message(), "2 of 2 trainers are taken, and 1 were asked for");
}

// Or the worker's witness would report the end of trainers that go on.
TEST_F(SupervisorTest, ATrainerHoldsTheWorkersLifeOpen) {
  int life[2];
  ASSERT_EQ(pipe2(life, O_CLOEXEC), 0);
  {
    auto logs = std::make_unique<LogPump>();
    Supervisor supervisor({.trainer_binary = binary_,
                           .gpus = {},
                           .listen_host = "127.0.0.1",
                           .tls = {},
                           .life_fd = life[1]},
                          &data_dir_, &events_, logs.get(), &metrics_,
                          [](std::function<void()>) {});
    const absl::Cleanup pump_ends_first = [&] { logs.reset(); };
    supervisor.OnCommand(StartOf(7, 1), now_);
    EXPECT_TRUE(Next().command_ack().accepted());
    EXPECT_GT(PidOf(7, 0), 0);
    close(life[1]);
    pollfd end = {.fd = life[0], .events = POLLIN, .revents = 0};
    EXPECT_EQ(poll(&end, 1, 0), 0);
  }
  pollfd end = {.fd = life[0], .events = POLLIN, .revents = 0};
  EXPECT_EQ(poll(&end, 1, 20'000), 1);
  close(life[0]);
}

// Or the next worker would start trainers beside those of an earlier one that have not ended yet.
TEST_F(SupervisorTest, ATrainerHoldsTheFoldersLock) {
  namespace fs = std::filesystem;
  EXPECT_TRUE(Do(StartOf(7, 1)).accepted());
  const pid_t pid = PidOf(7, 0);
  ASSERT_GT(pid, 0);
  std::vector<fs::path> open;
  std::error_code gone;  // the shell closes files of its own
  for (const auto& file : fs::directory_iterator(absl::StrCat("/proc/", pid, "/fd"), gone)) {
    open.push_back(fs::read_symlink(file, gone));
  }
  EXPECT_THAT(open, Contains(fs::canonical(dir_.File("data/lock"))));
}

TEST_F(SupervisorTest, SaysWhenATrainerEnded) {
  EXPECT_TRUE(Do(StartOf(7, 1)).accepted());
  const absl::Time before = absl::Now();
  kill(PidOf(7, 0), SIGKILL);
  const absl::Time ended = ToTime(NextExit().time());
  EXPECT_GE(ended, before);
  EXPECT_LE(ended, absl::Now());
}

TEST_F(SupervisorTest, CountsTheEndsOfTrainersByTheirOutcome) {
  EXPECT_TRUE(Do(StartOf(7, 2)).accepted());
  v1::TrainerMessage done;
  done.mutable_result()->set_outcome(v1::TrainerExited::COMPLETED);
  supervisor_.OnTrainerMessage(Attach(7, 0), done, now_);
  supervisor_.KillAll("over");
  for (int i = 0; i < 2; ++i) NextExit();
  std::map<std::string, double> ends;
  for (const prometheus::MetricFamily& family : registry_.Collect()) {
    if (family.name != "ringleader_worker_trainer_exits_total") continue;
    for (const prometheus::ClientMetric& metric : family.metric) {
      ends[metric.label.at(0).value] = metric.counter.value;
    }
  }
  const std::map<std::string, double> expected = {{"completed", 1}, {"failed", 1}, {"stopped", 0}};
  EXPECT_EQ(ends, expected);
}

TEST_F(SupervisorTest, FoldersThatHoldNothingGoWithTheirAttempt) {
  EXPECT_TRUE(Do(StartOf(7, 2)).accepted());
  PidOf(7, 0);
  PidOf(7, 1);
  std::filesystem::remove(FolderOf(7, 1) + "/pid");
  kill(PidOf(7, 0), SIGKILL);
  NextExit();
  // One of a trainer that runs stays, whatever it holds.
  EXPECT_TRUE(std::filesystem::exists(FolderOf(7, 1)));
  supervisor_.KillAll("over");
  NextExit();
  supervisor_.Tick(now_);
  EXPECT_TRUE(std::filesystem::exists(FolderOf(7, 0) + "/pid"));
  EXPECT_FALSE(std::filesystem::exists(FolderOf(7, 1)));
  std::filesystem::remove(FolderOf(7, 0) + "/pid");
  EXPECT_TRUE(Do(StartOf(8, 1)).accepted());
  PidOf(8, 0);
  std::filesystem::remove(FolderOf(8, 0) + "/pid");
  supervisor_.KillAll("over");
  NextExit();
  supervisor_.Tick(now_);
  EXPECT_FALSE(std::filesystem::exists(dir_.File("data/jobs/job/attempt-8")));
}

TEST_F(SupervisorTest, RefusesCommandsThatItDoesNotKnow) {
  v1::CommandAck ack = Do(Command(7));
  EXPECT_FALSE(ack.accepted());
  EXPECT_FALSE(ack.later());
  EXPECT_THAT(ack.message(), HasSubstr("no kind that this worker knows"));
  ack = Do(StopOf(7, static_cast<v1::StopTrainers::Mode>(9), 0));
  EXPECT_FALSE(ack.accepted());
  EXPECT_THAT(ack.message(), HasSubstr("stop.mode 9"));
}

}  // namespace
}  // namespace ringleader::agent
