#include "worker/attention/cuda/device_stats.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "kernels/ops/cuda_call.h"

namespace ringleader::attention {

CounterSlots DeviceStats::SlotsOf(int layer) {
  const int64_t layers = counters_.defined() ? counters_.size(0) : 0;
  if (layer >= layers) {
    torch::Tensor more =
        torch::zeros({std::max<int64_t>(2 * layers, layer + 64), slots_per_layer()},
                     torch::device(torch::kCUDA).dtype(torch::kLong));
    if (layers > 0) more.slice(0, 0, layers).copy_(counters_);
    counters_ = std::move(more);
  }
  int64_t* const slots = counters_.mutable_data_ptr<int64_t>() + layer * slots_per_layer();
  return {.counters = reinterpret_cast<LayerCounters*>(slots),
          .owner_tiles = slots + kLayerCounters};
}

LayerStats& DeviceStats::HostOf(int layer) {
  if (layer >= static_cast<int>(host_.size())) host_.resize(layer + 1);
  return host_[layer];
}

void DeviceStats::AddCounters(const int64_t* slots, const ring::RingSchedule& schedule,
                              LayerStats& layer) {
  LayerCounters counters;
  std::memcpy(&counters, slots, sizeof(counters));
  layer.verticals = counters.verticals;
  layer.slashes = counters.slashes;
  layer.verticals_at_budget = counters.verticals_at_budget;
  layer.slashes_at_budget = counters.slashes_at_budget;
  if (layer.recall >= 0.0) layer.recall = counters.recall;
  layer.balanced = static_cast<uint64_t>(counters.balanced);
  layer.anchor_missed = static_cast<uint64_t>(counters.anchor_missed);
  layer.column_tiles = static_cast<uint64_t>(counters.column_tiles);
  layer.tiles_per_ring_step.resize(schedule.steps.size());
  for (size_t t = 0; t < schedule.steps.size(); ++t) {
    layer.tiles_per_ring_step[t] +=
        static_cast<uint64_t>(slots[kLayerCounters + schedule.steps[t].owner]);
  }
}

void DeviceStats::Mark() {
  Marked& mark = marks_.emplace_back();
  for (const LayerStats& layer : host_) {
    mark.host.visited += layer.TotalTiles();
    mark.host.causal += layer.causal_tiles;
  }
  if (counters_.defined()) mark.counters = counters_.clone();
}

std::vector<VisitedTiles> DeviceStats::TakeMarks() {
  std::vector<VisitedTiles> micro_batches;
  VisitedTiles before;
  for (const Marked& mark : std::exchange(marks_, {})) {
    VisitedTiles now = mark.host;
    const torch::Tensor read = mark.counters.defined() ? mark.counters.cpu() : torch::Tensor();
    for (int64_t layer = 0; read.defined() && layer < read.size(0); ++layer) {
      const int64_t* const slots = read.const_data_ptr<int64_t>() + layer * slots_per_layer();
      LayerCounters counters;
      std::memcpy(&counters, slots, sizeof(counters));
      now.visited += static_cast<uint64_t>(std::accumulate(
          slots + kLayerCounters, slots + slots_per_layer(), counters.column_tiles));
    }
    micro_batches.push_back({now.visited - before.visited, now.causal - before.causal});
    before = now;
  }
  return micro_batches;
}

AttentionStats DeviceStats::Take(const ring::RingSchedule& schedule) {
  AttentionStats stats;
  auto seconds = timers_.Take();
  kernels::ops::Check(seconds.status());
  stats.seconds = *seconds;
  stats.micro_batches = TakeMarks();
  stats.layers = std::exchange(host_, {});
  torch::Tensor read;
  if (counters_.defined()) {
    read = counters_.cpu();
    counters_.zero_();
  }
  for (const Probe& probe : std::exchange(probes_, {})) {
    const torch::Tensor visited = probe.visited.cpu();
    stats.layers[probe.layer].AddProbe(
        {visited.const_data_ptr<int32_t>(), static_cast<size_t>(visited.numel())}, probe.queries,
        probe.first_head, probe.rows);
  }
  for (size_t layer = 0; layer < stats.layers.size(); ++layer) {
    const auto i = static_cast<int64_t>(layer);
    if (stats.layers[layer].calls > 0 && read.defined() && i < read.size(0)) {
      AddCounters(read.const_data_ptr<int64_t>() + i * slots_per_layer(), schedule,
                  stats.layers[layer]);
    }
    stats.layers[layer].TakeMeans();
  }
  return stats;
}

}  // namespace ringleader::attention
