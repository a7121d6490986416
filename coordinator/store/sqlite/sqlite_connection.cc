#include "coordinator/store/sqlite/sqlite_connection.h"

#include <sqlite3.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_format.h"
#include "base/checksum.h"

namespace ringleader::store {
namespace {

// How long a connection waits for a lock that another process (a backup, the sqlite3 shell) holds.
constexpr int kBusyTimeoutMs = 5000;

constexpr size_t kChecksumBytes = sizeof(uint64_t);

int OpenFlags(Connection::Mode mode) {
  // A connection is used by one thread at a time: SQLite's own mutex would only cost.
  return SQLITE_OPEN_NOMUTEX |
         (mode == Connection::Mode::kReadWrite ? SQLite::OPEN_READWRITE | SQLite::OPEN_CREATE
                                               : SQLite::OPEN_READONLY);
}

}  // namespace

Connection::Connection(const std::string& path, Mode mode)
    : path_(path), database_(path, OpenFlags(mode), kBusyTimeoutMs) {}

SQLite::Statement& Connection::Prepare(const char* sql) {
  std::unique_ptr<SQLite::Statement>& statement = statements_[sql];
  if (statement == nullptr) statement = std::make_unique<SQLite::Statement>(database_, sql);
  return *statement;
}

int Connection::WriteErrno() {
  sqlite3_file* log = nullptr;
  int last = 0;
  sqlite3_file_control(database_.getHandle(), "main", SQLITE_FCNTL_JOURNAL_POINTER,
                       static_cast<void*>(&log));
  if (log == nullptr || log->pMethods == nullptr) return 0;
  log->pMethods->xFileControl(log, SQLITE_FCNTL_LAST_ERRNO, static_cast<void*>(&last));
  return last;
}

absl::Status Connection::Explain(const std::string& path, const SQLite::Exception& error,
                                 int system_errno) {
  const auto message = [&](const char* what, const char* remedy) {
    return absl::StrFormat("database %s: %s (SQLite: %s); %s", path, what, error.what(), remedy);
  };
  switch (error.getErrorCode()) {
    case SQLITE_FULL:
      return absl::ResourceExhaustedError(
          message("the disk is full", "free space on its file system and try again"));
    case SQLITE_READONLY:
    case SQLITE_PERM:
    case SQLITE_AUTH:
      return absl::FailedPreconditionError(
          message("it is read-only", "make the file and its folder writable for this user"));
    case SQLITE_CANTOPEN:
      return absl::FailedPreconditionError(message(
          "it cannot be opened", "check that its folder exists and is writable for this user"));
    case SQLITE_CORRUPT:
    case SQLITE_NOTADB:
      return absl::DataLossError(
          message("it is damaged", "restore it from a backup (see docs/operations.md)"));
    case SQLITE_BUSY:
    case SQLITE_LOCKED:
      return absl::UnavailableError(
          message("another program holds it locked", "end that program and try again"));
    case SQLITE_IOERR:
      // SQLite itself takes only ENOSPC for a full disk.
      if (system_errno == EDQUOT) {
        return absl::ResourceExhaustedError(
            message("the disk is full: its user's quota is used up",
                    "free space that counts against the quota, or raise it, and try again"));
      }
      if (system_errno == EFBIG) {
        return absl::ResourceExhaustedError(
            message("a file may grow no more: it is as large as this process may make one",
                    "raise the limit (ulimit -f) and try again"));
      }
      return absl::UnavailableError(
          message("it cannot be read or written",
                  "check the file system, its quota and the process's limits"));
    default:
      return absl::InternalError(message("a statement failed", "please report this"));
  }
}

std::string Seal(std::string_view payload) {
  const uint64_t checksum = Checksum(payload.data(), payload.size());
  std::string sealed(kChecksumBytes, '\0');
  std::memcpy(sealed.data(), &checksum, kChecksumBytes);
  sealed.append(payload);
  return sealed;
}

absl::StatusOr<std::string_view> Unseal(std::string_view sealed) {
  if (sealed.size() < kChecksumBytes) return absl::DataLossError("");
  uint64_t checksum = 0;
  std::memcpy(&checksum, sealed.data(), kChecksumBytes);
  const std::string_view payload = sealed.substr(kChecksumBytes);
  if (checksum != Checksum(payload.data(), payload.size())) return absl::DataLossError("");
  return payload;
}

}  // namespace ringleader::store
