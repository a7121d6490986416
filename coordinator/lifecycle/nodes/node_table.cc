#include "coordinator/lifecycle/nodes/node_table.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "proto/timestamps.h"

namespace ringleader::lifecycle {

std::string NodeId(std::string_view name) {
  return std::string(name.substr(std::string_view("nodes/").size()));
}

EventLog::Verdict EventLog::Admit(uint64_t sequence) {
  if (sequence > applied_ + 1) return Verdict::kGap;
  arrived_ = std::max(arrived_, sequence);
  if (sequence <= applied_) return Verdict::kSeen;
  applied_ = sequence;
  return Verdict::kNew;
}

std::optional<uint64_t> EventLog::TakeUnstored() {
  if (incarnation_.empty() || stored_ == applied_) return std::nullopt;
  stored_ = applied_;
  return applied_;
}

std::optional<uint64_t> EventLog::TakeAcknowledgement() {
  const uint64_t safe = held_.empty() ? arrived_ : std::min(arrived_, *held_.begin() - 1);
  if (safe <= acknowledged_) return std::nullopt;
  acknowledged_ = safe;
  return safe;
}

size_t FailureLog::JobsSince(absl::Time begin) {
  std::erase_if(failed_, [begin](const auto& entry) { return entry.second < begin; });
  return failed_.size();
}

namespace {

// Which GPUs take no trainers, and why; empty where all do.
std::string GpuFaults(const v1::NodeInventory& inventory) {
  std::vector<std::string> faults;
  for (const v1::Gpu& gpu : inventory.gpus()) {
    if (gpu.fault().empty()) continue;
    faults.push_back(absl::StrCat(gpu.uuid(), " takes no trainers: ", gpu.fault()));
  }
  return absl::StrJoin(faults, "; ");
}

}  // namespace

scheduler::NodeSlots NodeRecord::Slots() const {
  return {.id = NodeId(node.name()),
          .total = node.inventory().trainers(),
          .in_use = trainers_in_use + reserved + static_cast<uint32_t>(strays.size()),
          .ready = TakesTrainers(),
          .has_gpus = node.inventory().gpus_size() > 0,
          .domain = node.inventory().topology_domain()};
}

void NodeRecord::Hear(absl::Time time) {
  last_heard = std::max(last_heard, time);
  lease_begin = std::max(lease_begin, time);
}

bool NodeRecord::NoteLastHeard() {
  const bool was_known = node.has_last_heartbeat_time();
  if (session != nullptr && !out_of_sight) {
    node.clear_last_heartbeat_time();
    return was_known;
  }
  // After a restart its worker may be about to come back.
  const bool is_awaited = !out_of_sight && log.incarnation().empty();
  if (is_awaited) return false;
  if (was_known && ToTime(node.last_heartbeat_time()) == last_heard) return false;
  SetTime(last_heard, node.mutable_last_heartbeat_time());
  return true;
}

v1::Node NodeRecord::View() const {
  v1::Node view = node;
  view.set_trainers_in_use(trainers_in_use);
  for (const std::string& job : jobs) view.add_jobs(job);
  SetTime(last_heard, view.mutable_last_heartbeat_time());
  if (out_of_sight) {
    const std::string silence = absl::StrCat(
        "no word since ", absl::FormatTime(absl::RFC3339_sec, last_heard, absl::UTCTimeZone()));
    // That nothing is heard of what was taken out of service is no fault.
    const bool is_out_of_service = node.state() == v1::Node::DRAINED;
    if (!is_out_of_service) view.set_state(v1::Node::UNREACHABLE);
    view.set_state_reason(is_out_of_service ? absl::StrCat(node.state_reason(), "; ", silence)
                                            : silence);
  } else if (leaving()) {
    view.set_state(trainers_in_use == 0 ? v1::Node::DRAINED : v1::Node::DRAINING);
    view.set_state_reason("its worker is shutting down");
  } else if (set_aside() && node.state() == v1::Node::READY) {
    view.set_state(trainers_in_use == 0 ? v1::Node::DRAINED : v1::Node::DRAINING);
    view.set_state_reason(set_aside_reason);
  } else if (session == nullptr && node.state() == v1::Node::READY) {
    view.set_state_reason("its worker is not connected; it takes no trainers until it is");
  }
  const std::string faults = GpuFaults(node.inventory());
  if (faults.empty()) return view;
  const bool none_left = node.inventory().trainers() == 0;
  if (view.state() == v1::Node::READY && none_left) {
    view.set_state(trainers_in_use == 0 ? v1::Node::DRAINED : v1::Node::DRAINING);
  }
  view.set_state_reason(
      absl::StrCat(view.state_reason(), view.state_reason().empty() ? "" : "; ", faults));
  return view;
}

}  // namespace ringleader::lifecycle
