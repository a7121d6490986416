// Tokens and the audit log in SqliteTransaction.
#include <SQLiteCpp/SQLiteCpp.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "coordinator/store/sqlite/sqlite_transaction.h"
#include "proto/timestamps.h"

namespace ringleader::store {
namespace {

// "JobService.CreateJob" for "CreateJob", too.
constexpr char kAuditQuery[] =
    "SELECT sequence, data FROM audit WHERE sequence < ? AND (? = '' OR caller = ?) AND "
    "(? = '' OR method = ? OR substr(method, instr(method, '.') + 1) = ?) AND "
    "(? = '' OR resource = ?) AND (? = '' OR outcome = ?) AND time_us >= ? AND time_us < ? "
    "ORDER BY sequence DESC LIMIT ?";

}  // namespace

absl::StatusOr<std::vector<StoredToken>> SqliteTransaction::ListTokens() {
  return connection_.Try([&]() -> absl::StatusOr<std::vector<StoredToken>> {
    std::vector<StoredToken> tokens;
    Cursor rows = connection_.Query("SELECT name, sha256, data FROM tokens ORDER BY name");
    while (rows.Next()) {
      StoredToken token;
      token.sha256 = std::string(rows.Bytes(1));
      const absl::Status read = Parse(rows.Bytes(2), std::string(rows.Bytes(0)), &token.token);
      if (read.ok()) {
        tokens.push_back(std::move(token));
      } else {
        spdlog::error("{}; nobody gets in with it", std::string(read.message()));
      }
    }
    return tokens;
  });
}

absl::Status SqliteTransaction::CreateToken(const StoredToken& token) {
  ASSIGN_OR_RETURN(const absl::Time history, GetHistoryTime());
  return connection_.Try([&]() -> absl::Status {
    connection_.Run(
        "DELETE FROM tokens WHERE expire_time_us < ?",
        absl::ToUnixMicros(std::min(history, options_.clock->Now()) - kExpiredTokenLifetime));
    const std::string data = Seal(token.token.SerializeAsString());
    const int added = connection_.Run(
        "INSERT INTO tokens (name, sha256, expire_time_us, data) VALUES (?, ?, ?, ?) ON CONFLICT "
        "DO NOTHING",
        std::string_view(token.token.name()), Blob{token.sha256},
        absl::ToUnixMicros(ToTime(token.token.expire_time())), Blob{data});
    wrote_ = true;
    if (added > 0) return absl::OkStatus();
    return absl::AlreadyExistsError(absl::StrCat(token.token.name(), " exists already"));
  });
}

absl::StatusOr<v1::Token> SqliteTransaction::DeleteToken(std::string_view name) {
  return connection_.Try([&]() -> absl::StatusOr<v1::Token> {
    v1::Token token;
    {
      Cursor row = connection_.Query("SELECT data FROM tokens WHERE name = ?", name);
      if (!row.Next()) {
        return absl::NotFoundError(absl::StrFormat("%s does not exist", std::string(name)));
      }
      // It goes, also where it can no longer be said whose it was.
      if (!Parse(row.Bytes(0), std::string(name), &token).ok()) token.Clear();
      token.set_name(std::string(name));
    }
    connection_.Run("DELETE FROM tokens WHERE name = ?", name);
    wrote_ = true;
    return token;
  });
}

absl::Status SqliteTransaction::AppendAudit(v1::AuditRecord record) {
  return connection_.Try([&]() -> absl::Status {
    if (!record.has_time()) SetTime(options_.clock->Now(), record.mutable_time());
    record.clear_sequence();  // the row's own
    const std::string data = Seal(record.SerializeAsString());
    connection_.Run(
        "INSERT INTO audit (time_us, caller, method, resource, outcome, data) VALUES (?, ?, ?, ?, "
        "?, ?)",
        absl::ToUnixMicros(ToTime(record.time())), std::string_view(record.caller()),
        std::string_view(record.method()), std::string_view(record.resource()),
        std::string_view(record.outcome()), Blob{data});
    wrote_ = true;
    return absl::OkStatus();
  });
}

absl::Status SqliteTransaction::TrimAudit(absl::Time oldest) {
  return connection_.Try([&]() -> absl::Status {
    if (connection_.Run("DELETE FROM audit WHERE time_us < ?", absl::ToUnixMicros(oldest)) > 0) {
      wrote_ = true;
    }
    return absl::OkStatus();
  });
}

absl::StatusOr<AuditPage> SqliteTransaction::ListAudit(const AuditQuery& query) {
  return connection_.Try([&]() -> absl::StatusOr<AuditPage> {
    AuditPage page;
    const std::string_view caller = query.caller, method = query.method, resource = query.resource,
                           outcome = query.outcome;
    const int64_t before =
        query.before_sequence == 0 ? INT64_MAX : static_cast<int64_t>(query.before_sequence);
    // One more than asked for tells whether there is a next page.
    Cursor rows =
        connection_.Query(kAuditQuery, before, caller, caller, method, method, method, resource,
                          resource, outcome, outcome, absl::ToUnixMicros(query.after),
                          absl::ToUnixMicros(query.before), int64_t{query.limit} + 1);
    size_t bytes = 0;
    while (rows.Next()) {
      const std::string_view data = rows.Bytes(1);
      bytes += data.size();
      if (!page.records.empty() &&
          (static_cast<int>(page.records.size()) == query.limit || bytes > query.max_bytes)) {
        page.last_sequence = page.records.back().sequence();
        break;
      }
      v1::AuditRecord& record = page.records.emplace_back();
      const auto sequence = static_cast<uint64_t>(rows.Int(0));
      RETURN_IF_ERROR(Parse(data, absl::StrCat("audit record ", sequence), &record));
      record.set_sequence(sequence);
    }
    return page;
  });
}

}  // namespace ringleader::store
