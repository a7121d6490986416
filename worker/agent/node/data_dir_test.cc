#include "worker/agent/node/data_dir.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/testing/temp_dir.h"

namespace ringleader::agent {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class DataDirTest : public ::testing::Test {
 protected:
  absl::StatusOr<DataDir> Open() { return DataDir::Open(dir_.File("data"), absl::ZeroDuration()); }
  std::string Refusal() { return std::string(Open().status().message()); }
  // An earlier release's, or one that somebody made by hand.
  void Make(mode_t mode) {
    fs::create_directory(dir_.File("data"));
    ASSERT_EQ(chmod(dir_.File("data").c_str(), mode), 0);
  }
  static mode_t ModeOf(const std::string& path) {
    struct stat found {};
    EXPECT_EQ(stat(path.c_str(), &found), 0) << path;
    return found.st_mode & 07777;
  }

  const TempDir dir_;
};

TEST_F(DataDirTest, ItsSocketLiesInItAndWhatAnEarlierWorkerLeftIsGone) {
  Make(0755);
  std::ofstream(dir_.File("data/trainers.sock")) << "stale";
  const absl::StatusOr<DataDir> data = Open();
  ASSERT_TRUE(data.ok()) << data.status();
  EXPECT_EQ(data->socket_path(), dir_.File("data/trainers.sock"));
  EXPECT_FALSE(fs::exists(data->socket_path()));
}

TEST_F(DataDirTest, ItsHolderIsNamedWhoeverHeldItBefore) {
  Make(0755);
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

// Trainers run in folders of their own, and find its socket from there.
TEST_F(DataDirTest, ARelativePathIsMadeWhole) {
  const absl::StatusOr<DataDir> data =
      DataDir::Open(fs::relative(dir_.File("data")), absl::ZeroDuration());
  ASSERT_TRUE(data.ok()) << data.status();
  EXPECT_EQ(data->path(), dir_.File("data"));
  EXPECT_EQ(data->socket_path(), dir_.File("data/trainers.sock"));
}

TEST_F(DataDirTest, WhatCannotBeWrittenIsNamed) {
  Make(0700);
  fs::create_directory(dir_.File("data/id"));
  EXPECT_EQ(Open().status(),
            absl::FailedPreconditionError(dir_.File("data/id") + " cannot be written"));
  std::ofstream(dir_.File("file")) << "";
  const absl::Status refused = DataDir::Open(dir_.File("file"), absl::ZeroDuration()).status();
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("--data-dir " + dir_.File("file") + " cannot be written to"));
}

// What it makes is its user's alone; a folder of that user's that others may read goes on.
TEST_F(DataDirTest, NobodyElseMayWriteToItsFolder) {
  const mode_t before = umask(0);
  EXPECT_TRUE(DataDir::Open(dir_.File("new/data/"), absl::ZeroDuration()).ok());
  umask(before);
  EXPECT_EQ(ModeOf(dir_.File("new/data")), 0700u);
  for (const mode_t mode : {0775, 0757, 01777}) {
    Make(mode);
    EXPECT_EQ(Refusal(),
              absl::StrFormat("--data-dir %s: other users may write to this folder (mode %o), and "
                              "put anything in it; give the worker a folder of its own, or "
                              "\"chmod go-w %s\" once you have made sure of what is in it",
                              dir_.File("data"), mode, dir_.File("data")));
    EXPECT_TRUE(fs::is_empty(dir_.File("data")));
  }
  for (const mode_t mode : {0755, 0711, 0700}) {
    Make(mode);
    EXPECT_TRUE(Open().ok()) << Refusal();
    EXPECT_EQ(ModeOf(dir_.File("data")), mode);
  }
}

// Whoever was first with a name that can be guessed, under /tmp, could read and swap what is in it.
TEST_F(DataDirTest, AFolderOfAnotherUserIsRefused) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root";
  Make(0755);
  ASSERT_EQ(chown(dir_.File("data").c_str(), 65534, 65534), 0);
  EXPECT_THAT(Refusal(), HasSubstr("--data-dir " + dir_.File("data") +
                                   ": this folder belongs to another user (uid 65534)"));
  EXPECT_THAT(Refusal(), HasSubstr("\"chown 0 " + dir_.File("data") + "\""));
  EXPECT_TRUE(fs::is_empty(dir_.File("data")));
  fs::remove(dir_.File("data"));
  // Nor does a link of theirs choose where a folder of this user's is used.
  fs::create_directory(dir_.File("mine"), dir_.path());
  fs::create_directory_symlink(dir_.File("mine"), dir_.File("data"));
  EXPECT_TRUE(Open().ok()) << Refusal();
  ASSERT_EQ(lchown(dir_.File("data").c_str(), 65534, 65534), 0);
  EXPECT_THAT(Refusal(), HasSubstr("this link belongs to another user (uid 65534)"));
}

// Root's is as good as its own.
TEST_F(DataDirTest, AFolderOfRootsIsTaken) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root";
  Make(0755);
  std::ofstream(dir_.File("data/lock")) << "";
  std::ofstream(dir_.File("data/id")) << "folder";
  for (const char* const file : {"data/lock", "data/id"}) {
    ASSERT_EQ(chown(dir_.File(file).c_str(), 65534, 65534), 0);
  }
  chmod(dir_.path().c_str(), 0711);
  // A process of its own gives its rights up.
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    if (setgid(65534) != 0 || setuid(65534) != 0) _exit(2);
    _exit(Open().ok() ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST_F(DataDirTest, ALockThatLeadsElsewhereIsNotFollowed) {
  Make(0755);
  std::ofstream(dir_.File("precious")) << "kept";
  ASSERT_EQ(chmod(dir_.File("precious").c_str(), 0644), 0);
  fs::create_symlink(dir_.File("precious"), dir_.File("data/lock"));
  EXPECT_THAT(Refusal(), HasSubstr("--data-dir " + dir_.File("data") + " cannot be written to"));
  EXPECT_EQ(ModeOf(dir_.File("precious")), 0644u);
  std::ifstream file(dir_.File("precious"));
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(file), {}), "kept");
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
