// One SQLite connection with its prepared statements, and how its failures read to a user.
#pragma once

#include <SQLiteCpp/SQLiteCpp.h>
#include <sqlite3.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ringleader::store {

// Marks an argument or result as bytes rather than text.
struct Blob {
  std::string_view bytes;
};

// A statement that is being run; puts it back when it goes out of scope.
class Cursor {
 public:
  explicit Cursor(SQLite::Statement* statement) : statement_(statement) {}
  Cursor(Cursor&& other) noexcept : statement_(std::exchange(other.statement_, nullptr)) {}
  ~Cursor() {
    if (statement_ != nullptr) statement_->tryReset();
  }

  // Goes to the next row; false after the last.
  bool Next() { return statement_->executeStep(); }
  int64_t Int(int column) const { return statement_->getColumn(column).getInt64(); }
  // Valid until the next call of Next().
  std::string_view Bytes(int column) const {
    const SQLite::Column value = statement_->getColumn(column);
    const void* data = value.getBlob();
    return {static_cast<const char*>(data), static_cast<size_t>(value.getBytes())};
  }

 private:
  SQLite::Statement* statement_;
};

// Used by one thread at a time. Methods throw SQLite::Exception; Try() turns that into a Status.
class Connection {
 public:
  enum class Mode { kReadWrite, kReadOnly };
  Connection(const std::string& path, Mode mode);

  // Runs `sql` with its ?s bound to `arguments`: integers, std::string_view (text) or Blob. `sql`
  // must be a literal: its address identifies the prepared statement.
  template <typename... Arguments>
  Cursor Query(const char* sql, const Arguments&... arguments) {
    CheckHeld();
    SQLite::Statement& statement = Prepare(sql);
    int index = 0;
    (Bind(statement, ++index, arguments), ...);
    return Cursor(&statement);
  }
  // The same for a statement without rows; returns the number of rows that it changed.
  template <typename... Arguments>
  int Run(const char* sql, const Arguments&... arguments) {
    Cursor cursor = Query(sql, arguments...);
    cursor.Next();
    return database_.getChanges();
  }
  // Serves statements that are built at run time.
  SQLite::Database& database() { return database_; }

  // False after an error that made SQLite give up the transaction by itself.
  bool InTransaction() { return sqlite3_get_autocommit(database_.getHandle()) == 0; }
  // While one exists, within a transaction: once SQLite has given that up, no statement is run, for
  // it would be durable alone. Each fails as the one did that made SQLite give it up.
  class Hold {
   public:
    explicit Hold(Connection* connection) : connection_(*connection) { connection_.held_ = true; }
    ~Hold() {
      connection_.held_ = false;
      connection_.given_up_.reset();
    }
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;

   private:
    Connection& connection_;
  };

  // `body` returns a Status or StatusOr; what it throws becomes one.
  template <typename Body>
  auto Try(const Body& body) -> decltype(body()) {
    try {
      return body();
    } catch (const SQLite::Exception& error) {
      if (held_ && !given_up_ && !InTransaction()) given_up_ = error;
      return Explain(path_, error, WriteErrno());
    }
  }

  // The failure with the file's name and what to do about it. `system_errno`: of the write that
  // failed; 0: not known.
  static absl::Status Explain(const std::string& path, const SQLite::Exception& error,
                              int system_errno = 0);

  const std::string& path() const { return path_; }

 private:
  SQLite::Statement& Prepare(const char* sql);
  void CheckHeld() {
    if (!held_ || InTransaction()) return;
    throw given_up_ ? *given_up_
                    : SQLite::Exception("the transaction ended within a write", SQLITE_ABORT);
  }
  // The errno of the last system call that failed on the log of writes; 0: none, or not known.
  // (sqlite3_system_errno() does not hear of a COMMIT that fails.)
  int WriteErrno();
  static void Bind(SQLite::Statement& statement, int index, int64_t value) {
    statement.bind(index, value);
  }
  static void Bind(SQLite::Statement& statement, int index, std::string_view text) {
    statement.bind(index, std::string(text));
  }
  static void Bind(SQLite::Statement& statement, int index, Blob blob) {
    statement.bind(index, blob.bytes.data(), static_cast<int>(blob.bytes.size()));
  }

  const std::string path_;
  SQLite::Database database_;
  std::unordered_map<const char*, std::unique_ptr<SQLite::Statement>> statements_;
  bool held_ = false;
  std::optional<SQLite::Exception> given_up_;
};

// A row's payload with a checksum in front, so that a flipped bit in it is found: SQLite itself
// checks only its pages' structure.
std::string Seal(std::string_view payload);
// DATA_LOSS without further words when the checksum does not match.
absl::StatusOr<std::string_view> Unseal(std::string_view sealed);

}  // namespace ringleader::store
