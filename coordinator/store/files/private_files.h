// The database and its folder belong to one user and are nobody else's to read: they hold job
// files, logs, hashes of tokens and the audit log.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ringleader::store {

// Lies in the data folder beside the database (trace/delivery_log.h).
inline constexpr char kTracesSentName[] = "traces-sent";

// Makes the folder, or takes other users' rights to it away and says so in the log.
// FAILED_PRECONDITION, with the remedy, where that is not possible, or where the folder holds other
// things than a database of Ringleader's, whose users may need it as it is.
absl::Status MakePrivateFolder(const std::string& path);

// The same for a file. One that does not exist is made, empty.
absl::Status MakePrivateFile(const std::string& path);

// The advisory lock that keeps a second coordinator off the same database.
class FileLock {
 public:
  // FAILED_PRECONDITION when another process has it, or no file can be made beside `database`.
  static absl::StatusOr<std::unique_ptr<FileLock>> Take(const std::string& database);
  ~FileLock();
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

 private:
  explicit FileLock(int fd) : fd_(fd) {}
  const int fd_;
};

}  // namespace ringleader::store
