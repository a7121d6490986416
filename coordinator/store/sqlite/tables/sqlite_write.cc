// The writing half of SqliteTransaction.
#include <spdlog/spdlog.h>
#include <sqlite3.h>

#include <algorithm>
#include <numeric>

#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "base/numbers/ceil_div.h"
#include "base/status_macros.h"
#include "coordinator/store/sqlite/sqlite_transaction.h"

namespace ringleader::store {
namespace {

// A worker process that was replaced may still have a message on the way: its numbers are kept for
// so many successors.
constexpr int64_t kIncarnationsPerNode = 8;

// Old steps are looked through once in so many new ones.
constexpr int64_t kStepsBetweenTrims = 64;
// So many of the newest steps have all their layers, and every 16th of those before.
constexpr int64_t kStepsWithLayers = 1024;

// Of the steps up to `last` one in `stride` is kept.
struct Thinned {
  int64_t last = 0;
  int64_t stride = 1;

  bool LeavesOut(int64_t step) const { return step <= last && (step - 1) % stride != 0; }
};

// So that some `most` are left once there is one of `newest_step`.
Thinned ThinnedAt(int64_t newest_step, int64_t most) {
  const int64_t kept_in_full = most / 2;
  Thinned thinned = {.last = newest_step - kept_in_full};
  while (CeilDiv(thinned.last, thinned.stride) > kept_in_full) thinned.stride *= 2;
  return thinned;
}

std::string Serialize(const google::protobuf::MessageLite& message) {
  return Seal(message.SerializeAsString());
}

int64_t Microseconds(const google::protobuf::Timestamp& time) {
  return time.seconds() * 1000000 + time.nanos() / 1000;
}

// The report as it is stored: figures that grow with the number of ranks are left out.
std::string SerializeStep(const v1::StepReport& merged) {
  v1::StepReport kept = merged;
  if (kept.rank_tiles_size() > kFiguresKept) kept.clear_rank_tiles();
  if (kept.rank_paces_size() > kFiguresKept) kept.clear_rank_paces();
  int figures = 0;
  for (const v1::LayerReport& layer : kept.layers()) figures += layer.tiles_per_ring_step_size();
  if (figures > kFiguresKept * kept.layers_size()) {
    for (v1::LayerReport& layer : *kept.mutable_layers()) {
      const auto& tiles = layer.tiles_per_ring_step();
      const uint64_t sum = std::accumulate(tiles.begin(), tiles.end(), uint64_t{0});
      layer.clear_tiles_per_ring_step();
      layer.add_tiles_per_ring_step(sum);
    }
  }
  return Serialize(kept);
}

std::string SerializeJob(const v1::Job& job) {
  v1::Job row = job;
  row.clear_attempts();
  row.clear_sequence();  // a column
  return Serialize(row);
}

const char* CounterName(Counter counter) {
  switch (counter) {
    case Counter::kFencingToken:
      return "fencing_token";
    case Counter::kCommandId:
      return "command_id";
    case Counter::kSessionEpoch:
      return "session_epoch";
  }
  return "";
}

}  // namespace

void SqliteTransaction::Touched(std::vector<std::string>& ids, std::string_view id) {
  wrote_ = true;
  if (std::find(ids.begin(), ids.end(), id) == ids.end()) ids.emplace_back(id);
}

template <typename... Arguments>
absl::Status SqliteTransaction::WriteOfJob(std::string_view job, const char* sql,
                                           const Arguments&... arguments) {
  return connection_.Try([&]() -> absl::Status {
    try {
      connection_.Run(sql, arguments...);
    } catch (const SQLite::Exception& error) {
      // Rows of a job refer to it.
      if (error.getErrorCode() == SQLITE_CONSTRAINT) return JobNotFound(job);
      throw;
    }
    Touched(change_.jobs, job);
    return absl::OkStatus();
  });
}

absl::Status SqliteTransaction::PutLabels(const v1::Job& job) {
  const std::string_view id = job.spec().name();
  for (const auto& [key, value] : job.spec().labels()) {
    connection_.Run("INSERT INTO job_labels (job, key, value) VALUES (?, ?, ?)", id,
                    std::string_view(key), std::string_view(value));
  }
  return absl::OkStatus();
}

absl::Status SqliteTransaction::CreateJob(v1::Job* job) {
  const std::string_view id = job->spec().name();
  job->set_revision(revision());
  return connection_.Try([&]() -> absl::Status {
    const std::string data = SerializeJob(*job);
    const int added = connection_.Run(
        "INSERT INTO jobs (id, state, priority, create_time_us, revision, data, owner, project) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING",
        id, int64_t{job->state()}, int64_t{job->spec().scheduling().priority()},
        Microseconds(job->create_time()), static_cast<int64_t>(revision()), Blob{data},
        std::string_view(job->owner()), std::string_view(job->project()));
    if (added == 0) {
      return absl::AlreadyExistsError(absl::StrFormat(
          "jobs/%s exists already; choose another name, or delete it first", std::string(id)));
    }
    job->set_sequence(static_cast<uint64_t>(connection_.database().getLastInsertRowid()));
    Touched(change_.jobs, id);
    return PutLabels(*job);
  });
}

absl::Status SqliteTransaction::UpdateJob(v1::Job* job) {
  const std::string_view id = job->spec().name();
  job->set_revision(revision());
  return connection_.Try([&]() -> absl::Status {
    const std::string data = SerializeJob(*job);
    const int changed = connection_.Run(
        "UPDATE jobs SET state = ?, priority = ?, revision = ?, data = ? WHERE id = ?",
        int64_t{job->state()}, int64_t{job->spec().scheduling().priority()},
        static_cast<int64_t>(revision()), Blob{data}, id);
    if (changed == 0) return JobNotFound(id);
    Touched(change_.jobs, id);
    return absl::OkStatus();
  });
}

absl::Status SqliteTransaction::DeleteJob(std::string_view id) {
  return connection_.Try([&]() -> absl::Status {
    if (connection_.Run("DELETE FROM jobs WHERE id = ?", id) == 0) return JobNotFound(id);
    Touched(change_.jobs, id);
    return absl::OkStatus();
  });
}

absl::StatusOr<bool> SqliteTransaction::DeleteReports(std::string_view id) {
  return connection_.Try([&]() -> absl::StatusOr<bool> {
    int rows = 0;
    rows += connection_.Run("DELETE FROM logs WHERE job = ?", id);
    rows += connection_.Run("DELETE FROM log_ends WHERE job = ?", id);
    rows += connection_.Run("DELETE FROM steps WHERE job = ?", id);
    rows += connection_.Run("DELETE FROM evals WHERE job = ?", id);
    if (rows > 0) Touched(change_.jobs, id);
    return rows > 0;
  });
}

absl::Status SqliteTransaction::PutAttempt(std::string_view job, const v1::Attempt& attempt) {
  return WriteOfJob(job, "INSERT OR REPLACE INTO attempts (job, number, data) VALUES (?, ?, ?)",
                    job, int64_t{attempt.number()}, Blob{Serialize(attempt)});
}

absl::Status SqliteTransaction::DeleteAttempt(std::string_view job, uint32_t number) {
  return WriteOfJob(job, "DELETE FROM attempts WHERE job = ? AND number = ?", job, int64_t{number});
}

absl::Status SqliteTransaction::PutStep(std::string_view job, const v1::StepReport& merged) {
  const int64_t step = static_cast<int64_t>(merged.step());
  RETURN_IF_ERROR(WriteOfJob(job, "INSERT OR REPLACE INTO steps (job, step, data) VALUES (?, ?, ?)",
                             job, step, Blob{SerializeStep(merged)}));
  return connection_.Try([&] { return TrimSteps(job, step); });
}

absl::Status SqliteTransaction::PutMissingStep(std::string_view job, const v1::StepReport& merged) {
  const int64_t step = static_cast<int64_t>(merged.step());
  ASSIGN_OR_RETURN(const uint64_t last, GetLastStep(job));
  const auto trimmed_at = static_cast<int64_t>(last - last % kStepsBetweenTrims);
  if (ThinnedAt(trimmed_at, options_.steps_per_job).LeavesOut(step)) return absl::OkStatus();
  RETURN_IF_ERROR(WriteOfJob(
      job,
      "INSERT INTO steps (job, step, data) VALUES (?, ?, ?) ON CONFLICT (job, step) DO NOTHING",
      job, step, Blob{SerializeStep(merged)}));
  return connection_.Try([&] { return TrimSteps(job, step); });
}

absl::Status SqliteTransaction::TrimSteps(std::string_view job, int64_t newest_step) {
  if (newest_step % kStepsBetweenTrims != 0) return absl::OkStatus();
  const int64_t without_layers = newest_step - kStepsWithLayers;
  RETURN_IF_ERROR(TrimLayers(job, without_layers - kStepsBetweenTrims, without_layers));
  const Thinned thinned = ThinnedAt(newest_step, options_.steps_per_job);
  if (thinned.stride == 1) return absl::OkStatus();
  connection_.Run("DELETE FROM steps WHERE job = ? AND step <= ? AND (step - 1) % ? <> 0", job,
                  thinned.last, thinned.stride);
  return absl::OkStatus();
}

absl::Status SqliteTransaction::TrimLayers(std::string_view job, int64_t after_step,
                                           int64_t last_step) {
  std::vector<v1::StepReport> steps;
  {
    Cursor rows = connection_.Query(
        "SELECT data, step FROM steps WHERE job = ? AND step > ? AND step <= ? AND (step - 1) % ? "
        "<> 0",
        job, after_step, last_step, kLayerStride);
    while (rows.Next()) {
      v1::StepReport step;
      const absl::Status read = Parse(
          rows.Bytes(0), absl::StrFormat("jobs/%s, step %d", std::string(job), rows.Int(1)), &step);
      // What a new step may come to does not hang on a report of an old one: whoever reads that
      // hears of it.
      if (!read.ok()) {
        spdlog::error("{}", std::string(read.message()));
        continue;
      }
      steps.push_back(std::move(step));
    }
  }
  for (v1::StepReport& step : steps) {
    step.clear_layers();
    step.clear_rank_tiles();
    step.clear_rank_paces();
    const std::string data = Serialize(step);
    // The step keeps its place: who follows the job has seen it.
    connection_.Run("UPDATE steps SET data = ? WHERE job = ? AND step = ?", Blob{data}, job,
                    static_cast<int64_t>(step.step()));
  }
  return absl::OkStatus();
}

absl::Status SqliteTransaction::PutEval(std::string_view job, const v1::EvalReport& eval) {
  RETURN_IF_ERROR(WriteOfJob(job, "INSERT OR REPLACE INTO evals (job, step, data) VALUES (?, ?, ?)",
                             job, static_cast<int64_t>(eval.step()), Blob{Serialize(eval)}));
  return connection_.Try([&] { return TrimEvals(job); });
}

absl::Status SqliteTransaction::TrimEvals(std::string_view job) {
  if (Cursor count = connection_.Query("SELECT COUNT(*) FROM evals WHERE job = ?", job);
      !count.Next() || count.Int(0) <= options_.evals_per_job) {
    return absl::OkStatus();
  }
  int64_t last_older = 0;
  if (Cursor row = connection_.Query(
          "SELECT step FROM evals WHERE job = ? ORDER BY step DESC LIMIT 1 OFFSET ?", job,
          options_.evals_per_job / 2);
      row.Next()) {
    last_older = row.Int(0);
  }
  // Less than the other half, so that all are looked through once in many new ones. Wider stretches
  // hold whole narrower ones: what stays has stayed before.
  const int64_t stretches = options_.evals_per_job * 3 / 8;
  int64_t width = 1;
  while (last_older / width >= stretches) width *= 2;
  connection_.Run(
      "DELETE FROM evals WHERE job = ? AND step <= ? AND step NOT IN (SELECT MIN(step) FROM evals "
      "WHERE job = ? AND step <= ? GROUP BY step / ?)",
      job, last_older, job, last_older, width);
  return absl::OkStatus();
}

absl::Status SqliteTransaction::PutPlan(std::string_view job, const v1::StepPlan& plan) {
  return WriteOfJob(job, "INSERT OR REPLACE INTO plans (job, data) VALUES (?, ?)", job,
                    Blob{Serialize(plan)});
}

absl::Status SqliteTransaction::PutCheckpoint(std::string_view job,
                                              const v1::CheckpointNotice& checkpoint) {
  return WriteOfJob(job, "INSERT OR REPLACE INTO checkpoints (job, step, data) VALUES (?, ?, ?)",
                    job, static_cast<int64_t>(checkpoint.step()), Blob{Serialize(checkpoint)});
}

absl::Status SqliteTransaction::TrimCheckpoints(std::string_view job, int kept) {
  return WriteOfJob(job,
                    "DELETE FROM checkpoints WHERE job = ? AND step NOT IN (SELECT step FROM "
                    "checkpoints WHERE job = ? ORDER BY step DESC LIMIT ?)",
                    job, job, int64_t{kept});
}

absl::Status SqliteTransaction::AppendLogs(std::string_view job, uint32_t attempt,
                                           std::vector<v1::LogLine> lines) {
  if (lines.empty()) return absl::OkStatus();
  return connection_.Try([&]() -> absl::Status {
    int64_t first_offset = 1, last_offset = 0, bytes = 0;
    if (Cursor end = connection_.Query(
            "SELECT first_offset, last_offset, bytes FROM log_ends WHERE job = ?", job);
        end.Next()) {
      first_offset = end.Int(0);
      last_offset = end.Int(1);
      bytes = end.Int(2);
    }
    v1::LogBatch batch;
    for (v1::LogLine& line : lines) {
      line.set_offset(static_cast<uint64_t>(++last_offset));
      line.set_attempt(attempt);
      *batch.add_lines() = std::move(line);
    }
    const std::string data = Serialize(batch);
    bytes += static_cast<int64_t>(data.size());
    RETURN_IF_ERROR(
        WriteOfJob(job, "INSERT INTO logs (job, last_offset, attempt, data) VALUES (?, ?, ?, ?)",
                   job, last_offset, int64_t{attempt}, Blob{data}));
    TrimLogs(job, &first_offset, &bytes);
    connection_.Run(
        "INSERT OR REPLACE INTO log_ends (job, first_offset, last_offset, bytes) VALUES (?, ?, ?, "
        "?)",
        job, first_offset, last_offset, bytes);
    Touched(change_.logs, job);
    return absl::OkStatus();
  });
}

void SqliteTransaction::TrimLogs(std::string_view job, int64_t* first_offset, int64_t* bytes) {
  while (*bytes > options_.log_bytes_per_job) {
    int64_t gone = 0;
    {
      Cursor oldest = connection_.Query(
          "SELECT last_offset, LENGTH(data) FROM logs WHERE job = ? ORDER BY last_offset LIMIT 1",
          job);
      if (!oldest.Next()) return;
      gone = oldest.Int(0);
      *bytes -= oldest.Int(1);
    }
    connection_.Run("DELETE FROM logs WHERE job = ? AND last_offset = ?", job, gone);
    *first_offset = gone + 1;
  }
}

absl::StatusOr<uint64_t> SqliteTransaction::Next(Counter counter) {
  return connection_.Try([&]() -> absl::StatusOr<uint64_t> {
    Cursor row = connection_.Query(
        "INSERT INTO counters (name, value) VALUES (?, 1) ON CONFLICT (name) DO UPDATE SET value = "
        "value + 1 "
        "RETURNING value",
        std::string_view(CounterName(counter)));
    row.Next();
    wrote_ = true;
    return static_cast<uint64_t>(row.Int(0));
  });
}

absl::Status SqliteTransaction::EndRestore() {
  return connection_.Try([&]() -> absl::Status {
    wrote_ = connection_.Run("DELETE FROM counters WHERE name = 'restored'") > 0 || wrote_;
    return absl::OkStatus();
  });
}

absl::Status SqliteTransaction::SetHistoryTime(absl::Time time) {
  return connection_.Try([&]() -> absl::Status {
    connection_.Run("INSERT OR REPLACE INTO counters (name, value) VALUES ('history_time_us', ?)",
                    absl::ToUnixMicros(time));
    wrote_ = true;
    return absl::OkStatus();
  });
}

absl::Status SqliteTransaction::PutCommand(std::string_view node, v1::Command* command) {
  ASSIGN_OR_RETURN(const uint64_t id, Next(Counter::kCommandId));
  command->set_command_id(id);
  return WriteOfJob(command->job(),
                    "INSERT INTO commands (id, node, job, attempt, data) VALUES (?, ?, ?, ?, ?)",
                    static_cast<int64_t>(id), node, std::string_view(command->job()),
                    int64_t{command->attempt()}, Blob{Serialize(*command)});
}

absl::Status SqliteTransaction::DeleteCommand(uint64_t command_id) {
  return connection_.Try([&]() -> absl::Status {
    if (connection_.Run("DELETE FROM commands WHERE id = ?", static_cast<int64_t>(command_id)) > 0)
      wrote_ = true;
    return absl::OkStatus();
  });
}

absl::Status SqliteTransaction::DeleteCommands(std::string_view job, uint32_t attempt) {
  return connection_.Try([&]() -> absl::Status {
    if (connection_.Run("DELETE FROM commands WHERE job = ? AND attempt = ?", job,
                        int64_t{attempt}) > 0) {
      wrote_ = true;
    }
    return absl::OkStatus();
  });
}

absl::Status SqliteTransaction::SetAppliedSequence(std::string_view node,
                                                   std::string_view incarnation,
                                                   uint64_t sequence) {
  return connection_.Try([&]() -> absl::Status {
    wrote_ = true;
    const int updated = connection_.Run(
        "UPDATE incarnations SET applied_sequence = ?, revision = ? WHERE node = ? AND incarnation "
        "= ?",
        static_cast<int64_t>(sequence), static_cast<int64_t>(revision()), node, incarnation);
    if (updated > 0) return absl::OkStatus();
    connection_.Run(
        "INSERT INTO incarnations (node, incarnation, applied_sequence, revision) VALUES (?, ?, ?, "
        "?)",
        node, incarnation, static_cast<int64_t>(sequence), static_cast<int64_t>(revision()));
    connection_.Run(
        "DELETE FROM incarnations WHERE node = ? AND incarnation NOT IN (SELECT incarnation FROM "
        "incarnations "
        "WHERE node = ? ORDER BY revision DESC LIMIT ?)",
        node, node, kIncarnationsPerNode);
    return absl::OkStatus();
  });
}

absl::Status SqliteTransaction::PutNode(const v1::Node& node) {
  ASSIGN_OR_RETURN(const std::string id, NodeIdFromName(node.name()));
  return connection_.Try([&]() -> absl::Status {
    const std::string data = Serialize(node);
    connection_.Run("INSERT OR REPLACE INTO nodes (id, data) VALUES (?, ?)", std::string_view(id),
                    Blob{data});
    Touched(change_.nodes, id);
    return absl::OkStatus();
  });
}

absl::Status SqliteTransaction::DeleteNode(std::string_view id) {
  return connection_.Try([&]() -> absl::Status {
    connection_.Run("DELETE FROM nodes WHERE id = ?", id);
    Touched(change_.nodes, std::string(id));
    return absl::OkStatus();
  });
}

absl::Status SqliteTransaction::PutReply(const RequestKey& key, std::string_view reply) {
  if (key.id.empty()) return absl::OkStatus();
  return connection_.Try([&]() -> absl::Status {
    wrote_ = true;
    const absl::Time now = options_.clock->Now() + reply_offset_;
    connection_.Run("DELETE FROM replies WHERE create_time_us < ?",
                    absl::ToUnixMicros(now - kReplyLifetime));
    const std::string data = Seal(reply);
    connection_.Run(
        "INSERT INTO replies (id, method, fingerprint, create_time_us, data) VALUES (?, ?, ?, ?, "
        "?)",
        std::string_view(key.id), std::string_view(key.method), std::string_view(key.fingerprint),
        absl::ToUnixMicros(now), Blob{data});
    return absl::OkStatus();
  });
}

}  // namespace ringleader::store
