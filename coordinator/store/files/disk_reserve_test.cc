#include "coordinator/store/files/disk_reserve.h"

#include <SQLiteCpp/SQLiteCpp.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/ringbuffer_sink.h>
#include <spdlog/spdlog.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <memory>
#include <thread>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "base/status_macros.h"
#include "base/testing/temp_dir.h"
#include "coordinator/store/sqlite/sqlite_store.h"

namespace ringleader::store {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kMebibyte = 1 << 20;

// A file system of 9 MiB, with a store on it that keeps 1.5 MiB in reserve, 1 of them in its file.
class DiskReserveTest : public ::testing::Test {
 protected:
  void SetUp() override {
    fs::create_directory(small_);
    mounted_ = mount("tmpfs", small_.c_str(), "tmpfs", 0, "size=9m") == 0;
    if (!mounted_) GTEST_SKIP() << "mounting a small file system needs CAP_SYS_ADMIN";
    Open();
  }
  void TearDown() override {
    store_.reset();
    if (mounted_) umount(small_.c_str());
  }

  void Open(int64_t reserve_bytes = kMebibyte) {
    store_.reset();
    auto store = OpenSqliteStore({.path = small_ + "/db", .reserve_bytes = reserve_bytes});
    ASSERT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
  }
  // Leaves nothing free but what the store keeps in reserve.
  void FillDisk(const std::string& file = "ballast") {
    std::ofstream ballast(small_ + "/" + file);
    const std::string block(4096, 'b');
    while (ballast.write(block.data(), static_cast<std::streamsize>(block.size())).flush()) {
    }
  }
  void MakeRoom() { fs::remove(small_ + "/ballast"); }
  void GrowDisk(const char* size) {
    ASSERT_EQ(mount("tmpfs", small_.c_str(), "tmpfs", MS_REMOUNT, size), 0);
  }

  absl::Status Create(const std::string& id, Need need, int64_t bytes = 0) {
    return store_->Write(
        [&](WriteTransaction& t) {
          v1::Job job;
          job.set_name("jobs/" + id);
          job.mutable_spec()->set_name(id);
          job.set_state_reason(std::string(static_cast<size_t>(bytes), 'x'));
          return t.CreateJob(&job);
        },
        need);
  }
  // Writes a record anew, 6 MiB in all, while a reader looks at what was before: the log cannot
  // begin anew.
  void GrowLog() {
    ASSERT_TRUE(Create("large", Need::kOrdinary).ok());
    const absl::Status read = store_->Read([&](ReadTransaction& before) {
      for (int i = 0; i < 24; ++i) {
        const absl::Status written = store_->Write([&](WriteTransaction& t) -> absl::Status {
          ASSIGN_OR_RETURN(v1::Job job, t.GetJob("large"));
          job.set_state_reason(std::string(kMebibyte / 4, static_cast<char>('a' + i)));
          return t.UpdateJob(&job);
        });
        EXPECT_TRUE(written.ok()) << written;
      }
      return before.GetJob("large").status();
    });
    EXPECT_TRUE(read.ok()) << read;
    EXPECT_GT(LogBytes(), static_cast<uint64_t>(5 * kMebibyte));
  }
  uintmax_t LogBytes() { return fs::file_size(small_ + "/db-wal"); }
  absl::Status Get(const std::string& id) {
    return store_->Read([&](ReadTransaction& t) { return t.GetJob(id).status(); });
  }

  const TempDir dir_;
  const std::string small_ = dir_.File("small");
  bool mounted_ = false;
  std::unique_ptr<Store> store_;
};

TEST_F(DiskReserveTest, AFullDiskIsSaidAndWhatIsVitalIsWritten) {
  ASSERT_TRUE(Create("before", Need::kOrdinary).ok());
  FillDisk();
  const absl::Status refused = Create("refused", Need::kOrdinary);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()),
              AllOf(HasSubstr("the disk is full"), HasSubstr(small_),
                    HasSubstr("and 0 MiB are free"), HasSubstr("make at least 2 MiB free")));
  EXPECT_EQ(store_->Space().code(), absl::StatusCode::kResourceExhausted);
  for (int i = 0; i < 200; ++i) {
    const absl::Status vital = Create(absl::StrCat("vital-", i), Need::kVital);
    ASSERT_TRUE(vital.ok()) << i << ": " << vital;
  }
  // Also after a restart, which finds no room for a reserve.
  Open();
  EXPECT_FALSE(Create("refused", Need::kOrdinary).ok());
  MakeRoom();
  EXPECT_TRUE(store_->Space().ok());
  EXPECT_TRUE(Create("after", Need::kOrdinary).ok());
  for (const char* id : {"before", "vital-0", "vital-199", "after"})
    EXPECT_TRUE(Get(id).ok()) << id;
  EXPECT_EQ(Get("refused").code(), absl::StatusCode::kNotFound);
  // The next time, too.
  FillDisk();
  EXPECT_FALSE(Create("refused", Need::kOrdinary).ok());
  EXPECT_TRUE(Create("vital", Need::kVital).ok());
}

// What fills the disk goes on when the reserve is given up, and takes all that is free then.
TEST_F(DiskReserveTest, WhatFillsTheDiskDoesNotGetTheReserve) {
  ASSERT_TRUE(Create("before", Need::kOrdinary).ok());
  FillDisk();
  EXPECT_FALSE(store_->Space().ok());
  const auto fill_up = [&] {
    std::ofstream more(small_ + "/more", std::ios::app);
    while (more.put('m').flush()) {
    }
  };
  fill_up();
  for (int i = 0; i < 60; ++i) {
    const absl::Status vital = Create(absl::StrCat("vital-", i), Need::kVital);
    ASSERT_TRUE(vital.ok()) << i << ": " << vital;
    if (i % 20 != 0) continue;
    store_.reset();  // nor what is free between an end and a start
    fill_up();
    Open();
    fill_up();
  }
  fs::remove(small_ + "/more");
  MakeRoom();
  EXPECT_TRUE(Create("after", Need::kOrdinary).ok());
}

// Nor does what is quicker than the store, and takes all in the moment in which it is free.
TEST_F(DiskReserveTest, WhatIsVitalNeedsNothingOfTheReserve) {
  ASSERT_TRUE(Create("before", Need::kOrdinary).ok());
  FillDisk();
  fs::remove(small_ + "/db.reserve");
  FillDisk("more");
  for (int i = 0; i < 60; ++i) {
    const absl::Status vital = Create(absl::StrCat("vital-", i), Need::kVital);
    ASSERT_TRUE(vital.ok()) << i << ": " << vital;
    if (i % 20 == 0) Open();
  }
}

// What is kept for them does not make a disk full that is not.
TEST_F(DiskReserveTest, AStartWithLittleFreeGoesOnWriting) {
  ASSERT_TRUE(Create("before", Need::kOrdinary).ok());
  store_.reset();
  FillDisk();
  fs::resize_file(small_ + "/ballast", fs::file_size(small_ + "/ballast") - kMebibyte * 3 / 4);
  Open();
  for (int i = 0; i < 3; ++i) {
    const absl::Status written = Create(absl::StrCat("after-", i), Need::kOrdinary);
    EXPECT_TRUE(written.ok()) << written;
  }
}

// What was written is larger than what was free: nobody knew until the disk was full.
TEST_F(DiskReserveTest, AWriteThatFindsTheDiskFullFreesTheReserveForWhatIsVital) {
  ASSERT_TRUE(Create("before", Need::kOrdinary).ok());
  const absl::Status full = Create("large", Need::kOrdinary, 16 * kMebibyte);
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_FALSE(fs::exists(small_ + "/db.reserve"));
  EXPECT_TRUE(Create("vital", Need::kVital).ok());
  EXPECT_EQ(Get("large").code(), absl::StatusCode::kNotFound);
}

// Nobody else could free what the log of that write took.
TEST_F(DiskReserveTest, AWriteThatFilledTheDiskLeavesItAsItWas) {
  ASSERT_TRUE(Create("before", Need::kOrdinary).ok());
  const absl::Status full = Create("large", Need::kOrdinary, 16 * kMebibyte);
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  const absl::Status after = Create("after", Need::kOrdinary);
  EXPECT_TRUE(after.ok()) << after;
  EXPECT_LT(LogBytes(), static_cast<uint64_t>(kMebibyte));
  EXPECT_TRUE(fs::exists(small_ + "/db.reserve"));
}

// A log that grew while a backup was made keeps nothing of the disk once it begins anew.
TEST_F(DiskReserveTest, ALogThatGrewIsCutWhenItBeginsAnew) {
  Open(/*reserve_bytes=*/0);
  GrowLog();
  for (const char* id : {"carries-it-over", "begins-anew"}) {
    ASSERT_TRUE(Create(id, Need::kOrdinary).ok());
  }
  EXPECT_LE(LogBytes(), static_cast<uint64_t>(4 * kMebibyte));
}

// What a reserve leaves to it, it may keep.
TEST_F(DiskReserveTest, ALogOfAQuarterOfTheReserveIsNotCut) {
  GrowDisk("size=80m");
  Open(32 * kMebibyte);
  GrowLog();
  const uintmax_t grown = LogBytes();
  for (const char* id : {"carries-it-over", "begins-anew"}) {
    ASSERT_TRUE(Create(id, Need::kOrdinary).ok());
  }
  EXPECT_GE(LogBytes(), grown);
}

// With what is cut off goes what was allocated beyond it, for what is vital.
TEST_F(DiskReserveTest, ALogThatIsCutInVainHasItsShareAgain) {
  GrowDisk("size=80m");
  Open(20 * kMebibyte);
  GrowLog();
  FillDisk();
  EXPECT_FALSE(store_->Space().ok());
  EXPECT_EQ(LogBytes(), 0u);
  FillDisk("more");
  for (int i = 0; i < 60; ++i) {
    const absl::Status vital = Create(absl::StrCat("vital-", i), Need::kVital);
    ASSERT_TRUE(vital.ok()) << i << ": " << vital;
  }
}

// Nor does one whose process ended meanwhile.
TEST_F(DiskReserveTest, ALogThatFillsTheDiskIsCutAtTheStart) {
  GrowLog();
  FillDisk();
  {
    // As long as somebody has the database open the store's end leaves the log, as a kill does.
    SQLite::Database other(small_ + "/db", SQLite::OPEN_READONLY);
    SQLite::Statement(other, "SELECT * FROM counters").executeStep();
    store_.reset();
  }
  ASSERT_GT(LogBytes(), static_cast<uint64_t>(5 * kMebibyte));
  Open();
  const absl::Status after = Create("after", Need::kOrdinary);
  EXPECT_TRUE(after.ok()) << after;
  EXPECT_LE(LogBytes(), static_cast<uint64_t>(4 * kMebibyte));
  EXPECT_TRUE(Get("large").ok());
}

// A write that shares a commit with one for which there is no room is told of the failure, too:
// what was acknowledged is there, and what was not is not.
TEST_F(DiskReserveTest, AFullDiskFailsAllThatShareTheCommit) {
  bool failed_together = false;
  for (int attempt = 0; !failed_together && attempt < 100; ++attempt) {
    // Each on an empty disk: a log that the large write filled may stay, and the disk full.
    store_.reset();
    for (const auto& file : fs::directory_iterator(small_)) fs::remove(file.path());
    Open();
    const std::string small = absl::StrCat("small-", attempt);
    absl::Notification entered, go_on;
    std::thread leader([&] {
      const auto wait = [&](WriteTransaction&) {
        entered.Notify();
        go_on.WaitForNotification();
        return absl::OkStatus();
      };
      EXPECT_TRUE(store_->Write(wait, Need::kVital).ok());
    });
    entered.WaitForNotification();
    absl::Status of_small, of_large;
    std::thread first([&] { of_large = Create("large", Need::kVital, 16 * kMebibyte); });
    for (int i = 0; i < 1000; ++i) std::this_thread::yield();
    std::thread second([&] { of_small = Create(small, Need::kVital); });
    for (int i = 0; i < 1000; ++i) std::this_thread::yield();
    go_on.Notify();
    for (std::thread* thread : {&leader, &first, &second}) thread->join();
    EXPECT_EQ(of_large.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(of_small.ok(), Get(small).ok()) << of_small;
    failed_together = !of_small.ok();
  }
  EXPECT_TRUE(failed_together) << "they never met in a commit";
}

// As a quota does, a limit on the size of files leaves less than the file system has free: what was
// given up is not taken back until there is room for more than itself.
TEST_F(DiskReserveTest, AQuotaThatTheFileSystemDoesNotTellOfIsSeenByTaking) {
  store_.reset();
  DiskReserve reserve(small_ + "/reserve", kMebibyte);
  ASSERT_TRUE(reserve.held());
  const auto before = signal(SIGXFSZ, SIG_IGN);
  rlimit limit = {};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &limit), 0);
  rlimit tight = limit;
  tight.rlim_cur = kMebibyte * 3 / 2;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &tight), 0);
  reserve.GiveUp();  // a write has failed
  EXPECT_EQ(reserve.Check().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(reserve.Check().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_FALSE(fs::exists(small_ + "/reserve"));
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  signal(SIGXFSZ, before);
  EXPECT_TRUE(reserve.Check().ok());
  EXPECT_EQ(fs::file_size(small_ + "/reserve"), kMebibyte);
}

TEST_F(DiskReserveTest, IsGivenUpWhileHalfOfItIsStillFree) {
  store_.reset();
  DiskReserve reserve(small_ + "/reserve", kMebibyte);
  ASSERT_TRUE(reserve.held());
  FillDisk();
  const std::string ballast = small_ + "/ballast";
  fs::resize_file(ballast, fs::file_size(ballast) - kMebibyte * 3 / 4);
  EXPECT_TRUE(reserve.Check().ok());
  std::ofstream(small_ + "/more") << std::string(kMebibyte / 2, 'm');
  EXPECT_EQ(reserve.Check().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_FALSE(fs::exists(small_ + "/reserve"));
}

// The coordinator's health looks at it twice a second.
TEST_F(DiskReserveTest, ThatTheDiskIsFullAndIsNotAnyMoreIsLoggedOnceEachTime) {
  store_.reset();
  const auto log = std::make_shared<spdlog::sinks::ringbuffer_sink_mt>(100);
  spdlog::default_logger()->sinks().push_back(log);
  const absl::Cleanup remove = [] { spdlog::default_logger()->sinks().pop_back(); };
  DiskReserve reserve(small_ + "/reserve", kMebibyte);
  for (int time = 0; time < 2; ++time) {
    FillDisk();
    for (int i = 0; i < 3; ++i) EXPECT_FALSE(reserve.Check().ok());
    MakeRoom();
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(reserve.Check().ok());
  }
  const std::vector<std::string> lines = log->last_formatted();
  for (const char* text : {"the disk is full", "there is space again"}) {
    EXPECT_EQ(std::ranges::count_if(
                  lines, [&](const std::string& line) { return absl::StrContains(line, text); }),
              2)
        << text;
  }
}

TEST_F(DiskReserveTest, TheReserveGoesWhenItIsNoLongerWanted) {
  EXPECT_EQ(fs::file_size(small_ + "/db.reserve"), kMebibyte);
  store_.reset();
  ASSERT_TRUE(OpenSqliteStore({.path = small_ + "/db"}).ok());
  EXPECT_FALSE(fs::exists(small_ + "/db.reserve"));
}

TEST(DiskReserveFileTest, AFileWithoutItsBlocksIsNoReserve) {
  const TempDir dir;
  const std::string path = dir.File("reserve");
  std::ofstream(path) << "";
  fs::resize_file(path, kMebibyte);
  const DiskReserve reserve(path, kMebibyte);
  EXPECT_TRUE(reserve.held());
  struct stat file = {};
  ASSERT_EQ(stat(path.c_str(), &file), 0);
  EXPECT_GE(int64_t{file.st_blocks} * 512, kMebibyte);
}

TEST(DiskReserveFileTest, HeirsHaveBlocksBeforeItIsGivenUpAndAgainWhenTheyGrew) {
  const TempDir dir;
  const std::string heir = dir.File("heir");
  std::ofstream(heir) << "text";
  DiskReserve reserve(dir.File("reserve"), kMebibyte, {heir});
  const auto ahead = [&] {
    struct stat file = {};
    EXPECT_EQ(stat(heir.c_str(), &file), 0);
    return int64_t{file.st_blocks} * 512 - file.st_size;
  };
  EXPECT_GE(ahead(), kMebibyte / 4);
  EXPECT_EQ(fs::file_size(heir), 4u);
  std::ofstream(heir, std::ios::app) << std::string(kMebibyte / 4 - 4096, 'x');
  EXPECT_LT(ahead(), kMebibyte / 8);
  ASSERT_TRUE(reserve.Check().ok());
  EXPECT_GE(ahead(), kMebibyte / 4);
  fs::resize_file(heir, 0);  // lets go of what lies beyond the end
  reserve.GiveUp();
  EXPECT_GE(ahead(), kMebibyte / 4);
}

TEST(DiskReserveFileTest, AReserveThatDoesNotFitLeavesNothingBehind) {
  const TempDir dir;
  const std::string path = dir.File("reserve");
  DiskReserve reserve(path, int64_t{1} << 60);
  EXPECT_FALSE(reserve.held());
  EXPECT_FALSE(fs::exists(path));
}

}  // namespace
}  // namespace ringleader::store
