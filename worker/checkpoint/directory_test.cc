#include "worker/checkpoint/directory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <thread>

#include "absl/time/clock.h"
#include "base/testing/temp_dir.h"
#include "worker/comm/testing/local_communicator.h"

namespace ringleader::checkpoint {
namespace {

namespace fs = std::filesystem;
using comm::Communicator;
using comm::testing::RunRanks;
using testing::AllOf;
using testing::Each;
using testing::HasSubstr;
using testing::IsEmpty;

class DirectoryTest : public testing::Test {
 protected:
  // What each rank hears when checkpoint.directory leads it to `views[rank]`, as mounts of its own
  // would.
  std::vector<absl::Status> Check(const std::vector<std::string>& views,
                                  absl::Duration patience = absl::ZeroDuration()) {
    std::vector<absl::Status> verdicts(views.size());
    RunRanks(static_cast<int>(views.size()), [&](Communicator& comm) {
      verdicts[comm.rank()] = CheckDirectory(views[comm.rank()], comm, patience);
    });
    return verdicts;
  }

  static std::vector<std::string> Entries(const std::string& folder) {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder)) {
      names.push_back(entry.path().filename());
    }
    return names;
  }

  TempDir temp_;
  const std::string shared_ = temp_.File("shared/checkpoints");
};

TEST_F(DirectoryTest, OneFolderForAllPassesAndStaysEmpty) {
  EXPECT_THAT(Check({shared_, shared_, shared_}), Each(absl::OkStatus()));
  EXPECT_THAT(Check({shared_}), Each(absl::OkStatus()));
  EXPECT_THAT(Entries(shared_), IsEmpty());
}

TEST_F(DirectoryTest, AFolderThatIsAnotherOneForSomeRankIsRefusedByAllRanks) {
  const std::string local = temp_.File("local");
  const std::vector<absl::Status> verdicts = Check({shared_, shared_, local, shared_});
  EXPECT_THAT(verdicts, Each(verdicts[0]));
  EXPECT_EQ(verdicts[0].code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(verdicts[0].message()),
              AllOf(HasSubstr("checkpoint.directory " + local),
                    HasSubstr("another folder for rank 2 than for rank 0"),
                    HasSubstr("mount the same storage at this path on every node")));
  EXPECT_THAT(Entries(shared_), IsEmpty());
  EXPECT_THAT(Entries(local), IsEmpty());
}

TEST_F(DirectoryTest, AFolderThatSomeRankCannotWriteIsRefusedByAllRanks) {
  std::ofstream(temp_.File("a-file")) << "where a folder should be";
  const std::vector<absl::Status> verdicts = Check({shared_, temp_.File("a-file/checkpoints")});
  EXPECT_THAT(verdicts, Each(verdicts[0]));
  EXPECT_EQ(verdicts[0].code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(verdicts[0].message()),
              AllOf(HasSubstr("checkpoint.directory cannot be written by rank 1"),
                    HasSubstr(temp_.File("a-file/checkpoints"))));
  EXPECT_THAT(Entries(shared_), IsEmpty());
}

TEST_F(DirectoryTest, WhatAnotherRankSeesLateIsWaitedFor) {
  // Rank 1's folder becomes rank 0's only after rank 1 has written into it.
  const std::string late = temp_.File("late"), aside = temp_.File("aside");
  fs::create_directory(aside);
  fs::create_directories(shared_);
  fs::create_directory_symlink(aside, late);
  fs::create_directory_symlink(shared_, temp_.File("mounted"));
  std::thread mount([&] {
    const auto is_probe = [](const std::string& name) { return !name.ends_with(".tmp"); };
    while (!std::ranges::any_of(Entries(aside), is_probe)) absl::SleepFor(absl::Milliseconds(1));
    fs::rename(temp_.File("mounted"), late);
  });
  EXPECT_THAT(Check({shared_, late}, absl::Minutes(1)), Each(absl::OkStatus()));
  mount.join();
}

TEST_F(DirectoryTest, ProbesOfADeadAttemptAreRemovedAndNothingElse) {
  fs::create_directories(shared_ + "/step-0000000001");
  std::ofstream(shared_ + "/.probe-0123456789abcdef") << "";
  EXPECT_THAT(Check({shared_, shared_}), Each(absl::OkStatus()));
  EXPECT_THAT(Entries(shared_), testing::ElementsAre("step-0000000001"));
}

}  // namespace
}  // namespace ringleader::checkpoint
