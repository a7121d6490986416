// What goes wrong with the file: each fault must be a Status that names the file and the remedy,
// never a crash.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/process/signals.h"
#include "base/status_macros.h"
#include "base/testing/temp_dir.h"
#include "coordinator/store/sqlite/sqlite_connection.h"
#include "coordinator/store/sqlite/sqlite_schema.h"
#include "coordinator/store/sqlite/sqlite_store.h"

namespace ringleader::store {
namespace {

using ::testing::HasSubstr;

namespace fs = std::filesystem;

absl::Status CreateJob(Store& store, const std::string& id, size_t payload_bytes = 0) {
  return store.Write([&](WriteTransaction& t) {
    v1::Job job;
    job.set_name("jobs/" + id);
    job.mutable_spec()->set_name(id);
    job.set_state_reason(std::string(payload_bytes, 'x'));
    return t.CreateJob(&job);
  });
}

absl::Status GetJob(Store& store, const std::string& id) {
  return store.Read([&](ReadTransaction& t) { return t.GetJob(id).status(); });
}

class SqliteFaultsTest : public ::testing::Test {
 protected:
  const std::string& path() const { return path_; }

  // A database with some jobs, closed.
  void MakeDatabase() {
    auto store = OpenSqliteStore({.path = path_});
    ASSERT_TRUE(store.ok()) << store.status();
    for (int i = 0; i < 20; ++i) ASSERT_TRUE(CreateJob(**store, absl::StrCat("j", i), 500).ok());
  }

  TempDir dir_;
  const std::string path_ = dir_.File("coordinator.db");
};

// While one exists, no file of this process grows beyond 4 KiB.
class FilesGrowNoMore {
 public:
  FilesGrowNoMore() {
    FailTooLargeWrites();
    EXPECT_EQ(getrlimit(RLIMIT_FSIZE, &before_), 0);
    const rlimit full = {.rlim_cur = 4096, .rlim_max = before_.rlim_max};
    EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &full), 0);
  }
  ~FilesGrowNoMore() { EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &before_), 0); }
  FilesGrowNoMore(const FilesGrowNoMore&) = delete;
  FilesGrowNoMore& operator=(const FilesGrowNoMore&) = delete;

 private:
  rlimit before_ = {};
};

TEST_F(SqliteFaultsTest, SecondCoordinatorIsRefused) {
  auto first = OpenSqliteStore({.path = path()});
  ASSERT_TRUE(first.ok());
  const auto second = OpenSqliteStore({.path = path()});
  EXPECT_EQ(second.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("another coordinator uses it"));
}

TEST_F(SqliteFaultsTest, MissingFolder) {
  const auto store = OpenSqliteStore({.path = dir_.File("absent/coordinator.db")});
  EXPECT_EQ(store.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(store.status().message()), HasSubstr("absent/coordinator.db"));
}

TEST_F(SqliteFaultsTest, ReadOnlyFile) {
  MakeDatabase();
  chmod(path().c_str(), 0444);
  chmod(dir_.path().c_str(), 0555);
  chmod((path() + ".lock").c_str(), 0666);
  // Root may write everything: look as somebody else.
  const bool root = geteuid() == 0;
  ASSERT_EQ(seteuid(root ? 65534 : geteuid()), 0);
  const auto store = OpenSqliteStore({.path = path()});
  ASSERT_EQ(seteuid(root ? 0 : geteuid()), 0);
  chmod(dir_.path().c_str(), 0755);
  EXPECT_EQ(store.status().code(), absl::StatusCode::kFailedPrecondition) << store.status();
  EXPECT_THAT(std::string(store.status().message()), HasSubstr(path()));
  EXPECT_THAT(std::string(store.status().message()), HasSubstr("writable"));
}

TEST_F(SqliteFaultsTest, NotADatabase) {
  std::ofstream(path()) << std::string(8192, 'g');
  const auto store = OpenSqliteStore({.path = path()});
  EXPECT_EQ(store.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(store.status().message()), HasSubstr("it is damaged"));
}

TEST_F(SqliteFaultsTest, AnotherProgramsDatabase) {
  SQLite::Database(path(), SQLite::OPEN_READWRITE | SQLite::OPEN_CREATE)
      .exec("CREATE TABLE cookies (a)");
  const auto store = OpenSqliteStore({.path = path()});
  EXPECT_EQ(store.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(store.status().message()), HasSubstr("belongs to another program"));
  // One that holds nothing yet.
  const std::string fresh = dir_.File("fresh.db");
  SQLite::Database(fresh, SQLite::OPEN_READWRITE | SQLite::OPEN_CREATE)
      .exec("PRAGMA application_id = 7");
  EXPECT_THAT(std::string(OpenSqliteStore({.path = fresh}).status().message()),
              HasSubstr("belongs to another program"));
}

TEST_F(SqliteFaultsTest, NewerSchema) {
  MakeDatabase();
  SQLite::Database(path(), SQLite::OPEN_READWRITE)
      .exec("INSERT INTO migrations VALUES (4, 'future')");
  const auto store = OpenSqliteStore({.path = path()});
  EXPECT_EQ(store.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(store.status().message()),
              HasSubstr("schema 4 is newer than this program"));
}

TEST_F(SqliteFaultsTest, ForeignSchemaOfTheSameNumber) {
  MakeDatabase();
  SQLite::Database(path(), SQLite::OPEN_READWRITE).exec("UPDATE migrations SET sha256 = 'x'");
  const auto store = OpenSqliteStore({.path = path()});
  EXPECT_EQ(store.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(store.status().message()), HasSubstr("checksum differs"));
}

TEST_F(SqliteFaultsTest, MigrationsContinueWhereTheFileStands) {
  MakeDatabase();
  std::vector<Migration> migrations = Migrations();
  migrations.push_back({static_cast<int>(migrations.size()) + 1,
                        "CREATE TABLE added (a); INSERT INTO added VALUES (7)"});
  Connection connection(path(), Connection::Mode::kReadWrite);
  for (int run = 0; run < 2; ++run) {
    const absl::Status status = Migrate(connection, migrations);
    ASSERT_TRUE(status.ok()) << status;
  }
  Cursor rows = connection.Query("SELECT a FROM added");
  ASSERT_TRUE(rows.Next());
  EXPECT_EQ(rows.Int(0), 7);
  EXPECT_FALSE(rows.Next());
}

TEST_F(SqliteFaultsTest, FailedMigrationLeavesTheFileAsItWas) {
  MakeDatabase();
  std::vector<Migration> migrations = Migrations();
  migrations.push_back({static_cast<int>(migrations.size()) + 1,
                        "CREATE TABLE added (a); INSERT INTO absent VALUES (1)"});
  {
    Connection connection(path(), Connection::Mode::kReadWrite);
    EXPECT_FALSE(Migrate(connection, migrations).ok());
  }
  EXPECT_TRUE(OpenSqliteStore({.path = path()}).ok());
}

// Flips bytes all over the file: opening says that it is damaged, or each job reads as it was
// written, or reading says that it is damaged. Nothing crashes and nothing reads as something else.
TEST_F(SqliteFaultsTest, FlippedBytes) {
  MakeDatabase();
  const std::string intact = [&] {
    std::ifstream file(path(), std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  }();
  std::mt19937 random(1);
  int found = 0;
  for (int trial = 0; trial < 200; ++trial) {
    std::string damaged = intact;
    for (int i = 0; i < 4; ++i) {
      damaged[random() % damaged.size()] ^= static_cast<char>(1 << (random() % 8));
    }
    fs::remove(path() + "-wal");
    fs::remove(path() + "-shm");
    std::ofstream(path(), std::ios::binary | std::ios::trunc) << damaged;
    auto store = OpenSqliteStore({.path = path()});
    if (!store.ok()) {
      EXPECT_THAT(std::string(store.status().message()), HasSubstr(path()));
      ++found;
      continue;
    }
    for (int i = 0; i < 20; ++i) {
      absl::StatusOr<v1::Job> job;
      const std::string id = absl::StrCat("j", i);
      const absl::Status read = (*store)->Read([&](ReadTransaction& t) {
        job = t.GetJob(id);
        return job.status();
      });
      if (!read.ok()) {
        ++found;
      } else {
        EXPECT_EQ(job->spec().name(), id);
        EXPECT_EQ(job->state_reason(), std::string(500, 'x'));
      }
    }
  }
  EXPECT_GT(found, 50);
}

TEST_F(SqliteFaultsTest, TruncatedFile) {
  MakeDatabase();
  fs::resize_file(path(), fs::file_size(path()) / 2);
  const auto store = OpenSqliteStore({.path = path()});
  EXPECT_EQ(store.status().code(), absl::StatusCode::kDataLoss) << store.status();
}

// A file system of 1 MiB fills up: writes fail with the reason, what was acknowledged stays
// readable, and once there is space writing goes on.
TEST_F(SqliteFaultsTest, FullDisk) {
  const std::string small = dir_.File("small");
  fs::create_directory(small);
  if (mount("tmpfs", small.c_str(), "tmpfs", 0, "size=1m") != 0) {
    GTEST_SKIP() << "mounting a small file system needs CAP_SYS_ADMIN";
  }
  {
    const std::string path = small + "/coordinator.db";
    auto store = OpenSqliteStore({.path = path});
    ASSERT_TRUE(store.ok()) << store.status();
    std::ofstream(small + "/ballast") << std::string(100 << 10, 'b');
    int created = 0;
    absl::Status status;
    while (status.ok() && created < 1000) {
      status = CreateJob(**store, absl::StrCat("j", created), 10000);
      if (status.ok()) ++created;
    }
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("the disk is full"));
    EXPECT_THAT(std::string(status.message()), HasSubstr(path));
    for (int i = 0; i < created; ++i) EXPECT_TRUE(GetJob(**store, absl::StrCat("j", i)).ok());
    EXPECT_EQ(GetJob(**store, absl::StrCat("j", created)).code(), absl::StatusCode::kNotFound);
    fs::remove(small + "/ballast");
    EXPECT_TRUE(CreateJob(**store, "after").ok());
    store->reset();
    const auto again = OpenSqliteStore({.path = path});
    EXPECT_TRUE(again.ok()) << again.status();
  }
  umount(small.c_str());
}

// SQLite takes ENOSPC alone for a full disk. Its file system calls are what it is given.
TEST_F(SqliteFaultsTest, AQuotaThatIsUsedUpIsAFullDisk) {
  auto store = OpenSqliteStore({.path = path()});
  ASSERT_TRUE(store.ok()) << store.status();
  ASSERT_TRUE(CreateJob(**store, "before").ok());
  sqlite3_vfs* const files = sqlite3_vfs_find(nullptr);
  const auto refuse = +[](int, const void*, size_t) -> ssize_t {
    errno = EDQUOT;
    return -1;
  };
  const auto refuse_at = +[](int, const void*, size_t, off_t) -> ssize_t {
    errno = EDQUOT;
    return -1;
  };
  const auto set = [&](const char* name, auto call) {
    ASSERT_EQ(files->xSetSystemCall(files, name, reinterpret_cast<sqlite3_syscall_ptr>(call)),
              SQLITE_OK);
  };
  set("write", refuse);
  set("pwrite", refuse_at);
  set("pwrite64", refuse_at);
  const absl::Status refused = CreateJob(**store, "refused");
  ASSERT_EQ(files->xSetSystemCall(files, nullptr, nullptr), SQLITE_OK);  // its own again
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("quota is used up"));
  EXPECT_TRUE(GetJob(**store, "before").ok());
  EXPECT_TRUE(CreateJob(**store, "after").ok());
}

// The same of a limit on the size of files (ulimit -f), which may be raised while the process runs.
TEST_F(SqliteFaultsTest, AFileThatMayGrowNoMoreIsAFullDisk) {
  auto store = OpenSqliteStore({.path = path()});
  ASSERT_TRUE(store.ok()) << store.status();
  ASSERT_TRUE(CreateJob(**store, "before").ok());
  absl::Status refused;
  {
    const FilesGrowNoMore full;
    refused = CreateJob(**store, "refused");
  }
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("raise the limit (ulimit -f)"));
  EXPECT_TRUE(CreateJob(**store, "after").ok());
}

// Else what a body goes on to write would be durable, and what it has written not.
TEST_F(SqliteFaultsTest, NothingIsWrittenOnceSqliteHasGivenTheTransactionUp) {
  auto store = OpenSqliteStore({.path = path()});
  ASSERT_TRUE(store.ok()) << store.status();
  ASSERT_TRUE(CreateJob(**store, "before").ok());
  const auto create = [](WriteTransaction& t, const std::string& id, size_t bytes) {
    v1::Job job;
    job.mutable_spec()->set_name(id);
    job.set_state_reason(std::string(bytes, 'x'));
    return t.CreateJob(&job);
  };
  absl::Status refused, later;
  const absl::Status written = (*store)->Write([&](WriteTransaction& t) {
    EXPECT_TRUE(create(t, "first", 1).ok());
    {
      const FilesGrowNoMore full;
      // More than SQLite keeps in memory, so that it writes within the transaction.
      for (int i = 0; i < 64 && refused.ok(); ++i) {
        refused = create(t, absl::StrCat("large-", i), size_t{1} << 20);
      }
    }
    later = create(t, "later", 1);
    return absl::OkStatus();  // as a batch does whose items fail each by itself
  });
  for (const absl::Status& status : {refused, later, written}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  }
  EXPECT_TRUE(GetJob(**store, "before").ok());
  for (const char* const none : {"first", "large-0", "later"}) {
    EXPECT_TRUE(absl::IsNotFound(GetJob(**store, none))) << none;
  }
  EXPECT_TRUE(CreateJob(**store, "after").ok());
}

// What is written into it would be acknowledged, and gone at the next start.
TEST_F(SqliteFaultsTest, ADatabaseThatIsNoLongerInItsPlaceTakesNoWrites) {
  const auto other = [&] { return path() + ".other"; };
  auto store = OpenSqliteStore({.path = path()});
  ASSERT_TRUE(store.ok()) << store.status();
  ASSERT_TRUE(CreateJob(**store, "before").ok());
  EXPECT_TRUE((*store)->Writable().ok());
  std::filesystem::rename(path(), other());
  EXPECT_FALSE((*store)->Writable().ok());
  EXPECT_TRUE((*store)->Space().ok());
  const absl::Status gone = CreateJob(**store, "gone");
  EXPECT_EQ(gone.code(), absl::StatusCode::kFailedPrecondition) << gone;
  EXPECT_THAT(std::string(gone.message()), HasSubstr("is not the file that this coordinator has"));
  std::ofstream(path()) << "another";
  EXPECT_FALSE(CreateJob(**store, "replaced").ok());
  std::filesystem::rename(other(), path());
  EXPECT_TRUE(CreateJob(**store, "after").ok());
}

TEST_F(SqliteFaultsTest, ALogWithoutItsDatabaseIsNotThrownAway) {
  std::ofstream(path() + "-wal") << "what was written last";
  const absl::Status refused = OpenSqliteStore({.path = path()}).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("is gone, and"));
  EXPECT_TRUE(std::filesystem::exists(path() + "-wal"));
  EXPECT_FALSE(std::filesystem::exists(path()));
  std::filesystem::remove(path() + "-wal");
  EXPECT_TRUE(OpenSqliteStore({.path = path()}).ok());
}

// The default file system, which counts how often the log of writes is synced.
class CountingFiles {
 public:
  CountingFiles() : files_(*original_) {
    files_.zName = "counting";
    files_.xOpen = &Open;
    sqlite3_vfs_register(&files_, /*makeDflt=*/1);
  }
  ~CountingFiles() {
    sqlite3_vfs_register(original_, 1);
    sqlite3_vfs_unregister(&files_);
  }
  static int synced() { return synced_; }

 private:
  static int Open(sqlite3_vfs* files, const char* name, sqlite3_file* file, int flags,
                  int* flags_out) {
    const int opened = original_->xOpen(files, name, file, flags, flags_out);
    if (opened != SQLITE_OK || (flags & SQLITE_OPEN_WAL) == 0) return opened;
    original_log_ = file->pMethods;
    log_ = *original_log_;
    log_.xSync = [](sqlite3_file* log, int how) {
      ++synced_;
      return original_log_->xSync(log, how);
    };
    file->pMethods = &log_;
    return opened;
  }

  static inline sqlite3_vfs* const original_ = sqlite3_vfs_find(nullptr);
  static inline const sqlite3_io_methods* original_log_ = nullptr;
  static inline sqlite3_io_methods log_ = {};
  static inline std::atomic<int> synced_ = 0;
  sqlite3_vfs files_;
};

// A machine that loses its power takes what was never synced, which no kill of a process shows.
TEST_F(SqliteFaultsTest, WhatIsAcknowledgedWasSynced) {
  const CountingFiles files;
  auto store = OpenSqliteStore({.path = path()});
  ASSERT_TRUE(store.ok()) << store.status();
  for (int i = 0; i < 5; ++i) {
    const int before = CountingFiles::synced();
    ASSERT_TRUE(CreateJob(**store, absl::StrCat("j", i)).ok());
    EXPECT_GT(CountingFiles::synced(), before) << i;
  }
  store->reset();
}

// kill -9 in the middle of writing: whatever Write() said OK to is there afterwards.
TEST_F(SqliteFaultsTest, KilledWriterLosesNothingAcknowledged) {
  int acknowledged[2];
  ASSERT_EQ(pipe(acknowledged), 0);
  const pid_t child = fork();
  if (child == 0) {
    auto store = OpenSqliteStore({.path = path_});
    for (int i = 0; store.ok() && CreateJob(**store, absl::StrCat("j", i)).ok(); ++i) {
      if (write(acknowledged[1], &i, sizeof(i)) != sizeof(i)) break;
    }
    _exit(1);
  }
  close(acknowledged[1]);
  int last = -1;
  while (last < 30) {
    ASSERT_EQ(read(acknowledged[0], &last, sizeof(last)), static_cast<ssize_t>(sizeof(last)));
  }
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  while (read(acknowledged[0], &last, sizeof(last)) > 0) {
  }
  close(acknowledged[0]);
  auto store = OpenSqliteStore({.path = path_});
  ASSERT_TRUE(store.ok()) << store.status();
  for (int i = 0; i <= last; ++i) EXPECT_TRUE(GetJob(**store, absl::StrCat("j", i)).ok()) << i;
}

// A backup or the sqlite3 shell holds it for a moment.
TEST_F(SqliteFaultsTest, ALockThatIsHeldShortlyFailsNoWrite) {
  auto store = OpenSqliteStore({.path = path()});
  ASSERT_TRUE(store.ok()) << store.status();
  Connection other(path(), Connection::Mode::kReadWrite);
  other.database().exec("BEGIN IMMEDIATE");
  std::thread holder([&] {
    absl::SleepFor(absl::Milliseconds(500));
    other.database().exec("COMMIT");
  });
  EXPECT_EQ(CreateJob(**store, "a"), absl::OkStatus());
  holder.join();
}

}  // namespace
}  // namespace ringleader::store
