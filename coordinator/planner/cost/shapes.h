// What the planner needs to know of the machines, as plain numbers.
#pragma once

#include <cstdint>

#include "ringleader/v1/job_spec.pb.h"

namespace ringleader::planner {

struct Link {
  double bytes_per_second = 0;
  double latency_seconds = 0;
};

// `nodes` machines with `trainers_per_node` trainers each. Ranks are numbered node by node.
struct ClusterShape {
  int nodes = 1;
  int trainers_per_node = 1;  // 0: nodes hold unequal numbers, so that no hierarchical ring fits
  Link intra_node;            // between two trainers of one node
  Link inter_node;            // of one trainer, to another node
  v1::ResourcesSpec::Engine engine = v1::ResourcesSpec::CPU;
  double threads_per_trainer = 1;         // CPU engine
  uint64_t memory_bytes_per_trainer = 0;  // 0: not known, not checked
  // CUDA: a trainer's share of its host's memory; likewise.
  uint64_t host_memory_bytes_per_trainer = 0;
};

// A cluster with links as they usually are: on CUDA, NVLink inside nodes (what a hop reaches beside
// attention, with the few blocks that NCCL has then) and 400 Gbit/s per GPU between them; on CPUs,
// loopback and 10 Gbit/s.
ClusterShape TypicalCluster(v1::ResourcesSpec::Engine engine, int nodes, int trainers_per_node);

// How the ranks of one context-parallel group lie on the nodes. Groups are runs of consecutive
// ranks; where `heads` neighbours share out heads, each such run of them counts as one rank.
struct GroupShape {
  int inner = 1;         // ranks of a group on one node
  int outer = 1;         // nodes of a group
  bool regular = false;  // every node holds `inner` of them: a hierarchical ring fits
};
GroupShape GroupOf(const ClusterShape& cluster, int context, int heads = 1);
// Whether neighbours that share out heads lie on one node, wherever a group begins.
bool SharesHeadsInNodes(const ClusterShape& cluster, int heads);

}  // namespace ringleader::planner
