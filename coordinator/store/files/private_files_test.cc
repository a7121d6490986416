#include "coordinator/store/files/private_files.h"

#include <SQLiteCpp/SQLiteCpp.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "base/testing/temp_dir.h"
#include "coordinator/store/sqlite/sqlite_store.h"

namespace ringleader::store {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

constexpr fs::perms kOthers = fs::perms::group_all | fs::perms::others_all;

bool IsPrivate(const std::string& path) {
  return (fs::status(path).permissions() & kOthers) == fs::perms::none;
}

TEST(PrivateFilesTest, ADatabaseIsItsUsersAlone) {
  const TempDir dir;
  const std::string path = dir.File("db");
  const auto open = [&] {
    auto store = OpenSqliteStore({.path = path, .reserve_bytes = 4096});
    ASSERT_TRUE(store.ok()) << store.status();
    ASSERT_TRUE(
        (*store)
            ->Write([](WriteTransaction& t) { return t.Next(Counter::kCommandId).status(); })
            .ok());
    for (const char* suffix : {"", "-wal", "-shm", ".lock", ".reserve"}) {
      EXPECT_TRUE(IsPrivate(path + suffix)) << suffix;
    }
  };
  open();
  // One that an earlier release made, or somebody opened up.
  for (const char* suffix : {"", ".lock"}) fs::permissions(path + suffix, fs::perms(0644));
  open();
}

// So is what a coordinator that was killed has left beside it.
TEST(PrivateFilesTest, TheLogOfWritesThatIsTakenUpBecomesItsUsersAlone) {
  const TempDir dir;
  const std::string path = dir.File("db");
  auto store = OpenSqliteStore({.path = path});
  ASSERT_TRUE(store.ok()) << store.status();
  ASSERT_TRUE((*store)
                  ->Write([](WriteTransaction& t) { return t.Next(Counter::kCommandId).status(); })
                  .ok());
  {
    // As long as somebody reads, the store's end leaves them, as a kill does.
    SQLite::Database other(path, SQLite::OPEN_READONLY);
    SQLite::Statement(other, "SELECT * FROM counters").executeStep();
    store->reset();
    for (const char* suffix : {"-wal", "-shm"}) {
      ASSERT_TRUE(fs::exists(path + suffix)) << suffix;
      fs::permissions(path + suffix, fs::perms(0644));
    }
    store = OpenSqliteStore({.path = path});
    ASSERT_TRUE(store.ok()) << store.status();
    for (const char* suffix : {"-wal", "-shm"}) EXPECT_TRUE(IsPrivate(path + suffix)) << suffix;
  }
}

TEST(PrivateFilesTest, AFolderIsMadeOrMendedUnlessItIsForOtherThings) {
  const TempDir dir;
  const std::string data = dir.File("a/b");
  ASSERT_TRUE(MakePrivateFolder(data).ok());
  EXPECT_TRUE(IsPrivate(data));
  std::ofstream(data + "/ringleader.db") << "x";
  fs::permissions(data, fs::perms(0755));
  ASSERT_TRUE(MakePrivateFolder(data).ok());
  EXPECT_TRUE(IsPrivate(data));

  // A file system of its own brings a folder along.
  fs::create_directory(data + "/lost+found");
  fs::permissions(data, fs::perms(0755));
  EXPECT_TRUE(MakePrivateFolder(data).ok());
  std::ofstream(data + "/" + kTracesSentName) << "x";
  fs::permissions(data, fs::perms(0770));
  EXPECT_TRUE(MakePrivateFolder(data).ok());
  EXPECT_TRUE(IsPrivate(data));

  std::ofstream(data + "/diary") << "x";
  EXPECT_TRUE(MakePrivateFolder(data).ok());
  fs::permissions(data, fs::perms(0755));
  const absl::Status refused = MakePrivateFolder(data);
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("other users may use it (mode 0755)"));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("chmod 700"));
  EXPECT_FALSE(IsPrivate(data));

  const absl::Status below = MakePrivateFolder(data + "/diary/below");
  EXPECT_EQ(below.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(below.message()),
              HasSubstr("cannot create " + data + "/diary/below: Not a directory"));
}

}  // namespace
}  // namespace ringleader::store
