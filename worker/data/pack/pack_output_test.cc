// What a pack leaves in its output folder, and what it says where there is nothing to put there.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "worker/data/pack/pack_lock.h"
#include "worker/data/testing/packed_text.h"

namespace ringleader::data {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using PackOutputTest = testing::PackedTextTest;

// Two that share what they build would mix their documents.
TEST_F(PackOutputTest, OnePackAtATimeWritesIntoAFolder) {
  AddText("a", "text");
  fs::create_directories(folder_ / "tokens");
  const int fd =
      open((folder_ / "tokens/.packing.lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  ASSERT_GE(fd, 0);
  ASSERT_EQ(flock(fd, LOCK_EX), 0);
  EXPECT_THAT(Complaint(Options()), HasSubstr("another `ringctl data pack` writes there"));
  EXPECT_TRUE(fs::exists(folder_ / "tokens/.packing.lock")) << "it is the other's";
  close(fd);
  EXPECT_TRUE(Pack(Options()).ok());
}

// One that ends takes file and folders away while others are about to lock them.
TEST_F(PackOutputTest, OneAtATimeHasTheLockHoweverManyTakeTheFolderAway) {
  const fs::path output = folder_ / "out/er/tokens";
  std::atomic<int> holders = 0, taken = 0;
  const auto work = [&] {
    for (int i = 0; i < 200; ++i) {
      const auto lock = PackLock::Take(output);
      if (!lock.ok()) {
        EXPECT_EQ(lock.status().code(), absl::StatusCode::kUnavailable) << lock.status();
        continue;
      }
      ++taken;
      EXPECT_EQ(++holders, 1);
      EXPECT_TRUE(std::ofstream(output / "train").good());
      EXPECT_TRUE(fs::remove(output / "train"));
      --holders;
    }
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back(work);
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(taken, 0);
  EXPECT_FALSE(fs::exists(output / ".packing.lock"));
}

TEST_F(PackOutputTest, NothingIsLeftBesideTheParts) {
  AddText("a", "text");
  ASSERT_TRUE(Pack(Options()).ok());
  std::vector<std::string> left;
  for (const auto& entry : fs::directory_iterator(folder_ / "tokens")) {
    left.push_back(entry.path().filename());
  }
  EXPECT_THAT(left, ::testing::UnorderedElementsAre("train", "eval"));
}

TEST_F(PackOutputTest, ACallThatFailsTakesTheFoldersThatItMadeAway) {
  AddText("a", "");
  PackOptions options = Options();
  options.output = folder_ / "out/er/tokens/";
  EXPECT_FALSE(Pack(options).ok());
  EXPECT_FALSE(fs::exists(folder_ / "out"));
  fs::create_directories(folder_ / "out/er");
  std::ofstream(folder_ / "out/note") << "kept";
  EXPECT_FALSE(Pack(options).ok());
  EXPECT_TRUE(fs::is_empty(folder_ / "out/er")) << "it was there before";
  fs::create_directories(options.output);
  EXPECT_FALSE(Pack(options).ok());
  EXPECT_TRUE(fs::is_empty(options.output));
  EXPECT_TRUE(fs::exists(folder_ / "out/note"));
}

TEST_F(PackOutputTest, AnOutputThatCannotBeMadeIsNamed) {
  AddText("a", "text");
  std::ofstream(folder_ / "file") << "";
  PackOptions options = Options();
  options.output = folder_ / "file/tokens";
  EXPECT_THAT(Complaint(options), HasSubstr("file/tokens"));
}

TEST_F(PackOutputTest, AShareThatHoldsNothingOutIsAnError) {
  AddText("a", "text");
  PackOptions options = Options();
  options.eval_share = 1e-9;
  EXPECT_THAT(Complaint(options),
              AllOf(HasSubstr("nothing was held out, for a file is held out whole, and there is "
                              "only one: pack with --eval-share 0"),
                    HasSubstr("(data.eval) into a folder of its own")));
  AddText("b", "text");
  EXPECT_THAT(Complaint(options), HasSubstr("none of 2 documents was held out"));
  EXPECT_FALSE(fs::exists(folder_ / "tokens"));
  options.eval_share = 0;
  EXPECT_TRUE(Pack(options).ok());
}

TEST_F(PackOutputTest, AShareThatHoldsAllOutIsAnError) {
  AddText("a", "text");
  PackOptions options = Options();
  options.eval_share = 1 - 1e-12;
  EXPECT_THAT(Complaint(options), HasSubstr("the only file was held out, and none is left to train "
                                            "on: pack with --eval-share 0"));
  AddText("b", "text");
  EXPECT_THAT(Complaint(options), HasSubstr("all 2 files were held out, and none is left"));
  EXPECT_FALSE(fs::exists(folder_ / "tokens"));
}

TEST_F(PackOutputTest, NothingToTrainOnIsAnError) {
  AddText("a", "");
  EXPECT_EQ(Complaint(Options()), "the only file is empty");
  AddText("b", "");
  EXPECT_EQ(Complaint(Options()), "all 2 files are empty");
  AddText("c", std::string("\0", 1));
  EXPECT_THAT(
      Complaint(Options()),
      HasSubstr("found no document to train on among 3 files, of which 2 are empty; check"));
  EXPECT_FALSE(fs::exists(folder_ / "tokens"));
}

TEST_F(PackOutputTest, HeldOutDocumentsStandInTheWay) {
  AddText("a", "text");
  fs::create_directories(folder_ / "tokens/eval");
  EXPECT_THAT(Complaint(Options()), HasSubstr("tokens/eval exists"));
}

}  // namespace
}  // namespace ringleader::data
