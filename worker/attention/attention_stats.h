// What one step of attention did: counted by RingAttention, read by the trainer after the step.
#pragma once

#include <cstdint>
#include <vector>

namespace ringleader::attention {

// Sums over the calls of the step (micro-batches); shares and counts are means over those calls.
struct LayerStats {
  double density = 0.0;    // share of the causal tiles visited, mean over heads; columns counted in
  double verticals = 0.0;  // selected columns, mean over heads
  double slashes = 0.0;    // block diagonals, mean over heads
  double recall = -1.0;    // attention mass kept on the estimate queries; -1 where not estimated
  std::vector<uint64_t> tiles_per_ring_step;  // forward, this rank, all heads
  uint64_t column_tiles = 0;                  // of the pass over selected columns, all heads
};

// This rank's seconds; exposed communication is the time spent waiting for transfers and
// collectives.
struct AttentionSeconds {
  double index = 0.0;
  double forward = 0.0;
  double backward = 0.0;
  double exposed_communication = 0.0;
};

struct AttentionStats {
  AttentionSeconds seconds;
  std::vector<LayerStats> layers;  // by layer index

  // Tiles that this rank visited in forward: the work that stripes balance.
  uint64_t TotalTiles() const {
    uint64_t tiles = 0;
    for (const LayerStats& layer : layers) {
      for (const uint64_t step : layer.tiles_per_ring_step) tiles += step;
      tiles += layer.column_tiles;
    }
    return tiles;
  }
};

}  // namespace ringleader::attention
