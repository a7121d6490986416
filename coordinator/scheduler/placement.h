// Gang placement of one job: every trainer or none.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "coordinator/scheduler/scheduler.h"

namespace ringleader::scheduler {

// Trainers on one node, by its index in the vector that was asked about.
struct Share {
  size_t node = 0;
  uint32_t trainers = 0;
};

// A node as placement sees it.
struct Room {
  const NodeSlots* node = nullptr;
  uint32_t available = 0;   // trainers that this job may place here
  uint32_t preference = 0;  // among nodes that serve equally well, the lowest goes first
};

// Without nodes that the job shuns, if it fits on the others. Fewest nodes first; the same number
// on each node where that is possible, because a ring of rings needs it, and nothing else for a job
// that asks for one; inside one domain where that is possible.
std::optional<std::vector<Share>> Place(const Request& request, const std::vector<Room>& rooms);

// Whether the node may run this job at all.
bool Eligible(const Request& request, const NodeSlots& node);

}  // namespace ringleader::scheduler
