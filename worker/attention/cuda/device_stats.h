// A step's statistics of attention on the device: counters that kernels add to, counts that the
// host knows, and timers. Read once a step.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <vector>

#include "kernels/index/between_ranks.h"
#include "ring/ring_schedule.h"
#include "worker/attention/cuda/device_timers.h"
#include "worker/attention/stats/attention_stats.h"

namespace ringleader::attention {

using kernels::index::kLayerCounters;
using kernels::index::LayerCounters;

// Where a layer is counted on the device.
struct CounterSlots {
  LayerCounters* counters = nullptr;
  int64_t* owner_tiles = nullptr;  // [ranks]
};

// Not thread-safe. Throws c10::Error.
class DeviceStats {
 public:
  explicit DeviceStats(int ranks) : ranks_(ranks) {}

  // Valid until a layer with a higher number is asked for.
  CounterSlots SlotsOf(int layer);
  // What the host counts of a layer's step: calls, causal_tiles, and tiles_per_ring_step of
  // patterns that do not depend on the data.
  LayerStats& HostOf(int layer);
  // The layer estimates its recall.
  void SetEstimated(int layer) { HostOf(layer).recall = 0.0; }
  // LayerStats::AddProbe, of [heads] int32 on the device.
  void AddProbe(int layer, const torch::Tensor& visited, int32_t queries, int first_head,
                ProbedRows rows) {
    probes_.push_back({layer, queries, first_head, rows, visited});
  }
  DeviceTimers& timers() { return timers_; }

  // AttentionDevice::MarkMicroBatch. Copies the counters on the device; does not wait for it.
  void Mark();
  // What `schedule` did since the last call; waits for the device.
  AttentionStats Take(const ring::RingSchedule& schedule);

 private:
  // What a layer's device counters hold: [slots_per_layer], read by the host.
  static void AddCounters(const int64_t* slots, const ring::RingSchedule& schedule,
                          LayerStats& layer);
  std::vector<VisitedTiles> TakeMarks();
  int64_t slots_per_layer() const { return kLayerCounters + ranks_; }

  const int ranks_;
  torch::Tensor counters_;  // [layers, slots_per_layer] int64: LayerCounters, owner_tiles
  std::vector<LayerStats> host_;
  struct Probe {
    int layer = 0;
    int32_t queries = 0;
    int first_head = 0;
    ProbedRows rows = ProbedRows::kApart;
    torch::Tensor visited;
  };
  std::vector<Probe> probes_;
  struct Marked {
    VisitedTiles host;       // visited: what the host counts
    torch::Tensor counters;  // a copy of counters_
  };
  std::vector<Marked> marks_;
  DeviceTimers timers_;
};

}  // namespace ringleader::attention
