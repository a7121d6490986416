#include "coordinator/store/upkeep/backup.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sqlite3.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <thread>
#include <utility>

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
using ::testing::HasSubstr;

absl::Status Create(WriteTransaction& transaction, const std::string& id) {
  v1::Job job;
  job.set_name("jobs/" + id);
  job.mutable_spec()->set_name(id);
  job.set_state_reason(std::string(5000, 'x'));
  return transaction.CreateJob(&job);
}
absl::Status Create(Store& store, const std::string& id) {
  return store.Write([&](WriteTransaction& t) { return Create(t, id); });
}
absl::Status Get(Store& store, const std::string& id) {
  return store.Read([&](ReadTransaction& t) { return t.GetJob(id).status(); });
}

class BackupTest : public ::testing::Test {
 protected:
  const TempDir dir_;
  const std::string path_ = dir_.File("db");
  const std::string copy_ = dir_.File("copy");
};

// Somebody writes without a pause: a backup that begins anew at each change never ends.
TEST_F(BackupTest, FinishesWhileOthersWriteAndHoldsWhatWasThere) {
  auto store = OpenSqliteStore({.path = path_});
  ASSERT_TRUE(store.ok()) << store.status();
  // More than a few steps of the copy.
  for (int i = 0; i < 4000; ++i) ASSERT_TRUE(Create(**store, absl::StrCat("a", i)).ok());
  std::atomic<bool> stop = false;
  std::atomic<int> written = 0;
  std::thread writer([&] {
    while (!stop && Create(**store, absl::StrCat("b", written.load())).ok()) ++written;
  });
  while (written == 0) std::this_thread::yield();
  const int before = written;
  const absl::Status backed_up = BackUp(path_, copy_);
  stop = true;
  writer.join();
  ASSERT_TRUE(backed_up.ok()) << backed_up;
  EXPECT_EQ(fs::status(copy_).permissions(), fs::perms::owner_read | fs::perms::owner_write);
  EXPECT_FALSE(fs::exists(copy_ + ".part"));

  auto restored = OpenSqliteStore({.path = copy_});
  ASSERT_TRUE(restored.ok()) << restored.status();
  for (int i = 0; i < 4000; i += 100) {
    EXPECT_TRUE(Get(**restored, absl::StrCat("a", i)).ok()) << i;
  }
  for (int i = 0; i < before; ++i) EXPECT_TRUE(Get(**restored, absl::StrCat("b", i)).ok()) << i;
  EXPECT_TRUE(Create(**restored, "new").ok());
}

// It neither holds what is written while it is made, nor begins anew for it.
TEST_F(BackupTest, IsOfOneMoment) {
  auto store = OpenSqliteStore({.path = path_});
  ASSERT_TRUE(store.ok()) << store.status();
  constexpr int kJobs = 2400;  // a few steps of the copy
  ASSERT_EQ((*store)->Write([](WriteTransaction& t) -> absl::Status {
    for (int i = 0; i < kJobs; ++i) RETURN_IF_ERROR(Create(t, absl::StrCat("a", i)));
    return absl::OkStatus();
  }),
            absl::OkStatus());
  static std::function<void()> meanwhile;
  meanwhile = [&] { EXPECT_EQ(Create(**store, "meanwhile"), absl::OkStatus()); };
  // SQLite's file system calls are what it is given.
  const auto write_at = +[](int fd, const void* data, size_t bytes, off_t at) -> ssize_t {
    const std::string file = fs::read_symlink(absl::StrCat("/proc/self/fd/", fd)).string();
    if (meanwhile != nullptr && absl::EndsWith(file, ".part")) std::exchange(meanwhile, nullptr)();
    return pwrite(fd, data, bytes, at);
  };
  sqlite3_vfs* const files = sqlite3_vfs_find(nullptr);
  for (const char* name : {"pwrite", "pwrite64"}) {
    ASSERT_EQ(files->xSetSystemCall(files, name, reinterpret_cast<sqlite3_syscall_ptr>(write_at)),
              SQLITE_OK);
  }
  const absl::Status backed_up = BackUp(path_, copy_);
  ASSERT_EQ(files->xSetSystemCall(files, nullptr, nullptr), SQLITE_OK);  // its own again
  ASSERT_EQ(backed_up, absl::OkStatus());
  EXPECT_EQ(Get(**store, "meanwhile"), absl::OkStatus());
  const auto restored = OpenSqliteStore({.path = copy_});
  ASSERT_TRUE(restored.ok()) << restored.status();
  for (const int job : {0, kJobs - 1}) {
    EXPECT_EQ(Get(**restored, absl::StrCat("a", job)), absl::OkStatus());
  }
  EXPECT_EQ(Get(**restored, "meanwhile").code(), absl::StatusCode::kNotFound);
}

TEST_F(BackupTest, LeavesNoFileOpen) {
  ASSERT_TRUE(OpenSqliteStore({.path = path_}).ok());
  const auto open_files = [] {
    return std::distance(fs::directory_iterator("/proc/self/fd"), fs::directory_iterator());
  };
  ASSERT_TRUE(BackUp(path_, copy_).ok());
  const auto before = open_files();
  ASSERT_TRUE(BackUp(path_, copy_).ok());
  EXPECT_FALSE(BackUp(dir_.File("none"), copy_).ok());
  EXPECT_EQ(open_files(), before);
}

// A watch that lives through the restore asks for what comes behind the last report that it has.
TEST_F(BackupTest, ReportsOfARestoredDatabaseComeBehindThoseBefore) {
  auto store = OpenSqliteStore({.path = path_});
  ASSERT_TRUE(store.ok()) << store.status();
  ASSERT_EQ(Create(**store, "a"), absl::OkStatus());
  const auto report = [](Store& to, uint64_t step) {
    return to.Write([&](WriteTransaction& t) -> absl::Status {
      v1::StepReport report;
      report.set_step(step);
      v1::EvalReport eval;
      eval.set_step(step);
      RETURN_IF_ERROR(t.PutStep("a", report));
      return t.PutEval("a", eval);
    });
  };
  // -> where the last step and the last evaluation are, of those behind `seen`.
  using Seen = std::pair<uint64_t, uint64_t>;
  const auto last_of = [](Store& of, const Seen& seen) {
    Seen last;
    EXPECT_TRUE(of.Read([&](ReadTransaction& t) -> absl::Status {
                    last = {t.ListSteps("a", 0, seen.first, 100)->last_sequence,
                            t.ListEvals("a", seen.second, 100)->last_sequence};
                    return absl::OkStatus();
                  }).ok());
    return last;
  };
  ASSERT_TRUE(BackUp(path_, copy_).ok());  // before any report
  for (uint64_t step = 1; step <= 20; ++step) ASSERT_TRUE(report(**store, step).ok());
  const Seen seen = last_of(**store, {});
  auto copy = OpenSqliteStore({.path = copy_});
  ASSERT_TRUE(copy.ok()) << copy.status();
  ASSERT_TRUE(report(**copy, 1).ok());
  const Seen behind = last_of(**copy, seen);
  EXPECT_GT(behind.first, seen.first);
  EXPECT_GT(behind.second, seen.second);
}

// What was numbered after the backup was made is known elsewhere: to workers, in checkpoint
// folders, to clients.
TEST_F(BackupTest, ARestoredDatabaseUsesNoNumberAgain) {
  constexpr Counter kCounters[] = {Counter::kFencingToken, Counter::kCommandId,
                                   Counter::kSessionEpoch};
  const auto next = [](Store& store, Counter counter) {
    uint64_t number = 0;
    EXPECT_TRUE(store
                    .Write([&](WriteTransaction& t) {
                      number = t.Next(counter).value();
                      return absl::OkStatus();
                    })
                    .ok());
    return number;
  };
  const auto restored = [](Store& store) {
    bool is = false;
    EXPECT_TRUE(store
                    .Read([&](ReadTransaction& t) {
                      is = t.Restored().value();
                      return absl::OkStatus();
                    })
                    .ok());
    return is;
  };
  auto store = OpenSqliteStore({.path = path_});
  ASSERT_TRUE(store.ok()) << store.status();
  for (const Counter counter : kCounters) next(**store, counter);
  ASSERT_TRUE(BackUp(path_, copy_).ok());
  std::map<Counter, uint64_t> last;
  for (int i = 0; i < 1000; ++i) {
    for (const Counter counter : kCounters) last[counter] = next(**store, counter);
  }
  const uint64_t revision = (*store)->revision();
  EXPECT_FALSE(restored(**store));
  EXPECT_FALSE(fs::exists(copy_ + "-wal"));

  std::map<Counter, uint64_t> first;
  for (const bool again : {false, true}) {
    auto copy = OpenSqliteStore({.path = copy_});
    ASSERT_TRUE(copy.ok()) << copy.status();
    EXPECT_GT((*copy)->revision(), revision);
    EXPECT_TRUE(restored(**copy));  // until it is said that this is over
    for (const Counter counter : kCounters) {
      const uint64_t number = next(**copy, counter);
      EXPECT_GT(number, last[counter]);
      if (again) {
        EXPECT_EQ(number, first[counter] + 1);
      }
      first[counter] = number;
    }
    if (!again) continue;
    ASSERT_TRUE((*copy)->Write([](WriteTransaction& t) { return t.EndRestore(); }).ok());
    EXPECT_FALSE(restored(**copy));
  }
  auto copy = OpenSqliteStore({.path = copy_});
  ASSERT_TRUE(copy.ok()) << copy.status();
  EXPECT_FALSE(restored(**copy));
}

TEST_F(BackupTest, WhatAnInterruptedOneLeftIsReplaced) {
  ASSERT_TRUE(OpenSqliteStore({.path = path_}).ok());
  std::ofstream(copy_ + ".part") << "half of a database";
  const absl::Status backed_up = BackUp(path_, copy_);
  EXPECT_TRUE(backed_up.ok()) << backed_up;
  EXPECT_TRUE(OpenSqliteStore({.path = copy_}).ok());
}

TEST_F(BackupTest, SaysWhatItCannotCopy) {
  EXPECT_THAT(std::string(BackUp(dir_.File("absent"), copy_).message()),
              HasSubstr(dir_.File("absent")));
  EXPECT_FALSE(fs::exists(dir_.File("absent")));  // nor is made by looking for it
  EXPECT_FALSE(fs::exists(copy_));
  ASSERT_TRUE(OpenSqliteStore({.path = path_}).ok());
  EXPECT_THAT(std::string(BackUp(path_, path_).message()), HasSubstr("is the database itself"));
  EXPECT_THAT(std::string(BackUp(path_, dir_.File("no/copy")).message()),
              HasSubstr("cannot be written"));
}

// The copy takes the place of what is there.
TEST_F(BackupTest, ReplacesNothingButAnEarlierCopy) {
  auto store = OpenSqliteStore({.path = path_});
  ASSERT_TRUE(store.ok()) << store.status();
  for (const char* suffix : {"-wal", "-shm", "-journal", ".lock", ".reserve"}) {
    EXPECT_THAT(std::string(BackUp(path_, path_ + suffix).message()),
                HasSubstr("is a file of the database's"));
  }
  std::ofstream(dir_.File("text")) << "somebody's own words, of more than a few bytes";
  std::ofstream(dir_.File("empty"));
  ASSERT_EQ(mkfifo(dir_.File("pipe").c_str(), 0600), 0);
  fs::create_directory(dir_.File("folder"));
  for (const char* name : {"text", "empty", "pipe", "folder"}) {
    EXPECT_THAT(std::string(BackUp(path_, dir_.File(name)).message()),
                HasSubstr("is there and is no copy of a database"))
        << name;
  }
  EXPECT_TRUE(BackUp(path_, copy_).ok());
  EXPECT_TRUE(BackUp(path_, copy_).ok());
}

TEST_F(BackupTest, RemovesWhatAKilledOneLeft) {
  auto store = OpenSqliteStore({.path = path_});
  ASSERT_TRUE(store.ok()) << store.status();
  for (const char* suffix : {"", "-wal", "-shm", "-journal"}) {
    std::ofstream(copy_ + ".part" + suffix) << "half of a page";
  }
  EXPECT_EQ(BackUp(path_, copy_), absl::OkStatus());
  for (const char* suffix : {"", "-wal", "-shm", "-journal"}) {
    EXPECT_FALSE(fs::exists(copy_ + ".part" + suffix)) << suffix;
  }
}

TEST_F(BackupTest, AFullDiskIsThatOfTheCopy) {
  const std::string small = dir_.File("small");
  fs::create_directory(small);
  if (mount("tmpfs", small.c_str(), "tmpfs", 0, "size=64k") != 0) {
    GTEST_SKIP() << "mounting a small file system needs CAP_SYS_ADMIN";
  }
  const absl::Cleanup unmount = [&] { umount(small.c_str()); };
  auto store = OpenSqliteStore({.path = path_});
  ASSERT_TRUE(store.ok()) << store.status();
  for (int i = 0; i < 400; ++i) ASSERT_TRUE(Create(**store, absl::StrCat("a", i)).ok());
  const absl::Status full = BackUp(path_, small + "/copy");
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(full.message()), HasSubstr(small));
  EXPECT_TRUE(fs::is_empty(small));
}

// Damage that opening does not come across: in the middle of the file.
TEST_F(BackupTest, DamageIsFoundBesideServiceAndInBackups) {
  {
    auto store = OpenSqliteStore({.path = path_});
    ASSERT_TRUE(store.ok()) << store.status();
    for (int i = 0; i < 200; ++i) ASSERT_TRUE(Create(**store, absl::StrCat("a", i)).ok());
  }
  {
    std::fstream file(path_, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(fs::file_size(path_) / 2 / 4096 * 4096));
    file << std::string(4096, '\x7f');
  }
  absl::Status damage;
  absl::Notification found;
  auto store = OpenSqliteStore({.path = path_, .on_damage = [&](const absl::Status& status) {
                                  damage = status;
                                  found.Notify();
                                }});
  ASSERT_TRUE(store.ok()) << store.status();
  EXPECT_TRUE(Create(**store, "served").ok());
  ASSERT_TRUE(found.WaitForNotificationWithTimeout(absl::Seconds(60)));
  EXPECT_EQ(damage.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(damage.message()), HasSubstr(absl::StrCat(path_, ": it is damaged")));
  EXPECT_EQ(BackUp(path_, copy_).code(), absl::StatusCode::kDataLoss);
  EXPECT_FALSE(fs::exists(copy_));
}

}  // namespace
}  // namespace ringleader::store
