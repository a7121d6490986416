// Workers come and go: hellos, sessions that end, worker processes that die.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/protocol_version.h"
#include "base/status_macros.h"
#include "coordinator/lifecycle/controller_core.h"
#include "coordinator/lifecycle/job/wire_time.h"
#include "jobspec/fields/text.h"
#include "proto/timestamps.h"

namespace ringleader::lifecycle {
namespace {

// Sessions that end while the same command is not acknowledged, until it is not sent again. One may
// end by chance.
constexpr int kMaxSessionsEnded = 2;

// The part that says which data folder a worker process uses.
std::string_view FolderOf(std::string_view incarnation) {
  return incarnation.substr(0, incarnation.find('.'));
}

}  // namespace

// After a restart or a failed commit the record in memory has none, and the store is asked.
absl::StatusOr<std::string> ControllerCore::NewestIncarnation(store::ReadTransaction& transaction,
                                                              const std::string& node,
                                                              const NodeRecord& record) {
  if (!record.log.incarnation().empty()) return record.log.incarnation();
  return transaction.GetNewestIncarnation(node);
}

// A new process of a node stands for the death of the old one and of its trainers, because the
// folder's lock says so. That of another folder, or beside one that is alive, does not.
absl::Status ControllerCore::CheckIdentity(const NodeRecord& record, const std::string& known,
                                           const session::Session& session, absl::Time now) const {
  if (known.empty() || known == session.incarnation()) return absl::OkStatus();
  if (record.session != nullptr && now - record.session->last_heard() <= options_.lease) {
    return absl::AlreadyExistsError(absl::StrFormat(
        "another worker is connected as nodes/%s: give each its own --name", session.node()));
  }
  if (FolderOf(known) != FolderOf(session.incarnation()) && record.trainers_in_use > 0) {
    return absl::FailedPreconditionError(
        absl::StrFormat("nodes/%s was last a worker with another --data-dir, whose trainers may "
                        "be alive: use that folder, or wait until they are given up",
                        session.node()));
  }
  return absl::OkStatus();
}

absl::Status ControllerCore::OnHello(store::WriteTransaction& transaction,
                                     const std::shared_ptr<session::Session>& session,
                                     const v1::WorkerHello& hello, absl::Time now) {
  const std::string& id = session->node();
  std::string known;
  if (const auto found = nodes_.find(id); found != nodes_.end()) {
    CountTrainers();
    ASSIGN_OR_RETURN(known, NewestIncarnation(transaction, id, found->second));
    if (const absl::Status refused = CheckIdentity(found->second, known, *session, now);
        !refused.ok()) {
      session->Close(refused);
      return absl::OkStatus();
    }
  }
  NodeRecord& record = nodes_[id];
  if (record.session && record.session != session) {
    record.session->Close(absl::AbortedError("another session of this node has begun"));
  }
  ASSIGN_OR_RETURN(const uint64_t epoch, transaction.Next(store::Counter::kSessionEpoch));
  ASSIGN_OR_RETURN(uint64_t applied, transaction.GetAppliedSequence(id, session->incarnation()));
  // What came in ahead of the hello in this batch is not in the store yet.
  if (record.log.incarnation() == session->incarnation()) {
    applied = std::max(applied, record.log.applied());
  }
  v1::Node& node = record.node;
  if (node.name().empty()) {
    node.set_name("nodes/" + id);
    node.set_state(v1::Node::READY);
    SetTime(now, node.mutable_create_time());
  }
  *node.mutable_inventory() = hello.inventory();
  node.set_worker_version(hello.version());
  node.set_session_epoch(epoch);
  node.set_fence_milliseconds(WireMilliseconds(options_.fence_after));
  node.set_certificate(session->certificate());
  node.clear_last_heartbeat_time();
  if (known != session->incarnation()) node.clear_leaving();
  RETURN_IF_ERROR(transaction.PutNode(node));

  if (record.log.incarnation() != session->incarnation()) {
    record.log = EventLog(session->incarnation(), std::max(applied, hello.acknowledged_sequence()));
    if (hello.acknowledged_sequence() > applied) {
      RETURN_IF_ERROR(OnLostMessages(transaction, id, hello, applied, now));
    }
  }
  record.session = session;
  // Load() lets the lease begin later where the coordinator before promised more time: until the
  // worker has this one's welcome, its trainers live by that promise.
  record.Hear(now);
  schedule_due_ = true;
  // A process of which nothing was ever applied cannot have started what an earlier one
  // acknowledged: that died with the earlier one. (What was not acknowledged is sent to this one.)
  if (applied == 0 && hello.acknowledged_sequence() == 0) {
    for (auto& [job, machine] : machines_) {
      if (StartPending(id, job)) continue;
      machine->OnWorkerDied(node.name(), "its worker was restarted, and it died with the old one",
                            now);
    }
  }
  record.out_of_sight = false;
  for (auto& [job, machine] : machines_) machine->OnSight(node.name(), std::nullopt, now);

  SendWelcome(session, epoch, record.log.acknowledged());
  StopStrays(record, hello);
  RETURN_IF_ERROR(SendAgain(transaction, id, session));
  metrics_->SessionBegan();
  spdlog::info("nodes/{} connected (epoch {}, version {}, {} trainers, runs {} attempts)", id,
               epoch, hello.version(), hello.inventory().trainers(), hello.attempts_size());
  return absl::OkStatus();
}

void ControllerCore::SendWelcome(const std::shared_ptr<session::Session>& session, uint64_t epoch,
                                 uint64_t applied) {
  v1::CoordinatorMessage message;
  v1::Welcome* const welcome = message.mutable_welcome();
  welcome->set_epoch(epoch);
  welcome->set_lease_milliseconds(WireMilliseconds(options_.lease));
  welcome->set_heartbeat_milliseconds(WireMilliseconds(options_.heartbeat_interval));
  welcome->set_fence_milliseconds(WireMilliseconds(options_.fence_after));
  welcome->set_applied_sequence(applied);
  welcome->set_protocol_version(kProtocolVersion);
  outbox_.emplace_back(session, std::move(message));
}

const v1::Placement* ControllerCore::DeadRanksOf(const SentCommand& start) {
  const JobMachine* const machine = FindAttempt(start.job, start.attempt, start.token);
  if (!start.is_start || machine == nullptr) return nullptr;
  const v1::Placement* const placement = PlacementOn(*machine->attempt(), "nodes/" + start.node);
  return placement != nullptr && !machine->RunsOn(*placement) ? placement : nullptr;
}

absl::Status ControllerCore::SendAgain(store::WriteTransaction& transaction,
                                       const std::string& node,
                                       const std::shared_ptr<session::Session>& session) {
  ASSIGN_OR_RETURN(std::vector<v1::Command> commands, transaction.ListCommands(node));
  for (v1::Command& command : commands) {
    if (const auto sent = unacknowledged_.find(command.command_id());
        sent != unacknowledged_.end()) {
      // The process that was to start them died, or was given up: what another one started now
      // would be nobody's.
      if (DeadRanksOf(sent->second) != nullptr) {
        RETURN_IF_ERROR(transaction.DeleteCommand(sent->first));
        unacknowledged_.erase(sent);
        continue;
      }
      sent->second.sent_on = session.get();
    }
    v1::CoordinatorMessage again;
    *again.mutable_command() = std::move(command);
    outbox_.emplace_back(session, std::move(again));
  }
  return absl::OkStatus();
}

bool ControllerCore::StartPending(const std::string& node, const std::string& job) const {
  const auto found = machines_.find(job);
  if (found == machines_.end() || found->second->attempt() == nullptr) return false;
  const uint32_t attempt = found->second->attempt()->number();
  return std::any_of(unacknowledged_.begin(), unacknowledged_.end(), [&](const auto& entry) {
    const SentCommand& command = entry.second;
    return command.is_start && command.job == job && command.node == node &&
           command.attempt == attempt;
  });
}

absl::StatusOr<bool> ControllerCore::OnDeath(store::WriteTransaction& transaction,
                                             const std::string& node,
                                             const std::string& incarnation, absl::Time now) {
  const auto found = nodes_.find(node);
  if (found == nodes_.end()) return true;
  NodeRecord& record = found->second;
  ASSIGN_OR_RETURN(const std::string newest, NewestIncarnation(transaction, node, record));
  // A later process of the node has said the same by its hello.
  if (newest != incarnation) return true;
  // Its last words are in the connection, ahead of its end.
  if (record.session != nullptr && !record.out_of_sight) return false;
  spdlog::warn("nodes/{}: its worker process died, and all of its trainers", node);
  schedule_due_ = true;
  for (auto& [job, machine] : machines_) {
    machine->OnWorkerDied(record.node.name(), "its worker process died, and it died with it", now);
  }
  return true;
}

absl::Status ControllerCore::OnLostMessages(store::WriteTransaction& transaction,
                                            const std::string& node, const v1::WorkerHello& hello,
                                            uint64_t applied, absl::Time now) {
  const std::string what = absl::StrFormat(
      "messages %d to %d of nodes/%s were taken in once, and this database, which was put back "
      "from a backup, does not hold them",
      applied + 1, hello.acknowledged_sequence(), node);
  spdlog::error("{}", what);
  for (auto& [job, machine] : machines_) {
    const v1::Attempt* const attempt = machine->attempt();
    const v1::Placement* const placement =
        attempt == nullptr ? nullptr : PlacementOn(*attempt, hello.node());
    if (placement == nullptr) continue;
    std::set<uint32_t> running;
    for (const v1::RunningAttempt& entry : hello.attempts()) {
      if (entry.job() != job || entry.fencing_token() != attempt->fencing_token()) continue;
      running.insert(entry.ranks().begin(), entry.ranks().end());
    }
    v1::LogLine line;
    line.set_rank(static_cast<int32_t>(placement->first_rank()));
    line.set_is_stderr(true);
    SetTime(now, line.mutable_time());
    line.set_text(absl::StrFormat("[reports and log lines may be missing here: %s]", what));
    RETURN_IF_ERROR(transaction.AppendLogs(job, attempt->number(), {line}));
    machine->OnEndsLost(hello.node(), running, absl::StrCat("it ended, and how is lost: ", what),
                        now);
  }
  return absl::OkStatus();
}

// The commands are not durable: trainers that are still there at the next hello are told again
// then.
void ControllerCore::StopStrays(NodeRecord& record, const v1::WorkerHello& hello) {
  record.strays.clear();
  for (const v1::RunningAttempt& running : hello.attempts()) {
    JobMachine* const machine =
        FindAttempt(running.job(), running.attempt(), running.fencing_token());
    const v1::Placement* const placement =
        machine == nullptr ? nullptr : PlacementOn(*machine->attempt(), record.node.name());
    const auto wanted = [&](uint32_t rank) {
      return placement != nullptr && Holds(*placement, rank) &&
             rank < static_cast<uint32_t>(machine->attempt()->ranks_size()) &&
             !Dead(machine->attempt()->ranks(static_cast<int>(rank)));
    };
    if (std::all_of(running.ranks().begin(), running.ranks().end(), wanted)) continue;
    for (const uint32_t rank : running.ranks()) {
      record.strays.emplace(running.fencing_token(), rank);
    }
    warnings_.Add(record.node.name(), Warnings::Reason::kStray, [&] {
      return absl::StrFormat(
          "nodes/%s still runs attempt %d of jobs/%s, which was given up: "
          "stopping it",
          record.session->node(), running.attempt(), jobspec::Printable(running.job()));
    });
    StopAttempt(record, running.job(), running.attempt(), running.fencing_token());
  }
}

void ControllerCore::OnStrays(NodeRecord& record, const std::string& job, uint32_t attempt,
                              uint64_t token, const std::vector<uint32_t>& ranks) {
  bool any = false;
  for (const uint32_t rank : ranks) any = record.strays.emplace(token, rank).second || any;
  if (!any) return;
  schedule_due_ = true;
  warnings_.Add(record.node.name(), Warnings::Reason::kStray, [&] {
    return absl::StrFormat(
        "%s took up attempt %d of jobs/%s after its ranks there were given up: stopping it",
        record.node.name(), attempt, job);
  });
  StopAttempt(record, job, attempt, token);
}

void ControllerCore::StopAttempt(const NodeRecord& record, const std::string& job, uint32_t attempt,
                                 uint64_t token) {
  v1::CoordinatorMessage message;
  v1::Command* const command = message.mutable_command();
  command->set_job(job);
  command->set_attempt(attempt);
  command->set_fencing_token(token);
  command->mutable_stop()->set_mode(v1::StopTrainers::ABORT);
  command->mutable_stop()->set_grace_milliseconds(WireMilliseconds(options_.abort_grace));
  command->mutable_stop()->set_reason("the attempt was given up");
  outbox_.emplace_back(record.session, std::move(message));
}

absl::Status ControllerCore::OnClosed(store::WriteTransaction& transaction,
                                      const std::shared_ptr<session::Session>& session,
                                      absl::Time now) {
  const auto found = nodes_.find(session->node());
  if (found == nodes_.end() || found->second.session != session) return absl::OkStatus();
  found->second.Hear(session->last_heard());
  found->second.session = nullptr;
  schedule_due_ = true;
  spdlog::info("nodes/{} disconnected", session->node());
  if (session->shut()) return absl::OkStatus();
  // A worker acknowledges commands one after the other: if one of them ended the session, it is the
  // first that is left. It was no word to stop, which is small and always the same; to give one up
  // would leave trainers running that nobody stops any more.
  const auto suspect =
      std::find_if(unacknowledged_.begin(), unacknowledged_.end(), [&](const auto& entry) {
        return entry.second.node == session->node() && entry.second.sent_on == session.get() &&
               !entry.second.is_stop;
      });
  if (suspect == unacknowledged_.end()) return absl::OkStatus();
  suspect->second.sent_on = nullptr;
  if (++suspect->second.sessions_ended < kMaxSessionsEnded) return absl::OkStatus();
  const SentCommand command = suspect->second;
  RETURN_IF_ERROR(transaction.DeleteCommand(suspect->first));
  unacknowledged_.erase(suspect);
  JobMachine* const machine = FindAttempt(command.job, command.attempt, command.token);
  if (machine != nullptr) machine->OnDeadlyCommand("nodes/" + command.node, command.is_start, now);
  return absl::OkStatus();
}

}  // namespace ringleader::lifecycle
