#include "coordinator/store/sqlite/sqlite_store.h"

#include <spdlog/spdlog.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <filesystem>
#include <list>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "coordinator/store/files/disk_reserve.h"
#include "coordinator/store/files/private_files.h"
#include "coordinator/store/sqlite/integrity_check.h"
#include "coordinator/store/sqlite/sqlite_connection.h"
#include "coordinator/store/sqlite/sqlite_schema.h"
#include "coordinator/store/sqlite/sqlite_transaction.h"

namespace ringleader::store {
namespace {

// Writes that share one commit: bounds how long the first of them waits for the others.
constexpr size_t kMaxGroup = 64;
// Connections that are kept for readers; more readers at once open their own for a moment.
constexpr size_t kMaxIdleReaders = 8;

// The log of writes is cut to this size when it begins anew: one that a large write or a long
// backup made larger would keep what it took of the disk for ever.
int64_t LogBytes(const SqliteOptions& options) {
  constexpr int64_t kLeast = 4 << 20;  // at which SQLite carries it over to the database by itself
  return std::max(kLeast, options.reserve_bytes / 4);
}

// Which file a path leads to: device and number; zeros where there is none.
using Place = std::pair<dev_t, ino_t>;
Place PlaceOf(const std::string& path) {
  struct stat file = {};
  return stat(path.c_str(), &file) == 0 ? Place(file.st_dev, file.st_ino) : Place();
}

// SQLite would begin a new database, and remove the log of the one that is gone.
absl::Status CheckNotGone(const std::string& database) {
  const std::string log = database + "-wal";
  struct stat file = {};
  if (PlaceOf(database) != Place() || stat(log.c_str(), &file) != 0 || file.st_size == 0) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrFormat(
      "database %s is gone, and %s, which holds its last writes, is not; put the database back "
      "or, to begin with an empty one, move that file away",
      database, log));
}

// The only file of a database that may go at any time.
std::string ReservePath(const std::string& database) {
  return database + ".reserve";
}

class SqliteStore : public Store {
 public:
  SqliteStore(SqliteOptions options, std::unique_ptr<FileLock> lock,
              std::unique_ptr<Connection> writer, uint64_t revision, absl::Duration reply_offset)
      : options_(std::move(options)),
        lock_(std::move(lock)),
        reserve_(ReservePath(options_.path), options_.reserve_bytes,
                 {options_.path, options_.path + "-wal"}),
        writer_(std::move(writer)),
        reply_offset_(reply_offset),
        revision_(revision) {
    if (options_.on_damage) {
      integrity_check_ = std::make_unique<IntegrityCheck>(options_.path, options_.on_damage);
    }
  }

  ~SqliteStore() override {
    // On a full disk the log stays as after a crash: its space would be gone at the next start.
    if (reserve_.held()) return;
    sqlite3_db_config(writer_->database().getHandle(), SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1,
                      nullptr);
  }

  absl::Status Read(absl::FunctionRef<absl::Status(ReadTransaction&)> body) override {
    ASSIGN_OR_RETURN(std::unique_ptr<Connection> connection, TakeReader());
    absl::Status status = connection->Try([&]() -> absl::Status {
      SQLite::Transaction snapshot(connection->database(), SQLite::TransactionBehavior::DEFERRED);
      // The first read fixes the snapshot.
      Cursor row = connection->Query("SELECT value FROM counters WHERE name = 'revision'");
      SqliteTransaction transaction(connection.get(), &options_,
                                    row.Next() ? static_cast<uint64_t>(row.Int(0)) : 0,
                                    reply_offset_);
      return body(transaction);
    });
    GiveReader(std::move(connection));
    return status;
  }

  // The first in the queue commits for all that wait with it, then wakes them and hands the lead to
  // the next.
  absl::Status Write(absl::FunctionRef<absl::Status(WriteTransaction&)> body, Need need) override {
    if (absl::Status space = Space(); !space.ok() && need == Need::kOrdinary) return space;
    Writer self(body);
    std::vector<Writer*> group;
    {
      absl::MutexLock lock(&queue_mu_);
      queue_.push_back(&self);
      while (!self.done && queue_.front() != &self) self.wake.Wait(&queue_mu_);
      if (self.done) return self.status;
      group.assign(queue_.begin(),
                   queue_.begin() + static_cast<long>(std::min(queue_.size(), kMaxGroup)));
    }
    CommitGroup(group);
    absl::MutexLock lock(&queue_mu_);
    for (Writer* writer : group) {
      queue_.pop_front();
      writer->done = true;
      if (writer != &self) writer->wake.Signal();
    }
    if (!queue_.empty()) queue_.front()->wake.Signal();
    return self.status;
  }

  absl::Status Writable() override {
    RETURN_IF_ERROR(CheckInPlace());
    return Space();
  }

  absl::Status Space() override {
    absl::Status space = reserve_.Check();
    if (space.ok() || !CutLog()) return space;
    space = reserve_.Check();
    if (!space.ok()) reserve_.GiveUp();  // what is due to the log goes to the empty one
    return space;
  }

  uint64_t revision() const override { return revision_.load(std::memory_order_acquire); }

  std::unique_ptr<Subscription> Subscribe(std::function<void(const Change&)> listener) override {
    absl::MutexLock lock(&listeners_mu_);
    listeners_.push_back(std::move(listener));
    return std::make_unique<Handle>(this, std::prev(listeners_.end()));
  }

 private:
  using Listeners = std::list<std::function<void(const Change&)>>;

  struct Writer {
    explicit Writer(absl::FunctionRef<absl::Status(WriteTransaction&)> body) : body(body) {}
    absl::FunctionRef<absl::Status(WriteTransaction&)> body;
    absl::Status status;
    bool done = false;
    absl::CondVar wake;
  };

  class Handle : public Subscription {
   public:
    Handle(SqliteStore* store, Listeners::iterator place) : store_(store), place_(place) {}
    ~Handle() override {
      absl::MutexLock lock(&store_->listeners_mu_);
      store_->listeners_.erase(place_);
    }

   private:
    SqliteStore* const store_;
    const Listeners::iterator place_;
  };

  // On a full disk: empties a log that is larger than it needs to be, as far as readers let it.
  // Returns whether that made room.
  bool CutLog() {
    absl::MutexLock lock(&cutting_);
    std::error_code none;
    const auto size = std::filesystem::file_size(options_.path + "-wal", none);
    if (none || static_cast<int64_t>(size) <= LogBytes(options_)) return false;
    try {
      Connection connection(options_.path, Connection::Mode::kReadWrite);
      connection.Query("SELECT value FROM counters WHERE name = 'revision'")
          .Next();  // opens the log
      sqlite3* const database = connection.database().getHandle();
      sqlite3_busy_timeout(database, 0);  // nobody is waited for: the next call tries again
      // Most is done beside writers, who wait for the second.
      sqlite3_wal_checkpoint_v2(database, nullptr, SQLITE_CHECKPOINT_PASSIVE, nullptr, nullptr);
      return sqlite3_wal_checkpoint_v2(database, nullptr, SQLITE_CHECKPOINT_TRUNCATE, nullptr,
                                       nullptr) == SQLITE_OK;
    } catch (const SQLite::Exception&) {
      return false;
    }
  }

  // What is written into a file that its path no longer leads to is gone at the next start.
  absl::Status CheckInPlace() const {
    if (place_ == PlaceOf(options_.path)) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrFormat(
        "database %s is not the file that this coordinator has open: it was removed, renamed or "
        "replaced; stop the coordinator, put the file back and start it again",
        options_.path));
  }

  // Only the leader of the queue is here.
  void CommitGroup(const std::vector<Writer*>& group) {
    const absl::Time start = absl::Now();
    std::vector<Change> changes;
    const absl::Status committed = writer_->Try([&]() -> absl::Status {
      RETURN_IF_ERROR(CheckInPlace());
      SQLite::Transaction transaction(writer_->database(), SQLite::TransactionBehavior::IMMEDIATE);
      const Connection::Hold hold(writer_.get());
      uint64_t next = revision() + 1;
      for (Writer* writer : group) {
        RETURN_IF_ERROR(RunBody(*writer, next, &changes));
        if (!changes.empty()) next = changes.back().revision + 1;
      }
      if (changes.empty()) return absl::OkStatus();
      writer_->Run("INSERT OR REPLACE INTO counters (name, value) VALUES ('revision', ?)",
                   static_cast<int64_t>(next - 1));
      transaction.commit();
      return absl::OkStatus();
    });
    if (!committed.ok()) {
      if (absl::IsResourceExhausted(committed)) reserve_.GiveUp();
      // A body that had succeeded did not: nothing of the group is in the file.
      for (Writer* writer : group) {
        if (writer->status.ok()) writer->status = committed;
      }
      return;
    }
    if (changes.empty()) return;
    revision_.store(changes.back().revision, std::memory_order_release);
    // While space is scarce the log of what was written begins anew each time, rather than growing
    // to its usual size.
    if (!reserve_.held()) {
      sqlite3_wal_checkpoint_v2(writer_->database().getHandle(), nullptr, SQLITE_CHECKPOINT_PASSIVE,
                                nullptr, nullptr);
    }
    if (options_.on_commit)
      options_.on_commit(absl::Now() - start, static_cast<int>(changes.size()));
    absl::MutexLock lock(&listeners_mu_);
    for (const Change& change : changes) {
      for (const auto& listener : listeners_) listener(change);
    }
  }

  // One body in a savepoint of its own, so that its failure undoes nobody else's. Fails only if the
  // whole group must.
  absl::Status RunBody(Writer& writer, uint64_t revision, std::vector<Change>* changes) {
    SqliteTransaction transaction(writer_.get(), &options_, revision, reply_offset_);
    writer_->Run("SAVEPOINT body");
    writer.status = writer.body(transaction);
    if (!writer_->InTransaction()) {
      if (!writer.status.ok()) return writer.status;
      // Fails as what ended it did.
      return writer_->Try([&]() -> absl::Status {
        writer_->Query("SELECT 1").Next();
        return absl::InternalError("the transaction ended within a write");
      });
    }
    if (!writer.status.ok()) writer_->Run("ROLLBACK TO body");
    writer_->Run("RELEASE body");
    if (writer.status.ok() && transaction.wrote()) changes->push_back(transaction.change());
    return absl::OkStatus();
  }

  absl::StatusOr<std::unique_ptr<Connection>> TakeReader() {
    {
      absl::MutexLock lock(&readers_mu_);
      if (!idle_readers_.empty()) {
        std::unique_ptr<Connection> reader = std::move(idle_readers_.back());
        idle_readers_.pop_back();
        return reader;
      }
    }
    try {
      return std::make_unique<Connection>(options_.path, Connection::Mode::kReadOnly);
    } catch (const SQLite::Exception& error) {
      return Connection::Explain(options_.path, error);
    }
  }

  void GiveReader(std::unique_ptr<Connection> reader) {
    absl::MutexLock lock(&readers_mu_);
    if (idle_readers_.size() < kMaxIdleReaders) idle_readers_.push_back(std::move(reader));
  }

  const SqliteOptions options_;
  const std::unique_ptr<FileLock> lock_;
  DiskReserve reserve_;                       // outlives all connections
  const std::unique_ptr<Connection> writer_;  // used by the queue's leader
  const Place place_ = PlaceOf(options_.path);
  const absl::Duration reply_offset_;
  std::atomic<uint64_t> revision_;

  absl::Mutex cutting_;
  absl::Mutex queue_mu_;
  std::deque<Writer*> queue_ ABSL_GUARDED_BY(queue_mu_);  // the front leads

  absl::Mutex readers_mu_;
  std::vector<std::unique_ptr<Connection>> idle_readers_ ABSL_GUARDED_BY(readers_mu_);

  absl::Mutex listeners_mu_;
  Listeners listeners_ ABSL_GUARDED_BY(listeners_mu_);

  std::unique_ptr<IntegrityCheck> integrity_check_;  // last: ends before all else
};

// What a backup does not know of: attempts, commands, sessions and revisions since it was made.
// Workers, checkpoint folders and clients remember their numbers, so that new ones begin far
// beyond.
constexpr int64_t kNumbersSkipped = int64_t{1} << 32;

absl::Status TakeUpCopy(Connection& connection) {
  SQLite::Transaction transaction(connection.database(), SQLite::TransactionBehavior::IMMEDIATE);
  if (connection.Run("DELETE FROM counters WHERE name = 'is_copy'") == 0) return absl::OkStatus();
  connection.Run("UPDATE counters SET value = value + ? WHERE name <> 'history_time_us'",
                 kNumbersSkipped);
  // Watches go on behind the reports that they have.
  for (const char* const table : {"steps", "evals"}) {
    const std::string_view name = table;
    connection.Run(
        "INSERT INTO sqlite_sequence (name, seq) SELECT ?1, 0 "
        "WHERE NOT EXISTS (SELECT 1 FROM sqlite_sequence WHERE name = ?1)",
        name);
    connection.Run("UPDATE sqlite_sequence SET seq = seq + ? WHERE name = ?", kNumbersSkipped,
                   name);
  }
  connection.Run("INSERT OR REPLACE INTO counters (name, value) VALUES ('restored', 1)");
  transaction.commit();
  spdlog::warn("database {} was put back from a backup", connection.path());
  return absl::OkStatus();
}

absl::Status SetUp(Connection& connection, int64_t log_bytes) {
  return connection.Try([&]() -> absl::Status {
    RETURN_IF_ERROR(Migrate(connection));
    bool is_wal = false;
    {
      Cursor mode = connection.Query("PRAGMA journal_mode = WAL");
      is_wal = mode.Next() && mode.Bytes(0) == "wal";
    }
    if (!is_wal) {
      return absl::FailedPreconditionError(
          absl::StrFormat("database %s: its file system has no shared memory, which WAL needs; "
                          "choose a local --data-dir",
                          connection.path()));
    }
    connection.database().exec("PRAGMA synchronous = FULL");
    connection.database().exec("PRAGMA foreign_keys = ON");
    // Some builds of SQLite write zeros over all that is deleted: a job that goes would want as
    // much room again, which a full disk has not.
    connection.database().exec("PRAGMA secure_delete = FAST");
    connection.database().exec(absl::StrFormat("PRAGMA journal_size_limit = %d", log_bytes));
    return TakeUpCopy(connection);
  });
}

// The time of replies goes on from the newest one, with what passes while the store is open: a
// clock that says something else at each start makes none older or younger.
absl::Duration ReplyOffset(Connection& connection, const Clock& clock) {
  Cursor row = connection.Query("SELECT create_time_us FROM replies ORDER BY create_time_us DESC");
  return row.Next() ? absl::FromUnixMicros(row.Int(0)) - clock.Now() : absl::ZeroDuration();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Store>> OpenSqliteStore(SqliteOptions options) {
  ASSIGN_OR_RETURN(std::unique_ptr<FileLock> lock, FileLock::Take(options.path));
  RETURN_IF_ERROR(CheckNotGone(options.path));
  RETURN_IF_ERROR(MakePrivateFile(options.path));
  for (const char* suffix : {"-wal", "-shm", ".lock"}) {
    if (std::filesystem::exists(options.path + suffix)) {
      RETURN_IF_ERROR(MakePrivateFile(options.path + suffix));
    }
  }
  try {
    auto writer = std::make_unique<Connection>(options.path, Connection::Mode::kReadWrite);
    RETURN_IF_ERROR(SetUp(*writer, LogBytes(options)));
    uint64_t revision = 0;
    {
      Cursor row = writer->Query("SELECT value FROM counters WHERE name = 'revision'");
      if (row.Next()) revision = static_cast<uint64_t>(row.Int(0));
    }
    const absl::Duration reply_offset = ReplyOffset(*writer, *options.clock);
    return std::make_unique<SqliteStore>(std::move(options), std::move(lock), std::move(writer),
                                         revision, reply_offset);
  } catch (const SQLite::Exception& error) {
    return Connection::Explain(options.path, error);
  }
}

}  // namespace ringleader::store
