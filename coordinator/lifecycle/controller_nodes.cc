// What becomes of nodes: they drain, and are set aside when they fail one job after another.
#include <spdlog/spdlog.h>

#include <algorithm>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "coordinator/lifecycle/controller_core.h"

namespace ringleader::lifecycle {

absl::StatusOr<v1::Node> ControllerCore::SetDraining(store::WriteTransaction& transaction,
                                                     std::string_view id, bool draining) {
  const auto found = nodes_.find(id);
  if (found == nodes_.end()) {
    return absl::NotFoundError(absl::StrFormat("nodes/%s does not exist", std::string(id)));
  }
  NodeRecord& record = found->second;
  if (!draining && record.set_aside()) {
    record.TakeBack();
    record.failures.Clear();
    schedule_due_ = true;
  }
  const bool was_draining = record.node.state() != v1::Node::READY;
  if (draining != was_draining) {
    record.node.set_state(draining ? v1::Node::DRAINING : v1::Node::READY);
    record.node.set_state_reason(draining ? "drained by a user" : "");
    schedule_due_ = true;
    RETURN_IF_ERROR(transaction.PutNode(record.node));
    if (draining) {
      for (auto& [job, machine] : machines_) {
        machine->MoveOff(record.node.name(), "the node is being drained");
      }
    }
    CountTrainers();  // attempts of this batch, too
    RETURN_IF_ERROR(UpdateDrains(transaction));
  }
  return record.View();
}

absl::Status ControllerCore::UpdateDrains(store::WriteTransaction& transaction) {
  for (auto& [id, record] : nodes_) {
    if (record.node.state() != v1::Node::DRAINING || record.trainers_in_use > 0) continue;
    record.node.set_state(v1::Node::DRAINED);
    RETURN_IF_ERROR(transaction.PutNode(record.node));
  }
  return absl::OkStatus();
}

bool ControllerCore::IsToBeForgotten(const NodeRecord& record, absl::Time now) const {
  if (record.session != nullptr || !record.out_of_sight || record.trainers_in_use > 0 ||
      record.reserved > 0) {
    return false;
  }
  // What a user drained stays so when it comes back, for as long as there is a record of it.
  const bool has_left = record.leaving() && record.node.state() == v1::Node::READY;
  return has_left || now - record.last_heard > options_.keep_nodes;
}

absl::Status ControllerCore::ForgetNodes(store::WriteTransaction& transaction, absl::Time now) {
  for (auto it = nodes_.begin(); it != nodes_.end();) {
    if (!IsToBeForgotten(it->second, now)) {
      ++it;
      continue;
    }
    spdlog::info("nodes/{} is forgotten: {}", it->first,
                 it->second.leaving() ? "its worker left" : "nothing was heard of it for long");
    RETURN_IF_ERROR(transaction.DeleteNode(it->first));
    it = nodes_.erase(it);
  }
  return absl::OkStatus();
}

absl::Status ControllerCore::StoreLastHeard(store::WriteTransaction& transaction) {
  for (auto& [id, record] : nodes_) {
    if (record.NoteLastHeard()) RETURN_IF_ERROR(transaction.PutNode(record.node));
  }
  return absl::OkStatus();
}

void ControllerCore::JudgeNodes(const JobMachine& machine, const Effects& effects, absl::Time now) {
  for (const std::string& name : effects.nodes_that_served) {
    if (const auto node = nodes_.find(NodeId(name)); node != nodes_.end()) {
      node->second.failures.Clear();
    }
  }
  for (const Effects::NodeFailure& failure : effects.node_failures) {
    const auto node = nodes_.find(NodeId(failure.node));
    if (node == nodes_.end()) continue;
    NodeRecord& record = node->second;
    // A job that fails on two nodes is to blame itself.
    bool failed_elsewhere = false;
    for (auto& [id, other] : nodes_) {
      if (id == node->first || !other.failures.Forget(machine.job().uid())) continue;
      failed_elsewhere = true;
    }
    if (failed_elsewhere) continue;
    record.failures.Add(machine.job().uid(), now);
    const size_t jobs = record.failures.JobsSince(now - options_.set_aside_window);
    const bool is_last = std::none_of(nodes_.begin(), nodes_.end(), [&](const auto& entry) {
      return &entry.second != &record && entry.second.TakesTrainers();
    });
    if (jobs < options_.set_aside_after_jobs || is_last) continue;
    record.set_aside_until = now + options_.set_aside_for;
    record.failures.Clear();
    record.set_aside_reason = absl::StrFormat(
        "set aside until %s: attempts of %d jobs failed here one after the other, the last (%s): "
        "%s; ringctl undrain %s takes it back at once",
        absl::FormatTime(absl::RFC3339_sec, record.set_aside_until, absl::UTCTimeZone()), jobs,
        machine.job().name(), failure.message, node->first);
    spdlog::warn("{} is {}", failure.node, record.set_aside_reason);
  }
}

std::vector<v1::Node> ControllerCore::ListNodes() const {
  std::vector<v1::Node> nodes;
  for (const auto& [id, record] : nodes_) nodes.push_back(record.View());
  return nodes;
}

}  // namespace ringleader::lifecycle
