#include "worker/agent/node/data_dir.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/testing/temp_dir.h"

namespace ringleader::agent {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class DataDirTest : public ::testing::Test {
 protected:
  absl::StatusOr<DataDir> Open() { return DataDir::Open(dir_.File("data"), absl::ZeroDuration()); }
  static mode_t ModeOf(const std::string& path) {
    struct stat found {};
    EXPECT_EQ(stat(path.c_str(), &found), 0) << path;
    return found.st_mode & 07777;
  }

  const TempDir dir_;
};

TEST_F(DataDirTest, ItsSocketLiesInItAndWhatAnEarlierWorkerLeftIsGone) {
  fs::create_directory(dir_.File("data"));
  std::ofstream(dir_.File("data/trainers.sock")) << "stale";
  const absl::StatusOr<DataDir> data = Open();
  ASSERT_TRUE(data.ok()) << data.status();
  EXPECT_EQ(data->socket_path(), dir_.File("data/trainers.sock"));
  EXPECT_FALSE(fs::exists(data->socket_path()));
}

TEST_F(DataDirTest, ItsHolderIsNamedWhoeverHeldItBefore) {
  fs::create_directory(dir_.File("data"));
  std::ofstream(dir_.File("data/lock")) << "1234567890123\n";
  const absl::StatusOr<DataDir> data = Open();
  ASSERT_TRUE(data.ok()) << data.status();
  EXPECT_THAT(
      std::string(Open().status().message()),
      HasSubstr(absl::StrCat("belongs to a running ringleader-worker (process ", getpid(), ")")));
}

TEST_F(DataDirTest, TheSocketOfALongPathGoesWithTheWorker) {
  std::string folder;
  {
    absl::StatusOr<DataDir> opened =
        DataDir::Open(dir_.File(std::string(120, 'd')), absl::ZeroDuration());
    ASSERT_TRUE(opened.ok()) << opened.status();
    const DataDir data = *std::move(opened);
    folder = fs::path(data.socket_path()).parent_path();
    EXPECT_TRUE(fs::exists(folder));
    std::ofstream(data.socket_path()) << "";
    ASSERT_TRUE(data.OpenToOtherUsers().ok());
    EXPECT_EQ(ModeOf(folder), 0711u);
    EXPECT_EQ(ModeOf(data.socket_path()), 0666u);
    EXPECT_EQ(ModeOf(dir_.File(std::string(120, 'd'))), 0711u);
  }
  EXPECT_FALSE(fs::exists(folder));
}

TEST_F(DataDirTest, WhatCannotBeWrittenIsNamed) {
  fs::create_directories(dir_.File("data/id"));
  EXPECT_EQ(Open().status(),
            absl::FailedPreconditionError(dir_.File("data/id") + " cannot be written"));
  std::ofstream(dir_.File("file")) << "";
  const absl::Status refused = DataDir::Open(dir_.File("file"), absl::ZeroDuration()).status();
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("--data-dir " + dir_.File("file") + " cannot be written to"));
}

TEST_F(DataDirTest, EveryRankOfEveryAttemptHasAFolder) {
  const DataDir data = Open().value();
  EXPECT_EQ(data.TrainerDirectory("job", 2, 3, {}).value(),
            dir_.File("data/jobs/job/attempt-2/rank-3"));
  EXPECT_TRUE(fs::is_directory(dir_.File("data/jobs/job/attempt-2/rank-3")));
  std::ofstream(dir_.File("data/jobs/full")) << "";
  EXPECT_THAT(std::string(data.TrainerDirectory("full", 1, 0, {}).status().message()),
              HasSubstr("data/jobs/full/attempt-1/rank-0 cannot be created"));
}

TEST_F(DataDirTest, OnlyWhatIsEmptyIsRemoved) {
  const DataDir data = Open().value();
  for (const uint32_t rank : {0, 1}) ASSERT_TRUE(data.TrainerDirectory("job", 1, rank, {}).ok());
  ASSERT_TRUE(data.TrainerDirectory("job", 2, 0, {}).ok());
  std::ofstream(dir_.File("data/jobs/job/attempt-1/rank-1/core")) << "kept";
  data.RemoveEmpty("job", 1);
  EXPECT_FALSE(fs::exists(dir_.File("data/jobs/job/attempt-1/rank-0")));
  EXPECT_TRUE(fs::exists(dir_.File("data/jobs/job/attempt-1/rank-1/core")));
  data.RemoveEmpty("job", 2);
  EXPECT_FALSE(fs::exists(dir_.File("data/jobs/job/attempt-2")));
  fs::remove(dir_.File("data/jobs/job/attempt-1/rank-1/core"));
  data.RemoveEmpty("job", 1);
  EXPECT_FALSE(fs::exists(dir_.File("data/jobs/job")));
  EXPECT_TRUE(fs::exists(dir_.File("data/jobs")));
}

TEST_F(DataDirTest, EveryProcessOfAFolderHasANameOfItsOwn) {
  const DataDir data = Open().value();
  const std::string first = data.DrawIncarnation(), second = data.DrawIncarnation();
  EXPECT_NE(first, second);
  EXPECT_EQ(first.substr(0, first.find('.')), data.id());
  EXPECT_EQ(second.substr(0, second.find('.')), data.id());
}

}  // namespace
}  // namespace ringleader::agent
