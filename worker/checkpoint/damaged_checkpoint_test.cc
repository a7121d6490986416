// What lies in a folder of checkpoints and is none, or none of this job's.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <cctype>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_format.h"
#include "base/files.h"
#include "worker/checkpoint/checkpoint.h"
#include "worker/checkpoint/checksummed_json.h"
#include "worker/checkpoint/format.h"
#include "worker/checkpoint/testing/checkpoint_test.h"

namespace ringleader::checkpoint {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using testing::CheckpointTest;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::Layout;

void Replace(const std::string& path, const std::string& bytes) {
  fs::remove(path);  // overwriting in place makes some file systems sync
  std::ofstream(path, std::ios::binary) << bytes;
}

class DamagedCheckpointTest : public CheckpointTest {};

void WriteWithItsChecksum(const std::string& path, nlohmann::json manifest) {
  manifest[kChecksumKey] = ChecksumOf(manifest);
  std::ofstream(path) << manifest;
}

// Whoever wrote it, and whatever lies in its place.
TEST_F(DamagedCheckpointTest, AManifestThatMakesNoSenseIsDamaged) {
  SaveSteps(1, {7});
  const std::string path = directory_ + "/step-0000000007/manifest.json";
  const nlohmann::json original = nlohmann::json::parse(*ReadFile(path));
  for (const nlohmann::json& updates : {nlohmann::json(-5), nlohmann::json(3.5)}) {
    nlohmann::json manifest = original;
    manifest["body"]["state"]["updates"] = updates;
    WriteWithItsChecksum(path, std::move(manifest));
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

// It may be whole, and to pass it over would have training go on without it, and remove it.
TEST_F(DamagedCheckpointTest, AnErrorOfReadingIsNoDamage) {
  SaveSteps(1, {7, 8});
  const std::string folder = directory_ + "/step-0000000008";
  const std::string path = folder + "/manifest.json";
  const std::string manifest = *ReadFile(path);
  fs::remove(path);
  fs::create_symlink("/proc/self/mem", path);  // no file system has an error at its beginning
  EXPECT_FALSE(Find().has_value());
  EXPECT_EQ(find_status_.code(), absl::StatusCode::kUnavailable) << find_status_;
  EXPECT_THAT(std::string(find_status_.message()), HasSubstr(path));
  EXPECT_THAT(problems_, ::testing::IsEmpty());
  Replace(path, manifest);

  const ShardFile shard = Find()->shards.at(0);
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit none = {.rlim_cur = 0, .rlim_max = before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  optim::OptimizerShard read = testing::MakeShard(0, 1, 0);
  const absl::Status verified = VerifyShardFile(folder, shard);
  const absl::Status ranged = ReadShardRange(folder, shard, 0, 1, read);
  setrlimit(RLIMIT_NOFILE, &before);
  for (const absl::Status& status : {verified, ranged}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(folder + "/" + shard.name));
  }
}

TEST_F(DamagedCheckpointTest, WhatIsNoFolderOrLeadsNowhereIsDamaged) {
  SaveSteps(1, {7, 8});
  const std::string folder = directory_ + "/step-0000000008";
  const std::string shard = folder + "/shard-00000-of-00001.bin";
  fs::remove(shard);
  fs::create_symlink(shard, shard);
  for (const std::string& named : {shard, folder + "/manifest.json"}) {
    const std::optional<CheckpointInfo> found = Find();
    ASSERT_TRUE(found.has_value()) << find_status_;
    EXPECT_EQ(found->state.step, 7u);
    EXPECT_THAT(problems_, ElementsAre(HasSubstr(named)));
    fs::remove_all(folder);
    std::ofstream(folder) << "in its place";
  }
}

// A writer's mistakes, and whoever can write a manifest with its checksum.
TEST_F(DamagedCheckpointTest, ShardsCoverTheModelAndLieInTheFolder) {
  SaveSteps(2, {7});
  const std::string path = directory_ + "/step-0000000007/manifest.json";
  const nlohmann::json original = nlohmann::json::parse(*ReadFile(path));
  const nlohmann::json& shards = original["body"]["shards"];
  ASSERT_EQ(shards.size(), 2u);
  const auto expect_damaged = [&](const nlohmann::json& changed, const std::string& why) {
    nlohmann::json manifest = original;
    manifest["body"]["shards"] = changed;
    WriteWithItsChecksum(path, std::move(manifest));
    EXPECT_FALSE(Find().has_value()) << changed;
    EXPECT_TRUE(find_status_.ok()) << find_status_;
    EXPECT_THAT(problems_, ElementsAre(HasSubstr(why)));
  };
  nlohmann::json changed = shards;
  changed[1]["file"] = "../step-0000000007/" + shards[1]["file"].get<std::string>();
  expect_damaged(changed, "its list of shards is damaged");
  // Twice the first half, and no second.
  const auto list = [](std::initializer_list<nlohmann::json> files) {
    nlohmann::json array = nlohmann::json::array();
    for (const nlohmann::json& file : files) array.push_back(file);
    return array;
  };
  expect_damaged(list({shards[0], shards[0]}), "its list of shards is damaged");
  expect_damaged(list({shards[0]}), "its shards do not cover the model");
  expect_damaged(list({shards[0], shards[1], shards[0]}), "its list of shards is damaged");
}

// Whole, but not what its name says: to pass it over would throw it away at the next saves.
TEST_F(DamagedCheckpointTest, AFolderOfAnotherNameIsAnError) {
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

TEST_F(DamagedCheckpointTest, ArePassedOverByNameAndNeverWinOverAValidOne) {
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

TEST_F(DamagedCheckpointTest, TakeNoPlaceOfAWholeOne) {
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

TEST_F(DamagedCheckpointTest, AFlippedBitAnywhereIsNoticed) {
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

TEST_F(DamagedCheckpointTest, AFileCutOffAnywhereIsNoticed) {
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

TEST_F(DamagedCheckpointTest, AnotherModelOrVersionIsAnErrorNotASilentFreshStart) {
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
    WriteWithItsChecksum(path, std::move(manifest));
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

}  // namespace
}  // namespace ringleader::checkpoint
