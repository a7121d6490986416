#include "coordinator/planner/cost/shapes.h"

namespace ringleader::planner {
ClusterShape TypicalCluster(v1::ResourcesSpec::Engine engine, int nodes, int trainers_per_node) {
  ClusterShape cluster;
  cluster.nodes = nodes;
  cluster.trainers_per_node = trainers_per_node;
  cluster.engine = engine;
  if (engine == v1::ResourcesSpec::CUDA) {
    cluster.intra_node = {.bytes_per_second = 120e9, .latency_seconds = 50e-6};
    cluster.inter_node = {.bytes_per_second = 45e9, .latency_seconds = 15e-6};
  } else {
    cluster.intra_node = {.bytes_per_second = 1.5e9, .latency_seconds = 100e-6};
    cluster.inter_node = {.bytes_per_second = 1.1e9, .latency_seconds = 200e-6};
  }
  return cluster;
}

GroupShape GroupOf(const ClusterShape& cluster, int context) {
  const int per_node = cluster.trainers_per_node;
  if (cluster.nodes == 1 || (per_node > 0 && per_node % context == 0)) {
    return {.inner = context, .outer = 1, .regular = true};
  }
  if (per_node > 0 && context % per_node == 0) {
    return {.inner = per_node, .outer = context / per_node, .regular = true};
  }
  return {.inner = 1, .outer = context, .regular = false};
}

}  // namespace ringleader::planner
