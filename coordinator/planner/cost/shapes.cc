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

GroupShape GroupOf(const ClusterShape& cluster, int context, int heads) {
  const int ring = context / heads;
  if (!SharesHeadsInNodes(cluster, heads)) return {.inner = 1, .outer = ring, .regular = false};
  const int per_node = cluster.trainers_per_node / heads;
  if (cluster.nodes == 1 || (per_node > 0 && per_node % ring == 0)) {
    return {.inner = ring, .outer = 1, .regular = true};
  }
  if (per_node > 0 && ring % per_node == 0) {
    return {.inner = per_node, .outer = ring / per_node, .regular = true};
  }
  return {.inner = 1, .outer = ring, .regular = false};
}

bool SharesHeadsInNodes(const ClusterShape& cluster, int heads) {
  return heads == 1 || cluster.nodes == 1 ||
         (cluster.trainers_per_node > 0 && cluster.trainers_per_node % heads == 0);
}

}  // namespace ringleader::planner
