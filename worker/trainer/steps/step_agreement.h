// What all ranks decide together at a step boundary.
#pragma once

#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "worker/comm/communicator.h"
#include "worker/trainer/host.h"

namespace ringleader::trainer {

struct Agreement {
  bool stop = false;           // some rank was asked to leave: all write a checkpoint and go
  std::optional<Plan> plan;    // a new one that rank 0 took
  std::string plan_bytes;      // the same as it travels
  std::string refused_plan;    // why the one that it took makes no sense; empty: it does
  uint32_t profile_steps = 0;  // that all are to trace from here on; 0: nothing new
};

// Collective. No step ever runs under two plans, because a plan reaches the step loop only through
// here.
absl::StatusOr<Agreement> Agree(comm::Communicator& world, Host& host);

}  // namespace ringleader::trainer
