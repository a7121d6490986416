#include "worker/attention/stats/device_stats.h"

#include <algorithm>
#include <cstring>
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

AttentionStats DeviceStats::Take(const ring::RingSchedule& schedule) {
  AttentionStats stats;
  auto seconds = timers_.Take();
  kernels::ops::Check(seconds.status());
  stats.seconds = *seconds;
  stats.layers = std::exchange(host_, {});
  if (!counters_.defined()) return stats;
  const torch::Tensor read = counters_.cpu();
  counters_.zero_();
  for (size_t layer = 0; layer < stats.layers.size(); ++layer) {
    LayerStats& of_layer = stats.layers[layer];
    if (of_layer.calls == 0 || static_cast<int64_t>(layer) >= read.size(0)) continue;
    const int64_t* const slots =
        read.const_data_ptr<int64_t>() + static_cast<int64_t>(layer) * slots_per_layer();
    LayerCounters counters;
    std::memcpy(&counters, slots, sizeof(counters));
    of_layer.verticals = counters.verticals / of_layer.calls;
    of_layer.slashes = counters.slashes / of_layer.calls;
    if (of_layer.recall >= 0.0) of_layer.recall = counters.recall / of_layer.calls;
    of_layer.column_tiles = static_cast<uint64_t>(counters.column_tiles);
    of_layer.tiles_per_ring_step.resize(schedule.steps.size());
    for (size_t t = 0; t < schedule.steps.size(); ++t) {
      of_layer.tiles_per_ring_step[t] +=
          static_cast<uint64_t>(slots[kLayerCounters + schedule.steps[t].owner]);
    }
    of_layer.density =
        static_cast<double>(of_layer.TotalTiles()) / static_cast<double>(of_layer.causal_tiles);
  }
  return stats;
}

}  // namespace ringleader::attention
