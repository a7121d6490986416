#include "coordinator/store/upkeep/backup.h"

#include <fcntl.h>
#include <sqlite3.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string_view>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_format.h"
#include "base/files.h"
#include "base/status_macros.h"
#include "coordinator/store/sqlite/integrity_check.h"
#include "coordinator/store/sqlite/sqlite_connection.h"

namespace ringleader::store {
namespace {

// Pages between two looks at what was copied: 4 MiB.
constexpr int kPagesPerStep = 1024;

absl::Status Copy(Connection& from, Connection& to) {
  // SQLite begins a backup anew whenever the source changes, unless its connection is in the middle
  // of reading: then the copy is of what it sees.
  SQLite::Transaction snapshot(from.database(), SQLite::TransactionBehavior::DEFERRED);
  from.Query("SELECT COUNT(*) FROM sqlite_master").Next();
  sqlite3* const target = to.database().getHandle();
  sqlite3_backup* const backup =
      sqlite3_backup_init(target, "main", from.database().getHandle(), "main");
  if (backup == nullptr) throw SQLite::Exception(target);
  int result = SQLITE_OK;
  while (result == SQLITE_OK) result = sqlite3_backup_step(backup, kPagesPerStep);
  const int finished = sqlite3_backup_finish(backup);
  if (finished == SQLITE_OK) return absl::OkStatus();
  // Nothing is written but the copy: the disk that is full is its.
  return Connection::Explain(finished == SQLITE_FULL ? to.path() : from.path(),
                             SQLite::Exception(target, finished));
}

absl::Status Sync(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  const bool synced = fd >= 0 && fsync(fd) == 0;
  absl::Status status = synced ? absl::OkStatus()
                               : absl::UnavailableError(absl::StrFormat(
                                     "%s: cannot be synced: %s", path, std::strerror(errno)));
  if (fd >= 0) close(fd);
  return status;
}

// The copy takes the place of what is there: of an earlier copy, and of nothing else.
absl::Status CheckTarget(const std::string& database, const std::string& copy) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (fs::equivalent(database, copy, error)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s is the database itself; name another file for its copy", copy));
  }
  for (const char* suffix : {"-wal", "-shm", "-journal", ".lock", ".reserve"}) {
    if (fs::weakly_canonical(copy, error) == fs::weakly_canonical(database + suffix, error)) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s is a file of the database's; name another for its copy", copy));
    }
  }
  const fs::file_status there = fs::status(copy, error);
  if (!fs::exists(there)) return absl::OkStatus();
  constexpr std::string_view kMagic = "SQLite format 3";
  std::string begin(kMagic.size(), '\0');
  if (!fs::is_regular_file(there) ||
      !std::ifstream(copy, std::ios::binary).read(begin.data(), kMagic.size()) || begin != kMagic) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s is there and is no copy of a database; name another file, or remove it", copy));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status BackUp(const std::string& database, const std::string& copy) {
  RETURN_IF_ERROR(CheckTarget(database, copy));
  const std::string part = copy + ".part";
  const auto remove_part = [&] {
    for (const char* suffix : {"", "-wal", "-shm", "-journal"}) unlink((part + suffix).c_str());
  };
  remove_part();  // of a backup that was killed
  const absl::Cleanup remove_at_end = remove_part;
  const int fd = open(part.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (fd < 0) {
    return absl::FailedPreconditionError(
        absl::StrFormat("%s: cannot be written: %s", part, std::strerror(errno)));
  }
  close(fd);
  try {
    Connection from(database, Connection::Mode::kReadOnly);
    Connection to(part, Connection::Mode::kReadWrite);
    RETURN_IF_ERROR(from.Try([&] { return Copy(from, to); }));
    RETURN_IF_ERROR(CheckIntegrity(to));
    to.Run("INSERT OR REPLACE INTO counters (name, value) VALUES ('is_copy', 1)");
  } catch (const SQLite::Exception& failure) {
    return Connection::Explain(database, failure);
  }
  RETURN_IF_ERROR(Sync(part));
  return RenameDurably(part, copy);
}

}  // namespace ringleader::store
