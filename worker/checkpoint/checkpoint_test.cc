#include "worker/checkpoint/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <atomic>
#include <csignal>
#include <filesystem>
#include <new>

#include "absl/time/clock.h"
#include "base/files.h"
#include "worker/checkpoint/checkpointer.h"
#include "worker/checkpoint/format.h"
#include "worker/checkpoint/testing/checkpoint_test.h"
#include "worker/comm/testing/local_communicator.h"

namespace ringleader::checkpoint {
namespace {

namespace fs = std::filesystem;
using comm::Communicator;
using comm::testing::LocalCommunicators;
using comm::testing::RunRanks;
using testing::CheckpointTest;
using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::Layout;
using testing::MakeShard;
using testing::Source;

void ExpectEqual(const optim::OptimizerShard& got, const optim::OptimizerShard& want) {
  EXPECT_EQ(got.begin, want.begin);
  EXPECT_THAT(got.master, ElementsAreArray(want.master));
  EXPECT_THAT(got.first_moment, ElementsAreArray(want.first_moment));
  EXPECT_THAT(got.second_moment, ElementsAreArray(want.second_moment));
}

TEST_F(CheckpointTest, ComesBackOnAnyNumberOfRanks) {
  for (const int writers : {1, 2, 4}) {
    fs::remove_all(directory_);
    SaveSteps(writers, {7});
    const std::optional<CheckpointInfo> found = Find();
    ASSERT_TRUE(found.has_value()) << find_status_;
    EXPECT_EQ(found->state.step, 7u);
    EXPECT_EQ(found->state.updates, 6u);
    EXPECT_EQ(found->state.skipped_steps, 1u);
    EXPECT_EQ(found->state.tokens, 7168u);
    EXPECT_EQ(found->state.data_position, 14u);
    EXPECT_EQ(found->state.seed, 42u);
    EXPECT_EQ(found->state.job_digest, "0123abcd");
    for (const int readers : {1, 2, 3, 4}) {
      for (int rank = 0; rank < readers; ++rank) {
        const optim::OptimizerShard want = MakeShard(rank, readers, 7);
        const auto got = ReadShard(*found, want.begin, want.elements());
        ASSERT_TRUE(got.ok()) << got.status();
        ExpectEqual(*got, want);
      }
    }
  }
}

TEST_F(CheckpointTest, AllRanksFindTheSame) {
  SaveSteps(2, {1, 2});
  RunRanks(3, [&](Communicator& comm) {
    std::vector<std::string> problems;
    const auto found = FindNewestCheckpoint(directory_, Layout(), comm, &problems);
    ASSERT_TRUE(found.ok() && found->has_value()) << found.status();
    EXPECT_EQ((*found)->state.step, 2u);
  });
}

// Written by tests/golden/make_checkpoint.py, which shares no code with this.
TEST_F(CheckpointTest, ReadsTheGoldenCheckpointAndWritesTheSameBytes) {
  directory_ = "tests/golden/checkpoint-v1";
  const std::optional<CheckpointInfo> golden = Find();
  ASSERT_TRUE(golden.has_value()) << find_status_ << ::testing::PrintToString(problems_);
  EXPECT_EQ(golden->state.data_position, 14u);
  const auto shard = ReadShard(*golden, 0, 32);
  ASSERT_TRUE(shard.ok()) << shard.status();
  ExpectEqual(*shard, MakeShard(0, 1, 0.5f));

  const std::string path = temp_.File("shard");
  const auto checksum = WriteShardFile(path, MakeShard(1, 2, 0.5f), 16);
  ASSERT_TRUE(checksum.ok()) << checksum.status();
  EXPECT_EQ(*checksum, golden->shards[1].checksum);
  EXPECT_EQ(*ReadFile(path), *ReadFile(golden->path + "/" + golden->shards[1].name));
  EXPECT_EQ(ManifestText(*golden, Layout()), *ReadFile(golden->path + "/manifest.json"));
}

TEST_F(CheckpointTest, HoldsHeadBudgetsThatAreSound) {
  SaveSteps(1, {7});
  std::optional<CheckpointInfo> info = Find();
  ASSERT_TRUE(info.has_value());
  EXPECT_TRUE(info->state.head_budgets.empty());
  info->state.head_budgets = {{}, {.recall = {5, 6}, .halves = {1, 3}}};
  const auto read = ParseManifest(ManifestText(*info, Layout()), Layout(), "here");
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->state.head_budgets, info->state.head_budgets);
  info->state.head_budgets[1].halves = {1, 2};
  const auto damaged = ParseManifest(ManifestText(*info, Layout()), Layout(), "here");
  EXPECT_EQ(damaged.status().message(), "here: its heads' budgets are damaged");
}

TEST_F(CheckpointTest, KeepsTheLastAndOnlyThose) {
  SaveSteps(2, {1, 2, 3, 4}, /*keep_last=*/2);
  EXPECT_THAT(Entries(), ElementsAre("step-0000000003", "step-0000000004"));
  SaveSteps(2, {5}, /*keep_last=*/1);
  EXPECT_THAT(Entries(), ElementsAre("step-0000000005"));
  ASSERT_EQ(saved_.size(), 5u);
  EXPECT_EQ(saved_.back().first, 5u);
  EXPECT_EQ(*saved_.back().second, directory_ + "/step-0000000005");
}

TEST_F(CheckpointTest, NothingThereIsAFreshStart) {
  EXPECT_FALSE(Find().has_value());
  EXPECT_TRUE(find_status_.ok());
  EXPECT_THAT(problems_, IsEmpty());
}

TEST_F(CheckpointTest, LeftoversOfADeadAttemptAreNeitherReadNorKept) {
  SaveSteps(1, {1});
  fs::create_directories(directory_ + "/.step-0000000002.partial");
  fs::copy(directory_ + "/step-0000000001", directory_ + "/.step-0000000003.removed");
  fs::create_directories(directory_ + "/.model.token-4");
  EXPECT_EQ(Find()->state.step, 1u);
  EXPECT_THAT(problems_, IsEmpty());
  SaveSteps(1, {});
  EXPECT_THAT(Entries(), ElementsAre("step-0000000001"));
}

// A limit on file size stands in for a full disk: both fail in write(2).
class FullDisk {
 public:
  explicit FullDisk(rlim_t bytes) {
    std::signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{.rlim_cur = bytes, .rlim_max = before_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FullDisk() { setrlimit(RLIMIT_FSIZE, &before_); }

 private:
  rlimit before_{};
};

TEST_F(CheckpointTest, AFullDiskFailsTheSaveOnAllRanksAndKeepsEarlierOnes) {
  SaveSteps(2, {1});
  {
    const FullDisk full(100);
    SaveSteps(2, {2, 3}, /*keep_last=*/1);
  }
  EXPECT_THAT(Entries(), ElementsAre("step-0000000001"));
  ASSERT_EQ(saved_.size(), 3u);
  EXPECT_FALSE(saved_[1].second.ok());
  EXPECT_THAT(std::string(saved_[2].second.status().message()),
              HasSubstr(".step-0000000003.token-5.partial/shard-0000"));
  EXPECT_FALSE(statuses_[1].ok());
  EXPECT_EQ(Find()->state.step, 1u);

  SaveSteps(2, {4}, /*keep_last=*/1);  // there is room again
  EXPECT_THAT(Entries(), ElementsAre("step-0000000004"));
}

// An attempt that was replaced wakes up late.
TEST_F(CheckpointTest, NothingIsPublishedOrRemovedOnceANewerAttemptHasTheFolder) {
  SaveSteps(2, {1});
  const FolderOwner old = owner_;
  RunRanks(2, [&](Communicator& comm) {
    auto own = comm.Split({0, 1});
    ASSERT_TRUE(own.ok()) << own.status();
    Checkpointer late(Claimed(/*keep_last=*/1), Layout(), *std::move(own),
                      [](uint64_t, const absl::StatusOr<std::string>&) {});
    ASSERT_TRUE(comm.Barrier().ok());
    if (comm.rank() == 0) {
      owner_.token = 6;
      EXPECT_EQ(ClaimDirectory(directory_, owner_), absl::OkStatus());
    }
    ASSERT_TRUE(comm.Barrier().ok());
    late.Save(Source(MakeShard(comm.rank(), 2, 2)), 16, {.step = 2, .job_digest = ""});
    EXPECT_EQ(late.Wait().code(), absl::StatusCode::kAborted);
    EXPECT_THAT(std::string(late.Wait().message()), HasSubstr("with token 6 has begun since"));
  });
  EXPECT_THAT(Entries(), ElementsAre("step-0000000001"));

  // What the newer one is writing stays, though the old one looks for leftovers.
  fs::create_directories(directory_ + "/.step-0000000003.token-6.partial");
  owner_ = old;
  SaveSteps(1, {});
  EXPECT_THAT(Entries(), ElementsAre(".step-0000000003.token-6.partial", "step-0000000001"));
}

TEST_F(CheckpointTest, ASaveThatIsPendingIsFinished) {
  auto comm = LocalCommunicators(1);
  std::vector<uint64_t> saved;
  {
    Checkpointer checkpointer(Claimed(), Layout(), std::move(comm[0]),
                              [&](uint64_t step, const absl::StatusOr<std::string>& path) {
                                EXPECT_TRUE(path.ok()) << path.status();
                                saved.push_back(step);
                              });
    for (const uint64_t step : {3, 4, 5}) {
      checkpointer.Save(Source(MakeShard(0, 1, static_cast<float>(step))), 32,
                        {.step = step, .job_digest = ""});
    }
  }  // the destructor finishes the save
  EXPECT_THAT(saved, ElementsAre(3, 4, 5)) << "none takes the place of the one before";
  const auto got = ReadShard(*Find(), 0, 32);
  ASSERT_TRUE(got.ok()) << got.status();
  ExpectEqual(*got, MakeShard(0, 1, 5));
}

// An attempt ends when it has waited, and with it whoever is told.
TEST_F(CheckpointTest, WhoWaitsForASaveFindsItReported) {
  auto comm = LocalCommunicators(1);
  std::atomic<bool> is_reported = false;
  Checkpointer checkpointer(Claimed(), Layout(), std::move(comm[0]),
                            [&](uint64_t, const absl::StatusOr<std::string>&) {
                              absl::SleepFor(absl::Milliseconds(20));  // as a slow report may
                              is_reported = true;
                            });
  checkpointer.Save(Source(MakeShard(0, 1, 5)), 32, {.step = 5, .job_digest = ""});
  EXPECT_EQ(checkpointer.Wait(), absl::OkStatus());
  EXPECT_TRUE(is_reported);
}

TEST_F(CheckpointTest, AShardThatCannotBeCopiedFailsTheSaveOnEveryRank) {
  SaveSteps(2, {1});
  RunRanks(2, [&](Communicator& comm) {
    auto own = comm.Split({0, 1});
    ASSERT_TRUE(own.ok()) << own.status();
    Checkpointer checkpointer(Claimed(), Layout(), *std::move(own),
                              [](uint64_t, const absl::StatusOr<std::string>&) {});
    const int rank = comm.rank();
    checkpointer.Save(
        [rank]() -> absl::StatusOr<optim::OptimizerShard> {
          if (rank == 1) throw std::bad_alloc();
          return MakeShard(0, 2, 2);
        },
        16, {.step = 2, .job_digest = ""});
    EXPECT_EQ(checkpointer.Wait().code(), absl::StatusCode::kResourceExhausted);
  });
  EXPECT_EQ(Find()->state.step, 1u);
}

TEST_F(CheckpointTest, AnAbortedGroupFailsTheSaveAndLeavesNoCheckpoint) {
  auto comms = LocalCommunicators(2);
  Communicator* lost = comms[1].get();
  Checkpointer checkpointer(Claimed(), Layout(), std::move(comms[0]),
                            [](uint64_t, const absl::StatusOr<std::string>&) {});
  checkpointer.Save(Source(MakeShard(0, 2, 1)), 16, {.step = 1, .job_digest = ""});
  lost->Abort("rank 1 was killed");
  EXPECT_EQ(checkpointer.Wait().code(), absl::StatusCode::kAborted);
  EXPECT_FALSE(Find().has_value());
}

}  // namespace
}  // namespace ringleader::checkpoint
