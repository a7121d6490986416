// A write transaction of which tests change a part.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "coordinator/store/store.h"

namespace ringleader::store::testing {

class ForwardingTransaction : public WriteTransaction {
 public:
  explicit ForwardingTransaction(WriteTransaction* transaction) : transaction_(*transaction) {}
  uint64_t revision() const override { return transaction_.revision(); }
  absl::StatusOr<bool> Restored() override { return transaction_.Restored(); }
  absl::StatusOr<absl::Time> GetHistoryTime() override { return transaction_.GetHistoryTime(); }
  absl::StatusOr<v1::Job> GetJob(std::string_view id) override { return transaction_.GetJob(id); }
  absl::StatusOr<v1::Attempt> GetAttempt(std::string_view job, uint32_t number) override {
    return transaction_.GetAttempt(job, number);
  }
  absl::StatusOr<JobPage> ListJobs(const JobQuery& query) override {
    return transaction_.ListJobs(query);
  }
  absl::StatusOr<std::vector<v1::Job>> ListUnfinishedJobs() override {
    return transaction_.ListUnfinishedJobs();
  }
  absl::StatusOr<std::vector<v1::Job>> ListFailedJobs(
      absl::FunctionRef<bool(const v1::Attempt&)> wanted) override {
    return transaction_.ListFailedJobs(wanted);
  }
  absl::StatusOr<std::vector<std::pair<v1::Job::State, int64_t>>> CountJobs() override {
    return transaction_.CountJobs();
  }
  absl::StatusOr<StepPage> ListSteps(std::string_view job, uint64_t after_step,
                                     uint64_t after_sequence, int limit) override {
    return transaction_.ListSteps(job, after_step, after_sequence, limit);
  }
  absl::StatusOr<v1::StepReport> GetStep(std::string_view job, uint64_t step) override {
    return transaction_.GetStep(job, step);
  }
  absl::StatusOr<uint64_t> GetLastStep(std::string_view job) override {
    return transaction_.GetLastStep(job);
  }
  absl::StatusOr<EvalPage> ListEvals(std::string_view job, uint64_t after_sequence,
                                     int limit) override {
    return transaction_.ListEvals(job, after_sequence, limit);
  }
  absl::StatusOr<std::vector<v1::StepReport>> SampleSteps(std::string_view job,
                                                          int count) override {
    return transaction_.SampleSteps(job, count);
  }
  absl::Status VisitStepsWithLayers(std::string_view job, int count,
                                    absl::FunctionRef<void(const v1::StepReport&)> visit) override {
    return transaction_.VisitStepsWithLayers(job, count, visit);
  }
  absl::StatusOr<std::vector<v1::EvalReport>> SampleEvals(std::string_view job,
                                                          int count) override {
    return transaction_.SampleEvals(job, count);
  }
  absl::StatusOr<std::vector<v1::CheckpointNotice>> ListCheckpoints(std::string_view job) override {
    return transaction_.ListCheckpoints(job);
  }
  absl::StatusOr<LogPage> ReadLogs(const LogQuery& query) override {
    return transaction_.ReadLogs(query);
  }
  absl::StatusOr<std::optional<v1::StepPlan>> GetPlan(std::string_view job) override {
    return transaction_.GetPlan(job);
  }
  absl::StatusOr<MeasurementList> ListMeasurements() override {
    return transaction_.ListMeasurements();
  }
  absl::StatusOr<std::vector<v1::Command>> ListCommands(std::string_view node) override {
    return transaction_.ListCommands(node);
  }
  absl::StatusOr<uint64_t> GetAppliedSequence(std::string_view node,
                                              std::string_view incarnation) override {
    return transaction_.GetAppliedSequence(node, incarnation);
  }
  absl::StatusOr<std::string> GetNewestIncarnation(std::string_view node) override {
    return transaction_.GetNewestIncarnation(node);
  }
  absl::StatusOr<std::vector<v1::Node>> ListNodes() override { return transaction_.ListNodes(); }
  absl::StatusOr<std::optional<std::string>> FindReply(const RequestKey& key) override {
    return transaction_.FindReply(key);
  }
  absl::StatusOr<std::vector<StoredToken>> ListTokens() override {
    return transaction_.ListTokens();
  }
  absl::StatusOr<AuditPage> ListAudit(const AuditQuery& query) override {
    return transaction_.ListAudit(query);
  }
  absl::Status CreateJob(v1::Job* job) override { return transaction_.CreateJob(job); }
  absl::Status UpdateJob(v1::Job* job) override { return transaction_.UpdateJob(job); }
  absl::Status DeleteJob(std::string_view id) override { return transaction_.DeleteJob(id); }
  absl::StatusOr<bool> DeleteReports(std::string_view id) override {
    return transaction_.DeleteReports(id);
  }
  absl::Status PutAttempt(std::string_view job, const v1::Attempt& attempt) override {
    return transaction_.PutAttempt(job, attempt);
  }
  absl::Status DeleteAttempt(std::string_view job, uint32_t number) override {
    return transaction_.DeleteAttempt(job, number);
  }
  absl::Status PutStep(std::string_view job, const v1::StepReport& merged) override {
    return transaction_.PutStep(job, merged);
  }
  absl::Status PutMissingStep(std::string_view job, const v1::StepReport& merged) override {
    return transaction_.PutMissingStep(job, merged);
  }
  absl::Status PutEval(std::string_view job, const v1::EvalReport& eval) override {
    return transaction_.PutEval(job, eval);
  }
  absl::Status PutPlan(std::string_view job, const v1::StepPlan& plan) override {
    return transaction_.PutPlan(job, plan);
  }
  absl::Status PutMeasurements(const v1::Measurements& measured) override {
    return transaction_.PutMeasurements(measured);
  }
  absl::Status PutCheckpoint(std::string_view job,
                             const v1::CheckpointNotice& checkpoint) override {
    return transaction_.PutCheckpoint(job, checkpoint);
  }
  absl::Status TrimCheckpoints(std::string_view job, int kept) override {
    return transaction_.TrimCheckpoints(job, kept);
  }
  absl::Status AppendLogs(std::string_view job, uint32_t attempt,
                          std::vector<v1::LogLine> lines) override {
    return transaction_.AppendLogs(job, attempt, std::move(lines));
  }
  absl::StatusOr<uint64_t> Next(Counter counter) override { return transaction_.Next(counter); }
  absl::Status EndRestore() override { return transaction_.EndRestore(); }
  absl::Status SetHistoryTime(absl::Time time) override {
    return transaction_.SetHistoryTime(time);
  }
  absl::Status PutCommand(std::string_view node, v1::Command* command) override {
    return transaction_.PutCommand(node, command);
  }
  absl::Status DeleteCommand(uint64_t command_id) override {
    return transaction_.DeleteCommand(command_id);
  }
  absl::Status DeleteCommands(std::string_view job, uint32_t attempt) override {
    return transaction_.DeleteCommands(job, attempt);
  }
  absl::Status SetAppliedSequence(std::string_view node, std::string_view incarnation,
                                  uint64_t sequence) override {
    return transaction_.SetAppliedSequence(node, incarnation, sequence);
  }
  absl::Status PutNode(const v1::Node& node) override { return transaction_.PutNode(node); }
  absl::Status DeleteNode(std::string_view id) override { return transaction_.DeleteNode(id); }
  absl::Status PutReply(const RequestKey& key, std::string_view reply) override {
    return transaction_.PutReply(key, reply);
  }
  absl::Status CreateToken(const StoredToken& token) override {
    return transaction_.CreateToken(token);
  }
  absl::StatusOr<v1::Token> DeleteToken(std::string_view name) override {
    return transaction_.DeleteToken(name);
  }
  absl::Status AppendAudit(v1::AuditRecord record) override {
    return transaction_.AppendAudit(std::move(record));
  }
  absl::Status TrimAudit(absl::Time oldest) override { return transaction_.TrimAudit(oldest); }

 private:
  WriteTransaction& transaction_;
};

}  // namespace ringleader::store::testing
