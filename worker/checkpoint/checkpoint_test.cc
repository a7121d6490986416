#include "worker/checkpoint/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "absl/strings/str_format.h"
#include "base/checksum.h"
#include "base/files.h"
#include "base/testing/temp_dir.h"
#include "worker/checkpoint/checkpointer.h"
#include "worker/checkpoint/format.h"
#include "worker/comm/testing/local_communicator.h"

namespace ringleader::checkpoint {
namespace {

namespace fs = std::filesystem;
using comm::Communicator;
using comm::testing::LocalCommunicators;
using comm::testing::RunRanks;
using testing::AllOf;
using testing::ElementsAre;
using testing::ElementsAreArray;
using testing::HasSubstr;
using testing::IsEmpty;

model::ParameterLayout Layout() {
  return {.slots = {{.name = "a.weight", .shape = {3, 4}, .offset = 0, .elements = 12},
                    {.name = "norm.weight", .shape = {5}, .offset = 16, .elements = 5}},
          .elements = 32};
}

// Element i of the flat space holds i + offset, -i and i / 4; nothing in gaps and padding.
optim::OptimizerShard MakeShard(int rank, int ranks, float offset) {
  const model::ParameterLayout layout = Layout();
  const int64_t elements = layout.ShardElements(ranks);
  optim::OptimizerShard shard{.begin = rank * elements,
                              .master = std::vector<float>(elements),
                              .first_moment = std::vector<float>(elements),
                              .second_moment = std::vector<float>(elements)};
  for (const model::ParameterSlot& slot : layout.slots) {
    for (int64_t i = slot.offset; i < slot.offset + slot.elements; ++i) {
      const int64_t local = i - shard.begin;
      if (local < 0 || local >= elements) continue;
      shard.master[local] = static_cast<float>(i) + offset;
      shard.first_moment[local] = -static_cast<float>(i);
      shard.second_moment[local] = static_cast<float>(i) / 4;
    }
  }
  return shard;
}

optim::ShardSource Source(optim::OptimizerShard shard) {
  return [shard = std::move(shard)]() mutable { return std::move(shard); };
}

void ExpectEqual(const optim::OptimizerShard& got, const optim::OptimizerShard& want) {
  EXPECT_EQ(got.begin, want.begin);
  EXPECT_THAT(got.master, ElementsAreArray(want.master));
  EXPECT_THAT(got.first_moment, ElementsAreArray(want.first_moment));
  EXPECT_THAT(got.second_moment, ElementsAreArray(want.second_moment));
}

void Replace(const std::string& path, const std::string& bytes) {
  fs::remove(path);  // overwriting in place makes some file systems sync
  std::ofstream(path, std::ios::binary) << bytes;
}

class CheckpointTest : public testing::Test {
 protected:
  // The folder is the test's attempt's, which need not be written down twice.
  CheckpointerOptions Claimed(int keep_last = 2, const std::string& resumed_from = "") {
    fs::create_directories(directory_);
    if (!fs::exists(directory_ + "/owner.json")) {
      const absl::Status claimed = ClaimDirectory(directory_, owner_);
      EXPECT_TRUE(claimed.ok()) << claimed;
    }
    return {.directory = directory_,
            .keep_last = keep_last,
            .owner = owner_,
            .resumed_from = resumed_from};
  }

  // Saves one checkpoint a step on `ranks` ranks; step s has offset s.
  void SaveSteps(int ranks, const std::vector<uint64_t>& steps, int keep_last = 2,
                 const std::string& resumed_from = "") {
    const CheckpointerOptions options = Claimed(keep_last, resumed_from);
    RunRanks(ranks, [&](Communicator& comm) {
      std::vector<int> all(ranks);
      for (int i = 0; i < ranks; ++i) all[i] = i;
      auto own = comm.Split(all);
      ASSERT_TRUE(own.ok()) << own.status();
      Checkpointer checkpointer(options, Layout(), *std::move(own),
                                [&](uint64_t step, const absl::StatusOr<std::string>& path) {
                                  saved_.emplace_back(step, path);
                                });
      for (const uint64_t step : steps) {
        optim::OptimizerShard shard = MakeShard(comm.rank(), ranks, static_cast<float>(step));
        const int64_t elements = shard.elements();
        checkpointer.Save(Source(std::move(shard)), elements,
                          {.step = step,
                           .updates = step - 1,
                           .skipped_steps = 1,
                           .tokens = 1024 * step,
                           .data_position = 2 * step,
                           .seed = 42,
                           .job_digest = "0123abcd"});
        last_ = checkpointer.Wait();
        if (comm.rank() == 0) statuses_.push_back(last_);
      }
    });
  }

  std::optional<CheckpointInfo> Find(const model::ParameterLayout& layout = Layout()) {
    auto comm = LocalCommunicators(1);
    problems_.clear();
    auto found = FindNewestCheckpoint(directory_, layout, *comm[0], &problems_);
    find_status_ = found.status();
    return found.value_or(std::nullopt);
  }

  std::vector<std::string> Entries() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(directory_)) {
      const std::string name = entry.path().filename();
      if (name != "owner.json" && name != ".owner.lock") names.push_back(name);
    }
    std::sort(names.begin(), names.end());
    return names;
  }

  TempDir temp_;
  FolderOwner owner_ = {.job = "j", .uid = "j-1", .token = 5};
  std::string directory_ = temp_.File("checkpoints");
  thread_local static absl::Status last_;
  std::vector<absl::Status> statuses_;
  std::vector<std::pair<uint64_t, absl::StatusOr<std::string>>> saved_;
  std::vector<std::string> problems_;
  absl::Status find_status_;
};
thread_local absl::Status CheckpointTest::last_;

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
  ASSERT_TRUE(golden.has_value()) << find_status_ << testing::PrintToString(problems_);
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

// Whoever wrote it, and whatever lies in its place.
TEST_F(CheckpointTest, AManifestThatMakesNoSenseIsDamaged) {
  SaveSteps(1, {7});
  const std::string path = directory_ + "/step-0000000007/manifest.json";
  const nlohmann::json original = nlohmann::json::parse(*ReadFile(path));
  for (const nlohmann::json& updates : {nlohmann::json(-5), nlohmann::json(3.5)}) {
    nlohmann::json manifest = original;
    manifest["body"]["state"]["updates"] = updates;
    manifest.erase("xxh3_64");
    const std::string canonical = manifest.dump();
    manifest["xxh3_64"] = absl::StrFormat("%016x", Checksum(canonical.data(), canonical.size()));
    std::ofstream(path) << manifest;
    EXPECT_FALSE(Find().has_value());
    EXPECT_THAT(problems_, ::testing::Contains(HasSubstr("updates is no whole number")));
  }
  std::ofstream(path) << std::string(400'000, '[') << std::string(400'000, ']');
  EXPECT_FALSE(Find().has_value());
  fs::remove(path);
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  EXPECT_FALSE(Find().has_value());
  EXPECT_THAT(problems_, ::testing::Contains(HasSubstr("is a pipe")));
}

// Whole, but not what its name says: to pass it over would throw it away at the next saves.
TEST_F(CheckpointTest, AFolderOfAnotherNameIsAnError) {
  SaveSteps(2, {7, 8});
  for (const char* name : {"/step-0000000009", "/step-0000000009.1"}) {
    fs::rename(directory_ + "/step-0000000007", directory_ + name);
    EXPECT_FALSE(Find().has_value());
    EXPECT_EQ(find_status_.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(find_status_.message()),
                HasSubstr("of step 7, in a folder named after step 9; give the folder its name, "
                          "step-0000000007"));
    fs::rename(directory_ + name, directory_ + "/step-0000000007");
  }
  ASSERT_TRUE(Find().has_value());
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

TEST_F(CheckpointTest, DamagedCheckpointsArePassedOverByNameAndNeverWinOverAValidOne) {
  SaveSteps(2, {10, 20, 30}, /*keep_last=*/3);
  fs::resize_file(directory_ + "/step-0000000030/shard-00001-of-00002.bin", 100);
  fs::remove(directory_ + "/step-0000000020/manifest.json");
  std::optional<CheckpointInfo> found = Find();
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->state.step, 10u);
  EXPECT_THAT(problems_, ElementsAre(AllOf(HasSubstr("step-0000000030/shard-00001-of-00002.bin"),
                                           HasSubstr("100 bytes long")),
                                     HasSubstr("step-0000000020/manifest.json")));

  // Going on from step 10 with room for one: the new one must survive, whatever the damaged ones
  // are called.
  SaveSteps(2, {20}, /*keep_last=*/1, found->path);
  found = Find();
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->path, directory_ + "/step-0000000020.1");
  EXPECT_THAT(Entries(), ElementsAre("step-0000000020.1", "step-0000000030"));
}

TEST_F(CheckpointTest, DamagedCheckpointsTakeNoPlaceOfAWholeOne) {
  SaveSteps(2, {10, 20, 30, 40}, /*keep_last=*/4);
  fs::remove(directory_ + "/step-0000000030/manifest.json");
  fs::resize_file(directory_ + "/step-0000000040/shard-00000-of-00002.bin", 100);
  std::optional<CheckpointInfo> found = Find();
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->state.step, 20u);

  // The new one and the one before it that is whole; the damaged one that is still ahead waits.
  SaveSteps(2, {30}, /*keep_last=*/2, found->path);
  EXPECT_THAT(Entries(), ElementsAre("step-0000000020", "step-0000000030.1", "step-0000000040"));
  found = Find();
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->path, directory_ + "/step-0000000030.1");

  // Another attempt, of several saves: its own later ones count.
  SaveSteps(2, {35, 40, 45}, /*keep_last=*/2, found->path);
  EXPECT_THAT(Entries(), ElementsAre("step-0000000040.1", "step-0000000045"));
}

TEST_F(CheckpointTest, AFlippedBitAnywhereIsNoticed) {
  SaveSteps(2, {1});
  const std::string folder = directory_ + "/step-0000000001";
  for (const char* name : {"shard-00000-of-00002.bin", "shard-00001-of-00002.bin", kManifestName}) {
    const std::string path = folder + "/" + name;
    const std::string whole = *ReadFile(path);
    for (size_t byte = 0; byte < whole.size(); ++byte) {
      std::string damaged = whole;
      damaged[byte] ^= static_cast<char>(1 << (byte % 8));
      Replace(path, damaged);
      if (!Find().has_value()) {
        EXPECT_TRUE(find_status_.ok()) << find_status_;
        EXPECT_THAT(problems_, ElementsAre(HasSubstr(path)));
        continue;
      }
      // Blanks between JSON tokens carry nothing.
      const bool blank = std::isspace(static_cast<unsigned char>(whole[byte])) != 0;
      EXPECT_TRUE(path.ends_with(".json") && blank) << path << " byte " << byte;
    }
    Replace(path, whole);
  }
  EXPECT_TRUE(Find().has_value());
}

TEST_F(CheckpointTest, AFileCutOffAnywhereIsNoticed) {
  SaveSteps(1, {1});
  for (const char* name : {"shard-00000-of-00001.bin", kManifestName}) {
    const std::string path = directory_ + "/step-0000000001/" + name;
    const std::string whole = *ReadFile(path);
    for (size_t bytes = 0; bytes + 1 < whole.size(); ++bytes) {
      Replace(path, whole.substr(0, bytes));
      ASSERT_FALSE(Find().has_value()) << path << " cut to " << bytes;
      ASSERT_TRUE(find_status_.ok());
      ASSERT_THAT(problems_, ElementsAre(HasSubstr(path)));
    }
    Replace(path, whole);
  }
}

TEST_F(CheckpointTest, AnotherModelOrVersionIsAnErrorNotASilentFreshStart) {
  SaveSteps(1, {1});
  model::ParameterLayout other = Layout();
  other.slots[1].shape = {6};
  EXPECT_FALSE(Find(other).has_value());
  EXPECT_EQ(find_status_.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(find_status_.message()),
              AllOf(HasSubstr("another model"), HasSubstr("norm.weight")));
  for (const bool fewer : {true, false}) {
    other = Layout();
    if (fewer) {
      other.slots.pop_back();
    } else {
      other.slots.push_back({.name = "more.bias", .shape = {5}, .offset = 24, .elements = 5});
    }
    EXPECT_FALSE(Find(other).has_value());
    EXPECT_THAT(std::string(find_status_.message()),
                HasSubstr(absl::StrFormat("it has 2 parameters, the model %d", fewer ? 1 : 3)));
  }

  const std::string path = directory_ + "/step-0000000001/manifest.json";
  const nlohmann::json original = nlohmann::json::parse(*ReadFile(path));
  const auto write = [&](const std::string& key, const nlohmann::json& value) {
    nlohmann::json manifest = original;
    manifest[key] = value;
    manifest.erase("xxh3_64");
    const std::string canonical = manifest.dump();
    manifest["xxh3_64"] = absl::StrFormat("%016x", Checksum(canonical.data(), canonical.size()));
    std::ofstream(path) << manifest;
  };
  write("format", "another-programs");
  EXPECT_FALSE(Find().has_value());
  EXPECT_THAT(problems_, ::testing::Contains(HasSubstr("not a checkpoint's manifest")));
  // A newer version's manifest carries its checksum at the same place.
  write("version", 2);
  EXPECT_FALSE(Find().has_value());
  EXPECT_EQ(find_status_.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(find_status_.message()), HasSubstr("format version 2"));
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
  {
    Checkpointer checkpointer(Claimed(), Layout(), std::move(comm[0]),
                              [](uint64_t, const absl::StatusOr<std::string>& path) {
                                EXPECT_TRUE(path.ok()) << path.status();
                              });
    checkpointer.Save(Source(MakeShard(0, 1, 5)), 32, {.step = 5, .job_digest = ""});
  }  // the destructor finishes the save
  const auto got = ReadShard(*Find(), 0, 32);
  ASSERT_TRUE(got.ok()) << got.status();
  ExpectEqual(*got, MakeShard(0, 1, 5));
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
