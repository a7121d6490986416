#include "worker/attention/documents/merged_stats.h"

#include <algorithm>
#include <utility>

namespace ringleader::attention {
namespace {

// The mean of `a` over `calls_a` and of `b` over `calls_b`.
double Mean(double a, int calls_a, double b, int calls_b) {
  return calls_a + calls_b == 0 ? 0 : (a * calls_a + b * calls_b) / (calls_a + calls_b);
}

void AddLayer(const LayerStats& more, LayerStats* layer) {
  for (const auto member : {&LayerStats::verticals, &LayerStats::slashes,
                            &LayerStats::verticals_at_budget, &LayerStats::slashes_at_budget}) {
    layer->*member = Mean(layer->*member, layer->calls, more.*member, more.calls);
  }
  if (more.recall >= 0) {
    layer->recall = layer->recall < 0 ? more.recall
                                      : Mean(layer->recall, layer->calls, more.recall, more.calls);
  }
  layer->probed_recall.resize(std::max(layer->probed_recall.size(), more.probed_recall.size()));
  layer->probed_visited.resize(layer->probed_recall.size());
  layer->probed_queries += more.probed_queries;
  for (size_t head = 0; head < more.probed_recall.size(); ++head) {
    layer->probed_visited[head] += more.probed_visited[head];
    double& recall = layer->probed_recall[head];
    recall = Mean(recall, layer->probes, more.probed_recall[head], more.probes);
  }
  layer->probes += more.probes;
  layer->calls += more.calls;
  layer->balanced += more.balanced;
  layer->anchor_missed += more.anchor_missed;
  layer->column_tiles += more.column_tiles;
  layer->tiles_per_ring_step.resize(
      std::max(layer->tiles_per_ring_step.size(), more.tiles_per_ring_step.size()));
  for (size_t step = 0; step < more.tiles_per_ring_step.size(); ++step) {
    layer->tiles_per_ring_step[step] += more.tiles_per_ring_step[step];
  }
}

}  // namespace

void Add(const AttentionStats& more, AttentionStats* stats) {
  stats->seconds.index += more.seconds.index;
  stats->seconds.forward += more.seconds.forward;
  stats->seconds.backward += more.seconds.backward;
  stats->seconds.exposed_communication += more.seconds.exposed_communication;
  stats->ring_bytes.sent += more.ring_bytes.sent;
  stats->ring_bytes.whole += more.ring_bytes.whole;
  stats->layers.resize(std::max(stats->layers.size(), more.layers.size()));
  for (size_t i = 0; i < more.layers.size(); ++i) AddLayer(more.layers[i], &stats->layers[i]);
  for (size_t i = 0; i < stats->micro_batches.size(); ++i) {
    stats->micro_batches[i].visited += more.micro_batches[i].visited;
    stats->micro_batches[i].causal += more.micro_batches[i].causal;
  }
}

void ForwardCounts::Count(int layer, uint64_t causal_tiles) {
  ++by_layer_[layer].calls;
  by_layer_[layer].causal_tiles += causal_tiles;
}

void ForwardCounts::MoveTo(AttentionStats* stats) {
  for (const auto& [number, forwards] : std::exchange(by_layer_, {})) {
    LayerStats& layer = stats->layers[number];
    layer.calls = forwards.calls;
    layer.causal_tiles = forwards.causal_tiles;
    layer.density =
        static_cast<double>(layer.TotalTiles()) / static_cast<double>(layer.causal_tiles);
  }
}

}  // namespace ringleader::attention
