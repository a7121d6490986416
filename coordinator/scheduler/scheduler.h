// Which waiting jobs start now, and where; why the others wait. Pure functions: no clock, no I/O.
//
// Order: priority, then the order in which jobs were submitted. Allocation is all or nothing. The
// first job that does not fit holds the nodes that it will start on, and jobs after it may only
// take what it does not need (backfill without starving the head); a job that no number of finished
// jobs could make fit holds nothing.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "ringleader/v1/job.pb.h"
#include "ringleader/v1/job_spec.pb.h"

namespace ringleader::scheduler {

struct NodeSlots {
  std::string id;
  uint32_t total = 0;  // trainers that it can run
  uint32_t in_use = 0;
  bool ready = true;        // in sight and not draining
  bool has_gpus = false;    // only such nodes run the CUDA engine
  std::string domain = {};  // nodes of one domain share a fast network
};

struct Request {
  std::string id;
  int32_t priority = 0;
  uint64_t sequence = 0;  // in the order in which they were submitted
  uint32_t trainers = 0;
  uint32_t max_nodes = 0;  // 0: any number
  // The context and the ranks that share out heads of a ring of rings, which takes equal shares of
  // nodes that fit it (planner::GroupOf); context 0: any shares do.
  uint32_t context = 0, heads = 1;
  bool needs_gpus = false;
  std::set<std::string> avoid = {};  // ids of nodes that refused the job a moment ago
  std::set<std::string> shun = {};   // ids of nodes to take only if the job fits nowhere else
};

struct Decision {
  std::string id;
  // One for each rank, with "nodes/" in front of the node's id; empty: the job waits.
  std::vector<v1::Placement> placements = {};
  std::string pending_reason = {};  // set when it waits
};

Request MakeRequest(const v1::Job& job);

// One decision a request, in queue order.
std::vector<Decision> Schedule(std::vector<Request> requests, std::vector<NodeSlots> nodes);

}  // namespace ringleader::scheduler
