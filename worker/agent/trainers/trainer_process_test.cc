#include "worker/agent/trainers/trainer_process.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <string>

#include "absl/time/time.h"
#include "base/net/message_size.h"

namespace ringleader::agent {
namespace {

using ::testing::HasSubstr;
using v1::TrainerExited;

const absl::Time kNow = absl::FromUnixSeconds(1'000'000);

TEST(DescribeExitTest, TheTrainersOwnWordCounts) {
  Trainer trainer{.rank = 3};
  trainer.exit = ExitStatus{.code = 1, .signal = 0};
  trainer.result.emplace();
  trainer.result->set_outcome(TrainerExited::FAILED);
  trainer.result->set_message("data.train: shard 2 is damaged");
  trainer.result->set_retryable(false);
  trainer.result->set_collateral(true);
  const TrainerExited exited = DescribeExit(trainer, kNow);
  EXPECT_EQ(exited.rank(), 3);
  EXPECT_EQ(exited.exit_code(), 1);
  EXPECT_EQ(exited.message(), "data.train: shard 2 is damaged");
  EXPECT_FALSE(exited.retryable());
  EXPECT_TRUE(exited.collateral());
  trainer.result->set_retryable(true);
  trainer.result->set_collateral(false);
  EXPECT_TRUE(DescribeExit(trainer, kNow).retryable());
  EXPECT_FALSE(DescribeExit(trainer, kNow).collateral());
}

// E.g. of a trainer that is newer than its worker.
TEST(DescribeExitTest, AResultWithoutAnOutcomeThatIsKnownIsNone) {
  Trainer trainer;
  trainer.exit = ExitStatus{.code = 3, .signal = 0};
  trainer.result.emplace();
  trainer.result->set_message("done");
  for (const int outcome : {static_cast<int>(TrainerExited::OUTCOME_UNSPECIFIED), 99}) {
    trainer.result->set_outcome(static_cast<TrainerExited::Outcome>(outcome));
    const TrainerExited exited = DescribeExit(trainer, kNow);
    EXPECT_EQ(exited.outcome(), TrainerExited::FAILED);
    EXPECT_EQ(exited.message(), "exited with code 3 without giving a reason");
    EXPECT_TRUE(exited.retryable());
  }
}

TEST(DescribeExitTest, ASignalIsNamedAndCanBeRetried) {
  Trainer trainer;
  trainer.exit = ExitStatus{.code = 0, .signal = SIGSEGV};
  trainer.last_error_line = "tile 7 out of range";
  trainer.last_error_time = kNow - absl::Seconds(30);
  const TrainerExited exited = DescribeExit(trainer, kNow);
  EXPECT_EQ(exited.outcome(), TrainerExited::FAILED);
  EXPECT_EQ(exited.message(),
            "killed by signal 11 (SIGSEGV); last line on stderr: tile 7 out of range");
  EXPECT_TRUE(exited.retryable());
  EXPECT_FALSE(exited.collateral());
  trainer.last_error_line.clear();
  trainer.exit->signal = SIGKILL;
  EXPECT_EQ(DescribeExit(trainer, kNow).message(),
            "killed by signal 9 (SIGKILL), e.g. for want of memory");
  trainer.exit->signal = SIGRTMIN;
  EXPECT_THAT(DescribeExit(trainer, kNow).message(), HasSubstr("(SIG?)"));
}

TEST(DescribeExitTest, WhatWasSaidOnStderrLongBeforeIsNoReason) {
  Trainer trainer;
  trainer.exit = ExitStatus{.code = 3, .signal = 0};
  trainer.last_error_line = "warning: an old driver";
  trainer.last_error_time = kNow - absl::Minutes(2);
  EXPECT_EQ(DescribeExit(trainer, kNow).message(), "exited with code 3 without giving a reason");
  trainer.last_error_time = kNow - absl::Minutes(1);
  EXPECT_THAT(DescribeExit(trainer, kNow).message(), HasSubstr("warning: an old driver"));
}

// Who says more than can be kept is heard as far as there is room.
TEST(DescribeExitTest, ALongReasonIsCut) {
  Trainer trainer;
  trainer.result.emplace();
  trainer.result->set_outcome(TrainerExited::FAILED);
  trainer.result->set_message(std::string(2 * kMaxExitMessageBytes, 'x'));
  const std::string message = DescribeExit(trainer, kNow).message();
  EXPECT_LE(message.size(), kMaxExitMessageBytes);
  EXPECT_GT(message.size(), kMaxExitMessageBytes - 10);
}

TEST(DescribeExitTest, WhatWasAbortedIsNotToBlame) {
  Trainer trainer;
  trainer.exit = ExitStatus{.code = 0, .signal = SIGKILL};
  trainer.told_to_abort = true;
  EXPECT_TRUE(DescribeExit(trainer, kNow).collateral());
}

TEST(DescribeExitTest, AWorkerThatKillsSaysWhy) {
  Trainer trainer;
  trainer.exit = ExitStatus{.code = 0, .signal = SIGKILL};
  trainer.killed_because = "no sign of life for 30s";
  EXPECT_EQ(DescribeExit(trainer, kNow).message(), "no sign of life for 30s");
}

}  // namespace
}  // namespace ringleader::agent
