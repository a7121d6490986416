// Attempts that end otherwise than they should, and whose failure it is.
#include <c10/util/Exception.h>
#include <gmock/gmock.h>

#include <filesystem>
#include <functional>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "base/process/progress.h"
#include "worker/checkpoint/ownership.h"
#include "worker/trainer/testing/run_test.h"

namespace ringleader::trainer {
namespace {

using testing::RecordingHost;
using testing::StepsOf;

class FailureTest : public testing::RunTest {
 protected:
  // As the attempt after this one does.
  static void TakeFolder(const TrainingJob& job) {
    const absl::Status taken = checkpoint::ClaimDirectory(
        job.checkpoint_directory,
        {.job = job.name, .uid = job.uid, .token = job.fencing_token + 1});
    EXPECT_TRUE(taken.ok()) << taken;
  }
};

// Another attempt takes the folder in the step before the stop: what it trained is lost.
TEST_F(FailureTest, AStopThatSavedNothingIsAFailure) {
  TrainingJob job = Job();
  job.checkpoint_every_steps = 0;
  NewHosts(job)[0].on_step = [&](RecordingHost& host, const StepRecord&) {
    host.stop = true;
    TakeFolder(job);
  };
  const absl::Status lost = testing::RunRanks(job, hosts_)[0].status();
  EXPECT_EQ(lost.code(), absl::StatusCode::kAborted) << lost;
  EXPECT_EQ(StepsOf(hosts_[0].steps), (std::vector<uint64_t>{1}));
  EXPECT_TRUE(hosts_[0].checkpoints.empty());
}

// Another attempt takes the folder when everything is saved: what is left is the export.
TEST_F(FailureTest, NoRankCompletesWhereTheModelDoesNotComeToItsPlace) {
  TrainingJob job = Job(2);
  job.steps = 1;
  NewHosts(job)[0].on_checkpoint = [&](uint64_t) { TakeFolder(job); };
  for (const auto& outcome : testing::RunRanks(job, hosts_)) {
    EXPECT_EQ(outcome.status().code(), absl::StatusCode::kAborted) << outcome.status();
    EXPECT_THAT(std::string(outcome.status().message()), ::testing::HasSubstr("has begun since"));
  }
  for (const RecordingHost& host : hosts_) {
    EXPECT_EQ(StepsOf(host.steps), (std::vector<uint64_t>{1}));
    EXPECT_EQ(host.model, "");
  }
  EXPECT_FALSE(std::filesystem::exists(job.checkpoint_directory + "/model"));
}

// Each has its share of the machine's memory, and so many none that is worth the name.
TEST_F(FailureTest, RanksThatShareAMachineShareItsMemory) {
  TrainingJob job = Job();
  job.ranks_per_node = 1'000'000'000;
  const absl::Status failure = Failure(job);
  EXPECT_EQ(failure.code(), absl::StatusCode::kFailedPrecondition) << failure;
  EXPECT_THAT(std::string(failure.message()), ::testing::HasSubstr("the job does not fit"));
  EXPECT_TRUE(hosts_[0].steps.empty());
}

// One that has less than the others plans for all of them.
TEST_F(FailureTest, RanksPlanByTheLeastMemoryThatAnyHas) {
  const TrainingJob job = Job(2);
  NewHosts(job);
  const auto outcomes = testing::RunRanks(job, hosts_, [](TrainingJob& of_rank) {
    if (of_rank.rank == 1) of_rank.ranks_per_node = 1'000'000'000;
  });
  for (const auto& outcome : outcomes) {
    EXPECT_EQ(outcome.status().code(), absl::StatusCode::kFailedPrecondition) << outcome.status();
    EXPECT_THAT(std::string(outcome.status().message()),
                ::testing::HasSubstr("the job does not fit"));
  }
}

// The other rank hears of it in attention, and an error that passes through LibTorch loses its
// code.
TEST_F(FailureTest, AFailureOfARankIsThatRanksToTheOthers) {
  NewHosts(Job(2))[1].on_place = [](const std::string& phase) {
    if (phase == "forward and backward") throw std::runtime_error("rank 1's own");
  };
  const auto outcomes = testing::RunRanks(Job(2), hosts_);
  EXPECT_EQ(outcomes[0].status(), absl::AbortedError("rank 1: rank 1's own"));
  EXPECT_EQ(outcomes[1].status(), absl::InternalError("rank 1's own"));
}

// What another attempt may fare better with, and what to change for it.
TEST_F(FailureTest, WhoRunsOutOfMemoryHearsWhatTakesLess) {
  const auto failure_with = [this](const std::function<void()>& fail) {
    NewHosts(Job())[0].on_place = [&fail](const std::string& phase) {
      if (phase == "forward and backward") fail();
    };
    return testing::RunRanks(Job(), hosts_)[0].status();
  };
  EXPECT_EQ(failure_with([] {
              TORCH_CHECK_WITH(OutOfMemoryError, false, "it asked for 7 GiB\nand had none");
            }),
            absl::ResourceExhaustedError(
                "rank 0: it asked for 7 GiB; set resources.recompute: full and resources.offload: "
                "host, use more GPUs (resources.trainers) or a shorter data.sequence_length"));
  const absl::Status of_host = failure_with([] { throw std::bad_alloc(); });
  EXPECT_EQ(of_host.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(of_host.message()), ::testing::StartsWith("out of memory with "));
  EXPECT_EQ(failure_with([] { TORCH_CHECK(false, "a kernel failed"); }),
            absl::InternalError("a kernel failed"));
}

// Weights may be many, and who waits for them is not the one that hangs.
TEST_F(FailureTest, TheOtherRanksAreNotBlamedWhileTheFirstExports) {
  TrainingJob job = Job(2);
  job.steps = 1;
  NewHosts(job)[0].on_model = [] {
    const absl::Time deadline = absl::Now() + absl::Seconds(20);
    while (!Progress::waiting() && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(1));
    EXPECT_TRUE(Progress::waiting());
  };
  Run(job);
  EXPECT_FALSE(Progress::waiting());
}

TEST_F(FailureTest, WhatARankFindsWrongByItselfStaysItsOwn) {
  const TrainingJob job = Job(2);
  std::filesystem::remove_all(job.eval_data);
  NewHosts(job);
  const auto outcomes = testing::RunRanks(job, hosts_);
  // Both find it by themselves, whoever was first.
  for (const auto& outcome : outcomes) {
    EXPECT_EQ(outcome.status().code(), absl::StatusCode::kNotFound) << outcome.status();
  }
}

}  // namespace
}  // namespace ringleader::trainer
