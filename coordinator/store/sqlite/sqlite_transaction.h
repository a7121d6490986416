// The queries and mutations of store.h in SQL, on one connection within one transaction. Its
// methods are in sqlite_read.cc, sqlite_write.cc and, of tokens and the audit log,
// sqlite_access.cc, and of measurements and plans, sqlite_measurements.cc.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status_macros.h"
#include "coordinator/store/sqlite/sqlite_connection.h"
#include "coordinator/store/sqlite/sqlite_store.h"
#include "coordinator/store/store.h"

namespace ringleader::store {

// The first of the older steps, and every kLayerStride-th after it, keep their layers.
inline constexpr int64_t kLayerStride = 16;

class SqliteTransaction : public WriteTransaction {
 public:
  // `revision`: the newest committed for reading, the one being written for writing.
  // `reply_offset`: what the time of replies is ahead of the clock.
  SqliteTransaction(Connection* connection, const SqliteOptions* options, uint64_t revision,
                    absl::Duration reply_offset)
      : connection_(*connection), options_(*options), reply_offset_(reply_offset) {
    change_.revision = revision;
  }

  // True once something was written, which then takes up the revision.
  bool wrote() const { return wrote_; }
  const Change& change() const { return change_; }

  uint64_t revision() const override { return change_.revision; }

  absl::StatusOr<bool> Restored() override;
  absl::StatusOr<absl::Time> GetHistoryTime() override;
  absl::StatusOr<v1::Job> GetJob(std::string_view id) override;
  absl::StatusOr<v1::Attempt> GetAttempt(std::string_view job, uint32_t number) override;
  absl::StatusOr<JobPage> ListJobs(const JobQuery& query) override;
  absl::StatusOr<std::vector<v1::Job>> ListUnfinishedJobs() override;
  absl::StatusOr<std::vector<v1::Job>> ListFailedJobs(
      absl::FunctionRef<bool(const v1::Attempt&)> wanted) override;
  absl::StatusOr<std::vector<std::pair<v1::Job::State, int64_t>>> CountJobs() override;
  absl::StatusOr<StepPage> ListSteps(std::string_view job, uint64_t after_step,
                                     uint64_t after_sequence, int limit) override;
  absl::StatusOr<v1::StepReport> GetStep(std::string_view job, uint64_t step) override;
  absl::StatusOr<uint64_t> GetLastStep(std::string_view job) override;
  absl::StatusOr<EvalPage> ListEvals(std::string_view job, uint64_t after_sequence,
                                     int limit) override;
  absl::StatusOr<std::vector<v1::StepReport>> SampleSteps(std::string_view job, int count) override;
  absl::Status VisitStepsWithLayers(std::string_view job, int count,
                                    absl::FunctionRef<void(const v1::StepReport&)> visit) override;
  absl::StatusOr<std::vector<v1::EvalReport>> SampleEvals(std::string_view job, int count) override;
  absl::StatusOr<std::vector<v1::CheckpointNotice>> ListCheckpoints(std::string_view job) override;
  absl::StatusOr<LogPage> ReadLogs(const LogQuery& query) override;
  absl::StatusOr<std::vector<v1::Command>> ListCommands(std::string_view node) override;
  absl::StatusOr<uint64_t> GetAppliedSequence(std::string_view node,
                                              std::string_view incarnation) override;
  absl::StatusOr<std::string> GetNewestIncarnation(std::string_view node) override;
  absl::StatusOr<std::vector<v1::Node>> ListNodes() override;

  absl::Status CreateJob(v1::Job* job) override;
  absl::Status UpdateJob(v1::Job* job) override;
  absl::Status DeleteJob(std::string_view id) override;
  absl::StatusOr<bool> DeleteReports(std::string_view id) override;
  absl::Status PutAttempt(std::string_view job, const v1::Attempt& attempt) override;
  absl::Status DeleteAttempt(std::string_view job, uint32_t number) override;
  absl::Status PutStep(std::string_view job, const v1::StepReport& merged) override;
  absl::Status PutMissingStep(std::string_view job, const v1::StepReport& merged) override;
  absl::Status PutEval(std::string_view job, const v1::EvalReport& eval) override;
  absl::Status PutCheckpoint(std::string_view job, const v1::CheckpointNotice& checkpoint) override;
  absl::Status TrimCheckpoints(std::string_view job, int kept) override;
  absl::Status AppendLogs(std::string_view job, uint32_t attempt,
                          std::vector<v1::LogLine> lines) override;
  absl::StatusOr<uint64_t> Next(Counter counter) override;
  absl::Status EndRestore() override;
  absl::Status SetHistoryTime(absl::Time time) override;
  absl::Status PutCommand(std::string_view node, v1::Command* command) override;
  absl::Status DeleteCommand(uint64_t command_id) override;
  absl::Status DeleteCommands(std::string_view job, uint32_t attempt) override;
  absl::Status SetAppliedSequence(std::string_view node, std::string_view incarnation,
                                  uint64_t sequence) override;
  absl::Status PutNode(const v1::Node& node) override;
  absl::Status DeleteNode(std::string_view id) override;
  absl::StatusOr<std::optional<std::string>> FindReply(const RequestKey& key) override;
  absl::Status PutReply(const RequestKey& key, std::string_view reply) override;
  absl::StatusOr<std::vector<StoredToken>> ListTokens() override;
  absl::StatusOr<AuditPage> ListAudit(const AuditQuery& query) override;
  absl::Status CreateToken(const StoredToken& token) override;
  absl::StatusOr<v1::Token> DeleteToken(std::string_view name) override;
  absl::Status AppendAudit(v1::AuditRecord record) override;
  absl::Status TrimAudit(absl::Time oldest) override;
  absl::StatusOr<std::optional<v1::StepPlan>> GetPlan(std::string_view job) override;
  absl::StatusOr<MeasurementList> ListMeasurements() override;
  absl::Status PutPlan(std::string_view job, const v1::StepPlan& plan) override;
  absl::Status PutMeasurements(const v1::Measurements& measured) override;

 private:
  // `sql` writes rows of `job`, which must exist (NOT_FOUND otherwise).
  template <typename... Arguments>
  absl::Status WriteOfJob(std::string_view job, const char* sql, const Arguments&... arguments);
  absl::Status PutLabels(const v1::Job& job);
  // Deletes the oldest lines until the log is within its bound; updates both.
  void TrimLogs(std::string_view job, int64_t* first_offset, int64_t* bytes);
  // Thins older steps, and the layers of the others, out to within their bounds, now and then.
  absl::Status TrimSteps(std::string_view job, int64_t newest_step);
  absl::Status TrimLayers(std::string_view job, int64_t after_step, int64_t last_step);
  // Thins older evaluations out where there are more than there is room for.
  absl::Status TrimEvals(std::string_view job);
  // One record: of a shape or of links, `subject`, on machines of a kind.
  absl::Status PutMeasurement(const v1::MachineKind& machine, const std::string& subject,
                              const v1::Measurements& measured);
  // The record of jobs/`id`, without attempts.
  absl::StatusOr<v1::Job> ParseJob(std::string_view id, int64_t sequence, std::string_view sealed);
  absl::Status AddAttempts(std::string_view id, v1::Job* job);
  // The offset after which the last query.last_lines lines stand.
  absl::StatusOr<uint64_t> BeforeLastLines(const LogQuery& query);

  // Parses a sealed row; DATA_LOSS names the file and `what`.
  absl::Status Parse(std::string_view sealed, const std::string& what,
                     google::protobuf::MessageLite* message);
  // Parses the first column of all rows.
  template <typename Message>
  absl::StatusOr<std::vector<Message>> ParseAll(Cursor& rows, const std::string& what) {
    std::vector<Message> messages;
    while (rows.Next()) RETURN_IF_ERROR(Parse(rows.Bytes(0), what, &messages.emplace_back()));
    return messages;
  }
  // Fills a page with `reports` of a job from rows of a sequence and a record.
  template <typename Page, typename Report>
  absl::StatusOr<Page> ReadPage(Cursor& rows, const std::string& what, uint64_t after_sequence,
                                int limit, std::vector<Report> Page::*reports);

  void Touched(std::vector<std::string>& ids, std::string_view id);

  Connection& connection_;
  const SqliteOptions& options_;
  const absl::Duration reply_offset_;
  Change change_;
  bool wrote_ = false;
};

}  // namespace ringleader::store
