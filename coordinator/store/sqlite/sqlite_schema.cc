#include "coordinator/store/sqlite/sqlite_schema.h"

#include <openssl/sha.h>

#include "absl/strings/escaping.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"

namespace ringleader::store {
namespace {

// "RLdb" in the file's header, so that another program's database is not taken for ours.
constexpr int kApplicationId = 0x524c6462;

// `data` columns hold a checksum and a serialized message (Seal). `sequence` columns give the order
// of writing.
constexpr char kInitial[] = R"sql(
CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;

CREATE TABLE jobs (
  sequence INTEGER PRIMARY KEY AUTOINCREMENT,
  id TEXT NOT NULL UNIQUE,
  state INTEGER NOT NULL,
  priority INTEGER NOT NULL,
  create_time_us INTEGER NOT NULL,
  revision INTEGER NOT NULL,
  data BLOB NOT NULL
);
CREATE INDEX jobs_by_state ON jobs (state, sequence);

CREATE TABLE job_labels (
  job TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
  key TEXT NOT NULL,
  value TEXT NOT NULL,
  PRIMARY KEY (job, key)
) WITHOUT ROWID;
CREATE INDEX job_labels_by_value ON job_labels (key, value, job);

CREATE TABLE attempts (
  job TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
  number INTEGER NOT NULL,
  data BLOB NOT NULL,
  UNIQUE (job, number)
);

CREATE TABLE steps (
  sequence INTEGER PRIMARY KEY AUTOINCREMENT,
  job TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
  step INTEGER NOT NULL,
  data BLOB NOT NULL,
  UNIQUE (job, step)
);
CREATE INDEX steps_by_sequence ON steps (job, sequence);

CREATE TABLE evals (
  sequence INTEGER PRIMARY KEY AUTOINCREMENT,
  job TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
  step INTEGER NOT NULL,
  data BLOB NOT NULL,
  UNIQUE (job, step)
);

CREATE TABLE checkpoints (
  job TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
  step INTEGER NOT NULL,
  data BLOB NOT NULL,
  UNIQUE (job, step)
);

-- A row is a batch of lines as it came from a worker.
CREATE TABLE logs (
  job TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
  last_offset INTEGER NOT NULL,
  attempt INTEGER NOT NULL,
  data BLOB NOT NULL,
  UNIQUE (job, last_offset)
);
CREATE TABLE log_ends (
  job TEXT PRIMARY KEY REFERENCES jobs (id) ON DELETE CASCADE,
  first_offset INTEGER NOT NULL,
  last_offset INTEGER NOT NULL,
  bytes INTEGER NOT NULL
) WITHOUT ROWID;

CREATE TABLE commands (
  id INTEGER PRIMARY KEY,
  node TEXT NOT NULL,
  job TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
  attempt INTEGER NOT NULL,
  data BLOB NOT NULL
);
CREATE INDEX commands_by_node ON commands (node, id);
CREATE INDEX commands_by_attempt ON commands (job, attempt);

CREATE TABLE incarnations (
  node TEXT NOT NULL,
  incarnation TEXT NOT NULL,
  applied_sequence INTEGER NOT NULL,
  revision INTEGER NOT NULL,
  PRIMARY KEY (node, incarnation)
) WITHOUT ROWID;

CREATE TABLE nodes (id TEXT PRIMARY KEY, data BLOB NOT NULL);

CREATE TABLE replies (
  id TEXT PRIMARY KEY,
  method TEXT NOT NULL,
  fingerprint TEXT NOT NULL,
  create_time_us INTEGER NOT NULL,
  data BLOB NOT NULL
);
CREATE INDEX replies_by_time ON replies (create_time_us);
)sql";

// Who a job belongs to, who may call, and who did what.
constexpr char kAccess[] = R"sql(
ALTER TABLE jobs ADD COLUMN owner TEXT NOT NULL DEFAULT '';
ALTER TABLE jobs ADD COLUMN project TEXT NOT NULL DEFAULT '';
CREATE INDEX jobs_by_owner ON jobs (owner, sequence);
CREATE INDEX jobs_by_project ON jobs (project, sequence);

CREATE TABLE tokens (
  name TEXT PRIMARY KEY,
  sha256 BLOB NOT NULL UNIQUE,
  expire_time_us INTEGER NOT NULL,
  data BLOB NOT NULL
) WITHOUT ROWID;

CREATE TABLE audit (
  sequence INTEGER PRIMARY KEY AUTOINCREMENT,
  time_us INTEGER NOT NULL,
  caller TEXT NOT NULL,
  method TEXT NOT NULL,
  resource TEXT NOT NULL,
  outcome TEXT NOT NULL,
  data BLOB NOT NULL
);
CREATE INDEX audit_by_time ON audit (time_us);
CREATE INDEX audit_by_caller ON audit (caller, sequence);
CREATE INDEX audit_by_resource ON audit (resource, sequence);
)sql";

// What trainers measured, by kind of machine, and the plan that a job goes by.
constexpr char kMeasured[] = R"sql(
CREATE TABLE measurements (
  machine TEXT NOT NULL,
  subject TEXT NOT NULL,
  device TEXT NOT NULL,
  time_us INTEGER NOT NULL,
  data BLOB NOT NULL,
  PRIMARY KEY (machine, subject)
) WITHOUT ROWID;
CREATE INDEX measurements_by_time ON measurements (time_us);

CREATE TABLE plans (
  job TEXT PRIMARY KEY REFERENCES jobs (id) ON DELETE CASCADE,
  data BLOB NOT NULL
) WITHOUT ROWID;
)sql";

std::string Sha256(std::string_view text) {
  unsigned char digest[SHA256_DIGEST_LENGTH];
  SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), digest);
  return absl::BytesToHexString(std::string(reinterpret_cast<const char*>(digest), sizeof(digest)));
}

absl::Status CheckApplication(Connection& connection) {
  Cursor id = connection.Query("PRAGMA application_id");
  id.Next();
  if (id.Int(0) == kApplicationId) return absl::OkStatus();
  Cursor tables = connection.Query("SELECT COUNT(*) FROM sqlite_master");
  tables.Next();
  if (id.Int(0) == 0 && tables.Int(0) == 0) return absl::OkStatus();  // a new file
  return absl::FailedPreconditionError(absl::StrFormat(
      "database %s: it belongs to another program; choose another --data-dir", connection.path()));
}

// Compares what the file says of its migrations with what this program would have run; returns how
// many it has.
absl::StatusOr<size_t> CheckApplied(Connection& connection, const std::vector<Migration>& known) {
  size_t applied = 0;
  Cursor rows = connection.Query("SELECT number, sha256 FROM migrations ORDER BY number");
  while (rows.Next()) {
    if (applied >= known.size()) {
      Cursor newest = connection.Query("SELECT MAX(number) FROM migrations");
      newest.Next();
      return absl::FailedPreconditionError(
          absl::StrFormat("database %s: its schema %d is newer than this program, which knows up "
                          "to %d; run the newer "
                          "ringleader-coordinator, or restore the backup made before the upgrade",
                          connection.path(), newest.Int(0), known.size()));
    }
    const Migration& migration = known[applied];
    if (rows.Int(0) != migration.number || rows.Bytes(1) != Sha256(migration.sql)) {
      return absl::FailedPreconditionError(
          absl::StrFormat("database %s: its schema %d was not made by a release of this program "
                          "(checksum differs); restore a "
                          "backup, or run the program that made it",
                          connection.path(), rows.Int(0)));
    }
    ++applied;
  }
  return applied;
}

}  // namespace

const std::vector<Migration>& Migrations() {
  static const auto* const kMigrations =
      new std::vector<Migration>{{1, kInitial}, {2, kAccess}, {3, kMeasured}};
  return *kMigrations;
}

absl::Status Migrate(Connection& connection, const std::vector<Migration>& migrations) {
  return connection.Try([&]() -> absl::Status {
    RETURN_IF_ERROR(CheckApplication(connection));
    // IMMEDIATE: a file that cannot be written is found here, not at the first job.
    SQLite::Transaction transaction(connection.database(), SQLite::TransactionBehavior::IMMEDIATE);
    if (!connection.database().tableExists("migrations")) {
      connection.database().exec(absl::StrFormat("PRAGMA application_id = %d", kApplicationId));
      connection.database().exec(
          "CREATE TABLE migrations (number INTEGER PRIMARY KEY, sha256 TEXT NOT NULL)");
    }
    ASSIGN_OR_RETURN(const size_t applied, CheckApplied(connection, migrations));
    for (size_t i = applied; i < migrations.size(); ++i) {
      connection.database().exec(migrations[i].sql);
      connection.Run("INSERT INTO migrations (number, sha256) VALUES (?, ?)",
                     int64_t{migrations[i].number}, std::string_view(Sha256(migrations[i].sql)));
    }
    transaction.commit();
    return absl::OkStatus();
  });
}

}  // namespace ringleader::store
