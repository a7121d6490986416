// The coordinator's durable state as one interface, which SQLite implements (sqlite_store.h).
//
// All access happens in transactions. Write() is durable (synced to disk) when it returns OK, so
// whatever a reply or a command speaks of must have been written before. Writes that wait at the
// same time share one sync (group commit), and a body may apply as many events as its caller has at
// hand.
//
// Every committed write has a revision, one more than the last; a Job and whatever else a write
// touches carry it, and Subscribe() tells of it after the commit.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ringleader/v1/access.pb.h"
#include "ringleader/v1/job.pb.h"
#include "ringleader/v1/latency.pb.h"
#include "ringleader/v1/log_service.pb.h"
#include "ringleader/v1/node.pb.h"
#include "ringleader/v1/plan.pb.h"
#include "ringleader/v1/telemetry.pb.h"
#include "ringleader/v1/worker_control.pb.h"

namespace ringleader::store {

// A page of a list ends where it would hold more than this, with at least one entry in it: what one
// reader costs does not depend on how large the entries are.
inline constexpr size_t kPageBytes = size_t{1} << 20;

// One condition on jobs; a query is the AND of its terms.
struct JobTerm {
  enum class Field { kState, kName, kLabel, kOwner, kProject };
  enum class Operator { kEquals, kNotEquals, kHas };
  Field field = Field::kState;
  std::string label = {};  // kLabel: its key
  Operator op = Operator::kEquals;
  std::string value = {};  // kState: the state's name, e.g. "RUNNING"; unused with kHas
};

struct JobQuery {
  std::vector<JobTerm> terms = {};
  uint64_t before_sequence = 0;  // the next page: JobPage::last_sequence; 0: from the newest
  int limit = 50;
};

struct JobPage {
  std::vector<v1::Job> jobs;  // newest first, without attempts
  // Those of the page whose record is damaged on disk, newest first, with what is known of them all
  // the same: name, state, owner, project, creation and sequence, and as state_reason what is
  // wrong.
  std::vector<v1::Job> damaged;
  uint64_t last_sequence = 0;  // 0: there are no more
  int64_t total = 0;           // that match, over all pages
};

struct LogQuery {
  std::string job = {};
  uint32_t attempt = 0;       // 0: all
  int32_t rank = -1;          // -1: all
  uint64_t after_offset = 0;  // lines with a greater offset
  int limit = 1000;
  int last_lines = 0;  // > 0: begin so many lines before the end, if that is later
};

struct LogPage {
  std::vector<v1::LogLine> lines;  // in order of offset
  uint64_t next_offset = 0;        // read on with this as after_offset
  bool more = false;               // the log holds lines after next_offset
  // Lines (of all ranks) after a given after_offset that went to keep the log within its bound.
  uint64_t dropped = 0;
};

// Figures by rank, or by layer and ring step, that a stored step report may hold at most.
inline constexpr int kFiguresKept = 64;

struct StepPage {
  std::vector<v1::StepReport> steps;
  uint64_t last_sequence = 0;  // read on after this; the argument where there was nothing new
  bool more = false;           // there are reports after it
};

struct EvalPage {
  std::vector<v1::EvalReport> evals;
  uint64_t last_sequence = 0;
  bool more = false;
};

// Who asks for a mutation: the client's request_id with what it was used for. An empty id asks for
// no idempotency.
struct RequestKey {
  std::string id = {};
  std::string method = {};       // e.g. "CreateJob"
  std::string fingerprint = {};  // of the request's arguments and of who sent it
  // Goes into the audit log in the transaction that applies the request, with outcome "OK".
  std::optional<v1::AuditRecord> audit = {};
};

struct StoredToken {
  v1::Token token;
  std::string sha256;  // of its text, 32 bytes
};

// Records that have all of these; what is empty does not matter.
struct AuditQuery {
  std::string caller = {};
  std::string method = {};  // with its service, or without
  std::string resource = {};
  std::string outcome = {};
  absl::Time after = absl::InfinitePast();     // not before it
  absl::Time before = absl::InfiniteFuture();  // before it
  uint64_t before_sequence = 0;  // page on with AuditPage::last_sequence; 0: the newest
  int limit = 50;
  size_t max_bytes = kPageBytes;
};

struct AuditPage {
  std::vector<v1::AuditRecord> records;  // newest first
  uint64_t last_sequence = 0;            // 0: there are no more
};

// What trainers measured of their machines, newest first.
struct MeasurementList {
  std::vector<v1::LatencyTable> tables;
  std::vector<v1::LinkSpeed> links;
  // DATA_LOSS, by name, of records that are damaged on disk: they are measured anew.
  std::vector<absl::Status> damaged;
};

// Replies to mutating requests are kept this long, the time not counted in which no coordinator
// runs: a request repeated within it gets the first reply again.
inline constexpr absl::Duration kReplyLifetime = absl::Hours(24);

// A token that has expired lets nobody in, and is deleted no sooner than this after its end, by the
// time of history (upkeep/history_time.h): a clock that is ahead, by however much, for less than
// this costs nobody a token that is good by the right one.
inline constexpr absl::Duration kExpiredTokenLifetime = absl::Hours(24 * 7);

// Numbers that only grow, over all restarts.
enum class Counter { kFencingToken, kCommandId, kSessionEpoch };

// What a committed write touched. Ids without "jobs/" and "nodes/".
struct Change {
  uint64_t revision = 0;
  std::vector<std::string> jobs;  // the job, its attempts, steps, evaluations or checkpoints
  std::vector<std::string> logs;  // jobs whose log grew
  std::vector<std::string> nodes;
};

// A consistent view. Job ids are JobSpec.name, node ids the part after "nodes/". Not thread-safe;
// valid only inside the body that it was handed to. NOT_FOUND names the resource; DATA_LOSS names
// the file and the row.
class ReadTransaction {
 public:
  virtual ~ReadTransaction() = default;

  // The newest committed revision (in a write: the one being written).
  virtual uint64_t revision() const = 0;

  // The database was put back from a backup, so that more happened than it knows of, and nobody has
  // called EndRestore() since.
  virtual absl::StatusOr<bool> Restored() = 0;
  // What SetHistoryTime() set last; infinitely past: nothing.
  virtual absl::StatusOr<absl::Time> GetHistoryTime() = 0;

  virtual absl::StatusOr<v1::Job> GetJob(std::string_view id) = 0;  // with attempts, oldest first
  // Its attempt of this number; NOT_FOUND also where there is no such job.
  virtual absl::StatusOr<v1::Attempt> GetAttempt(std::string_view job, uint32_t number) = 0;
  virtual absl::StatusOr<JobPage> ListJobs(const JobQuery& query) = 0;
  // Jobs in a state that is not terminal, with attempts, oldest first: what a restarted coordinator
  // takes up.
  virtual absl::StatusOr<std::vector<v1::Job>> ListUnfinishedJobs() = 0;
  // Jobs that FAILED whose last attempt is as `wanted` says, with attempts, oldest first: their
  // ranks may outlive them. Those whose record is damaged are left out, and the log says so.
  virtual absl::StatusOr<std::vector<v1::Job>> ListFailedJobs(
      absl::FunctionRef<bool(const v1::Attempt&)> wanted) = 0;
  // [state] → jobs in it; states without jobs are absent.
  virtual absl::StatusOr<std::vector<std::pair<v1::Job::State, int64_t>>> CountJobs() = 0;

  // Merged reports of steps after `after_step`, in the order in which they were written, after
  // page.last_sequence of an earlier call. A step that a later attempt trained again has only its
  // newest report, at its newest place.
  virtual absl::StatusOr<StepPage> ListSteps(std::string_view job, uint64_t after_step,
                                             uint64_t after_sequence, int limit) = 0;
  // The newest merged report of one step; NOT_FOUND where there is none, or it was thinned out.
  virtual absl::StatusOr<v1::StepReport> GetStep(std::string_view job, uint64_t step) = 0;
  // The last step of which there is a merged report; 0: there is none.
  virtual absl::StatusOr<uint64_t> GetLastStep(std::string_view job) = 0;
  virtual absl::StatusOr<EvalPage> ListEvals(std::string_view job, uint64_t after_sequence,
                                             int limit) = 0;
  // At most `count` (at least 2) merged reports, in order of their steps, spread evenly over those
  // there are, without what is by layer or rank: the first and the newest are among them. It costs
  // as much of a million as of `count`.
  virtual absl::StatusOr<std::vector<v1::StepReport>> SampleSteps(std::string_view job,
                                                                  int count) = 0;
  // The same of steps that have their layers (see PutStep), whole, one after the other: one may
  // take a megabyte.
  virtual absl::Status VisitStepsWithLayers(
      std::string_view job, int count, absl::FunctionRef<void(const v1::StepReport&)> visit) = 0;
  virtual absl::StatusOr<std::vector<v1::EvalReport>> SampleEvals(std::string_view job,
                                                                  int count) = 0;
  virtual absl::StatusOr<std::vector<v1::CheckpointNotice>> ListCheckpoints(
      std::string_view job) = 0;
  virtual absl::StatusOr<LogPage> ReadLogs(const LogQuery& query) = 0;

  // The newest plan under which the job ran; nullopt before its first attempt.
  virtual absl::StatusOr<std::optional<v1::StepPlan>> GetPlan(std::string_view job) = 0;
  virtual absl::StatusOr<MeasurementList> ListMeasurements() = 0;

  // Commands to the node that it has not acknowledged, oldest first.
  virtual absl::StatusOr<std::vector<v1::Command>> ListCommands(std::string_view node) = 0;
  // The last sequence of this worker process that was applied; 0 for an incarnation never seen.
  virtual absl::StatusOr<uint64_t> GetAppliedSequence(std::string_view node,
                                                      std::string_view incarnation) = 0;

  // The node's worker process that SetAppliedSequence() named last; empty: none.
  virtual absl::StatusOr<std::string> GetNewestIncarnation(std::string_view node) = 0;

  virtual absl::StatusOr<std::vector<v1::Node>> ListNodes() = 0;  // by id

  // The serialized reply to an earlier request with this key; INVALID_ARGUMENT if its id was used
  // for something else.
  virtual absl::StatusOr<std::optional<std::string>> FindReply(const RequestKey& key) = 0;

  // By name. Those whose record is damaged are left out, and the log says so.
  virtual absl::StatusOr<std::vector<StoredToken>> ListTokens() = 0;
  virtual absl::StatusOr<AuditPage> ListAudit(const AuditQuery& query) = 0;
};

class WriteTransaction : public ReadTransaction {
 public:
  // Creates (ALREADY_EXISTS if the id is taken) or updates a job. Both set job->revision, and the
  // first job->sequence; attempts are not written.
  virtual absl::Status CreateJob(v1::Job* job) = 0;
  virtual absl::Status UpdateJob(v1::Job* job) = 0;
  // Its attempts, reports, logs, plan, checkpoints' records and commands go with it.
  virtual absl::Status DeleteJob(std::string_view id) = 0;
  // What a job that has ended reported: its logs, steps and evaluations. The job itself stays, with
  // its attempts, its progress and its first and last evaluation. Returns whether there was any.
  virtual absl::StatusOr<bool> DeleteReports(std::string_view id) = 0;
  // Creates or replaces the attempt with this number.
  virtual absl::Status PutAttempt(std::string_view job, const v1::Attempt& attempt) = 0;
  // OK also if it is not there.
  virtual absl::Status DeleteAttempt(std::string_view job, uint32_t number) = 0;

  // Keeps what a step came to as a whole and by layer. Of older steps only every 16th keeps its
  // layers, so that a job's record does not grow with layers x steps; figures of single ranks and
  // ring steps, of which there may be thousands, are kept up to kFiguresKept. Where there are more,
  // those of ranks go, and those of ring steps become their sum; their imbalance stays.
  virtual absl::Status PutStep(std::string_view job, const v1::StepReport& merged) = 0;
  // The same, unless there is a report of that step already, or it was thinned out.
  virtual absl::Status PutMissingStep(std::string_view job, const v1::StepReport& merged) = 0;
  // Of older evaluations some go (SqliteOptions::evals_per_job).
  virtual absl::Status PutEval(std::string_view job, const v1::EvalReport& eval) = 0;
  // Replaces the one before.
  virtual absl::Status PutPlan(std::string_view job, const v1::StepPlan& plan) = 0;
  // Replaces what was measured of the same machines and shape, or links, before; gives both their
  // time. Of each device and of all, the newest are kept. The caller has checked the figures.
  virtual absl::Status PutMeasurements(const v1::Measurements& measured) = 0;
  virtual absl::Status PutCheckpoint(std::string_view job,
                                     const v1::CheckpointNotice& checkpoint) = 0;
  // Deletes all but those of the last `kept` steps, damaged ones, too.
  virtual absl::Status TrimCheckpoints(std::string_view job, int kept) = 0;
  // Gives the lines their offsets. The oldest lines go when the job's log exceeds its bound.
  virtual absl::Status AppendLogs(std::string_view job, uint32_t attempt,
                                  std::vector<v1::LogLine> lines) = 0;

  virtual absl::StatusOr<uint64_t> Next(Counter counter) = 0;  // 1 is the first
  virtual absl::Status EndRestore() = 0;
  // The time by which history is too old (upkeep/history_time.h), to the microsecond.
  virtual absl::Status SetHistoryTime(absl::Time time) = 0;
  // Sets command->command_id and keeps it until it is acknowledged.
  virtual absl::Status PutCommand(std::string_view node, v1::Command* command) = 0;
  // OK also if it is not there (acknowledged before).
  virtual absl::Status DeleteCommand(uint64_t command_id) = 0;
  // Commands of one attempt to all nodes: what a fenced or finished attempt no longer needs.
  virtual absl::Status DeleteCommands(std::string_view job, uint32_t attempt) = 0;
  virtual absl::Status SetAppliedSequence(std::string_view node, std::string_view incarnation,
                                          uint64_t sequence) = 0;

  // Creates or replaces. What changes with every heartbeat does not belong here.
  virtual absl::Status PutNode(const v1::Node& node) = 0;
  // OK also if it is not there. Which of its processes was the newest stays known.
  virtual absl::Status DeleteNode(std::string_view id) = 0;

  // The reply to this request, for as long as it is kept; a key without id keeps nothing.
  virtual absl::Status PutReply(const RequestKey& key, std::string_view reply) = 0;

  // ALREADY_EXISTS if the name is taken. Tokens that expired long ago (kExpiredTokenLifetime) go
  // with the next one.
  virtual absl::Status CreateToken(const StoredToken& token) = 0;
  // Of one whose record is damaged, the name alone is returned.
  virtual absl::StatusOr<v1::Token> DeleteToken(std::string_view name) = 0;
  // Gives the record its sequence, and a time unless it has one.
  virtual absl::Status AppendAudit(v1::AuditRecord record) = 0;
  // Deletes what is older.
  virtual absl::Status TrimAudit(absl::Time oldest) = 0;
};

// How much hangs on a write. While the disk is as good as full, what is kVital goes on in the space
// that is kept in reserve for it, and everything else is refused.
enum class Need { kOrdinary, kVital };

// Thread-safe.
class Store {
 public:
  virtual ~Store() = default;

  // `body` sees the store as of one revision. Never waits for a writer.
  virtual absl::Status Read(absl::FunctionRef<absl::Status(ReadTransaction&)> body) = 0;

  // Runs `body` alone among writers. All of it is durable when OK is returned; nothing of it
  // happened when the body or the commit fails. `body` may run on another thread that is writing at
  // the moment, while the caller waits; it must not call the Store. RESOURCE_EXHAUSTED, without
  // having run the body, where Space() says so and the write is kOrdinary.
  virtual absl::Status Write(absl::FunctionRef<absl::Status(WriteTransaction&)> body,
                             Need need = Need::kOrdinary) = 0;

  // RESOURCE_EXHAUSTED, with the file system and the remedy, while only kVital writes are taken.
  // Looks at the file system: cheap, and right again as soon as there is space.
  virtual absl::Status Space() = 0;

  // Why nothing can be written whatever it is, a database that is not where it was opened, or else
  // what Space() says.
  virtual absl::Status Writable() { return Space(); }

  // The newest committed revision.
  virtual uint64_t revision() const = 0;

  // `listener` is called after each commit, in order of revision, on the thread that committed: it
  // must return at once and must not call the Store. Dropping the handle ends it; no call is under
  // way once the handle is gone.
  class Subscription {
   public:
    virtual ~Subscription() = default;
  };
  virtual std::unique_ptr<Subscription> Subscribe(std::function<void(const Change&)> listener) = 0;
};

// Runs `body` at most once per request: in the same transaction either hands out the reply of an
// earlier request with this key, or runs `body` and keeps its reply; FAILED_PRECONDITION where the
// earlier reply is damaged. Reply: a protobuf message.
template <typename Reply>
absl::StatusOr<Reply> Once(WriteTransaction& transaction, const RequestKey& key,
                           absl::FunctionRef<absl::StatusOr<Reply>()> body) {
  absl::StatusOr<std::optional<std::string>> earlier = transaction.FindReply(key);
  // Nothing has been changed: the request fails, and nobody else's that shares the transaction.
  if (absl::IsDataLoss(earlier.status())) {
    return absl::FailedPreconditionError(earlier.status().message());
  }
  if (!earlier.ok()) return earlier.status();
  if (earlier->has_value()) {
    Reply reply;
    if (!reply.ParseFromString(**earlier)) {
      return absl::FailedPreconditionError("the reply kept for request_id \"" + key.id +
                                           "\" is damaged");
    }
    return reply;
  }
  absl::StatusOr<Reply> reply = body();
  if (!reply.ok()) return reply;
  if (absl::Status kept = transaction.PutReply(key, reply->SerializeAsString()); !kept.ok())
    return kept;
  return reply;
}

// "jobs/x" → "x", "nodes/x" → "x"; INVALID_ARGUMENT for anything else.
absl::StatusOr<std::string> JobIdFromName(std::string_view name);
absl::StatusOr<std::string> NodeIdFromName(std::string_view name);

// NOT_FOUND: "jobs/x does not exist".
absl::Status JobNotFound(std::string_view id);

}  // namespace ringleader::store
