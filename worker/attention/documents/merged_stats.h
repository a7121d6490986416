// What one step of attention did, where several attentions share a rank's tokens.
#pragma once

#include <cstdint>
#include <map>

#include "worker/attention/stats/attention_stats.h"

namespace ringleader::attention {

// Adds what another attention did in the same step and with the same marks: seconds, bytes, calls
// and tiles. Shares and counts of choices become means over the calls of both.
void Add(const AttentionStats& more, AttentionStats* stats);

// Forwards of a layer as their caller sees them, however many calls computed each.
class ForwardCounts {
 public:
  // `causal_tiles`: of the rank, all heads.
  void Count(int layer, uint64_t causal_tiles);
  // Sets calls, causal_tiles and density of all layers, and begins anew.
  void MoveTo(AttentionStats* stats);

 private:
  struct Forwards {
    int calls = 0;
    uint64_t causal_tiles = 0;
  };
  std::map<int, Forwards> by_layer_;
};

}  // namespace ringleader::attention
