// Requests for plans of a small model, and the wait for them.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "coordinator/lifecycle/planning/plan_source.h"
#include "jobspec/jobspec.h"

namespace ringleader::testing {

inline absl::StatusOr<lifecycle::MadePlan> Plan(lifecycle::PlanSource& plans,
                                                lifecycle::PlanRequest request) {
  struct Answer {
    absl::StatusOr<lifecycle::MadePlan> made;
    absl::Notification there;
  };
  const auto answer = std::make_shared<Answer>();
  plans.Plan(std::move(request), [answer](absl::StatusOr<lifecycle::MadePlan> made) {
    answer->made = std::move(made);
    answer->there.Notify();
  });
  if (!answer->there.WaitForNotificationWithTimeout(absl::Seconds(60))) {
    return absl::UnknownError("no answer");
  }
  return answer->made;
}

inline v1::ModelShape Shape() {
  v1::ModelShape shape;
  shape.set_vocab_size(257);
  shape.set_hidden_size(256);
  shape.set_intermediate_size(512);
  shape.set_layers(4);
  shape.set_heads(4);
  shape.set_kv_heads(2);
  shape.set_head_dim(64);
  return shape;
}

// vertical_slash on `trainers` ranks in one ring on one node.
inline lifecycle::PlanRequest Request(uint32_t trainers, uint64_t tokens) {
  lifecycle::PlanRequest request;
  request.spec.set_name("job");
  request.spec.mutable_attention()->set_pattern(v1::AttentionSpec::VERTICAL_SLASH);
  request.spec.mutable_data()->set_sequence_length(tokens);
  request.spec.mutable_resources()->set_trainers(trainers);
  jobspec::ApplyDefaults(&request.spec);
  request.shape = Shape();
  v1::Placement& placement = request.placements.emplace_back();
  placement.set_node("nodes/a");
  placement.set_trainers(trainers);
  v1::NodeInventory& node = request.nodes.emplace_back();
  node.set_trainers(trainers);
  node.set_cpu_cores(trainers);
  node.set_memory_bytes(uint64_t{64} << 30);
  return request;
}

}  // namespace ringleader::testing
