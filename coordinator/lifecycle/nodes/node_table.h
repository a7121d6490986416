// The nodes as the controller sees them now: the stored record, the live session, and how far its
// messages have been applied.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "absl/time/time.h"
#include "coordinator/scheduler/scheduler.h"
#include "coordinator/session/session.h"
#include "ringleader/v1/node.pb.h"
#include "ringleader/v1/worker_control.pb.h"

namespace ringleader::lifecycle {

// "nodes/{id}" without "nodes/".
std::string NodeId(std::string_view name);

// Messages of one worker process: each is applied once, and acknowledged once it and all before it
// need not be sent again.
class EventLog {
 public:
  EventLog() = default;
  // `applied`: what the store says of this incarnation.
  EventLog(std::string incarnation, uint64_t applied)
      : incarnation_(std::move(incarnation)), applied_(applied) {}

  const std::string& incarnation() const { return incarnation_; }
  uint64_t applied() const { return applied_; }

  enum class Verdict { kNew, kSeen, kGap };
  // Notes the message as applied if it is new.
  Verdict Admit(uint64_t sequence);
  // The message may be needed again: a step report that is not merged yet.
  void Hold(uint64_t sequence) { held_.insert(sequence); }
  void Release(uint64_t sequence) { held_.erase(sequence); }

  // The applied sequence if it has to be stored; then it counts as stored. It is at first, whatever
  // was applied: that this process is the node's newest must outlast the coordinator, too.
  std::optional<uint64_t> TakeUnstored();
  // What may be acknowledged if that is news to the worker; then it counts as told.
  std::optional<uint64_t> TakeAcknowledgement();
  // What the worker has been told so far, in this run of the coordinator.
  uint64_t acknowledged() const { return acknowledged_; }

 private:
  std::string incarnation_;
  uint64_t applied_ = 0;
  std::optional<uint64_t> stored_;
  // The highest that has arrived in this run of the coordinator. What was applied before, but not
  // acknowledged, comes again, and may hold reports that are to be merged now.
  uint64_t arrived_ = 0;
  uint64_t acknowledged_ = 0;
  std::set<uint64_t> held_;
};

// Whether a node fails the attempts of one job after another.
class FailureLog {
 public:
  // An attempt of the job with this uid failed by the own fault of a rank there.
  void Add(const std::string& job_uid, absl::Time now) { failed_[job_uid] = now; }
  void Clear() { failed_.clear(); }
  // Forgets the job; returns whether it had failed here.
  bool Forget(const std::string& job_uid) { return failed_.erase(job_uid) > 0; }
  // How many jobs did so since `begin`.
  size_t JobsSince(absl::Time begin);

 private:
  std::map<std::string, absl::Time> failed_;  // by job uid: when last
};

struct NodeRecord {
  v1::Node node;                              // what is stored
  std::shared_ptr<session::Session> session;  // null: not connected
  absl::Time last_heard;                      // by whichever coordinator, as far as is known
  // The lease runs from then: when it was last heard, or after a restart that of the coordinator,
  // so that the worker can come back, or later where more was promised.
  absl::Time lease_begin;
  EventLog log;
  bool out_of_sight = false;
  FailureLog failures;
  // It failed too many attempts and gets no other until this time (infinitely past: it gets them);
  // why, for people.
  absl::Time set_aside_until = absl::InfinitePast();
  std::string set_aside_reason;
  // Ranks of attempts that are none of ours any more, as {token, rank}: told to stop, and in the
  // way until they have.
  std::set<std::pair<uint64_t, uint32_t>> strays;
  uint32_t trainers_in_use = 0;   // by our attempts
  uint32_t reserved = 0;          // trainers of attempts that are being planned
  std::vector<std::string> jobs;  // "jobs/{id}" with trainers here

  void Hear(absl::Time time);
  // Brings what is stored of when it was last heard up to date; returns whether that changed.
  // Stored is the time once its session has ended or its lease has run out, and none while it is
  // heard, so that heartbeats write nothing.
  bool NoteLastHeard();

  bool leaving() const { return node.leaving(); }
  bool set_aside() const { return set_aside_until != absl::InfinitePast(); }
  void TakeBack() { set_aside_until = absl::InfinitePast(); }
  bool TakesTrainers() const {
    return session != nullptr && !out_of_sight && !leaving() && !set_aside() &&
           node.state() == v1::Node::READY;
  }
  scheduler::NodeSlots Slots() const;
  // The node as users see it.
  v1::Node View() const;
};

}  // namespace ringleader::lifecycle
