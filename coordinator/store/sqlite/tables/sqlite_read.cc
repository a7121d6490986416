// The reading half of SqliteTransaction.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "coordinator/store/sqlite/sqlite_transaction.h"
#include "proto/timestamps.h"

namespace ringleader::store {
namespace {

// A WHERE clause on jobs and the values of its ?s.
struct Condition {
  std::string sql = "1";
  std::vector<std::string> values;
};

absl::StatusOr<Condition> ToCondition(const std::vector<JobTerm>& terms) {
  Condition condition;
  for (const JobTerm& term : terms) {
    const char* op = term.op == JobTerm::Operator::kNotEquals ? "<>" : "=";
    switch (term.field) {
      case JobTerm::Field::kState: {
        v1::Job::State state;
        if (!v1::Job::State_Parse(term.value, &state)) {
          return absl::InvalidArgumentError(
              absl::StrFormat("filter: \"%s\" is no job state", term.value));
        }
        absl::StrAppend(&condition.sql, " AND state ", op, " ", static_cast<int>(state));
        break;
      }
      case JobTerm::Field::kName:
        absl::StrAppend(&condition.sql, " AND id ", op, " ?");
        condition.values.push_back(term.value);
        break;
      case JobTerm::Field::kOwner:
        absl::StrAppend(&condition.sql, " AND owner ", op, " ?");
        condition.values.push_back(term.value);
        break;
      case JobTerm::Field::kProject:
        absl::StrAppend(&condition.sql, " AND project ", op, " ?");
        condition.values.push_back(term.value);
        break;
      case JobTerm::Field::kLabel:
        // != also holds for jobs without the label.
        absl::StrAppend(&condition.sql,
                        term.op == JobTerm::Operator::kNotEquals ? " AND NOT" : " AND",
                        " EXISTS (SELECT 1 FROM job_labels WHERE job = jobs.id AND key = ?",
                        term.op == JobTerm::Operator::kHas ? ")" : " AND value = ?)");
        condition.values.push_back(term.label);
        if (term.op != JobTerm::Operator::kHas) condition.values.push_back(term.value);
        break;
    }
  }
  return condition;
}

void BindAll(SQLite::Statement& statement, const std::vector<std::string>& values) {
  for (size_t i = 0; i < values.size(); ++i) statement.bind(static_cast<int>(i) + 1, values[i]);
}

std::string_view BytesOf(const SQLite::Column& column) {
  const void* data = column.getBlob();
  return {static_cast<const char*>(data), static_cast<size_t>(column.getBytes())};
}

// What fits into one page of a list.
class PageRoom {
 public:
  explicit PageRoom(int entries) : entries_(entries) {}
  // Whether an entry of so many bytes still does. The first always does.
  bool Take(size_t bytes) {
    bytes_ += bytes;
    return ++taken_ == 1 || (taken_ <= entries_ && bytes_ <= kPageBytes);
  }

 private:
  const int entries_;
  int taken_ = 0;
  size_t bytes_ = 0;
};

bool OfRank(const LogQuery& query, const v1::LogLine& line) {
  return query.rank < 0 || line.rank() == query.rank;
}

}  // namespace

absl::Status SqliteTransaction::Parse(std::string_view sealed, const std::string& what,
                                      google::protobuf::MessageLite* message) {
  const absl::StatusOr<std::string_view> payload = Unseal(sealed);
  if (payload.ok() && message->ParseFromArray(payload->data(), static_cast<int>(payload->size()))) {
    return absl::OkStatus();
  }
  return absl::DataLossError(absl::StrFormat(
      "database %s: the record of %s is damaged (checksum differs); restore it from a backup (see "
      "docs/operations.md)",
      connection_.path(), what));
}

absl::StatusOr<v1::Job> SqliteTransaction::ParseJob(std::string_view id, int64_t sequence,
                                                    std::string_view sealed) {
  v1::Job job;
  RETURN_IF_ERROR(Parse(sealed, absl::StrCat("jobs/", std::string(id)), &job));
  job.set_sequence(static_cast<uint64_t>(sequence));
  if (job.spec().name() == id) return job;
  return absl::DataLossError(absl::StrFormat(
      "database %s: it is damaged (under the name of jobs/%s stands %s); restore it from a backup "
      "(see docs/operations.md)",
      connection_.path(), std::string(id), job.name()));
}

absl::Status SqliteTransaction::AddAttempts(std::string_view id, v1::Job* job) {
  Cursor attempts =
      connection_.Query("SELECT data FROM attempts WHERE job = ? ORDER BY number", id);
  while (attempts.Next()) {
    RETURN_IF_ERROR(
        Parse(attempts.Bytes(0), absl::StrCat(job->name(), ", attempts"), job->add_attempts()));
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> SqliteTransaction::Restored() {
  return connection_.Try([&]() -> absl::StatusOr<bool> {
    return connection_.Query("SELECT value FROM counters WHERE name = 'restored'").Next();
  });
}

absl::StatusOr<absl::Time> SqliteTransaction::GetHistoryTime() {
  return connection_.Try([&]() -> absl::StatusOr<absl::Time> {
    Cursor row = connection_.Query("SELECT value FROM counters WHERE name = 'history_time_us'");
    return row.Next() ? absl::FromUnixMicros(row.Int(0)) : absl::InfinitePast();
  });
}

absl::StatusOr<v1::Job> SqliteTransaction::GetJob(std::string_view id) {
  return connection_.Try([&]() -> absl::StatusOr<v1::Job> {
    Cursor row = connection_.Query("SELECT sequence, data FROM jobs WHERE id = ?", id);
    if (!row.Next()) return JobNotFound(id);
    ASSIGN_OR_RETURN(v1::Job job, ParseJob(id, row.Int(0), row.Bytes(1)));
    RETURN_IF_ERROR(AddAttempts(id, &job));
    return job;
  });
}

absl::StatusOr<v1::Attempt> SqliteTransaction::GetAttempt(std::string_view job, uint32_t number) {
  return connection_.Try([&]() -> absl::StatusOr<v1::Attempt> {
    const std::string what = absl::StrFormat("jobs/%s, attempt %d", std::string(job), number);
    Cursor row = connection_.Query("SELECT data FROM attempts WHERE job = ? AND number = ?", job,
                                   int64_t{number});
    if (!row.Next()) return absl::NotFoundError(what + " does not exist");
    v1::Attempt attempt;
    RETURN_IF_ERROR(Parse(row.Bytes(0), what, &attempt));
    return attempt;
  });
}

absl::StatusOr<JobPage> SqliteTransaction::ListJobs(const JobQuery& query) {
  ASSIGN_OR_RETURN(const Condition condition, ToCondition(query.terms));
  return connection_.Try([&]() -> absl::StatusOr<JobPage> {
    JobPage page;
    SQLite::Statement count(connection_.database(),
                            "SELECT COUNT(*) FROM jobs WHERE " + condition.sql);
    BindAll(count, condition.values);
    count.executeStep();
    page.total = count.getColumn(0).getInt64();

    const std::string before =
        query.before_sequence == 0 ? "" : absl::StrCat(" AND sequence < ", query.before_sequence);
    // One more than asked for tells whether there is a next page.
    SQLite::Statement rows(
        connection_.database(),
        absl::StrCat("SELECT sequence, data, id, state, owner, project, "
                     "create_time_us FROM jobs WHERE ",
                     condition.sql, before, " ORDER BY sequence DESC LIMIT ", query.limit + 1));
    BindAll(rows, condition.values);
    int64_t last_sequence = 0;
    PageRoom room(query.limit);
    while (rows.executeStep()) {
      const std::string_view data = BytesOf(rows.getColumn(1));
      if (!room.Take(data.size())) {
        page.last_sequence = static_cast<uint64_t>(last_sequence);
        break;
      }
      last_sequence = rows.getColumn(0).getInt64();
      const std::string id = rows.getColumn(2).getString();
      absl::StatusOr<v1::Job> read = ParseJob(id, last_sequence, data);
      if (read.ok()) {
        page.jobs.push_back(*std::move(read));
        continue;
      }
      v1::Job& job = page.damaged.emplace_back();
      job.set_name(absl::StrCat("jobs/", id));
      job.mutable_spec()->set_name(id);
      job.set_state(static_cast<v1::Job::State>(rows.getColumn(3).getInt()));
      job.set_owner(rows.getColumn(4).getString());
      job.set_project(rows.getColumn(5).getString());
      SetTime(absl::FromUnixMicros(rows.getColumn(6).getInt64()), job.mutable_create_time());
      job.set_sequence(static_cast<uint64_t>(last_sequence));
      job.set_state_reason(std::string(read.status().message()));
    }
    return page;
  });
}

absl::StatusOr<std::vector<v1::Job>> SqliteTransaction::ListUnfinishedJobs() {
  return connection_.Try([&]() -> absl::StatusOr<std::vector<v1::Job>> {
    std::vector<v1::Job> jobs;
    Cursor rows = connection_.Query(
        "SELECT id, data, sequence FROM jobs WHERE state NOT IN (?, ?, ?) ORDER BY sequence",
        int64_t{v1::Job::CANCELLED}, int64_t{v1::Job::SUCCEEDED}, int64_t{v1::Job::FAILED});
    while (rows.Next()) {
      const std::string id(rows.Bytes(0));
      ASSIGN_OR_RETURN(v1::Job job, ParseJob(id, rows.Int(2), rows.Bytes(1)));
      RETURN_IF_ERROR(AddAttempts(id, &job));
      jobs.push_back(std::move(job));
    }
    return jobs;
  });
}

absl::StatusOr<std::vector<v1::Job>> SqliteTransaction::ListFailedJobs(
    absl::FunctionRef<bool(const v1::Attempt&)> wanted) {
  return connection_.Try([&]() -> absl::StatusOr<std::vector<v1::Job>> {
    std::vector<v1::Job> jobs;
    Cursor rows = connection_.Query(
        "SELECT id, attempts.data FROM jobs JOIN attempts ON job = id WHERE state = ? AND number = "
        "(SELECT MAX(number) FROM attempts WHERE job = id) ORDER BY jobs.sequence",
        int64_t{v1::Job::FAILED});
    while (rows.Next()) {
      const std::string id(rows.Bytes(0));
      v1::Attempt last;
      absl::Status read = Parse(rows.Bytes(1), absl::StrCat("jobs/", id, ", attempts"), &last);
      if (read.ok() && !wanted(last)) continue;
      if (read.ok()) {
        absl::StatusOr<v1::Job> job = GetJob(id);
        read = job.status();
        if (job.ok()) jobs.push_back(*std::move(job));
      }
      if (absl::IsDataLoss(read)) {
        spdlog::error("{}", std::string(read.message()));
      } else if (!read.ok()) {
        return read;
      }
    }
    return jobs;
  });
}

absl::StatusOr<std::vector<std::pair<v1::Job::State, int64_t>>> SqliteTransaction::CountJobs() {
  using Counts = std::vector<std::pair<v1::Job::State, int64_t>>;
  return connection_.Try([&]() -> absl::StatusOr<Counts> {
    Counts counts;
    Cursor rows = connection_.Query("SELECT state, COUNT(*) FROM jobs GROUP BY state");
    while (rows.Next()) counts.emplace_back(static_cast<v1::Job::State>(rows.Int(0)), rows.Int(1));
    return counts;
  });
}

template <typename Page, typename Report>
absl::StatusOr<Page> SqliteTransaction::ReadPage(Cursor& rows, const std::string& what,
                                                 uint64_t after_sequence, int limit,
                                                 std::vector<Report> Page::*reports) {
  Page page;
  page.last_sequence = after_sequence;
  PageRoom room(limit);
  while (rows.Next()) {
    if (!room.Take(rows.Bytes(1).size())) {
      page.more = true;
      break;
    }
    page.last_sequence = static_cast<uint64_t>(rows.Int(0));
    RETURN_IF_ERROR(Parse(rows.Bytes(1), what, &(page.*reports).emplace_back()));
  }
  return page;
}

absl::StatusOr<StepPage> SqliteTransaction::ListSteps(std::string_view job, uint64_t after_step,
                                                      uint64_t after_sequence, int limit) {
  return connection_.Try([&] {
    Cursor rows = connection_.Query(
        "SELECT sequence, data FROM steps WHERE job = ? AND sequence > ? AND step > ? ORDER BY "
        "sequence",
        job, static_cast<int64_t>(after_sequence), static_cast<int64_t>(after_step));
    return ReadPage(rows, absl::StrCat("jobs/", std::string(job), ", steps"), after_sequence, limit,
                    &StepPage::steps);
  });
}

absl::StatusOr<uint64_t> SqliteTransaction::GetLastStep(std::string_view job) {
  return connection_.Try([&]() -> absl::StatusOr<uint64_t> {
    Cursor row =
        connection_.Query("SELECT step FROM steps WHERE job = ? ORDER BY step DESC LIMIT 1", job);
    return row.Next() ? static_cast<uint64_t>(row.Int(0)) : uint64_t{0};
  });
}

absl::StatusOr<v1::StepReport> SqliteTransaction::GetStep(std::string_view job, uint64_t step) {
  return connection_.Try([&]() -> absl::StatusOr<v1::StepReport> {
    const std::string name = absl::StrCat("jobs/", std::string(job), ", step ", step);
    Cursor row = connection_.Query("SELECT data FROM steps WHERE job = ? AND step = ?", job,
                                   static_cast<int64_t>(step));
    if (!row.Next()) return absl::NotFoundError(absl::StrCat(name, " has no report"));
    v1::StepReport report;
    RETURN_IF_ERROR(Parse(row.Bytes(0), name, &report));
    return report;
  });
}

absl::StatusOr<EvalPage> SqliteTransaction::ListEvals(std::string_view job, uint64_t after_sequence,
                                                      int limit) {
  return connection_.Try([&] {
    Cursor rows = connection_.Query(
        "SELECT sequence, data FROM evals WHERE job = ? AND sequence > ? ORDER BY sequence", job,
        static_cast<int64_t>(after_sequence));
    return ReadPage(rows, absl::StrCat("jobs/", std::string(job), ", evaluations"), after_sequence,
                    limit, &EvalPage::evals);
  });
}

absl::StatusOr<std::vector<v1::CheckpointNotice>> SqliteTransaction::ListCheckpoints(
    std::string_view job) {
  return connection_.Try([&] {
    Cursor rows =
        connection_.Query("SELECT data FROM checkpoints WHERE job = ? ORDER BY step", job);
    return ParseAll<v1::CheckpointNotice>(rows,
                                          absl::StrCat("jobs/", std::string(job), ", checkpoints"));
  });
}

absl::StatusOr<LogPage> SqliteTransaction::ReadLogs(const LogQuery& query) {
  return connection_.Try([&]() -> absl::StatusOr<LogPage> {
    LogPage page;
    page.next_offset = query.after_offset;
    Cursor end = connection_.Query("SELECT first_offset FROM log_ends WHERE job = ?",
                                   std::string_view(query.job));
    if (query.after_offset > 0 && query.last_lines == 0 && end.Next()) {
      const auto first = static_cast<uint64_t>(end.Int(0));
      page.dropped = first > query.after_offset + 1 ? first - query.after_offset - 1 : 0;
      // Also when no line of this attempt is left that would move it: what was counted once is not
      // counted again.
      page.next_offset += page.dropped;
    }
    if (query.last_lines > 0) {
      ASSIGN_OR_RETURN(page.next_offset, BeforeLastLines(query));
    }
    const uint64_t begin = page.next_offset;
    Cursor rows = connection_.Query(
        "SELECT data FROM logs WHERE job = ? AND last_offset > ? AND (? = 0 OR attempt = ?) ORDER "
        "BY last_offset",
        std::string_view(query.job), static_cast<int64_t>(begin), int64_t{query.attempt},
        int64_t{query.attempt});
    PageRoom room(std::numeric_limits<int>::max());
    while (rows.Next()) {
      if (static_cast<int>(page.lines.size()) >= query.limit || !room.Take(rows.Bytes(0).size())) {
        page.more = true;
        break;
      }
      v1::LogBatch batch;
      RETURN_IF_ERROR(Parse(rows.Bytes(0), absl::StrCat("jobs/", query.job, ", log"), &batch));
      for (v1::LogLine& line : *batch.mutable_lines()) {
        page.next_offset = std::max<uint64_t>(page.next_offset, line.offset());
        if (line.offset() > begin && OfRank(query, line)) page.lines.push_back(std::move(line));
      }
    }
    return page;
  });
}

// Looks from the end backwards and keeps nothing, so that a long log costs no more than what is
// asked for.
absl::StatusOr<uint64_t> SqliteTransaction::BeforeLastLines(const LogQuery& query) {
  Cursor rows = connection_.Query(
      "SELECT data FROM logs WHERE job = ? AND last_offset > ? AND (? = 0 OR attempt = ?) ORDER BY "
      "last_offset DESC",
      std::string_view(query.job), static_cast<int64_t>(query.after_offset), int64_t{query.attempt},
      int64_t{query.attempt});
  int lines = 0;
  while (rows.Next()) {
    v1::LogBatch batch;
    RETURN_IF_ERROR(Parse(rows.Bytes(0), absl::StrCat("jobs/", query.job, ", log"), &batch));
    for (int i = batch.lines_size() - 1; i >= 0; --i) {
      if (!OfRank(query, batch.lines(i))) continue;
      if (++lines == query.last_lines) {
        return std::max(query.after_offset, batch.lines(i).offset() - 1);
      }
    }
  }
  return query.after_offset;
}

absl::StatusOr<std::vector<v1::Command>> SqliteTransaction::ListCommands(std::string_view node) {
  return connection_.Try([&] {
    Cursor rows = connection_.Query("SELECT data FROM commands WHERE node = ? ORDER BY id", node);
    return ParseAll<v1::Command>(rows, absl::StrCat("nodes/", std::string(node), ", commands"));
  });
}

absl::StatusOr<uint64_t> SqliteTransaction::GetAppliedSequence(std::string_view node,
                                                               std::string_view incarnation) {
  return connection_.Try([&]() -> absl::StatusOr<uint64_t> {
    Cursor row = connection_.Query(
        "SELECT applied_sequence FROM incarnations WHERE node = ? AND incarnation = ?", node,
        incarnation);
    return row.Next() ? static_cast<uint64_t>(row.Int(0)) : uint64_t{0};
  });
}

absl::StatusOr<std::string> SqliteTransaction::GetNewestIncarnation(std::string_view node) {
  return connection_.Try([&]() -> absl::StatusOr<std::string> {
    Cursor row = connection_.Query(
        "SELECT incarnation FROM incarnations WHERE node = ? ORDER BY revision DESC LIMIT 1", node);
    return row.Next() ? std::string(row.Bytes(0)) : std::string();
  });
}

absl::StatusOr<std::vector<v1::Node>> SqliteTransaction::ListNodes() {
  return connection_.Try([&]() -> absl::StatusOr<std::vector<v1::Node>> {
    std::vector<v1::Node> nodes;
    Cursor rows = connection_.Query("SELECT id, data FROM nodes ORDER BY id");
    while (rows.Next()) {
      RETURN_IF_ERROR(Parse(rows.Bytes(1), absl::StrCat("nodes/", std::string(rows.Bytes(0))),
                            &nodes.emplace_back()));
    }
    return nodes;
  });
}

absl::StatusOr<std::optional<std::string>> SqliteTransaction::FindReply(const RequestKey& key) {
  if (key.id.empty()) return std::nullopt;
  return connection_.Try([&]() -> absl::StatusOr<std::optional<std::string>> {
    Cursor row = connection_.Query("SELECT method, fingerprint, data FROM replies WHERE id = ?",
                                   std::string_view(key.id));
    if (!row.Next()) return std::nullopt;
    if (row.Bytes(0) != key.method || row.Bytes(1) != key.fingerprint) {
      return absl::InvalidArgumentError(
          absl::StrFormat("request_id \"%s\" was used for another request before; choose a new one "
                          "for each request",
                          key.id));
    }
    const absl::StatusOr<std::string_view> reply = Unseal(row.Bytes(2));
    if (!reply.ok()) {
      return absl::DataLossError(
          absl::StrFormat("database %s: the reply kept for request_id \"%s\" is damaged",
                          connection_.path(), key.id));
    }
    return std::optional<std::string>(std::string(*reply));
  });
}

}  // namespace ringleader::store
